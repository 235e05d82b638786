"""One plain forward, watched: which modules run when, and what passes between the blocks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from shoal.partition.callsheet import (
    Call,
    CallWriter,
    argument_name,
    argument_wire,
    leaf_wires,
    module_wire,
    own_wire,
)
from shoal.partition.discover import CalledApart, Candidate, NotCuttable, ancestors_of
from shoal.partition.glue import Block, ReplacedCalls, own_call
from shoal.partition.handed import Keepers, KeeperSearch, returned_of, run_noting
from shoal.partition.preserve import BufferWatch, has_other
from shoal.partition.sections import Sections
from shoal.partition.taint import BlockOutput, Computed, Source, Sources, Taint
from shoal.partition.template import (
    Shape,
    Template,
    flatten,
    is_handed_on,
    output_template,
    packing_handed_on,
)
from shoal.partition.wires import (
    Names,
    OwnCall,
    OwnCalls,
    TouchWatch,
    Wire,
    Wires,
    storage_key,
    tensors_in,
)
from shoal.partition.writes import WriteWatch
from shoal.recipes.recipe import Batch, Recipe, autocast, loss_and_output
from shoal.rng import RngState, capture_rng, same_rng


@dataclass(slots=True)
class Gap:
    """What a forward does before one of its blocks, or after the last one."""

    read: frozenset[Source] = frozenset()
    looked_at: frozenset[Source] = frozenset()
    line: str = ""  # of the user's code, where it looked at a block's output
    buffers: frozenset[str] = frozenset()  # those that it changed
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    made: set[Wire] = field(default_factory=set)
    changed: list[int] = field(default_factory=list)  # storages of wires, in place


@dataclass(slots=True)
class Seen:
    """What there was to see in a forward that was taken to have ``joints``.

    ``found`` are the joints that it turned out to need. There is one gap more than blocks, and
    in ``calls`` one list for each section. ``keepers`` are the hooks by which its blocks hand
    over what it reads, ``shared`` what it computes itself and several sections read.
    """

    joints: tuple[int, ...]
    keepers: Keepers = field(default_factory=dict)
    shared: frozenset[OwnCall] = frozenset()
    found: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=lambda: [Gap()])
    calls: list[list[Call]] = field(default_factory=list)
    made: Wires = field(default_factory=dict)
    changed: list[tuple[int, int]] = field(default_factory=list)  # storage, block's position
    skipped: list[str] = field(default_factory=list)  # blocks that it did not call
    buffers: frozenset[str] = frozenset()  # that it changed
    rewritten: frozenset[str] = frozenset()  # those of them whose own elements it changed
    written: frozenset[str] = frozenset()  # parameters that it wrote to itself
    draws: bool = False  # random numbers, outside of all modules
    by_gradients: bool = False  # operators whose bits may depend on them


class Spy:
    """Watches one forward of a model whose joints are taken to be ``joints``.

    What it computes itself is made anew by what reads it later. With ``names_own`` copies are
    wires, and what is ``shared`` by several sections, where gradients would add up in another
    order. What blocks hand over to ``keepers`` is output of theirs; where none are known they are
    looked for.

    Attributes:
        seen: What it saw. Where ``seen.found`` are other joints, or ``seen.keepers`` or
            ``seen.shared`` others than were known, watch again with these.
    """

    def __init__(
        self,
        model: nn.Module,
        candidate: Candidate,
        device: torch.device,
        joints: tuple[int, ...] = (),
        *,
        shared: frozenset[OwnCall] = frozenset(),
        names_own: bool = True,
        keepers: Keepers | None = None,
    ) -> None:
        self.seen = Seen(joints, keepers=keepers or {}, shared=shared)
        self._search = None if keepers else KeeperSearch(self._alias)
        self._aliases: set[Source] = set()
        self._names_own = names_own
        self._model, self._device = model, device
        self._sections = Sections(sys.maxsize, joints)
        self._ancestors = ancestors_of(model, iter(candidate.blocks))
        self._block_names = {m: name for name, m in reversed(candidate.blocks.items())}
        self._names = Names()
        self._taint = Taint(dict(model.named_parameters()))
        self._touch = TouchWatch()
        self._writes = WriteWatch(model, (*self._block_names, *candidate.apart))
        self._writers: list[CallWriter] = []
        self._unsure: set[Wire | None] = set()
        self._free: set[Wire] = set()  # made of the batch alone
        self._early: dict[Wire, int] = {}  # computed from blocks, by a module before a position
        self._outer_buffers = BufferWatch(model, without=candidate.blocks.values())
        self._buffers = BufferWatch(model)
        self._weights = {name: (p.data, p._version) for name, p in model.named_parameters()}
        self._counts: Counter[str] = Counter()
        self._own_counts: Counter[str] = Counter()
        self._uses: dict[OwnCall, set[int]] = {}
        self._late: dict[OwnCall, int] = {}  # before which block, where no joint is known
        self._handed_on: dict[tuple[type, int], frozenset[int]] = {}  # output -> arguments
        self._depth = 0
        self._ambient: Any = None
        self._elsewhere: set[str] = set()  # blocks that it calls in another mode
        self._rng: RngState = capture_rng(device)  # when the last block returned
        self._last_rng = self._rng  # when the last module did

    def watch(self, recipe: Recipe, batch: Batch) -> None:
        """Run the forward, with gradients. Buffers and random state change as in any.

        Raises:
            CalledApart: it calls some of these blocks as no block can.
            NotCuttable: it does something that no chain of these blocks could do.
        """
        calls = ReplacedCalls(self._replacements())
        grads, cast = torch.enable_grad(), autocast(recipe, self._device)
        own = OwnCalls(self._compute)
        with grads, cast, calls, self._taint, self._touch, self._writes, own:
            self._ambient = self._mode()
            loss, output = loss_and_output(recipe, self._model, batch)
            if self._elsewhere:
                how = "calls block {} within torch.no_grad or parametrize.cached(), or an "
                how += "autocast of its own"
                raise CalledApart(self._elsewhere, how)
            with self._aside():
                self._end_gap()
                leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
                sources = self._taint.of_all([loss, *leaves])
                self.seen.gaps[-1].read |= sources
                self._note_uses(sources)
                self._find_numbers()
                self._find_late_joints()
                self._end()

    # -- while the forward runs -----------------------------------------------------------

    def _mode(self) -> tuple[Any, ...]:
        kind = self._device.type
        cast = torch.is_autocast_enabled(kind)
        autocast_to = torch.get_autocast_dtype(kind) if cast else None
        return torch.is_grad_enabled(), cast, autocast_to, bool(parametrize._cache_enabled)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Nothing is noted of what is done inside."""
        before = self._taint.paused
        self._taint.paused = self._touch.paused = True
        try:
            yield
        finally:
            self._taint.paused = self._touch.paused = before

    def _replacements(self) -> dict[nn.Module, Callable[..., Any]]:
        containers = set(self._ancestors.values())
        return {
            module: self._replace(name, module, own_call(module))
            for name, module in self._model.named_modules()
            if module not in containers
        }

    def _replace(self, name: str, module: nn.Module, call: Callable[..., Any]) -> Any:
        def spied(*args: Any, **kwargs: Any) -> Any:
            if self._depth and module in self._block_names:
                raise NotCuttable(f"block {name!r} is called from inside another module")
            if self._depth:
                return call(*args, **kwargs)
            self._depth += 1
            try:
                with self._aside():
                    self._note_draws()
                    if module in self._block_names:
                        return self._call_block(module, call, args, kwargs)
                    self._note_handed(name, args, kwargs)
                keepers = self.seen.keepers.get(name, ())
                with self._searching(name, module):
                    output = run_noting(call, module, keepers, args, kwargs)
                with self._aside():
                    self._note_module(name, module, output)
                    self._last_rng = capture_rng(self._device)
                    return returned_of(output, module, keepers, args, kwargs)
            finally:
                self._depth -= 1

        return spied

    def _compute(self, function: str, compute: Callable[[], Any], given: Any) -> Any:
        """What the forward computes itself: a wire, if it is one of these and takes no joint."""
        computed = compute()
        if self._depth:
            return computed
        self._own_counts[function] += 1
        call = OwnCall(function, self._own_counts[function])
        if not isinstance(computed, Tensor):
            return computed
        with self._aside():
            if not self._taint.of(computed):
                return computed
            is_here = not self._is_computed(computed, self._first)
            if self._names_own and is_here and (call.is_copy or call in self.seen.shared):
                head = self._sections.head(self._sections.of_block(len(self.seen.blocks)))
                self._note_made(computed, wire := own_wire(head, call))
                self._name(computed, wire)
            elif computed.requires_grad and not _share_memory(computed, tensors_in(given)):
                self._taint.add(computed, Computed(call))
                if not is_here:
                    self._late[call] = len(self.seen.blocks)
        return computed

    def _note_uses(self, sources: Sources) -> None:
        """Note before which block what is computed by the forward itself comes to anything."""
        for source in sources:
            if isinstance(source, Computed):
                self._uses.setdefault(source.call, set()).add(len(self.seen.blocks))

    def _find_shared(self) -> Iterator[OwnCall]:
        """Calls of the forward itself whose results come to something in several sections."""
        sections = Sections(len(self.seen.blocks), self.seen.joints)
        for call, positions in self._uses.items():
            if len({sections.of_block(position) for position in positions}) > 1:
                yield call

    def _note_draws(self) -> None:
        """Note whether random numbers were drawn since the last module returned."""
        now = capture_rng(self._device)
        self.seen.draws = self.seen.draws or not same_rng(now, self._last_rng)

    def _note_handed(self, name: str, args: Any, kwargs: Any) -> None:
        """Know again what a module outside of the blocks is called with."""
        head = self._sections.head(self._sections.of_block(len(self.seen.blocks)))
        for index, leaf in enumerate(flatten((args, kwargs))[0]):
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                wire = argument_wire(head, name, self._counts[name], index)
                sources = self._taint.of(leaf)
                if self._names.of(leaf) is None and sources:
                    self._taint.read |= sources  # it may be of an earlier gap
                    self._note_uses(sources)
                    self._note_made(leaf, wire)
                    self._taint.name(leaf, wire)

    def _note_made(self, tensor: Tensor, wire: Wire) -> None:
        """``tensor`` is made here, outside of the blocks."""
        if self._is_computed(tensor):
            self._early[wire] = len(self.seen.blocks)
        self.seen.gaps[-1].made.add(wire)
        self.seen.made[wire] = tensor

    def _note_module(self, name: str, module: nn.Module, output: Any) -> None:
        """Name what a module outside of the blocks returned."""
        head = self._sections.head(self._sections.of_block(len(self.seen.blocks)))
        gap, call = self.seen.gaps[-1], self._counts[name]
        self._counts[name] += 1
        gap.modules.append((name, module))
        for index, leaf in enumerate(flatten(output)[0]):
            if isinstance(leaf, Tensor) and self._names.of(leaf) is None:
                wire = module_wire(head, name, call, index)
                self._note_made(leaf, wire)
                self._name(leaf, wire)

    def _call_block(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        name, position = self._block_names[module], len(self.seen.blocks)
        if self._mode() != self._ambient:
            self._elsewhere.add(name)
            return call(*args, **kwargs)
        self._end_gap()
        writer = self._writer(position)
        if position and self._needs_joint(flatten((args, kwargs))[0]):
            self.seen.found.append(position)
        values = writer.write(module, name, args, kwargs)
        self._name_arguments(writer.calls[-1], values)
        keepers = self.seen.keepers.get(name, ())
        with self._writes.inside(module), self._searching(name, module):
            output = run_noting(call, module, keepers, args, kwargs)
        self._note_changes(module, args, kwargs, values)
        tensors = [value for value in values if isinstance(value, Tensor)]
        handed = packing_handed_on(output, values)
        num_returned = None
        if keepers:
            returned = _apart(output[0], tensors)
            num_returned, output = len(flatten(returned)[0]), (returned, output[1])
        else:
            output = _apart(output, tensors)
        template = output_template(output, tensors, owner=f"block {name!r}")
        template = template.handing_on(handed)
        block = Block(name, module, template, keepers=keepers, num_returned=num_returned)
        block = self._with_handed_on(block, values)
        unsure = frozenset(self._find_unsure(block.output, tensors))
        self._name_outputs(position, output, block.output, unsure)
        self.seen.blocks.append(replace(block, unsure=unsure))
        self._rng = self._last_rng = capture_rng(self._device)
        self.seen.gaps.append(Gap())
        self._taint.position = position + 1
        self._touch.touched.clear()
        return block.returned(output, args, kwargs)

    def _searching(self, name: str, module: nn.Module) -> AbstractContextManager[None]:
        """Look for keepers in a module that runs, where none are known."""
        return self._search.inside(name, module) if self._search else nullcontext()

    def _alias(self, tensor: Tensor) -> Tensor:
        """Another tensor with this one's memory, for a hook: is it read by the forward?"""
        with self._aside():
            alias = tensor.view_as(tensor)
        wire = Wire(self._sections.layer_of(len(self.seen.blocks)), f"hook.{len(self._aliases)}")
        self._taint.name(alias, wire)
        self._aliases.add(wire)
        return alias

    def _writer(self, position: int) -> CallWriter:
        """Of the section that the block at ``position`` is in, which may begin here."""
        section = self._sections.of_block(position)
        if section == len(self._writers):
            self._names.forget(self._free)
            self._free.clear()
            head = self._sections.head(section)
            self._writers.append(CallWriter(self._names, head, position))
            self.seen.calls.append(self._writers[-1].calls)
        return self._writers[section]

    def _name(self, tensor: Tensor, wire: Wire, *, position: int | None = None) -> None:
        self._names.give(tensor, wire)
        self._taint.name(tensor, wire, position=position)
        self.seen.made[wire] = tensor

    def _name_arguments(self, call: Call, values: Sequence[Any]) -> None:
        """Take up what was named as an argument; what is made of the batch alone stays free."""
        for leaf, value in zip(call.leaves, values, strict=True):
            if isinstance(leaf, Wire) and leaf not in self.seen.made:
                self.seen.made[leaf] = value
                sources = self._taint.of(value)
                self.seen.gaps[-1].read |= sources
                self._note_uses(sources)
                if sources:
                    self._taint.name(value, leaf)
                else:
                    self._free.add(leaf)

    def _find_unsure(self, template: Template, arguments: Sequence[Tensor]) -> Iterator[int]:
        """The leaves that look like no argument, or like one whose size is unsure itself."""
        for index, leaf in enumerate(template.leaves):
            if isinstance(leaf, Shape) and (
                leaf.like is None
                or leaf.size != leaf.like_size
                or self._names.of(arguments[leaf.like]) in self._unsure
            ):
                yield index

    def _with_handed_on(self, block: Block, values: Sequence[Any] | None = None) -> Block:
        """``block`` with the arguments that its numbers are, in all calls of its class so far."""
        leaves = list(block.output.leaves)
        for index, number in block.numbers.items():
            key = type(block.module), index
            if values is not None:
                same = [i for i, value in enumerate(values) if is_handed_on(number.value, value)]
                self._handed_on[key] = self._handed_on.get(key, frozenset(same)) & {*same}
            argument = min(self._handed_on[key], default=None)
            leaves[index] = replace(number, argument=argument)
        return replace(block, output=replace(block.output, leaves=tuple(leaves)))

    def _find_numbers(self) -> None:
        """Joints behind numbers that later calls of their class have shown to be no arguments."""
        blocks = self.seen.blocks = list(map(self._with_handed_on, self.seen.blocks))
        behind = {at + 1 for at, block in enumerate(blocks[:-1]) if block.returns_numbers}
        self.seen.found = sorted({*self.seen.found, *behind})

    def _name_outputs(
        self, position: int, output: Any, template: Template, unsure: frozenset[int]
    ) -> None:
        """Name a block's output, and watch what has no size that is known beforehand."""
        wires = leaf_wires(self._sections.layer_of(position), template)
        for index, leaf in enumerate(flatten(output)[0]):
            if isinstance(leaf, Tensor):
                wire = wires[index]
                self._name(leaf, wire, position=position)
                if index in unsure:
                    self._unsure.add(wire)
                    self._touch.watch(leaf, wire)

    def _note_changes(self, module: nn.Module, args: Any, kwargs: Any, values: list[Any]) -> None:
        """Note what a block did to its arguments.

        Raises:
            NotCuttable: it put something else into one of them.
        """
        for index, leaf in enumerate(flatten((args, kwargs))[0]):
            if index >= len(values) or leaf is not values[index]:
                argument = argument_name(module, args, kwargs, index)
                name = self._block_names[module]
                raise NotCuttable(f"block {name!r} changes its argument {argument!r}")
        position = len(self.seen.blocks)
        self.seen.changed += [(storage_key(t), position) for t in self._names.changed()]

    def _end_gap(self) -> None:
        """Note what was done since the last block ended."""
        gap, taint = self.seen.gaps[-1], self._taint
        gap.read, gap.looked_at = frozenset(taint.read), frozenset(taint.looked_at)
        taint.read.clear()
        gap.line, taint.line = taint.line, ""
        taint.looked_at.clear()
        gap.changed = [storage_key(tensor) for tensor in self._names.changed()]
        gap.buffers = frozenset(self._outer_buffers.changed())
        self._outer_buffers.restart()

    def _needs_joint(self, values: Sequence[Any]) -> bool:
        """Must the forward be entered again before the next block, to have what it needs?

        Raises:
            NotCuttable: it draws from generators that cannot be told from control flow.
        """
        now = capture_rng(self._device)
        if now.python != self._rng.python or not _same_numpy(now, self._rng):
            before = self.seen.blocks[-1].name
            raise NotCuttable(
                "the forward draws from Python's or NumPy's random numbers after block "
                f"{before!r}, and may decide by them which block comes next"
            )
        if not same_rng(now, self._rng) or self.seen.blocks[-1].returns_numbers:
            return True
        touched = (self._sections.position_of(t.wire.layer) for t in self._touch.touched)
        if any(position >= self._start for position in touched):
            return True
        tensors = [v for v in values if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)]
        return any(self._is_computed(tensor) for tensor in tensors)

    @property
    def _start(self) -> int:
        """The first block of the section that the forward is in, as far as that is known."""
        return self.seen.found[-1] if self.seen.found else 0

    @property
    def _first(self) -> int:
        """The same, if the next block is known to begin a section."""
        position = len(self.seen.blocks)
        return position if position in self.seen.joints else self._start

    def _is_computed(self, tensor: Tensor, start: int | None = None) -> bool:
        """Was it computed from a block's output of this section, outside of any block?"""
        start = self._start if start is None else start
        name = self._names.of(tensor)
        if name is not None and name.slot.startswith("out."):
            return False
        sources = self._taint.of(tensor)
        return any(isinstance(s, BlockOutput) and s.position >= start for s in sources)

    def _find_late_joints(self) -> None:
        """Also those where a module computes what only later sections read, as a pooler does.

        Or later blocks, as those of a decoder that attend to an encoder's normed output; or where
        the forward computes by itself what several later sections read.
        """
        calls = [call for section in self.seen.calls for call in section]
        late = {
            position
            for wire, position in self._early.items()
            if position < len(self.seen.blocks)
            and (
                any(wire in gap.read for gap in self.seen.gaps[position + 1 :])
                or any(wire in call.wires for call in calls[position + 1 :])
            )
        }
        late |= {self._late[call] for call in self._find_shared() if call in self._late}
        self.seen.found = sorted({*self.seen.found, *late})

    def _has_kernels_of_two_kinds(self) -> bool:
        """Whether a CPU computes an LSTM by oneDNN where no gradient is asked for.

        Not so of packed sequences of several lengths, as the pilot's may be: in a later batch all
        may have one.
        """
        if self._device.type != "cpu":
            return False
        recurrent = (m for m in self._model.modules() if isinstance(m, nn.LSTM))
        return any(p.dtype is not torch.float64 for m in recurrent for p in m.parameters())

    def _find_written(self) -> None:
        """Parameters that blocks have written to.

        Raises:
            NotCuttable: the forward has, or they have other ones now.
        """
        after = "do that after the optimizer's step, in a class or a hook of the optimizer's"
        pairs = [(n, p, *self._weights[n]) for n, p in self._model.named_parameters()]
        changed = {name for name, p, _, version in pairs if p._version != version}
        self.seen.written = frozenset(changed | self._writes.names)
        if self._writes.foreign:
            names = ", ".join(sorted(self._writes.foreign))
            raise NotCuttable(
                f"the forward writes to weights outside of the block they are in: {names}; {after}"
            )
        if other := [name for name, p, data, _ in pairs if has_other(p, data)]:
            names = ", ".join(sorted(other))
            raise NotCuttable(f"the forward gives weights other values by .data: {names}; {after}")

    def _end(self) -> None:
        if self._search and any(gap.read & self._aliases for gap in self.seen.gaps):
            self.seen.keepers = self._search.keepers
        self._search = None  # it knows this spy: a cycle would keep the whole forward's graph
        self.seen.shared |= set(self._find_shared())
        called = {block.module for block in self.seen.blocks}
        self.seen.skipped = [name for m, name in self._block_names.items() if m not in called]
        inner = tuple(name for gap in self.seen.gaps for name, _ in gap.modules)
        if entered := {b for b in self.seen.skipped if any(n.startswith(f"{b}.") for n in inner)}:
            how = "runs what is in block {} without calling it (block.forward(x) is no call)"
            raise CalledApart(entered, how)
        self._find_written()
        self.seen.by_gradients = self._taint.by_gradients or self._has_kernels_of_two_kinds()
        self.seen.buffers = frozenset(self._buffers.changed())
        self.seen.rewritten = frozenset(self._buffers.changed_themselves())
        if self._buffers.added():
            names = ", ".join(sorted(self._buffers.added()))
            raise NotCuttable(f"the forward adds buffers: {names}")


def _apart(output: Any, arguments: Sequence[Tensor]) -> Any:
    """A block's output, with a tensor of its own where it returns an argument as it is.

    The forward has two in place of it when it is run with stand-ins, and each has its wire.
    """
    same = {id(tensor) for tensor in arguments if tensor.layout is torch.strided}
    leaves, spec = flatten(output)
    if not any(id(leaf) in same for leaf in leaves):
        return output
    apart = {id(leaf): leaf.view_as(leaf) for leaf in leaves if id(leaf) in same}
    return pytree.tree_unflatten([apart.get(id(leaf), leaf) for leaf in leaves], spec)


def _share_memory(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return storage_key(tensor) in map(storage_key, others)


def _same_numpy(first: RngState, second: RngState) -> bool:
    return bool((first.numpy[1] == second.numpy[1]).all()) and first.numpy[2:] == second.numpy[2:]
