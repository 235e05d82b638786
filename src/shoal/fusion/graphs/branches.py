"""Slot by slot, each pass as the trial alone has it captured; on a GPU the slots side by side.

[Note: branches]
Other backends run one code on stacked tensors, by other kernels than a trial's own. Here every
slot runs its own module's pass, on its rows. One that is captured (``LonePass.ready``) is only
launched: on a GPU in a lane beside those of other slots, so that kernels which are too small to
fill the device share it. Those that draw random numbers take turns, since there is one generator
that kernels draw from. It is what is left where stacked kernels are poor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.fusion.crew import Crew, Trained, taking_part
from shoal.fusion.declined import Declined
from shoal.fusion.graphs.launcher import ByCode, Launcher, LonePass
from shoal.fusion.passes.loop import LoopBackend, alone
from shoal.fusion.rows.installed import weights_stay


class BranchesBackend(LoopBackend):
    """Runs each slot's own pass, captured where ``launcher`` can; without one, by its code.

    The bits are the same either way, and those of the trial alone on such rows.
    """

    def __init__(self, launcher: Launcher | None = None) -> None:
        self._launcher = launcher
        self.steps = launcher.of_steps() if launcher else None
        self._passes: dict[int, tuple[nn.Module, LonePass]] = {}  # by slot

    def train(
        self, crew: Crew, batches: Sequence[Any], active: Sequence[bool], scale: float
    ) -> Trained:
        """A pass of each slot that takes part; losses are read when all are launched."""
        if scale != 1 / crew.members[0].recipe.accumulate:  # what is captured divides by that
            return super().train(crew, batches, active, scale)
        launcher = self._launcher or ByCode(crew.device)
        found: dict[int, Tensor] = {}
        failures: dict[int, BaseException] = {}
        with launcher.together():
            for slot in taking_part(active):
                try:
                    found[slot] = self._train_one(launcher, crew, slot, batches[slot])
                except Declined:
                    raise
                except (Exception, SystemExit) as error:
                    failures[slot] = error
        losses = torch.full((crew.width,), math.nan, dtype=torch.float64)
        if found:
            told = torch.stack([loss.detach() for loss in found.values()])
            losses[list(found)] = told.double().cpu()
        return Trained(losses, failures)

    def _train_one(self, launcher: Launcher, crew: Crew, slot: int, batch: Any) -> Tensor:
        passes = self._pass_of(launcher, crew, slot)
        if (ready := passes.ready(batch)) is not None:
            streams = crew.streams.turn(slot) if ready.draws else nullcontext()
            with streams, launcher.lane(slot, beside=not ready.draws):
                loss = ready.launch()
            if loss is not None:
                return loss
        with (
            launcher.lane(slot, beside=False),
            alone(crew, slot) as member,
            weights_stay(member.module.parameters()),
        ):
            return passes.backward(batch)

    def _pass_of(self, launcher: Launcher, crew: Crew, slot: int) -> LonePass:
        member = crew.members[slot]
        known = self._passes.get(slot)
        if known is None or known[0] is not member.module:
            known = self._passes[slot] = member.module, launcher.capture(member, slot)
        return known[1]

    def changed(self, crew: Crew) -> None:
        """Who has left takes his captures along."""
        for slot, (module, passes) in list(self._passes.items()):
            if slot >= crew.width or crew.members[slot].module is not module:
                passes.let_go()
                del self._passes[slot]

    @property
    def why_eager(self) -> str:
        """Why some pass is not captured; empty if all are, or may get to be."""
        return next((words for _, p in self._passes.values() if (words := p.why_not)), "")
