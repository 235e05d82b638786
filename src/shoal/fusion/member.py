"""One trial as it lives alone: what an array takes in, and gives back."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.recipes.bound import bound
from shoal.recipes.habits import Habits, habits_of
from shoal.recipes.ownstep import Modes
from shoal.recipes.recipe import HP, Recipe
from shoal.recipes.schedules import state_of_schedule
from shoal.rng import RngState, capture_rng, restore_rng


@dataclass(slots=True, kw_only=True)
class Member:
    """A trial's objects, as the plain loop has them between two steps.

    In an array the module's parameters and buffers are views of the array's tensors, and
    the optimizer holds the same parameter objects throughout. ``rng`` is current outside an
    array; inside, the array's streams are (``Array.extract`` brings it up to date). ``recipe`` is
    that of a trial with these ``hp``, whichever was given. ``usual`` is the layout of its data's
    first batch, where it is asked for.
    """

    recipe: Recipe
    hp: HP
    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    rng: RngState
    step: int = 0
    modes: Modes | None = None  # where the recipe has a step of its own
    usual: Hashable = None
    habits: Habits = field(init=False)  # of the schedule

    def __post_init__(self) -> None:
        self.recipe = bound(self.recipe, self.hp)
        self.habits = habits_of(self.schedule)

    def train(self, training: bool = True) -> None:
        """Put the module into the modes in which it trains, or into evaluation mode."""
        if training and self.modes is not None:
            self.modes.train()
        else:
            self.module.train(training)

    def state(self) -> dict[str, Any]:
        """Everything by parameter name, in the layout of ``PlainResult.state()``."""
        return {
            "model": {name: tensor.cpu() for name, tensor in self.module.state_dict().items()},
            "optimizer": self._optimizer_state(),
            "schedule": state_of_schedule(self.schedule, self.module),
            "rng": self.rng,
            "step": self.step,
        }

    def _optimizer_state(self) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        state = {
            names[id(parameter)]: {
                key: value.cpu() if isinstance(value, Tensor) else value
                for key, value in entries.items()
            }
            for parameter, entries in self.optimizer.state.items()
            if entries and id(parameter) in names
        }
        groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return {"state": state, "groups": groups}


@contextmanager
def in_streams(member: Member, device: torch.device, *, puts_back: bool = True) -> Iterator[None]:
    """The process's random streams are the member's inside, and its ``rng`` afterwards."""
    outer = capture_rng(device) if puts_back else None
    restore_rng(member.rng, device)
    try:
        yield
    finally:
        member.rng = capture_rng(device)
        if outer is not None:
            restore_rng(outer, device)
