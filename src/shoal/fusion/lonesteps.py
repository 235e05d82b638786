"""Steps of the users' own slot by slot, as each trial does alone: slow, and its bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.fusion.crew import Crew, taking_part
from shoal.fusion.ownsteps import OwnStepped
from shoal.fusion.passes.loop import alone
from shoal.recipes.ownstep import Losses, OwnStep


class LoneSteps:
    """In the place of ``OwnSteps``, where no pass is one of all slots."""

    notes: Sequence[str] = ("steps run slot by slot",)
    by_data: Sequence[str] = ()

    def __init__(self) -> None:
        self._own: dict[int, OwnStep] = {}  # by slot

    def changed(self, crew: Crew) -> None:
        """The crew has other members than before."""
        self._own.clear()

    def step(self, crew: Crew, batches: Sequence[Any], active: Sequence[bool]) -> OwnStepped:
        """Call the recipe's step once in each slot that takes part, in its random streams."""
        losses: dict[int, Losses] = {}
        failures: dict[int, BaseException] = {}
        for slot in taking_part(active):
            try:
                losses[slot] = self._step(crew, slot, batches[slot])
            except (Exception, SystemExit) as error:
                failures[slot] = error
        return OwnStepped(losses, failures)

    def _step(self, crew: Crew, slot: int, batch: Any) -> Losses:
        with alone(crew, slot) as member:
            assert member.modes is not None
            if slot not in self._own:
                args = (member.recipe, member.module, member.optimizer, member.hp, member.modes)
                self._own[slot] = OwnStep(*args)
            losses = self._own[slot](batch, member.step)
        crew.stacked.settle(slot, member.module)
        return losses
