"""Validation batches through the stages of a pipeline: forwards alone, and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import TrialError
from shoal.partition.chain import Chain, Micro
from shoal.partition.units import run_forward
from shoal.pipeline.compute import Share
from shoal.program.ir import Action, Op, Program
from shoal.recipe import Batch, autocast
from shoal.rng import capture_rng, same_rng

Report = Callable[[Tensor, Any, Batch], None]
"""Told loss, output and batch of what the last stage computed."""


def validation(stages: int) -> Program:
    """One batch through all stages."""
    return Program(tuple(tuple(_actions(stage, stages)) for stage in range(stages)))


def _actions(stage: int, stages: int) -> list[Action]:
    found = [Action(Op.RECV, stage, 0, peer=stage - 1)] if stage else []
    found.append(Action(Op.F, stage, 0))
    if stage + 1 < stages:
        found.append(Action(Op.SEND, stage + 1, 0, peer=stage + 1))
    return found


@dataclass(slots=True)
class _Passing:
    """The batch that is at this stage."""

    micro: Micro
    wires: Mapping[Any, Tensor]


class Validation:
    """Runs the actions of ``validation`` at one stage; the weights are bound.

    Args:
        fetch: The next batch; of the first stage only.
        report: Told what came out; of the last stage only.
    """

    def __init__(
        self, chain: Chain, share: Share, fetch: Callable[[], Batch], report: Report
    ) -> None:
        self._chain, self._share, self._fetch, self._report = chain, share, fetch, report
        self._passing: _Passing | None = None

    def take(self, action: Action, tree: Any) -> None:
        """What the stage before left."""
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
        """What the next stage needs."""
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
