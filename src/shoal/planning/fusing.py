"""Which trials train as arrays, how wide, and why.

A trial that has trained keeps the place it had: its slot and the width are in its numerics key.
What was settled for a shape holds for all of its trials that come later in the run, so that what
they become does not depend on when they were asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.core.plan import ArrayPlace, Job, Resident
from shoal.core.spec import ArrayMeasure, DeviceSpec, TrialSpec, WidthMeasure
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

    measures: dict[int, ArrayMeasure] = field(default_factory=dict)  # by width
    width: int = 0  # not settled yet
    why: str = ""


class Fusing:
    """Gives jobs their places in arrays; keeps what was settled for the whole run.

    Args:
        wish: See ``Wish``.
        recorded: The widths of trials that are on record, ``ALONE`` for those in no array.
    """

    def __init__(
        self, wish: Wish, devices: Sequence[DeviceSpec], recorded: Mapping[int, int]
    ) -> None:
        self._wish, self._recorded, self._devices = wish, dict(recorded), len(devices)
        self._budget = min(device.memory for device in devices)
        self._shapes: dict[Signature, _Shape] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether any trial may come into an array."""
        return bool(self._wish) or any(width != ALONE for width in self._recorded.values())

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
            shape = self._shapes.setdefault(facts[some[0].number], _Shape())
            self._settle(shape, some, able[some[0].number], asking)
            for trial in some:
                job = self._place(able[trial.number], facts[trial.number], shape, some, asking)
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
        on_record = self._recorded_width(trials)
        if self._wish == 0:
            shape.width = ALONE
        elif on_record:
            shape.width = on_record
        elif self._wish is None:
            shape.width = ALONE
        elif isinstance(self._wish, int):
            shape.width = self._wish
        else:
            self._measure_widths(shape, fresh, job, asking)

    def _recorded_width(self, trials: Sequence[TrialSpec]) -> int:
        """What trials of this shape, or else of the study, have trained in; 0 if none has."""
        known = [self._recorded[t.number] for t in trials if t.number in self._recorded]
        wide = [width for width in known or self._recorded.values() if width != ALONE]
        return wide[0] if wide else 0

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
        shape.measures |= dict.fromkeys((found.width for found in measure.widths), measure)
        return measure

    def _fits(self, job: Job, found: WidthMeasure) -> bool:
        return _held_bytes(job, found.width) + found.unit_bytes <= self._budget

    def _place(
        self,
        job: Job,
        signature: Signature,
        shape: _Shape,
        trials: Sequence[TrialSpec],
        asking: Asking,
    ) -> Job:
        width = self._recorded.get(job.trial, shape.width)
        if width == ALONE:
            return replace(job, why=(*job.why, shape.why)) if shape.why else job
        if width not in shape.measures:
            declined = self._ask(shape, trials, (width,), asking).declined
            if declined:
                return replace(job, why=(*job.why, f"unfused: {declined}"))
        measure = shape.measures[width]
        found = next(found for found in measure.widths if found.width == width)
        if not self._fits(job, found):
            return replace(job, why=(*job.why, f"unfused: {width} of them do not fit the device"))
        self._recorded[job.trial] = width
        held = _held_bytes(job, width)
        slot = job.trial % width
        return replace(
            job,
            array=ArrayPlace(group=f"{_digest(signature)}x{width}", slot=slot, width=width),
            held_bytes=held,
            unit_bytes=found.unit_bytes,
            peak_bytes=Bytes(held + found.unit_bytes),
            step_s=Seconds(found.step_s / width),
            why=(*job.why, words_for(measure, width)),
            numerics={**job.numerics, "array": array_key(slot, width)},
        )


def array_key(slot: int, width: int) -> str:
    """A place in an array as the numerics key has it."""
    return f"slot {slot} of {width}"


def array_place(numerics: Mapping[str, object]) -> tuple[int, int] | None:
    """Slot and width that a numerics key tells of; None of a trial that is in no array."""
    words = str(numerics.get("array", "")).split()
    return (int(words[1]), int(words[3])) if words else None


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
