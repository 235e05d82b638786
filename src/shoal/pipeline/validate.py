"""Validation batches through the stages of a pipeline: forwards alone, and the metrics.

With copies of the pipeline the batches go to them in turn, whole, and device 0 reads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import TrialError
from shoal.partition.chain import Chain, Micro
from shoal.partition.units import run_forward
from shoal.pipeline.compute import Share
from shoal.program.ir import Action, Op, Program
from shoal.program.world import is_batch
from shoal.recipes.recipe import Batch, autocast
from shoal.rng import capture_rng, same_rng

Report = Callable[[Tensor, Any, Batch], None]
"""Told loss, output and batch of what the last stage computed."""


def validation(stages: int, width: int = 1, copy: int = 0) -> Program:
    """One batch through all stages of one of the copies, which device 0 hands it."""
    lists: list[tuple[Action, ...]] = [()] * (stages * width)
    for stage in range(stages):
        lists[copy * stages + stage] = tuple(_actions(stage, stages, copy))
    if copy:
        lists[0] = (Action(Op.SEND, 0, 0, peer=copy * stages, trial=copy),)
    return Program(tuple(lists))


def _actions(stage: int, stages: int, copy: int) -> Iterator[Action]:
    first = copy * stages
    if stage:
        yield Action(Op.RECV, stage, 0, peer=first + stage - 1, trial=copy)
    elif copy:
        yield Action(Op.RECV, 0, 0, peer=0, trial=copy)
    yield Action(Op.F, stage, 0, trial=copy)
    if stage + 1 < stages:
        yield Action(Op.SEND, stage + 1, 0, peer=first + stage + 1, trial=copy)


class BufferWrites:
    """Notices which buffers of a model are written to, without a copy of any.

    What is written through ``.data`` is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: (b, b._version) for name, b in model.named_buffers()}

    def found(self) -> list[str]:
        """The names of those that were written to, or replaced, since this was made."""
        now = self._model.named_buffers()
        return sorted(name for name, buffer in now if self._is_new(name, buffer))

    def _is_new(self, name: str, buffer: Tensor) -> bool:
        before, version = self._before.get(name, (None, 0))
        return buffer is not before or buffer._version != version


@dataclass(slots=True)
class _Passing:
    """The batch that is at this stage."""

    micro: Micro
    wires: Mapping[Any, Tensor]


class Validation:
    """Runs the actions of ``validation`` at one stage; the weights are bound.

    Args:
        fetch: The next batch; of the first stage of copy 0, or of the device that hands it out.
        report: Told what came out; of the last stage only.
    """

    def __init__(
        self, chain: Chain, share: Share, fetch: Callable[[], Batch], report: Report
    ) -> None:
        self._chain, self._share, self._fetch, self._report = chain, share, fetch, report
        self._passing: _Passing | None = None

    def take(self, action: Action, tree: Any) -> None:
        """What the stage before left; of another copy's first stage the batch."""
        if is_batch(action):
            self._fetch = lambda: tree
            return
        batch, parts, touched, wires = tree
        micro = self._chain.begin(batch)
        micro.sheet = replace(self._chain.skeleton.blank_sheet(), parts=parts)
        micro.touched |= touched
        self._passing = _Passing(micro, wires)

    def run(self, action: Action) -> None:
        """The forward of this stage.

        Raises:
            TrialError: it draws random numbers, which the stages would draw in another order.
        """
        before = capture_rng(self._chain.device)
        if self._passing is None:
            self._passing = _Passing(self._chain.begin(self._fetch()), {})
            before = capture_rng(self._chain.device)
        if self._share.stop == self._chain.num_layers:
            self._finish(self._passing)
        else:
            self._forward(self._passing)
        if not same_rng(before, capture_rng(self._chain.device)):
            raise TrialError(
                "the model draws random numbers while it is evaluated, which stages would draw "
                "in another order than one device. Train it with technique='spilled'."
            )

    def give(self, action: Action) -> Any:
        """What the next stage needs; a batch for another copy."""
        if is_batch(action):
            return self._fetch()
        assert self._passing is not None
        passing, self._passing = self._passing, None
        micro = passing.micro
        assert micro.sheet is not None
        return (micro.batch, micro.sheet.parts, micro.touched, passing.wires)

    def _forward(self, passing: _Passing) -> None:
        share, micro = self._share, passing.micro
        with torch.no_grad():
            made = run_forward(self._chain, micro, share.start, share.stop, passing.wires)
        alive = {**passing.wires, **made}
        live = self._chain.live_wires(share.stop, micro)
        passing.wires = {wire: alive[wire] for wire in live}

    def _finish(self, passing: _Passing) -> None:
        micro = passing.micro
        with torch.no_grad(), autocast(self._chain.recipe, self._chain.device):
            loss, output = self._chain.loss(micro, self._share.start, passing.wires)
        self._passing = None
        self._report(loss, output, micro.batch)
