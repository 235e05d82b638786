"""What an array of so many trials takes, and one of them alone: built, compared, timed.

Everything happens outside the device's budget, on copies, before a trial trains.

[Note: all at once]
Alone on a machine an array has caches and memory to itself that it will share with the arrays of
the other devices. So all workers of a study build the same, and are then told a moment on the
clock that all processes of a machine share, from which on all of them do the same for the same
slices of time, in rounds: a step alone, a step of the array, a validation batch alone, one of the
array. What counts is the median of a worker's rounds, and of the workers the slowest.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shoal.core.spec import HyperParameters, PassKind, ShardSpec, TrialSpec
from shoal.core.units import Bytes, Seconds
from shoal.data import epoch_length
from shoal.device import Device
from shoal.fusion import Array, Declined, Member, backend_of, dry_run
from shoal.fusion.compiled import compiler
from shoal.fusion.dryrun import difference
from shoal.fusion.finish import clip_alone
from shoal.fusion.likeness import copies
from shoal.fusion.loop import lone_pass
from shoal.fusion.traced import TracedBackend
from shoal.ownstep import Modes, OwnStep, own_evaluation
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
from shoal.runtime.counting import sparse_gradient_of
from shoal.runtime.describe import first_batch
from shoal.runtime.messages import ArrayTry, TimeArray
from shoal.runtime.spilledarray import chain_for
from shoal.runtime.stackedmeasure import StackedMeasure

TRIED = 4  # trials that are compared, one step as an array with one step of each alone
LONG_S = 0.2  # a contender with longer slices is timed in one round


class Shards(NamedTuple):
    """Of an array, or why it has none."""

    found: tuple[ShardSpec, ...]
    declined: str


class ArrayBench:
    """The array that is looked at now, and a trial alone beside it; of one shape of trials."""

    def __init__(self, recipe: Recipe, device: Device, trials: Sequence[TrialSpec]) -> None:
        self._recipe, self._device, self._where = recipe, device, device.torch_device
        self._first = trials[0]
        self._crowd = _Crowd(recipe, trials, self._where)
        self._declined: str | None = None  # not looked at yet
        self._alone: tuple[Member, list[Any]] | None = None
        self._works: tuple[Callable[[], Any] | None, ...] = ()
        self._valid_batches = 0

    def is_of(self, trial: TrialSpec) -> bool:
        """Whether these are the trials of the one of that number."""
        return self._first == trial

    def build(self, trials: Sequence[TrialSpec], width: int, kind: PassKind) -> ArrayTry:
        """Compare a few of the trials with themselves alone, and build an array."""
        self._works = ()
        self._crowd.trials = trials
        self._crowd.grow(min(TRIED, max(2, width)))
        if self._declined is None:
            self._declined = self._first_look()
        if self._declined:
            return ArrayTry(declined=self._declined)
        if self._recipe.step is not None and kind != "eager":
            return ArrayTry(declined="a step of one's own is no graph", is_kind=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of schedules of copied optimizers
                return self._built(width, kind)
        except Declined as error:
            return ArrayTry(declined=str(error), is_kind=kind != "eager")

    def _first_look(self) -> str:
        crowd = self._crowd
        declined = _obstacle(self._recipe, self._device, self._first, crowd.members[0])
        declined = declined or dry_run(
            crowd.members, [group[0] for group in crowd.batches], device=self._where
        )
        if not declined:
            try:
                self._alone = _one_that_can(crowd, self._where)
            except Declined as error:
                declined = str(error)
        hp = HyperParameters(self._first.hp)
        self._valid_batches = 0 if declined else _count(read_data(self._recipe, hp)[1])
        return declined

    def _built(self, width: int, kind: PassKind) -> ArrayTry:
        crowd, where = self._crowd, self._where
        crowd.grow(width)
        backend = backend_of(kind)
        array = Array(copies(crowd.members[:width]), device=where, backend=backend)
        rows = list(zip(*crowd.batches[:width], strict=True))
        valid = crowd.valid[:width]
        has_valid = any(batch is not None for batch in valid)
        began = time.perf_counter()
        _settle(array, rows, valid if has_valid and kind == "traced" else ())
        build_s = time.perf_counter() - began
        if isinstance(backend, TracedBackend) and kind == "traced" and backend.why_eager:
            return ArrayTry(declined=backend.why_eager, is_kind=True)
        if kind == "compiled":
            words = difference(
                copies(crowd.members[:width]), crowd.first_batches(width), where, backend
            )
            if words:
                return ArrayTry(declined=words, is_kind=True)
        assert self._alone is not None
        lone, group = self._alone
        alone_s = _seconds(lambda: _step_alone(lone, group, where), where)
        step_s = _seconds(lambda: array.step(*rows), where)
        unit, alone_valid_s, valid_s = self._allocated(width, kind, rows), 0.0, 0.0
        if has_valid:
            alone_valid_s = _seconds(lambda: _evaluate_alone(lone, valid[0], where), where)
            began = time.perf_counter()
            unit = Bytes(max(unit, _evaluated(array, valid)))
            valid_s = time.perf_counter() - began
        refill_s = self._refilled(array, rows) - step_s
        self._works = (
            lambda: _step_alone(lone, group, where),
            lambda: array.step(*rows),
            (lambda: _evaluate_alone(lone, valid[0], where)) if has_valid else None,
            (lambda: _evaluate_array(array, valid)) if has_valid else None,
        )
        return ArrayTry(
            notes=tuple(array.notes),
            unit_bytes=unit,
            build_s=Seconds(build_s),
            refill_s=Seconds(max(0.0, refill_s)),
            once_s=(alone_s, step_s, alone_valid_s, valid_s),
            valid_batches=self._valid_batches,
            nodes=getattr(backend, "nodes", 0),
            compiler=compiler() if where.type == "cpu" else "",
        )

    def shards(
        self, trials: Sequence[TrialSpec], width: int, cuts: Sequence[int], num_layers: int
    ) -> Shards:
        """An array of ``width`` in shards; why there is none, in words."""
        crowd = self._crowd
        crowd.trials = trials
        crowd.grow(width)
        trial = self._first
        try:
            hp = HyperParameters(trial.hp)
            chain = chain_for(self._recipe, hp, trial.seed, self._where, num_layers)
            members, batches = crowd.members[:width], crowd.first_batches(width)
            measure = StackedMeasure(members, batches, chain, self._where, self._clock)
            return Shards(measure.shards(cuts), "")
        except Declined as error:
            return Shards((), str(error))
        finally:
            self._works = ()

    def _clock(self) -> float:
        _wait(self._where)
        return time.perf_counter()

    def _allocated(self, width: int, kind: PassKind, rows: Sequence[Sequence[Any]]) -> Bytes:
        """The most bytes that a step allocates, where it makes its graph too.

        Compiled code, whose allocations nothing sees, is taken to need what the eager pass does.
        """
        backend = backend_of("eager" if kind == "compiled" else kind)
        array = Array(copies(self._crowd.members[:width]), device=self._where, backend=backend)
        array.step(*rows)  # its optimizers' states are there from now on
        if isinstance(backend, TracedBackend):
            backend.forget()
        with AllocationTracker() as tracker:
            array.step(*rows)
        return Bytes(tracker.peak_bytes)

    def _refilled(self, array: Array, rows: Sequence[Sequence[Any]]) -> float:
        """Seconds in which a slot gets another trial, and a step is done."""
        began = time.perf_counter()
        member = array.retire(0)
        array.refill(0, member)
        array.step(*rows)
        _wait(self._where)
        return time.perf_counter() - began

    def time(self, order: TimeArray) -> tuple[tuple[float, ...], ...]:
        """For each round, seconds of each of the four contenders; 0 for one that is left out."""
        found = []
        until = order.begin
        for at in range(order.rounds):
            row = []
            for work, slice_s in zip(self._works, order.slices_s, strict=True):
                if work is None or not slice_s or (at and slice_s > LONG_S):
                    row.append(0.0)
                    continue
                time.sleep(max(0.0, until - time.monotonic()))
                until = max(until, time.monotonic()) + slice_s
                row.append(_in_slice(work, until, self._where))
            found.append(tuple(row))
        return tuple(found)


class _Crowd:
    """Trials with their batches, built one after the other as they are needed."""

    def __init__(self, recipe: Recipe, trials: Sequence[TrialSpec], device: torch.device) -> None:
        # Timing takes many steps on one batch: what diverges is to take as long as ever.
        self._recipe = dataclasses.replace(recipe, on_nonfinite="ignore")
        self.trials, self._device = trials, device
        self.members: list[Member] = []
        self.batches: list[list[Any]] = []  # a group for each
        self.valid: list[Any] = []  # a batch to evaluate for each, None without such data

    def grow(self, count: int) -> None:
        for index in range(len(self.members), count):
            trial = self.trials[index % len(self.trials)]  # some twice, if there are too few
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

    def first_batches(self, count: int) -> list[Any]:
        """One for each of the first ``count``."""
        return [group[0] for group in self.batches[:count]]


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


def _obstacle(recipe: Recipe, device: Device, trial: TrialSpec, member: Member) -> str:
    """What keeps any trial of this study from an array; empty if nothing does."""
    if device.spec.profile is not None:
        return "an emulated device has no times for arrays"
    if compiles(member.module):
        return "its model is compiled"
    if name := sparse_gradient_of(member.module):
        return f"the gradient of {name!r} is sparse, which no rows of stacked tensors are"
    if recipe.accumulate > 1:
        train, _ = read_data(recipe, HyperParameters(trial.hp))
        if epoch_length(train) is None:
            return "its data does not say how many batches it has, and a step takes several"
    return ""


def _settle(array: Array, rows: Sequence[Sequence[Any]], valid: Sequence[Any]) -> None:
    """Steps and evaluations until the array runs as it will from then on."""
    for _ in range(3):
        array.step(*rows)
        if valid:
            _evaluate_array(array, valid)
        if not isinstance(array.backend, TracedBackend):
            return


def _count(valid: Any) -> int:
    """Batches of one evaluation; 1 where the data does not say."""
    if valid is None:
        return 0
    return epoch_length(valid) or 1


def _evaluated(array: Array, batches: Sequence[Any]) -> int:
    """The most bytes that an evaluation of one batch for each slot allocates."""
    with AllocationTracker() as tracker:
        _evaluate_array(array, batches)
    return int(tracker.peak_bytes)


def _evaluate_array(array: Array, batches: Sequence[Any]) -> None:
    array.set_training(False)
    array.evaluate(batches)
    array.set_training(True)


def _evaluate_alone(member: Member, batch: Any, device: torch.device) -> None:
    """A validation batch as the plain loop does it."""
    member.train(False)
    with torch.no_grad():
        if member.recipe.evaluate is not None:
            own_evaluation(member.recipe, member.module, batch, member.hp)
        else:
            output, loss = lone_pass(member, batch, device)
            float(loss)
            for metric in member.recipe.metrics.values():
                float(metric(output, batch))
    member.train()


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Of doing it once."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return max(1e-9, time.perf_counter() - began)


def _in_slice(work: Callable[[], Any], until: float, device: torch.device) -> float:
    """Seconds of one, of as many as are over at about ``until``; at least one."""
    began = last = time.monotonic()
    count = 0
    while True:
        work()
        count += 1
        now = time.monotonic()
        if now + (now - last) / 2 > until:
            break
        last = now
    _wait(device)
    return (time.monotonic() - began) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
