"""What an array of so many trials takes, and one of them alone: built, compared, timed.

Everything happens outside the device's budget, on copies, before a trial trains. Both are timed
in the same rounds, on batches that are there already, each by its best round: a machine that
others use is only ever slower than it is.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.core.spec import ArrayMeasure, HyperParameters, TrialSpec, WidthMeasure
from shoal.core.units import Bytes, Seconds
from shoal.data import epoch_length
from shoal.device import Device
from shoal.fusion import Array, Declined, Member, dry_run
from shoal.fusion.finish import clip_alone
from shoal.fusion.likeness import copies
from shoal.fusion.loop import lone_pass
from shoal.ownstep import Modes, OwnStep
from shoal.partition.compiled import compiles
from shoal.partition.track import AllocationTracker
from shoal.recipe import (
    Recipe,
    build_model,
    build_optimizer_of,
    build_schedule,
    read_data,
    to_device,
)
from shoal.rng import capture_rng, seed_all
from shoal.runtime.describe import first_batch

TRIED = 4  # trials that are compared, one step as an array with one step of each alone
ROUNDS = 5
ROUND_S = 0.05  # a round repeats a step that is quicker
PATIENCE_S = 20.0  # no wider array is tried when one round of all takes so long


class _Crowd:
    """Trials with their batches, built one after the other as they are needed."""

    def __init__(self, recipe: Recipe, trials: Sequence[TrialSpec], device: torch.device) -> None:
        # Timing takes many steps on one batch: what diverges is to take as long as ever.
        self._recipe = dataclasses.replace(recipe, on_nonfinite="ignore")
        self._trials, self._device = trials, device
        self.members: list[Member] = []
        self.batches: list[list[Any]] = []  # a group for each
        self.valid: list[Any] = []  # a batch to evaluate for each, None without such data

    def grow(self, count: int) -> None:
        for index in range(len(self.members), count):
            trial = self._trials[index % len(self._trials)]  # some twice, if there are too few
            hp = HyperParameters(trial.hp)
            seed_all(trial.seed)
            model = build_model(self._recipe, hp).to(self._device)
            modes = Modes(self._recipe, model) if self._recipe.step else None
            train, valid = read_data(self._recipe, hp)
            optimizer = build_optimizer_of(self._recipe, model, hp)
            schedule = build_schedule(self._recipe, optimizer, hp)
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
            batch = to_device(first_batch(train), self._device)
            self.batches.append([batch] * self._recipe.accumulate)
            self.valid.append(to_device(next(iter(valid or ()), None), self._device))


class _Endless:
    """A schedule that begins anew where it ends, since timing takes more steps than a trial."""

    def __init__(self, schedule: Any) -> None:
        self._schedule, self._beginning = schedule, copy.deepcopy(schedule.state_dict())

    def step(self) -> None:
        """The schedule's own."""
        try:
            self._schedule.step()
        except Exception:
            self._schedule.load_state_dict(copy.deepcopy(self._beginning))


def measure_array(
    recipe: Recipe, device: Device, trials: Sequence[TrialSpec], widths: Sequence[int]
) -> ArrayMeasure:
    """Compare a few of the trials with themselves alone, and time ``widths`` of them."""
    crowd = _Crowd(recipe, trials, device.torch_device)
    crowd.grow(min(TRIED, max(widths)))
    declined = _obstacle(recipe, device, trials[0], crowd.members[0])
    declined = declined or dry_run(
        crowd.members, [group[0] for group in crowd.batches], device=device.torch_device
    )
    if declined:
        return ArrayMeasure(declined=declined)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of schedules of optimizers that are copies
            return _timed(crowd, device, sorted(widths))
    except Declined as error:
        return ArrayMeasure(declined=str(error))


def _obstacle(recipe: Recipe, device: Device, trial: TrialSpec, member: Member) -> str:
    """What keeps any trial of this study from an array; empty if nothing does."""
    if device.spec.profile is not None:
        return "an emulated device has no times for arrays"
    if compiles(member.module):
        return "its model is compiled"
    if recipe.accumulate > 1:
        train, _ = read_data(recipe, HyperParameters(trial.hp))
        if epoch_length(train) is None:
            return "its data does not say how many batches it has, and a step takes several"
    return ""


def _timed(crowd: _Crowd, device: Device, widths: Sequence[int]) -> ArrayMeasure:
    where = device.torch_device
    lone, group = _one_that_can(crowd, where)
    alone = _Race(lambda: _step_alone(lone, group, where), where)
    found: list[WidthMeasure] = []
    notes: dict[str, None] = {}
    began = time.perf_counter()
    for width in widths:
        crowd.grow(width)
        array = Array(copies(crowd.members[:width]), device=where)
        rows = list(zip(*crowd.batches[:width], strict=True))
        array.step(*rows)
        race = _Race(lambda array=array, rows=rows: array.step(*rows), where)  # type: ignore[misc]
        for _ in range(ROUNDS):
            alone.run()
            race.run()
        with AllocationTracker() as tracker:
            array.step(*rows)
        notes |= dict.fromkeys(array.notes)
        unit = Bytes(max(tracker.peak_bytes, _evaluated(array, crowd.valid[:width])))
        found.append(WidthMeasure(width=width, step_s=Seconds(race.best_s), unit_bytes=unit))
        if time.perf_counter() - began > PATIENCE_S:
            break
    return ArrayMeasure(alone_s=Seconds(alone.best_s), widths=tuple(found), notes=tuple(notes))


def _evaluated(array: Array, batches: Sequence[Any]) -> int:
    """The most bytes that an evaluation of one batch for each slot allocates."""
    if all(batch is None for batch in batches):
        return 0
    with AllocationTracker() as tracker, array.evaluating():
        array.evaluate(batches)
    return int(tracker.peak_bytes)


def _one_that_can(crowd: _Crowd, device: torch.device) -> tuple[Member, list[Any]]:
    """The first trial whose own code does not raise, with its batches.

    Raises:
        Declined: there is none.
    """
    for member, group in zip(crowd.members, crowd.batches, strict=True):
        (lone,) = copies([member])
        try:
            _step_alone(lone, group, device)
        except Exception as error:
            failure = error
        else:
            return lone, group
    raise Declined(f"none of the trials can do a step: {type(failure).__name__}: {failure}")


class _Race:
    """One contender: how long its work takes at best."""

    def __init__(self, work: Callable[[], Any], device: torch.device) -> None:
        self._work, self._device = work, device
        self.best_s = float("inf")
        self._count = max(1, min(50, round(ROUND_S / self._seconds(2))))

    def run(self) -> None:
        """One round."""
        self.best_s = min(self.best_s, self._seconds(self._count))

    def _seconds(self, count: int) -> float:
        """Of one of ``count``."""
        began = self._clock()
        for _ in range(count):
            self._work()
        return max(1e-9, (self._clock() - began) / count)

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _step_alone(member: Member, group: Sequence[Any], device: torch.device) -> None:
    """An optimizer step as the plain loop does it."""
    if member.modes is not None:
        own = OwnStep(member.recipe, member.module, member.optimizer, member.hp, member.modes)
        own(group[0], member.step)
        if member.schedule:
            member.schedule.step()
        return
    member.optimizer.zero_grad(set_to_none=True)
    accumulate = member.recipe.accumulate
    for batch in group:
        _, loss = lone_pass(member, batch, device)
        (loss if accumulate == 1 else loss / accumulate).backward()
        float(loss.detach())
    clip_alone(member)
    member.optimizer.step()
    if member.schedule:
        member.schedule.step()
