"""The user's own forward with its blocks stubbed: what comes before and after them.

[Note: stand-ins]
Neither end of a chain is traced. The prologue is the forward run until the last block is
called; the epilogue is the same forward run again, skipped through quickly:

                 embeddings   glue   block 1 ... block n-1   block n      head, loss
    prologue     really       really stub        stub        stub: cut    -
    epilogue     stub         really stub        stub        real value   really

A stub returns a stand-in: the shape and dtype of the real output over one NaN. The glue
between the modules runs in both, so whatever depends on the batch alone (masks,
positions) is right in both; whatever wrongly depends on a stand-in is NaN, and loud. A
stub takes the place where ``nn.Module.__call__`` looks first, above the hooks: the hooks
of a block fire when the block really runs, and only then; those of the model and of
other modules that contain blocks fire in both runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import TrialError
from shoal.partition.callsheet import (
    CallSheet,
    CallWriter,
    Shape,
    Template,
    Wire,
    Wires,
    flatten,
    leaf_wires,
    module_wires,
    output_template,
)
from shoal.partition.taint import Taint
from shoal.recipe import Batch, Output, Recipe, compute_loss, model_inputs
from shoal.rng import capture_rng, restore_rng

_FIRST_PLACE = "_compiled_call_impl"  # read first by nn.Module.__call__, torch 2.10 to 2.13


@dataclass(frozen=True, slots=True)
class Block:
    """One call of one module: a layer of the chain between prologue and epilogue."""

    name: str
    module: nn.Module
    output: Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model seen as blocks in calling order, and the modules that run before them.

    ``kept`` are the wires from before the last block that the epilogue reads. ``dense`` says
    that the glue changes stand-ins in place, so that they need memory; ``glue_free`` that
    nothing between the blocks can look at them.
    """

    model: nn.Module
    recipe: Recipe
    device: torch.device
    blocks: tuple[Block, ...]
    prologue: Mapping[str, nn.Module]
    kept: frozenset[Wire] = frozenset()
    dense: bool = False
    glue_free: bool = False

    def stand_in(self, shape: Shape) -> Tensor:
        """A tensor of this shape and no values, on the skeleton's device."""
        return shape.stand_in(self.device, dense=self.dense)


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


class _Prologue:
    """One run of the forward up to its last block."""

    def __init__(self, skeleton: Skeleton, taint: Taint | None) -> None:
        self.skeleton = skeleton
        self.taint = taint
        self.writer = CallWriter()
        self.returned: dict[str, list[Template]] = {name: [] for name in skeleton.prologue}
        self.depth = 0

    def replacements(self) -> dict[nn.Module, Callable[..., Any]]:
        stubs = {block.module: self._stub(block.module) for block in self.skeleton.blocks}
        spies = {
            module: self._spy(name, own_call(module))
            for name, module in self.skeleton.prologue.items()
        }
        return {**spies, **stubs}

    def _stub(self, module: nn.Module) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            position = len(self.writer.calls)
            block = _expect(self.skeleton.blocks, position, module)
            values = self.writer.write_call(module, block.name, args, kwargs)
            arguments = [value for value in values if isinstance(value, Tensor)]
            if self.taint is not None:
                self.taint.check_arguments(module, args, kwargs, self.skeleton.blocks, position)
            template = block.output.resolved(arguments)
            if position == len(self.skeleton.blocks) - 1:
                self.writer.outputs.append(template)
                raise _Cut
            names = leaf_wires(position + 1, template)
            output = template.fill(names, {}, self.skeleton.stand_in)
            self.writer.write_output(template, output)
            _mark(self.taint, names, output, {})
            return output

        return stub

    def _spy(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                output = call(*args, **kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0:
                template = output_template(output, (), owner=f"module {name!r}")
                names = module_wires(name, len(self.returned[name]), template)
                self.writer.write_module_output(names, output, self.skeleton.kept)
                self.returned[name].append(template)
            return output

        return spy


def run_prologue(
    skeleton: Skeleton, batch: Batch, taint: Taint | None = None
) -> tuple[CallSheet, Wires]:
    """The calls of this batch, and the tensors that the prologue hands to the blocks.

    Gradient mode, autocast and random state are the caller's.

    Raises:
        TrialError: the forward calls other blocks than it did in the pilot.
    """
    run = _Prologue(skeleton, taint)
    with ReplacedCalls(run.replacements()):
        try:
            args, kwargs = model_inputs(skeleton.recipe, batch)
            skeleton.model(*args, **kwargs)
        except _Cut:
            return run.writer.sheet(run.returned, skeleton.kept), run.writer.made
    raise TrialError(
        f"the forward called {len(run.writer.calls)} of the {len(skeleton.blocks)} blocks it "
        "called in the pilot. A model that skips blocks trains unsharded only."
    )


class _Epilogue:
    """One run of the forward, skipped through to the end of its last block."""

    def __init__(
        self,
        skeleton: Skeleton,
        sheet: CallSheet,
        wires: Wires,
        resume: Callable[[], None],
        taint: Taint | None,
    ) -> None:
        self.skeleton = skeleton
        self.sheet = sheet
        self.wires = wires
        self.resume = resume
        self.taint = taint
        self.position = 0
        self.resumed = False

    def replacements(self) -> dict[nn.Module, Callable[..., Any]]:
        stubs = {block.module: self._stub(block.module) for block in self.skeleton.blocks}
        skips = {
            module: self._skip(name, self.sheet.prologue[name])
            for name, module in self.skeleton.prologue.items()
        }
        return {**skips, **stubs}

    def _stub(self, module: nn.Module) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            _expect(self.skeleton.blocks, self.position, module)
            self.position += 1
            template = self.sheet.outputs[self.position - 1]
            is_last = self.position == len(self.skeleton.blocks)
            if is_last:
                self.resumed = True
                self.resume()
            output = self._fill(leaf_wires(self.position, template), template)
            if is_last:
                self.wires.clear()
            return output

        return stub

    def _skip(self, name: str, templates: tuple[Template, ...]) -> Callable[..., Any]:
        calls = itertools.count()

        def skip(*args: Any, **kwargs: Any) -> Any:
            call = next(calls)
            if call >= len(templates):
                raise TrialError(
                    f"module {name!r} is called more often in the epilogue's run of the forward "
                    "than in the prologue's. Train this model unsharded."
                )
            return self._fill(module_wires(name, call, templates[call]), templates[call])

        return skip

    def _fill(self, names: Sequence[Wire], template: Template) -> Any:
        output = template.fill(names, self.wires, self.skeleton.stand_in)
        _mark(self.taint, names, output, self.wires)
        return output


def run_epilogue(
    skeleton: Skeleton,
    sheet: CallSheet,
    batch: Batch,
    wires: Wires,
    *,
    on_resume: Callable[[], None] | None = None,
    taint: Taint | None = None,
) -> tuple[Tensor, Output]:
    """Loss and output, from the wires alive at the epilogue; takes them out of ``wires``.

    What is drawn while skipping does not count: the random state on return is as if
    only the part after the last block had run. ``on_resume`` is told when that begins.

    Raises:
        TrialError: the forward never reached its last block.
    """
    state = capture_rng(skeleton.device)

    def resume() -> None:
        calls.restore()
        restore_rng(state, skeleton.device)
        if on_resume is not None:
            on_resume()

    run = _Epilogue(skeleton, sheet, wires, resume, taint)
    calls = ReplacedCalls(run.replacements())
    with calls:
        args, kwargs = model_inputs(skeleton.recipe, batch)
        output = skeleton.model(*args, **kwargs)
    if not run.resumed:
        raise TrialError(
            "the forward ended before its last block was called, unlike in the pilot. Train "
            "this model unsharded."
        )
    return compute_loss(skeleton.recipe, output, batch), output


def _mark(
    taint: Taint | None, names: Sequence[Wire], output: Any, real: Mapping[Wire, Tensor]
) -> None:
    """Tell ``taint`` which leaves of an output are stand-ins."""
    if taint is None:
        return
    for name, leaf in zip(names, flatten(output)[0], strict=True):
        if isinstance(leaf, Tensor) and name not in real:
            taint.mark(leaf, name)


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
