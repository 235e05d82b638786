"""The user's own forward with its blocks stubbed: what comes before, between and after them.

[Note: stand-ins]
The forward is not traced. A section's head (see ``sections``) is the forward run once more:
skipped through quickly up to the section, then real until the section's last block is called,
or to the end. For one joint between the blocks 2 and 3:

                 embeddings   block 1   block 2      joint    block 3   block 4   head, loss
    prologue     really       stub      stub: cut    -        -         -         -
    joint        stub         stub      real value   really   stub      stub: cut -
    epilogue     stub         stub      stub         stub     stub      real value  really

A stub returns a stand-in: the shape and dtype of the real output over one NaN, or the real
tensor where what follows reads it. The glue between the modules runs each time, so whatever
depends on the batch alone (masks, positions) is right each time; whatever wrongly depends
on a stand-in is NaN, and loud. Random numbers drawn on the way are those of the first time,
and then undone. A stub takes the place where ``nn.Module.__call__`` looks first, above the
hooks: the hooks of a block fire when the block really runs, and only then; those of the model
and of other modules that contain blocks fire each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import TrialError
from shoal.partition.callsheet import (
    CallSheet,
    CallWriter,
    Part,
    Reads,
    Returned,
    argument_wire,
    leaf_wires,
    module_wire,
    own_among,
)
from shoal.partition.handed import Given, Keeper, Keepers, returned_of, run_noting
from shoal.partition.sections import Sections
from shoal.partition.template import Constant, Shape, Template, flatten, may_vary, output_template
from shoal.partition.wires import (
    Names,
    OwnCall,
    OwnCalls,
    Substitution,
    Touch,
    TouchWatch,
    Wire,
    Wires,
)
from shoal.recipes.recipe import Batch, Output, Recipe, compute_loss, model_inputs
from shoal.rng import capture_rng, restore_rng

_FIRST_PLACE = "_compiled_call_impl"  # read first by nn.Module.__call__, torch 2.10 to 2.13


@dataclass(frozen=True, slots=True)
class Block:
    """One call of one module: a layer of the chain that is no head.

    ``unsure`` are the leaves of its output whose size cannot be told from its arguments' sizes
    for other batches than the pilot's; ``retyped`` those that have another floating type in
    evaluation than in training. With ``keepers`` the output is a pair: what the module returns,
    ``num_returned`` leaves, and what these hooks are given (see ``handed``).
    """

    name: str
    module: nn.Module
    output: Template
    unsure: frozenset[int] = frozenset()
    retyped: frozenset[int] = frozenset()
    keepers: tuple[Keeper, ...] = ()
    num_returned: int | None = None

    @property
    def watched(self) -> frozenset[int]:
        """The leaves that may turn out unlike the stand-ins that the forward looks at."""
        return self.unsure | self.retyped

    @property
    def numbers(self) -> Mapping[int, Constant]:
        """The leaves of its output that are no tensors and may vary from batch to batch."""
        constants = {i: c for i, c in enumerate(self.output.leaves) if isinstance(c, Constant)}
        return {
            index: leaf
            for index, leaf in constants.items()
            if not isinstance(leaf.value, Given) and may_vary(leaf.value)
        }

    @property
    def returns_numbers(self) -> bool:
        """Whether something of its output is known only when it has run, and no tensor."""
        return any(number.argument is None for number in self.numbers.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module: its output, the pair if there are keepers."""
        return run_noting(self.module, self.module, self.keepers, args, kwargs)

    def returned(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns; the keepers are given what is theirs of ``output``."""
        return returned_of(output, self.module, self.keepers, args, kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model seen as blocks in calling order, and the modules that run between them.

    ``reads`` is what the sections were seen to read of what earlier ones made, ``keepers`` the
    hooks in blocks and other modules by which that is handed over. ``dense``
    says that the glue changes stand-ins in place, so that they need memory; ``glue_free`` that
    nothing between the blocks can look at them; ``draws`` that the forward draws random numbers
    outside of all modules. With ``graph_kernels`` torch takes other kernels, with other bits,
    for a forward without gradients.
    """

    model: nn.Module
    recipe: Recipe
    device: torch.device
    sections: Sections
    blocks: tuple[Block, ...]
    outside: Mapping[str, nn.Module]
    reads: Reads
    keepers: Keepers = field(default_factory=dict)
    dense: bool = False
    glue_free: bool
    draws: bool
    graph_kernels: bool = False

    def stand_in(self, shape: Shape) -> Tensor:
        """A tensor of this shape and no values, on the skeleton's device."""
        return shape.stand_in(self.device, dense=self.dense)

    def blank_sheet(self) -> CallSheet:
        """The call sheet of a micro-batch of which nothing has run."""
        return CallSheet(sections=self.sections, reads=self.reads)


class _Cut(BaseException):
    """Ends a forward when its last block is called; no ``except Exception`` may catch it."""


class ReplacedCalls:
    """Calls of modules replaced by functions, until the end of the ``with``."""

    def __init__(self, replacements: Mapping[nn.Module, Callable[..., Any]]) -> None:
        self._replacements = replacements
        self._before: dict[nn.Module, Any] = {}

    def __enter__(self) -> ReplacedCalls:
        for module, function in self._replacements.items():
            self._before[module] = module.__dict__.get(_FIRST_PLACE)
            module.__dict__[_FIRST_PLACE] = function
        return self

    def restore(self) -> None:
        """Give every module its own call back; once is enough."""
        while self._before:
            module, before = self._before.popitem()
            if before is None:
                module.__dict__.pop(_FIRST_PLACE, None)
            else:
                module.__dict__[_FIRST_PLACE] = before

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()


def own_call(module: nn.Module) -> Callable[..., Any]:
    """What calling ``module`` runs, hooks included, whatever may replace it later."""
    compiled = module.__dict__.get(_FIRST_PLACE)
    return compiled if compiled is not None else module._call_impl


class Headed(NamedTuple):
    """What running a section's head gave: the part of the sheet, and the tensors it made.

    ``touched`` are the outputs of its blocks whose stand-ins the forward looked at.
    """

    part: Part
    made: Wires
    touched: frozenset[Touch]


def run_head(
    skeleton: Skeleton,
    section: int,
    sheet: CallSheet,
    batch: Batch,
    wires: Mapping[Wire, Tensor],
    *,
    on_resume: Callable[[], None] | None,
    guard: AbstractContextManager[object] | None,
) -> Headed:
    """Run the forward from the end of the section before to this section's last block.

    ``sheet`` has the sections before, ``wires`` what the head reads of them. Gradient mode,
    autocast and random state are the caller's. ``on_resume`` is told when the skipping ends. The
    recipe's inputs are made within ``guard``.

    Raises:
        TrialError: the forward calls other blocks than it did in the pilot.
    """
    run = _Run(skeleton, section, sheet, wires, on_resume)
    try:
        with run.under_way():
            with guard or nullcontext():
                args, kwargs = model_inputs(skeleton.recipe, batch)
            skeleton.model(*args, **kwargs)
    except _Cut:
        return run.headed()
    raise TrialError(_skipped(skeleton, run.position))


def _skipped(skeleton: Skeleton, called: int) -> str:
    of = f"{called} of the {len(skeleton.blocks)} blocks"
    if skeleton.model.training:
        return (
            f"the forward called {of} it called in the pilot. A model that skips blocks trains "
            "unsharded only."
        )
    return (
        f"in evaluation mode the forward called {of} it calls in training, as where it evaluates "
        "an average of its weights, in modules of its own. What is cut is evaluated in the shards "
        "that train. Such a model trains unsharded only, or has its average evaluated once it is "
        "trained."
    )


def run_epilogue(
    skeleton: Skeleton,
    sheet: CallSheet,
    batch: Batch,
    wires: Wires,
    *,
    on_resume: Callable[[], None] | None,
    guard: AbstractContextManager[object] | None,
) -> tuple[Tensor, Output]:
    """Loss and output, from the wires alive at the epilogue; takes them out of ``wires``.

    What is drawn while skipping does not count: the random state on return is as if only the
    part after the last block had run. ``on_resume`` is told when that begins. The loss is computed
    within ``guard``.

    Raises:
        TrialError: the forward never reached its last block.
    """
    run = _Run(skeleton, skeleton.sections.epilogue, sheet, wires, on_resume)
    wires.clear()
    with run.under_way():
        args, kwargs = model_inputs(skeleton.recipe, batch)
        output = run.substitution.in_leaves(skeleton.model(*args, **kwargs))
        if run.skipping:
            raise TrialError(
                "the forward ended before its last block was called, unlike in the pilot. Train "
                "this model unsharded."
            )
        with guard or nullcontext():
            return compute_loss(skeleton.recipe, output, batch), output


class _Run:
    """One run of the forward on behalf of one section.

    Attributes:
        position: Of the next block that the forward will call.
        skipping: Whether the section is still to come.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        section: int,
        sheet: CallSheet,
        wires: Mapping[Wire, Tensor],
        on_resume: Callable[[], None] | None,
    ) -> None:
        self.skeleton, self.section, self.sheet = skeleton, section, sheet
        self.position = 0
        self.skipping = section > 0
        self.substitution = Substitution()
        reads = skeleton.reads
        self._real = {wire: wires[wire] for wire in reads.by_head[section]}
        self._expected = reads.by_section[section]
        self._arguments = {wire for wire in self._expected if wire.is_argument}
        self._kept = reads.anywhere
        self._own = own_among(self._kept)
        self._own_counts: Counter[str] = Counter()
        self._on_resume = on_resume
        blocks = skeleton.sections.blocks_of(section)
        self._first, self._stop = blocks.start, blocks.stop
        self._head = skeleton.sections.head(section)
        self._names = Names()
        self._writer = CallWriter(self._names, self._head, blocks.start, self._kept)
        self._outputs: list[Template] = []
        self._counts: Counter[str] = Counter()
        self._returned: dict[str, list[Returned]] = {}
        self._made: Wires = {}
        self._depth = 0
        self._touch = TouchWatch()
        self._calls = ReplacedCalls({})
        draws = section > 0 or skeleton.draws
        self._rng = capture_rng(skeleton.device) if draws else None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The modules' calls replaced, and torch's functions watched as far as is needed."""
        self._calls = ReplacedCalls(self._replacements())
        with ExitStack() as stack:
            stack.enter_context(self._calls)
            blocks = self.skeleton.blocks[self._first : self._stop]
            if not self.skeleton.glue_free and any(block.watched for block in blocks):
                stack.enter_context(self._touch)
            if self._arguments & self._real.keys():
                stack.enter_context(self.substitution)
            if self.skipping and self.skeleton.draws:
                self._replay(0)
            if self._own:
                functions = {call.function for call in self._own}
                stack.enter_context(OwnCalls(self._compute, functions))
            try:
                yield
            finally:
                self._calls, self._on_resume = ReplacedCalls({}), None  # they refer to this

    def headed(self) -> Headed:
        """What there is when the last block has been called."""
        part = Part(
            calls=tuple(self._writer.calls),
            outputs=tuple(self._outputs),
            returned={name: tuple(calls) for name, calls in self._returned.items()},
            rng=self._rng if self.skeleton.draws else None,  # it travels: only what is replayed
        )
        return Headed(part, self._made | self._writer.made, frozenset(self._touch.touched))

    # -- what modules are replaced by -----------------------------------------------------

    def _replacements(self) -> dict[nn.Module, Callable[..., Any]]:
        stubs = {block.module: self._stub(block.module) for block in self.skeleton.blocks}
        spies = {
            module: self._spy(name, own_call(module))
            for name, module in self.skeleton.outside.items()
        }
        return {**spies, **stubs}

    def _stub(self, module: nn.Module) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            block = _expect(self.skeleton.blocks, self.position, module)
            self._step_aside(True)
            self._depth += 1
            try:
                if self.position < self._first:
                    return self._skip_block(args, kwargs)
                return self._note_block(block, args, kwargs)
            finally:
                self._depth -= 1
                self._step_aside(False)

        return stub

    def _spy(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return call(*args, **kwargs)
            self._step_aside(True)
            self._depth += 1
            try:
                module, keepers = self.skeleton.outside[name], self.skeleton.keepers.get(name, ())
                if self.skipping:
                    output = self._skip_module(name, args, kwargs)
                    return returned_of(output, module, keepers, args, kwargs)
                args, kwargs = self.substitution.in_leaves((args, kwargs))
                self._note_handed(name, args, kwargs)
                self._step_aside(False)
                with self._away_from((args, kwargs)):
                    output = run_noting(call, module, keepers, args, kwargs)
                self._step_aside(True)
                output = self._note_module(name, output)
                return returned_of(output, module, keepers, args, kwargs)
            finally:
                self._depth -= 1
                self._step_aside(False)

        return spy

    def _compute(self, function: str, compute: Callable[[], Any], given: Any) -> Any:
        """What the forward computes itself: what there is, where that was computed before."""
        if self._depth or self.substitution.paused:
            return compute()
        self._own_counts[function] += 1
        wire = self._own.get(OwnCall(function, self._own_counts[function]))
        if wire is None:
            return compute()
        computed = self._real.get(wire)
        if computed is None or self.skeleton.draws:  # what it draws is drawn once more
            anew = compute()
            computed = anew if computed is None else computed
        self._names.give(computed, wire)
        if not self.skipping:
            self._made[wire] = computed
        return computed

    def _away_from(self, arguments: Any) -> AbstractContextManager[object]:
        """While a module outside of the blocks runs; looks at types alone need no watch there."""
        blocks = self.skeleton.blocks[self._first : self._stop]
        if any(block.retyped for block in blocks) and not any(block.unsure for block in blocks):
            return self._touch.left_for(arguments)
        return nullcontext()

    def _step_aside(self, aside: bool) -> None:
        """What is done while ``aside`` is not the forward's own doing."""
        self._touch.paused = self.substitution.paused = aside

    # -- on the way to the section --------------------------------------------------------

    def _skip_block(self, args: Any, kwargs: Any) -> Any:
        position = self.position
        self.position += 1
        if self._arguments:
            self._recognise(position, args, kwargs)
        template = self.sheet.output(position)
        names = leaf_wires(self.skeleton.sections.layer_of(position), template)
        output = self._fill(template, names, flatten((args, kwargs))[0])
        output = self.skeleton.blocks[position].returned(output, args, kwargs)
        if self.position == self._first:
            self._resume()
        elif self.skeleton.draws and self.position in self.skeleton.sections.joints:
            self._replay(self.skeleton.sections.of_block(self.position))
        return output

    def _replay(self, section: int) -> None:
        """Have the numbers drawn again that an earlier section's head drew."""
        state = self.sheet.parts[section].rng
        if state is not None:
            restore_rng(state, self.skeleton.device)

    def _recognise(self, position: int, args: Any, kwargs: Any) -> None:
        """Know the wires again among what a block is called with, and give them their values."""
        leaves, values = self.sheet.call(position).leaves, flatten((args, kwargs))[0]
        if len(leaves) != len(values):
            raise TrialError(
                f"block {self.skeleton.blocks[position].name!r} is called otherwise each time "
                "the forward runs. Train this model unsharded."
            )
        for leaf, value in zip(leaves, values, strict=True):
            if leaf in self._arguments and isinstance(leaf, Wire):
                self._names.give(value, leaf)
                if leaf in self._real:
                    self.substitution.replace(value, self._real[leaf])

    def _skip_module(self, name: str, args: Any, kwargs: Any) -> Any:
        call = index = self._counts[name]
        self._counts[name] += 1
        for section, part in enumerate(self.sheet.parts[: self.section]):
            before = part.returned.get(name, ())
            if index < len(before):
                self._recognise_handed(section, name, call, args, kwargs)
                return self._fill(*before[index])
            index -= len(before)
        raise TrialError(
            f"module {name!r} is called more often when the forward is run again than it was "
            "before. Train this model unsharded."
        )

    def _recognise_handed(
        self, section: int, name: str, call: int, args: Any, kwargs: Any
    ) -> None:
        """The same for what a module outside of the blocks is called with."""
        head = self.skeleton.sections.head(section)
        for index, value in enumerate(flatten((args, kwargs))[0] if self._arguments else ()):
            wire = argument_wire(head, name, call, index)
            if wire in self._real:
                self.substitution.replace(value, self._real[wire])

    def _fill(
        self, template: Template, names: Sequence[Wire], arguments: Sequence[Any] = ()
    ) -> Any:
        """An output with what is real of it; all its tensors have their names."""

        def stand_in(shape: Shape) -> Tensor:
            at = shape.argument
            return self.skeleton.stand_in(shape) if at is None else torch.detach(arguments[at])

        values = template.values(names, self._real, stand_in)
        for name, value in zip(names, values, strict=True):
            if isinstance(value, Tensor):
                self._names.give(value, name)
        return pytree.tree_unflatten(values, template.spec)

    def _resume(self) -> None:
        """From here on the forward is real."""
        self.skipping = False
        self._real = {}
        if self.section == self.skeleton.sections.epilogue:
            self._calls.restore()
        if self._rng is not None:
            restore_rng(self._rng, self.skeleton.device)
        if self._on_resume is not None:
            self._on_resume()

    # -- in the section -------------------------------------------------------------------

    def _note_block(self, block: Block, args: Any, kwargs: Any) -> Any:
        position = self.position
        self.position += 1
        args, kwargs = self.substitution.in_leaves((args, kwargs))
        values = self._writer.write(block.module, block.name, args, kwargs)
        self._require_expected(block)
        arguments = [value for value in values if isinstance(value, Tensor)]
        _refuse_nested(block, arguments)
        template = self._known_output(position) or block.output.resolved(values)
        self._outputs.append(template)
        if self.position == self._stop:
            raise _Cut
        names = leaf_wires(self.skeleton.sections.layer_of(position), template)
        output = self._fill(template, names, values)
        if block.watched:
            leaves = flatten(output)[0]
            for index in block.watched:
                self._touch.watch(leaves[index], names[index])
        return block.returned(output, args, kwargs)

    def _known_output(self, position: int) -> Template | None:
        """The block's output as it turned out to be when the head ran before."""
        ran = self.section < len(self.sheet.parts)
        return self.sheet.output(position) if ran else None

    def _require_expected(self, block: Block) -> None:
        """Raise TrialError for an argument from an earlier section that nobody kept."""
        for wire in self._writer.calls[-1].wires if self.section else ():
            if wire.layer < self._head and wire not in self._expected:
                raise TrialError(
                    f"block {block.name!r} reads the tensor {wire} of an earlier part of the "
                    "forward, which it did not in the pilot. Train this model unsharded."
                )

    def _note_handed(self, name: str, args: Any, kwargs: Any) -> None:
        """Keep what a module is called with and later sections read."""
        for index, leaf in enumerate(flatten((args, kwargs))[0] if self._kept else ()):
            wire = argument_wire(self._head, name, self._counts[name], index)
            if wire in self._kept:
                self._made[wire] = leaf

    def _note_module(self, name: str, output: Any) -> Any:
        call = self._counts[name]
        self._counts[name] += 1
        template = output_template(output, (), owner=f"module {name!r}")
        names = []
        for index, leaf in enumerate(flatten(output)[0]):
            wire = module_wire(self._head, name, call, index)
            known = self._names.of(leaf) if isinstance(leaf, Tensor) else None
            if isinstance(leaf, Tensor) and (known is None or wire in self._kept):
                self._names.give(leaf, wire)
                if wire in self._kept:
                    self._made[wire] = leaf
            names.append(wire if known is None or wire in self._kept else known)
        self._returned.setdefault(name, []).append(Returned(template, tuple(names)))
        return output


def _refuse_nested(block: Block, arguments: Sequence[Tensor]) -> None:
    """Raise TrialError for a tensor without a shape, by which what a block returns is foreseen."""
    if any(argument.is_nested for argument in arguments):
        raise TrialError(
            f"block {block.name!r} is called with a nested tensor, which cannot be handed from "
            "shard to shard. nn.TransformerEncoder makes one in evaluation where it is given "
            "src_key_padding_mask: build it with enable_nested_tensor=False (for nn.Transformer's "
            "set encoder.use_nested_tensor = False), or train this model unsharded."
        )


def _expect(blocks: Sequence[Block], position: int, module: nn.Module) -> Block:
    """The block whose turn it is.

    Raises:
        TrialError: another module was called.
    """
    if position >= len(blocks) or blocks[position].module is not module:
        wanted = repr(blocks[position].name) if position < len(blocks) else "no more blocks"
        called = next((block.name for block in blocks if block.module is module), "?")
        raise TrialError(
            f"the forward called block {called!r} where it called {wanted} in the pilot. A model "
            "whose blocks run in changing order trains unsharded only."
        )
    return blocks[position]
