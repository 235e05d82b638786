"""What a run begins with: what ran before, merged with what is asked for now."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.control import CloneTrial
from shoal.core import event as events
from shoal.core.errors import SpecError
from shoal.core.spec import TrialSpec
from shoal.core.studyfiles import RECORD
from shoal.core.technique import Pipelined, Technique
from shoal.execution.hunt import Hunt
from shoal.hardware import Hardware
from shoal.launch.cloning import begin_warm, clear
from shoal.launch.directory import StudyDirectory
from shoal.launch.growing import grow, of_today
from shoal.launch.notcarried import refuse_what_stays
from shoal.launch.onrecord import Keys, keys_to_follow, technique_to_follow, threads_to_follow
from shoal.launch.plan import packed_recipe
from shoal.launch.request import Asked, Request
from shoal.launch.searching import begin_hunt, more_trials
from shoal.launch.sinks import Sinks
from shoal.launch.starts import Restart, progress_of, restart
from shoal.observe.reader import read_events
from shoal.observe.rows import TrialState
from shoal.observe.snapshot import Folder, Snapshot
from shoal.planning import agree_on_weights
from shoal.resume import Merged, StudyRecord, describe_study, merge, with_points
from shoal.search.sampler import sample


@dataclass(frozen=True, slots=True)
class Case:
    """What a run begins with.

    Attributes:
        before: Of the runs before.
        found: Where trials go on.
        todo: The trials that have not ended.
        keys: The numerics keys, by trial, that say how they train.
        hardware: For so many, and those that a search will come to.
        hunt: The study's search as it stands.
        technique: What is asked for, or what is on record; None where it is chosen, or that of
            each trial.
    """

    place: StudyDirectory
    sinks: Sinks
    before: Snapshot
    merged: Merged
    found: Restart
    todo: list[TrialSpec]
    keys: Keys
    hardware: Hardware
    hunt: Hunt
    technique: Technique | None

    @property
    def to_come(self) -> int:
        """Trials that the search has not come to yet."""
        return _to_come(self.hunt)

    @property
    def unplanned(self) -> frozenset[int]:
        """Trials that the search came to, and that no run planned before."""
        searched = {t.number for t in self.merged.record.trials if t.origin == "searched"}
        planned = {row.number for row in self.before.trials if row.numerics}
        return frozenset({trial.number for trial in self.todo} & searched - planned)

    @property
    def built(self) -> list[TrialSpec]:
        """The trial that came furthest of those that an earlier run planned, if there are any."""
        rows = sorted((row for row in self.before.trials if row.numerics), key=lambda r: -r.step)
        return [self.merged.record.trial(row.number).to_spec() for row in rows[:1]]


def refuse_early(study: Asked, request: Request) -> bytes:
    """Refuse what can be seen to be wrong before anything is made.

    Returns:
        The recipe for workers.

    Raises:
        SpecError: there is nothing to resume, two wishes exclude each other, no trials are
            asked for that could be added, or the recipe or what holds beside it cannot travel
            to a worker.
    """
    exists, orders = (study.directory / RECORD).exists(), request.orders
    if request.resume and not exists:
        raise SpecError(
            f"there is no study in {study.directory} to resume. Run it without resume=True, "
            "or look for it with: shoal ls."
        )
    if request.overwrite and (request.resume or orders):
        raise SpecError("overwrite=True deletes what resume=True goes on with. Choose one.")
    if request.retry_failed and (request.overwrite or request.resume is False):
        other = "overwrite=True deletes" if request.overwrite else "resume=False refuses to find"
        raise SpecError(f"{other} what retry_failed=True trains again. Choose one.")
    refuse_what_stays()
    return packed_recipe(study)


def take_up(study: Asked, request: Request, place: StudyDirectory) -> Case:
    """Read what ran before in a directory that is held, and merge.

    Raises:
        SpecError: there is an earlier study where none may be, or it was another one.
        StorageError: it cannot be read.
    """
    if place.recorded is not None and request.resume is False:
        raise SpecError(
            f"{place.path} already holds a study of this name. Go on with it "
            "(resume=True), read it with shoal.open, pass overwrite=True (--overwrite) "
            "to replace it, or choose another name."
        )
    before, worked_s = _read(place)
    merged = _grown(study, request, _merge(study, request, place, before), before)
    again = _again(merged, before, retry_failed=request.retry_failed)
    varies = bool(study.search.varied)
    found = _restart(place, before, merged, worked_s, again, varies=varies)
    hunt = begin_hunt(study, place, merged, found)
    hunt.keys = {row.number: row.numerics for row in before.trials}
    merged = more_trials(hunt, place, merged, found)
    todo = [_as_it_is(trial, found) for trial in merged.trials if trial.number in found.starts]
    numbers = {trial.number for trial in todo}
    rows = before.trials if _count_plans(request, place, merged) else ()
    keys = keys_to_follow(found.numerics, rows, numbers)
    on_record, differs = _on_record(study, before, keys, numbers)
    technique = request.technique or on_record
    hardware = _hardware_for(request, technique, len(todo) + _to_come(hunt), keys)
    if request.technique is None and differs:
        technique = None  # the planner has it trial by trial
    sinks = Sinks(place.database, request.callbacks, check=place.check)
    sinks.look_back(before)
    return Case(place, sinks, before, merged, found, todo, keys, hardware, hunt, technique)


def _count_plans(request: Request, place: StudyDirectory, merged: Merged) -> bool:
    """Whether what trials were planned as holds, though they have saved nothing.

    Not where another plan is to be followed, or the recipe is another one that nothing trained
    with; one that was accepted is of the same trials.
    """
    recorded, now = place.recorded, merged.record
    if recorded is None or request.plan is not None:
        return False
    return recorded.recipe.is_same(now.recipe) or len(recorded.older) < len(now.older)


def _on_record(
    study: Asked, before: Snapshot, keys: Keys, numbers: Collection[int]
) -> tuple[Technique | None, bool]:
    """What trials train as that go on or come beside others; whether it may be another of each.

    Where a recipe allows stale weights the first plan of each trial counts beside the ``keys``
    that are followed.
    """
    technique, known = technique_to_follow(keys, numbers), list(keys.values())
    chosen = study.recipe.stale is not None
    if chosen:
        more = {row.number: row.numerics for row in before.trials if row.number in numbers}
        both = {number: key for number, key in (more | dict(keys)).items() if key}
        technique, known = technique_to_follow(both, numbers), list(both.values())
    is_stale = isinstance(technique, Pipelined) and technique.is_stale
    return technique, (chosen and is_stale) or not agree_on_weights(known)


def _as_it_is(trial: TrialSpec, found: Restart) -> TrialSpec:
    """A trial with the hyperparameters that it has now."""
    now = found.starts[trial.number].hp
    return trial if now is None else replace(trial, hp=now)


def _to_come(hunt: Hunt) -> int:
    return hunt.search.to_come if hunt.search is not None else 0


def more_points(study: Asked, record: StudyRecord, more: int) -> StudyRecord:
    """The record with so many more trials of the study's space.

    Raises:
        SpecError: the space has too few points, or which come next follows from results.
    """
    if study.search.varied:
        raise SpecError(
            f"study {record.name!r} cannot be extended: its trials are a population, and who "
            "copied whom follows from all of them. Give more trials to a study of another name."
        )
    if study.search.is_adaptive:
        raise SpecError(
            f"study {record.name!r} cannot be extended by hand: which trials come next, its "
            f"sampler says as results come. Put trials={(study.search.trials or 0) + more} into "
            "its file, and run that again."
        )
    search, total = study.search, record.sampled + more
    points = sample(study.space, total, study.seed, sampler=study.sampler, points=search.points)
    return with_points(record, points, more)


def _read(place: StudyDirectory) -> tuple[Snapshot, dict[int, float]]:
    """What an earlier run came to, and the seconds that each trial had of a device."""
    folder, worked_s = Folder(), defaultdict[int, float](float)
    for event in read_events(place.path) if place.recorded else ():
        folder.add(event)
        if isinstance(event, events.StepFinished):
            worked_s[event.trial] += event.seconds
    return folder.last_snapshot(), dict(worked_s)


def _merge(study: Asked, request: Request, place: StudyDirectory, before: Snapshot) -> Merged:
    asked = describe_study(study, study.policy.record(), study.search.words(), request.fuse)
    if place.recorded is not None:
        numbers = [trial.number for trial in place.recorded.trials]
        progress = progress_of(place.path, before, place.recorded.unit, numbers)
        try:
            return merge(place.recorded, progress, asked, accept_recipe=request.accept_recipe)
        except SpecError as error:
            if study.arguments == before.arguments:
                raise
            raise SpecError(f"{error}\n{_other_arguments(before, study)}") from None
    return Merged(
        trials=tuple(t.to_spec() for t in asked.trials),
        ended=(),
        continued=(),
        added=tuple(t.number for t in asked.trials),
        changes=(),
        record=asked,
    )


def _other_arguments(before: Snapshot, study: Asked) -> str:
    """What may be all that differs."""
    was, now = (shlex.join(given) or "none" for given in (before.arguments, study.arguments))
    return f"The run before gave the study's file other arguments: {was}; this one: {now}."


def _grown(study: Asked, request: Request, merged: Merged, before: Snapshot) -> Merged:
    """With the trials that this call asks for beside the study's own."""
    record, words, claimed, now = merged.record, list[str](), set[int](), time.time()
    ended = {row.number for row in before.trials if row.is_done}
    rows = {row.number: row for row in before.trials if row.inherited}
    for order in request.orders:
        row = rows.get(order.trial) if isinstance(order, CloneTrial) else None
        grown = grow(
            record,
            of_today(order, record, row.hp if row else None),
            lambda record, more: more_points(study, record, more),
            ended=ended,
            time=now,
            claimed=claimed,
        )
        record = grown.record
        words.append(grown.text)
        claimed.update(grown.trials)
    known = {trial.number for trial in merged.trials}
    new = [t.to_spec() for t in record.trials if t.number not in known]
    return replace(
        merged,
        trials=(*merged.trials, *new),
        added=(*merged.added, *(t.number for t in new)),
        changes=(*merged.changes, *words),
        record=record,
    )


def _again(merged: Merged, before: Snapshot, *, retry_failed: bool) -> list[int]:
    """The trials that are there and train on."""
    again = list(merged.continued)
    if retry_failed:
        failed = [r.number for r in before.trials if r.state is TrialState.FAILED]
        again += [number for number in failed if number not in again]
    return again


def _restart(
    place: StudyDirectory,
    before: Snapshot,
    merged: Merged,
    worked_s: Mapping[int, float],
    again: Sequence[int],
    *,
    varies: bool,
) -> Restart:
    known = {row.number for row in before.trials}
    new = [n for n in merged.added if n not in known]
    for number in new:
        clear(place.path, number)
    warm = {trial.number for trial in merged.record.trials if trial.warm}
    length = merged.record.length
    found = restart(
        place.path,
        before,
        [*again, *new],
        length=length,
        warm=warm,
        worked_s=worked_s,
        varies=varies,
    )
    for clone in merged.record.trials:
        fresh = clone.number in new and not found.starts[clone.number].restore
        if clone.warm and fresh and clone.parent is not None:
            found.starts[clone.number] = begin_warm(place.path, clone.parent, clone.number)
    return found


def _hardware_for(
    request: Request, technique: Technique | None, trials: int, keys: Keys
) -> Hardware:
    """The devices for so many trials; as wide as those of the ``keys``, where that is open."""
    hardware = request.hardware
    if request.plan is not None:
        return hardware
    threads = threads_to_follow(keys, hardware.devices[0])
    if hardware.shared_cores is not None and threads is not None:
        return hardware.with_threads(threads, max(1, trials), technique)
    return hardware.fewer_trials(max(1, trials), technique)
