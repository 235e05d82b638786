"""The trials of one shape with which arrays are measured."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from shoal.core.spec import HyperParameters, TrialSpec
from shoal.fusion import Member
from shoal.fusion.batches import elements_of, layout_of
from shoal.fusion.matching.lengths import ranges
from shoal.fusion.matching.signature import kind_of
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.ownstep import Modes
from shoal.recipes.recipe import (
    Recipe,
    build_model,
    read_data,
)
from shoal.recipes.schedules import Schedules, build_schedule
from shoal.rng import capture_rng, seed_all
from shoal.runtime.measuring.firstbatches import first_batch, first_batches

LEARNS, TIMED = 4, 4
"""Steps whose batches are looked at where these vary in length: first those of which graphs are
made, then those that are timed. A length that comes again has a graph there, and no other one."""


class Crowd:
    """Trials with their batches, in host memory; built one after the other as they are needed.

    ``varies``: their batches vary in length, and each has those of several steps. ``one_base``:
    what is frozen is the same in all of them, and an array has it once.
    """

    varies, one_base = False, False

    def __init__(self, recipe: Recipe, trials: Sequence[TrialSpec], device: torch.device) -> None:
        # Timing takes many steps on one batch: what diverges is to take as long as ever.
        self._recipe = dataclasses.replace(recipe, on_nonfinite="ignore")
        self.trials, self._device = trials, device
        self.members: list[Member] = []
        self.groups: list[list[list[Any]]] = []  # for each, of a step or several
        self.valid: list[Any] = []  # a batch to evaluate for each, None without such data
        self._bad: list[Any] = []  # batches of which a trial's code raises

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
            self.groups.append(self._read(train))
            self.valid.append(next(iter(() if valid is None else valid), None))

    def first_batches(self, count: int) -> list[Any]:
        """One for each of the first ``count``."""
        return [group[0] for group in self.batches[:count]]

    @property
    def batches(self) -> list[list[Any]]:
        """For each the batches of its first step."""
        return [groups[0] for groups in self.groups]

    def steps(self, count: int) -> list[list[tuple[Any, ...]]]:
        """Of the first ``count``, their batches by step, micro-batch and slot."""
        steps = zip(*self.groups[:count], strict=True)
        return [list(zip(*step, strict=True)) for step in steps]

    def lengths(self, count: int) -> str:
        """The sizes of what the first ``count`` have, where they vary."""
        if not self.varies:
            return ""
        groups = itertools.chain(*self.groups[:count])
        return ranges([kind_of(batch) for batch in itertools.chain(*groups)])

    def alike(self, count: int) -> list[Any]:
        """A batch for each of the first ``count``, all of the layout that most have.

        Who has none gets another one's: it is compared with itself alone on that.
        """
        return self._of_one(count, lambda layouts: Counter(layouts).most_common(1)[0][0])

    def longest(self, count: int) -> list[Any]:
        """A batch for each of the first ``count``, all of the layout that has the most elements.

        Who has none of that layout gets another one's.
        """
        return self._of_one(count, lambda layouts: max(layouts, key=elements_of))

    def pass_over(self, batches: Iterable[Any], count: int) -> bool:
        """Look at these batches no more; whether the first ``count`` have others."""
        self._bad += batches
        return self.varies and any(map(self._good_ones, self.groups[:count]))

    def _good_ones(self, groups: Iterable[Iterable[Any]]) -> dict[Hashable, Any]:
        bad = set(map(id, self._bad))
        return _first_of_each(b for b in itertools.chain(*groups) if id(b) not in bad)

    def _of_one(self, count: int, chosen: Callable[[list[Hashable]], Hashable]) -> list[Any]:
        """Of the layout that is ``chosen`` among those that each has, each once."""
        if not self.varies:
            return self.first_batches(count)
        mine = [self._good_ones(groups) for groups in self.groups[:count]]
        one = chosen(list(itertools.chain(*mine)))
        some = next(batches[one] for batches in mine if one in batches)
        return [batches.get(one, some) for batches in mine]

    def _read(self, train: Any) -> list[list[Any]]:
        each = self._recipe.accumulate
        if not self.varies:
            return [[first_batch(train)] * each]
        steps = LEARNS + TIMED
        found = itertools.cycle(first_batches(train, steps * each))
        return [list(itertools.islice(found, each)) for _ in range(steps)]


def _first_of_each(batches: Iterable[Any]) -> dict[Hashable, Any]:
    """By layout the first one: what comes later may be what a trial fails of."""
    found: dict[Hashable, Any] = {}
    for batch in batches:
        found.setdefault(layout_of(batch), batch)
    return found


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
