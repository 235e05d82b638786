"""Which trials train as arrays, how wide, and why.

A trial that has trained keeps the place it had: its slot and the width are in its numerics key.
What was settled for a shape holds for all of its trials that come later in the run, so that what
they become does not depend on when they were asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from shoal.core.arraykeys import NO_BASE, Base
from shoal.core.plan import Job
from shoal.core.seats import ALONE, Epoch, epochs_of, longer
from shoal.core.spec import (
    NO_BYTES,
    ArrayMeasure,
    DeviceSpec,
    PassKind,
    Scalar,
    TrialSpec,
    WidthMeasure,
)
from shoal.core.technique import Resident, Spilled
from shoal.core.units import Bytes, Seconds
from shoal.fusion.matching.lengths import alike, kind_in
from shoal.fusion.matching.match import Signature, groups
from shoal.memory.layout import TrialLayout
from shoal.planner.lanes import Load
from shoal.planner.narrower import from_key, narrower
from shoal.planner.uneven import told_of_passes, with_lengths
from shoal.planner.width import (
    Candidate,
    Fits,
    choose,
    next_candidate,
    pace,
    praise,
    when_spilled,
    why_no_look,
    widths_to_try,
    worth_spilling,
)
from shoal.planning.arrayjobs import (
    ArraySlot,
    Later,
    as_recorded,
    elsewhere,
    held_bytes,
    in_array,
    in_spilled_array,
    of_base,
    seats_taken,
    why_spilled,
    with_rooms,
)
from shoal.planning.arrayshapes import Shape, digest_of, shapes_on_record
from shoal.planning.asking import Asking
from shoal.planning.based import BASE, base_in, based, without_base
from shoal.planning.capturing import lone_way
from shoal.planning.changing import why_apart
from shoal.planning.reseating import (
    Reseating,
    array_kind,
    asked_width,
    begins_in_one,
    free_slot,
    recorded_seat,
    recorded_width,
    where_it_is,
)
from shoal.planning.spilling import SpilledArrayPlan, Spilling
from shoal.planning.times import Times
from shoal.planning.trying import BRIEFLY, Room, try_arrays
from shoal.planning.widthwish import ONE_WIDTH, UNCUT, Wish, width_wished

MOST_SPILLED = 2  # widths for which shards are looked for
NOTHING: Mapping[int, str] = MappingProxyType({})


class Fusing:
    """Gives jobs their places in arrays; keeps what was settled for the whole run.

    Args:
        wish: See ``Wish``.
        on_record: An earlier run's, for trials without a place, where there is none now.
        recorded: The numerics keys of all trials that were planned before.
        times: How long trials are; None: nobody knows.
        now, steps: The numerics keys of trials that go on, and the steps from which they do.
        reseats: Whether those under way are to have the width that is wished, and other bits.

    Attributes:
        layouts: The homes of trials of arrays that are spilled, in the arrays' shards.
    """

    def __init__(
        self,
        wish: Wish,
        devices: Sequence[DeviceSpec],
        recorded: Mapping[int, Mapping[str, Scalar]],
        times: Times | None = None,
        now: Mapping[int, Mapping[str, Scalar]] = MappingProxyType({}),
        steps: Mapping[int, int] = MappingProxyType({}),
        *,
        on_record: Wish = None,
        reseats: bool = False,
    ) -> None:
        self._wish, self._times = on_record if wish is None else wish, times or Times()
        self._now, self._devices = dict(now), len(devices)
        self._wished, wished = (width_wished(w, self._times.at_once) for w in (self._wish, wish))
        self._reseating = Reseating(wished, steps, accepts=reseats)
        self._recorded = {**now, **recorded}
        for trial, key in now.items():  # of which more may be on record than the study knows
            self._recorded[trial] = longer(self._recorded[trial], key)
        for trial in steps.keys() & self._recorded.keys():
            self._recorded[trial] = where_it_is(self._recorded[trial], steps[trial])
            if self._reseating.begins(trial):
                del self._recorded[trial]
        self._budget = min(device.for_trials for device in devices)
        self._shapes: dict[Signature, Shape] = {}
        self._spilling: Spilling | None = None
        self._bases: dict[int, Base] = {}
        self.layouts: dict[int, TrialLayout] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether any trial may come into an array."""
        return bool(self._wish) or any("array_group" in key for key in self._recorded.values())

    def knows(self, trials: Iterable[int]) -> bool:
        """Whether one of them was in an array before, or may have been."""
        return any("array_group" in self._recorded.get(trial, {}) for trial in trials)

    def alike(
        self, facts: Mapping[int, Signature], kinds: Mapping[int, str], bases: Mapping[int, Base]
    ) -> dict[int, Signature]:
        """The facts of trials, and with which batches and bases they may share an array.

        Who was planned before keeps what it was planned with.
        """
        before = {t: key for t, key in self._recorded.items() if "array_group" in key}
        on_record = {
            trial: str(before[trial].get("array_batches", kind_in(facts[trial])))
            for trial in sorted(facts.keys() & before.keys())
        }
        there = shapes_on_record(self._recorded.values(), facts.values())
        found = alike(facts, kinds, on_record, [*map(without_base, self._shapes), *there])
        had = {trial: str(before[trial].get(BASE, "")) for trial in on_record}
        self._bases = dict(bases)
        known = {trial: str(key[BASE]) for trial, key in self._recorded.items() if BASE in key}
        return based(found, bases, had, known, exchanges=self._times.changes is not None)

    def places(
        self,
        jobs: Sequence[Job],
        trials: Sequence[TrialSpec],
        facts: Mapping[int, Signature],
        asking: Asking,
        *,
        constants: Mapping[int, str] = NOTHING,
        num_batches: Mapping[int, int | None] = MappingProxyType({}),
        spilling: Spilling | None = None,
    ) -> tuple[Job, ...]:
        """The jobs, with places for those that train in arrays.

        ``constants``: by trial, of its code; ``spilling`` looks for arrays that do not fit whole.
        """
        self._spilling = spilling
        kinds = Resident if spilling is None else Resident | Spilled
        able = {
            j.trial: of_base(j, base_in(facts[j.trial]), self._bases.get(j.trial, NO_BASE))
            for j in jobs
            if isinstance(j.technique, kinds) and j.trial in facts
        }
        specs = [trial for trial in trials if trial.number in able]
        done, before = {job.trial: job for job in jobs}, dict(self._recorded)
        for members in groups([facts[trial.number] for trial in specs]):
            some = [specs[index] for index in members]
            signature = facts[some[0].number]
            shape = self._shapes.setdefault(signature, Shape(signature, digest_of(signature)))
            mine = [able[trial.number] for trial in some]
            varies = len({constants.get(trial.number) for trial in some}) > 1
            fresh = [job for job in mine if job.trial not in self._recorded] or mine
            load = self._times.load(fresh, num_batches, self._devices, varies=varies)
            shape.lone = lone_way(mine)
            self._settle(shape, some, mine[0], asking, load, constants)
            told = {trial.number: constants.get(trial.number, "") for trial in some}
            for trial in some:
                job = self._place(able[trial.number], shape, some, asking, told)
                self._recorded[trial.number] = job.numerics
                done[trial.number] = job
        return tuple(self._accounted(done[j.trial], before.get(j.trial)) for j in jobs)

    def _accounted(self, job: Job, before: Mapping[str, Scalar] | None) -> Job:
        """A trial under way that cannot have its seat: what it has from here on, if accepted."""
        step, there = self._reseating.accepted(job.trial), self._there(job.trial, before)
        return elsewhere(job, before, there, step) if before and there and step else job

    # -- one shape --------------------------------------------------------------------

    def _settle(
        self,
        shape: Shape,
        trials: Sequence[TrialSpec],
        job: Job,
        asking: Asking,
        load: Load,
        constants: Mapping[int, str],
    ) -> None:
        """What this shape's trials that have no place yet train as."""
        fresh = [trial for trial in trials if trial.number not in self._recorded]
        if shape.width or not fresh:
            return
        shape.closes = self._times.prunes
        usual = Counter(constants.get(trial.number, "") for trial in fresh)
        shape.constants = usual.most_common(1)[0][0]
        keys = self._of(shape)
        places = [(recorded_width(key), array_kind(key)) for key in keys]
        if self._wish == 0:
            shape.width = ALONE
        elif why := self._why_apart(shape, fresh[0], asking):
            shape.width, shape.why = ALONE, (f"unfused: {why}",)
        elif self._wished is not None and (self._reseating.is_asked or not places):
            shape.width, shape.kind, shape.rest = self._wished
        elif places:  # what its trials trained in
            # Beside a compiled array a traced one has the trials whose floats are others.
            widest = max(places, key=lambda place: (place[0], place[1] == "compiled"))
            asked = asked_width(keys)
            shape.width, shape.kind = widest if asked is None else (asked, None)
            shape.constants = self._recorded_constants(shape) or shape.constants
            rest = next(filter(None, map(from_key, keys)), ())
            shape.rest = tuple(narrow for narrow in rest if narrow.width < shape.width)
            shape.closes = any("array_widths" in key for key in keys)
        elif self._wish is None:
            shape.width = ALONE
        else:
            self._measure_widths(shape, fresh, job, asking, load)

    def _why_apart(self, shape: Shape, trial: TrialSpec, asking: Asking) -> str:
        """Why trials of this shape share no array, though they could now; "" where they may."""
        if not self._wish or self._times.changes is None:
            return ""
        return why_apart(
            self._times.changes,
            trial,
            shape.signature,
            asking,
            wished=None if self._wished is None else str(self._wish),
        )

    def _of(self, shape: Shape) -> list[Mapping[str, Scalar]]:
        """The keys on record of this shape's trials."""
        return [k for k in self._recorded.values() if k.get("array_group") == shape.group]

    def _recorded_constants(self, shape: Shape) -> str:
        return next((str(k["array_floats"]) for k in self._of(shape) if "array_floats" in k), "")

    def _measure_widths(
        self, shape: Shape, trials: Sequence[TrialSpec], job: Job, asking: Asking, load: Load
    ) -> None:
        """Try arrays of several widths, on as many devices as the trials would occupy."""
        if not widths_to_try(len(trials), self._devices):
            shape.width = ALONE
            shape.why = (f"unfused: no more trials of its shape ({len(trials)}) than devices",)
            return
        if words := why_no_look(load):
            shape.width, shape.why = ALONE, (f"unfused: {words}",)
            return
        is_forced = self._spilling is not None and self._spilling.is_forced

        def fits(found: WidthMeasure) -> bool:
            return self._fits(job, found) and (bool(found.shards) or not is_forced)

        def priced(measure: ArrayMeasure) -> ArrayMeasure:
            return self._with_lone_price(measure, job)

        measure = try_arrays(
            asking,
            shape.lone.first(trials),
            min(self._devices, len(trials)),
            lambda measure: next_candidate(priced(measure), load, fits),
            room=self._room(job, shape),
            pace=pace(load),
        )
        measure, told = self._with_spilled(shape, priced(measure), trials, asking, load, fits)
        shape.width, shape.kind, shape.why = choose(measure, load, fits)
        shape.why = with_lengths(shape.why, measure.widths, shape.width)
        shape.why = (*shape.why, *shape.lone.beside(measure), *told)
        shape.notes, shape.compiler = measure.notes, measure.compiler
        for found in measure.widths:
            shape.found[Candidate(found.width, found.kind)] = found
        best = shape.found.get(Candidate(shape.width, shape.kind))
        if best is None or best.shards or not shape.closes or shape.kind in ONE_WIDTH:
            return
        whole = [f for f in measure.widths if not (f.declined or f.shards) and fits(f)]
        able = [found for found in whole if found.kind == best.kind]
        shape.rest = narrower(best, able, load, measure.valid_batches)

    def _room(self, job: Job, shape: Shape) -> Room:
        """What the device has room for by the trials' states; the rest is found out by trying."""
        return Room(
            lambda width: held_bytes(job, width) <= self._budget,
            has_trial=held_bytes(job, 1) <= self._budget,
            captures=shape.lone.captures,
            varies=shape.varies,
            one_base=bool(shape.base),
        )

    def _with_lone_price(self, measure: ArrayMeasure, job: Job) -> ArrayMeasure:
        """Where one trial alone is spilled, beside what that takes."""
        if self._spilling is None or not isinstance(job.technique, Spilled):
            return measure
        alone_s, forward_s = self._spilling.lone_s(job), sum(s.forward_s for s in job.shards)
        valid_s = max(forward_s, alone_s / 3) if measure.valid_batches else 0.0

        def priced(found: WidthMeasure) -> WidthMeasure:
            if found.declined:
                return found
            if not found.alone_s:  # it has no room on the device
                return replace(found, alone_s=alone_s, alone_valid_s=Seconds(valid_s))
            slower = max(1.0, alone_s / found.alone_s)
            return replace(
                found,
                alone_valid_s=Seconds(found.alone_valid_s * slower),
                alone_s=Seconds(max(alone_s, found.alone_s)),
            )

        return replace(measure, widths=tuple(map(priced, measure.widths)))

    def _with_spilled(
        self,
        shape: Shape,
        measure: ArrayMeasure,
        trials: Sequence[TrialSpec],
        asking: Asking,
        load: Load,
        fits: Fits,
    ) -> tuple[ArrayMeasure, tuple[str, ...]]:
        """With the best array that does not fit, in shards; and what else there is to say."""
        told: dict[int, str] = {}
        while self._spilling is not None and len(told) < MOST_SPILLED:
            best = worth_spilling(measure, load, fits, told.keys())
            if best is None:
                break
            found = self._spilled(shape, trials, best.width, asking)
            if isinstance(found, SpilledArrayPlan):
                there = next(
                    f for f in measure.widths if (f.width, f.kind) == (best.width, best.kind)
                )
                spilled = when_spilled(there, found.in_shards)
                return replace(measure, widths=(*measure.widths, spilled)), tuple(told.values())
            told[best.width] = f"{best.width} wide, spilled: none, {found}"
        return measure, tuple(told.values())

    def _spilled(
        self,
        shape: Shape,
        trials: Sequence[TrialSpec],
        width: int,
        asking: Asking,
        *,
        fits: bool = False,
    ) -> SpilledArrayPlan | str:
        """The array of this shape in shards, or why there is none."""
        assert self._spilling is not None
        if width not in shape.spilled:
            base = bool(shape.base)
            find = partial(self._spilling.find, one_base=base, varies=shape.varies)
            shape.spilled[width] = find(asking, trials, width, fits=fits)
        return shape.spilled[width]

    def _look_at(
        self,
        shape: Shape,
        trials: Sequence[TrialSpec],
        candidate: Candidate,
        asking: Asking,
        job: Job,
    ) -> WidthMeasure:
        """What an array that is settled already takes."""
        if candidate not in shape.found:
            todo = [candidate]
            measure = try_arrays(
                asking,
                trials,
                1,
                lambda _: todo.pop() if todo else None,
                room=self._room(job, shape),
                pace=BRIEFLY,
            )
            declined = WidthMeasure(
                width=candidate.width, kind=candidate.kind, declined=measure.declined
            )
            shape.found[candidate] = next(iter(measure.widths), declined)
            if measure.declined:  # however its passes run
                shape.found[Candidate(candidate.width, "eager")] = declined
            shape.notes = (*shape.notes, *measure.notes)
            shape.compiler = measure.compiler or shape.compiler
        return shape.found[candidate]

    def _fits(self, job: Job, found: WidthMeasure) -> bool:
        if found.shards:
            return True
        if found.is_over:
            return False
        held = held_bytes(job, found.width) + found.pool_bytes
        return held + found.unit_bytes <= self._budget

    def _kind(
        self, shape: Shape, before: Mapping[str, Scalar] | None, constants: str
    ) -> PassKind | None:
        """How a trial's array is to run; None: traced, if there is a graph."""
        if before is not None and not begins_in_one(before):
            return array_kind(before)
        if shape.kind == "compiled" and constants != shape.constants:
            return None  # its code would be another one: an array beside the compiled one
        return shape.kind

    def _place(
        self,
        job: Job,
        shape: Shape,
        trials: Sequence[TrialSpec],
        asking: Asking,
        told: Mapping[int, str],
    ) -> Job:
        """The job in its array, if that is where it trains."""
        seated = partial(self._seated, shape=shape, trials=trials, asking=asking, told=told)
        if (before := self._recorded.get(job.trial)) is None:
            return seated(job)
        wished, said = self._reseating.seat(job.trial, before, self._of(shape))
        if wished != before:
            self._recorded[job.trial] = wished
            placed = seated(replace(job, why=(*job.why, said)))
            if epochs_of(placed.numerics) == epochs_of(wished):
                return placed
            said = self._reseating.stays(job.trial, before, placed.why[-1])
            self._recorded[job.trial] = before
        placed = seated(replace(job, why=(*job.why, said)) if said else job)
        if placed.array or placed.began or not epochs_of(before):
            return placed
        return replace(placed, why=tuple(why for why in placed.why if why != said))

    def _seated(
        self,
        job: Job,
        shape: Shape,
        trials: Sequence[TrialSpec],
        asking: Asking,
        told: Mapping[int, str],
    ) -> Job:
        """The job where it is on record, or where those are that come now."""
        before = self._recorded.get(job.trial)
        seat = None if before is None else recorded_seat(before)
        width = shape.width if seat is None else seat.width
        key = {**job.numerics, "array_group": shape.group}
        if shape.varies:
            key["array_batches"] = kind_in(shape.signature)
        if before and "array_company" in before:  # with whom it began, also where it left them
            key["array_company"] = before["array_company"]
        job = replace(job, numerics=key)
        there = self._there(job.trial, before)
        if width == ALONE or (there and there[-1].for_good):
            job = replace(job, why=(*job.why, *shape.why))
            return as_recorded(job, before or {}, there)
        kind = self._kind(shape, before, told[job.trial])
        if kind == "compiled":  # of those that share its code
            mine = str((before or {}).get("array_floats", shape.constants))
            trials = [trial for trial in trials if told[trial.number] == mine]
        slot = free_slot(self._of(shape), width) if seat is None else seat.slot
        place = ArraySlot(shape.group, slot, told[job.trial])
        placed, later = self._in_its_array(job, shape, trials, asking, place, width, kind)
        asked = before if seat is not None and seat.asked else None
        if placed.array is not None and (later is not None or asked):
            placed = with_rooms(placed, job, place, later or Later(()), asked)
        return as_recorded(placed, before or {}, there)

    def _there(self, trial: int, before: Mapping[str, Scalar] | None) -> tuple[Epoch, ...] | None:
        """The seats that a trial had so far; None at its first step."""
        if before is not None and (there := self._reseating.there(trial, before)) is not None:
            return there
        now = self._now.get(trial)
        return None if now is None else epochs_of(now)

    def _in_its_array(
        self,
        job: Job,
        shape: Shape,
        trials: Sequence[TrialSpec],
        asking: Asking,
        place: ArraySlot,
        width: int,
        kind: PassKind | None,
    ) -> tuple[Job, Later | None]:
        """The job in the array in which it began; and where else it may go on."""
        before = self._recorded.get(job.trial)
        is_cut = self._spilling is not None and self._spilling.is_forced
        candidate = Candidate(width, kind or ("eager" if is_cut else "traced"))
        found, captures = self._found(shape, trials, candidate, asking, job)
        if found.declined:
            return replace(job, why=(*job.why, f"unfused: {found.declined}")), None
        taken = seats_taken(len(trials), self._devices, width)
        fits = self._fits(job, found) and not found.shards
        if fits and not is_cut:
            praised = (praise(found, shape.notes, len(trials)), *told_of_passes([found], width))
            why = shape.why or praised
            later = self._later(shape, trials, before, kind, asking, job)
            place = place._replace(looped=shape.looped(self._of(shape)))
            args = (job, place, found, why, shape.compiler)
            return in_array(*args, captures=captures, taken=taken), later
        words = "shards were asked for" if fits else f"{width} of them do not fit the device"
        if self._spilling is None or found.kind in UNCUT:
            if self._spilling is not None:
                words = f"{words}, and {UNCUT[found.kind]} are not cut into shards"
            return replace(job, why=(*job.why, f"unfused: {words}")), None
        spilled = self._spilled(shape, trials, width, asking, fits=fits)
        if isinstance(spilled, str):
            words = f"{words}, and are no array in shards: {spilled}"
            return replace(job, why=(*job.why, f"unfused: {words}")), None
        self.layouts[job.trial] = spilled.layout
        whole = Bytes(held_bytes(job, width) + found.unit_bytes)
        if found.is_over:  # about: nobody saw it
            whole = spilled.measure.resident_bytes
        found = when_spilled(found, spilled.in_shards)
        praised = (praise(found, shape.notes, len(trials)), *told_of_passes([found], width))
        why = shape.why or praised
        why = (*why, *why_spilled(spilled, whole, self._budget, width))
        passes = kind if before is not None and kind else "eager"
        closes = shape.closes if before is None else "array_widths" in before
        later = Later(from_key(before or {})) if closes else None
        place = place._replace(looped=shape.looped(self._of(shape)))
        return in_spilled_array(job, place, spilled, width, why, passes, taken), later

    def _found(
        self,
        shape: Shape,
        trials: Sequence[TrialSpec],
        candidate: Candidate,
        asking: Asking,
        job: Job,
    ) -> tuple[WidthMeasure, bool]:
        """An array, eager where there is no graph of it; and whether passes are captured."""
        found = self._look_at(shape, trials, candidate, asking, job)
        if found.declined and candidate.kind == "traced":  # the same bits, operation by operation
            found = self._look_at(shape, trials, candidate._replace(kind="eager"), asking, job)
        if found.declined:
            return found, True
        return self._with_room(shape, trials, found, asking, job)

    def _later(
        self,
        shape: Shape,
        trials: Sequence[TrialSpec],
        before: Mapping[str, Scalar] | None,
        kind: PassKind | None,
        asking: Asking,
        job: Job,
    ) -> Later | None:
        """Where a trial may go on when others were pruned, as is on record; None: it stays."""
        closes = shape.closes if before is None else "array_widths" in before
        if not closes:
            return None
        found, captures = [], True
        widths = shape.rest if before is None else from_key(before)
        widest = ALONE if before is None else recorded_width(before)
        for width, most in widths:
            if width == ALONE or (before is not None and width >= widest):
                continue
            candidate = Candidate(width, kind or "traced")
            less, captured = self._found(shape, trials, candidate, asking, job)
            if not less.declined and not less.shards and self._fits(job, less):
                found.append((less, most))
                captures = captures and captured
        if before is None:  # what is not there is not on record either
            there = {less.width for less, _ in found} | {ALONE}
            widths = tuple(one for one in widths if one.width in there)
        return Later(widths, tuple(found), captures)

    def _with_room(
        self,
        shape: Shape,
        trials: Sequence[TrialSpec],
        found: WidthMeasure,
        asking: Asking,
        job: Job,
    ) -> tuple[WidthMeasure, bool]:
        """The array, and whether passes are captured; not where graphs' own memory has no room.

        The bits are the same without.
        """
        if not found.pool_bytes or self._fits(job, found):
            return found, True
        if found.kind == "branches":
            return replace(found, pool_bytes=NO_BYTES), False
        eager = self._look_at(shape, trials, Candidate(found.width, "eager"), asking, job)
        return (found if eager.declined else eager), True
