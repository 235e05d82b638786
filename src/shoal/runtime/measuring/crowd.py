"""The trials of one shape with which arrays are measured."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from shoal.core.spec import HyperParameters, TrialSpec
from shoal.fusion import Member
from shoal.optimizers import build_optimizer_of
from shoal.ownstep import Modes
from shoal.recipe import (
    Recipe,
    build_model,
    read_data,
)
from shoal.rng import capture_rng, seed_all
from shoal.runtime.measuring.describe import first_batch
from shoal.schedules import Schedules, build_schedule


class Crowd:
    """Trials with their batches, in host memory; built one after the other as they are needed."""

    def __init__(self, recipe: Recipe, trials: Sequence[TrialSpec], device: torch.device) -> None:
        # Timing takes many steps on one batch: what diverges is to take as long as ever.
        self._recipe = dataclasses.replace(recipe, on_nonfinite="ignore")
        self.trials, self._device = trials, device
        self.members: list[Member] = []
        self.batches: list[list[Any]] = []  # a group for each
        self.valid: list[Any] = []  # a batch to evaluate for each, None without such data

    def grow(self, count: int) -> None:
        """Have so many at least."""
        for index in range(len(self.members), count):
            trial = self.trials[index % len(self.trials)]  # some twice, if there are too few
            hp = HyperParameters(trial.hp)
            seed_all(trial.seed)
            model = build_model(self._recipe, hp)
            modes = Modes(self._recipe, model) if self._recipe.step else None
            train, valid = read_data(self._recipe, hp)
            optimizer = build_optimizer_of(self._recipe, model, hp)
            schedule = build_schedule(self._recipe, optimizer, hp, train)
            self.members.append(
                Member(
                    recipe=self._recipe,
                    hp=hp,
                    module=model,
                    optimizer=optimizer,
                    schedule=_Endless(schedule) if schedule else None,
                    rng=capture_rng(self._device),
                    modes=modes,
                )
            )
            self.batches.append([first_batch(train)] * self._recipe.accumulate)
            self.valid.append(next(iter(() if valid is None else valid), None))

    def first_batches(self, count: int) -> list[Any]:
        """One for each of the first ``count``."""
        return [group[0] for group in self.batches[:count]]


class _Endless(Schedules):
    """A schedule that begins anew where it ends, since timing takes more steps than a trial."""

    def __init__(self, schedule: Any) -> None:
        super().__init__({"it": schedule})
        self._schedule, self._beginning = schedule, copy.deepcopy(schedule.state_dict())
        self._has_begun = False

    def step(self) -> None:
        """The schedule's own."""
        try:
            with nullcontext() if self._has_begun else warnings.catch_warnings():
                if not self._has_begun:  # torch's, of an optimizer that others step too
                    warnings.simplefilter("ignore")
                self._has_begun = True
                self._schedule.step()
        except Exception:
            self._schedule.load_state_dict(copy.deepcopy(self._beginning))
