"""A plan that was made before, and is to be followed.

Its jobs say how each trial trains: the technique as a whole, and the seat in an array. Trials
are measured again, as that and nothing else, since what a worker needs beside a plan is not in
it. What comes of it has to have the same techniques and numerics keys, or nothing trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shoal.core.errors import PlanError, SpecError
from shoal.core.plan import OWN_DIRECTORY, Job, Plan
from shoal.core.spec import NO_BYTES, Scalar
from shoal.core.technique import Technique
from shoal.hardware import Hardware
from shoal.launch.request import Asked


@dataclass(frozen=True, slots=True)
class Pins:
    """How trials are to train that have not begun to: by number."""

    jobs: Mapping[int, Job] = field(default_factory=dict)

    @property
    def techniques(self) -> dict[int, Technique]:
        return {number: job.technique for number, job in self.jobs.items()}

    @property
    def keys(self) -> dict[int, Mapping[str, Scalar]]:
        """Their numerics keys, which say what arrays they are in."""
        return {number: job.numerics for number, job in self.jobs.items()}


NO_PINS = Pins()


def pins_of(plan: Plan | None, begun: Collection[int]) -> Pins:
    """What a plan says of trials that have not ``begun``: the others go on as they are."""
    if plan is None:
        return NO_PINS
    return Pins({job.trial: job for job in plan.jobs if job.trial not in begun})


def hardware_of(plan: Plan, given: Hardware | None) -> Hardware:
    """The devices of a plan: as they were then, or as those that are ``given`` by the same names.

    Raises:
        SpecError: some are missing there.
    """
    if given is None:
        own = tuple(replace(device, library_bytes=NO_BYTES) for device in plan.devices)
        named = plan.spill_dir not in ("", OWN_DIRECTORY)
        place = plan.spill_dir if named and Path(plan.spill_dir).is_dir() else None
        return Hardware(devices=own, spill_dir=place)
    there = {device.name: device for device in given.devices}
    names = [device.name for device in plan.devices]
    if missing := [name for name in names if name not in there]:
        raise SpecError(
            f"the plan is of {', '.join(names)}, and the hardware has {', '.join(there)}, not "
            f"{', '.join(missing)}. Leave hardware= out to have the plan's, or plan again."
        )
    same = [there[name] for name in names]
    if given.shared_cores is not None:  # how many threads each has, is the plan's to say
        threads = {device.name: device.threads for device in plan.devices}
        same = [replace(there[name], threads=threads[name]) for name in names]
    return replace(given, devices=tuple(same))


def require_its_plan(study: Asked, plan: object, others: Mapping[str, object]) -> None:
    """Refuse a plan that is not one of this study's trials.

    ``others``: wishes that a plan leaves no room for, where they are asked for.

    Raises:
        SpecError: it is none, or of other trials, or something else is asked for beside it.
    """
    if not isinstance(plan, Plan):
        raise SpecError(
            f"plan is what study.plan() or shoal.Plan.from_json(text) returns, got {plan!r}."
        )
    if beside := [name for name, value in others.items() if value is not None]:
        raise SpecError(
            f"plan=... says all of how trials train, and {', '.join(beside)} is asked for too. "
            "Leave one of them out, or plan again with it."
        )
    if plan.study != study.name:
        raise SpecError(f"the plan is of study {plan.study!r}, and this is {study.name!r}.")
    known = {trial.number: trial for trial in study.trials}
    for job in plan.jobs:
        trial = known.get(job.trial)
        if trial is None or (dict(trial.hp), trial.seed) != (dict(job.hp), job.seed):
            now = "is not there" if trial is None else f"is {dict(trial.hp)!r}, seed {trial.seed}"
            raise SpecError(
                f"the plan was made for other trials: trial {job.trial} was {dict(job.hp)!r}, "
                f"seed {job.seed}, and {now} now. Plan again."
            )


def require_followed(pins: Pins, made: Plan, recorded: Collection[int]) -> None:
    """Refuse to train what did not come out as planned; of trials that are not ``recorded``.

    Raises:
        PlanError: names the first difference.
    """
    for job in made.jobs:
        planned = pins.jobs.get(job.trial)
        if planned is None or job.trial in recorded:
            continue
        if difference := _difference(planned, job):
            raise PlanError(
                f"trial {job.trial} cannot train as it was planned: {difference}. Something it "
                "was made for has changed since. Plan again."
            )


def _difference(planned: Job, job: Job) -> str:
    """In words. How an array in shards moves is chosen anew, and changes no bit."""
    kinds = type(planned.technique), type(job.technique)
    if kinds[0] is not kinds[1]:
        return f"{kinds[0].__name__} then, {kinds[1].__name__} now"
    pairs: list[tuple[str, Any, Any]] = [
        (one.name, getattr(planned.technique, one.name), getattr(job.technique, one.name))
        for one in fields(planned.technique)
        if planned.array is None
    ]
    names = dict.fromkeys([*planned.numerics, *job.numerics])
    pairs += [(name, planned.numerics.get(name), job.numerics.get(name)) for name in names]
    unequal = (f"{name} was {then!r} and is {now!r}" for name, then, now in pairs if then != now)
    return next(unequal, "")
