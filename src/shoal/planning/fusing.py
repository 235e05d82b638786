"""Which trials train as arrays, how wide, and why.

A trial that has trained keeps the place it had: its slot and the width are in its numerics key.
What was settled for a shape holds for all of its trials that come later in the run, so that what
they become does not depend on when they were asked for.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shoal.core.plan import NO_ARRAY, ArrayPlace, Job, LoneNeed
from shoal.core.spec import ArrayMeasure, DeviceSpec, Scalar, TrialSpec, WidthMeasure
from shoal.core.technique import Resident
from shoal.core.units import Bytes, Seconds
from shoal.fusion.match import Signature, first_difference, groups, told_apart
from shoal.planner.width import choose_width, widths_to_try, words_for
from shoal.planning.asking import Asking
from shoal.runtime.messages import MeasureArray

Wish = str | int | None
"""``"auto"`` measures, a number is a width, 0 is none; None is what the study has on record."""

ALONE = 1


@dataclass(slots=True)
class _Shape:
    """Trials of one signature: what was measured of them, and the width of those that come."""

    group: str  # its name
    measures: dict[int, ArrayMeasure] = field(default_factory=dict)  # by width
    width: int = 0  # not settled yet
    why: str = ""


class Fusing:
    """Gives jobs their places in arrays; keeps what was settled for the whole run.

    Args:
        wish: See ``Wish``.
        recorded: The numerics keys of all trials that were planned before.
    """

    def __init__(
        self,
        wish: Wish,
        devices: Sequence[DeviceSpec],
        recorded: Mapping[int, Mapping[str, Scalar]],
    ) -> None:
        self._wish, self._recorded, self._devices = wish, dict(recorded), len(devices)
        self._budget = min(device.memory for device in devices)
        self._shapes: dict[Signature, _Shape] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether any trial may come into an array."""
        return bool(self._wish) or any("array_group" in key for key in self._recorded.values())

    def places(
        self,
        jobs: Sequence[Job],
        trials: Sequence[TrialSpec],
        facts: Mapping[int, Signature],
        asking: Asking,
    ) -> tuple[Job, ...]:
        """The jobs, with places for those that train in arrays."""
        able = {j.trial: j for j in jobs if isinstance(j.technique, Resident) and j.trial in facts}
        specs = [trial for trial in trials if trial.number in able]
        done = {job.trial: job for job in jobs}
        for members in groups([facts[trial.number] for trial in specs]):
            some = [specs[index] for index in members]
            signature = facts[some[0].number]
            shape = self._shapes.setdefault(signature, _Shape(_digest(signature)))
            self._settle(shape, some, able[some[0].number], asking)
            for trial in some:
                job = self._place(able[trial.number], shape, some, asking)
                self._recorded[trial.number] = job.numerics
                done[trial.number] = job
        return tuple(done[job.trial] for job in jobs)

    def notes(
        self, trials: Sequence[TrialSpec], facts: Mapping[int, Signature]
    ) -> tuple[str, ...]:
        """Lines that say who may share an array, and what keeps the others apart."""
        some = [trial for trial in trials if trial.number in facts]
        signatures = [facts[trial.number] for trial in some]
        shapes = groups(signatures)
        if len(some) < 2:
            return ()
        apart = told_apart([trial.hp for trial in some], signatures)
        lines = [
            f"  arrays: {len(some)} trials of {len(shapes)} shapes; inside an array may differ: "
            f"{', '.join(apart.fusible) or 'nothing that does'}"
            + (f"; shapes differ by {', '.join(apart.infusible)}" if apart.infusible else "")
        ]
        first = shapes[0][0]
        lines += [
            f"    trial {some[other[0]].number} shares none with trial {some[first].number}: "
            + first_difference(signatures[first], signatures[other[0]])
            for other in shapes[1:4]
        ]
        return tuple(lines)

    # -- one shape --------------------------------------------------------------------

    def _settle(
        self, shape: _Shape, trials: Sequence[TrialSpec], job: Job, asking: Asking
    ) -> None:
        """The width of this shape's trials that have none yet."""
        fresh = [trial for trial in trials if trial.number not in self._recorded]
        if shape.width or not fresh:
            return
        widths = [recorded_width(key) for key in self._of(shape)]
        if self._wish == 0:
            shape.width = ALONE
        elif widths:  # what its trials trained in
            shape.width = max(widths)
        elif self._wish is None:
            shape.width = ALONE
        elif isinstance(self._wish, int):
            shape.width = self._wish
        else:
            self._measure_widths(shape, fresh, job, asking)

    def _of(self, shape: _Shape) -> list[Mapping[str, Scalar]]:
        """The keys on record of this shape's trials."""
        return [k for k in self._recorded.values() if k.get("array_group") == shape.group]

    def _measure_widths(
        self, shape: _Shape, trials: Sequence[TrialSpec], job: Job, asking: Asking
    ) -> None:
        widths = widths_to_try(len(trials), self._devices)
        if not widths:
            shape.width, shape.why = ALONE, ""
            return
        measure = self._ask(shape, trials, widths, asking)
        shape.width, shape.why = choose_width(
            measure, len(trials), self._devices, lambda found: self._fits(job, found)
        )

    def _ask(
        self,
        shape: _Shape,
        trials: Sequence[TrialSpec],
        widths: Sequence[int],
        asking: Asking,
    ) -> ArrayMeasure:
        measure = asking.measure_array(MeasureArray(tuple(trials[: max(widths)]), tuple(widths)))
        shape.measures |= dict.fromkeys(widths, measure)
        return measure

    def _fits(self, job: Job, found: WidthMeasure) -> bool:
        return _held_bytes(job, found.width) + found.unit_bytes <= self._budget

    def _place(self, job: Job, shape: _Shape, trials: Sequence[TrialSpec], asking: Asking) -> Job:
        """The job in its array, if that is where it trains."""
        before = self._recorded.get(job.trial)
        known = array_place(before) if before else None
        width = shape.width if before is None else recorded_width(before)
        job = replace(job, numerics={**job.numerics, **_since(before), "array_group": shape.group})
        if width == ALONE:
            return replace(job, why=(*job.why, shape.why)) if shape.why else job
        if width not in shape.measures:
            self._ask(shape, trials, (width,), asking)
        measure = shape.measures[width]
        found = next((found for found in measure.widths if found.width == width), None)
        if found is None:
            why = f"unfused: {measure.declined or 'its array could not be measured'}"
            return replace(job, why=(*job.why, why))
        if not self._fits(job, found):
            return replace(job, why=(*job.why, f"unfused: {width} of them do not fit the device"))
        slot = known[0] if known else self._free_slot(shape, width)
        place = ArraySlot(shape.group, slot, width)
        return _in_array(job, place, found, words_for(measure, width))

    def _free_slot(self, shape: _Shape, width: int) -> int:
        """The slot that fewest trials of the shape have; they follow each other there."""
        places = [place for key in self._of(shape) if (place := array_place(key))]
        used = Counter(slot for slot, wide in places if wide == width)
        return min(range(width), key=lambda slot: (used[slot], slot))


class ArraySlot(NamedTuple):
    """Which array, and where in it."""

    group: str
    slot: int
    width: int


def _in_array(job: Job, place: ArraySlot, found: WidthMeasure, why: str) -> Job:
    held = _held_bytes(job, place.width)
    alone = LoneNeed(
        held_bytes=job.held_bytes,
        unit_bytes=job.unit_bytes,
        peak_bytes=job.peak_bytes,
        step_s=job.step_s,
    )
    group = f"{place.group}x{place.width}"
    return replace(
        job,
        array=ArrayPlace(group=group, slot=place.slot, width=place.width, alone=alone),
        held_bytes=held,
        unit_bytes=found.unit_bytes,
        peak_bytes=Bytes(held + found.unit_bytes),
        step_s=Seconds(found.step_s / place.width),
        why=(*job.why, why),
        numerics={**job.numerics, "array": f"slot {place.slot} of {place.width}"},
    )


def _since(before: Mapping[str, Scalar] | None) -> dict[str, Scalar]:
    """That a trial left its array, if it did."""
    words = str((before or {}).get("array", ""))
    return {"array": words} if words.startswith(NO_ARRAY) else {}


def array_place(numerics: Mapping[str, object]) -> tuple[int, int] | None:
    """Slot and width that a numerics key tells of; None of a trial that is in no array."""
    words = str(numerics.get("array", "")).split()
    return (int(words[1]), int(words[3])) if words[:1] == ["slot"] else None


def recorded_width(numerics: Mapping[str, object]) -> int:
    """The width that a numerics key tells of."""
    place = array_place(numerics)
    return place[1] if place else ALONE


def _held_bytes(job: Job, width: int) -> Bytes:
    """What ``width`` such trials hold on the device between two steps."""
    shard = job.shards[0]
    each = shard.owned_bytes + shard.state_bytes + job.buffer_bytes
    batches = job.batch_bytes * job.micro_batches
    return Bytes(width * (each + batches))


def _digest(signature: Signature) -> str:
    return hashlib.sha256(repr(signature.facts).encode()).hexdigest()[:12]
