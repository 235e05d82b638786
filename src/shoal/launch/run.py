"""One run of a study, from its directory to its report.

[Note: in this order]
    hold the directory          a lock, the database; nothing of an earlier run is touched
    what ran before             the record, the events, the generations that verify
    merge                       what is asked for now with what ran; refusals change nothing
    plan                        measure; refuse what cannot fit in memory or on disk
    settle                      the record is written: from here on it can be resumed
    run                         until all have ended, or somebody stops it
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from shoal.control import CloneTrial, ControlServer
from shoal.core import event as events
from shoal.core.errors import PlanError, SpecError, StorageError
from shoal.core.plan import Plan, Technique
from shoal.core.spec import TrialSpec
from shoal.core.units import format_bytes
from shoal.execution.announce import planned_events, predict_seconds, steps_of
from shoal.execution.floor import Tally
from shoal.execution.run import Execution, Limits
from shoal.hardware import Hardware
from shoal.launch.cloning import begin_warm, clear
from shoal.launch.commands import Commands, Door
from shoal.launch.directory import RESERVE, StudyDirectory
from shoal.launch.keeping import Keeper
from shoal.launch.packing import pack_recipe
from shoal.launch.policy import CheckpointPolicy, bytes_on_disk, generation_bytes
from shoal.launch.signals import Interrupts
from shoal.launch.sinks import Callback, Sinks
from shoal.launch.starts import (
    Restart,
    check_numerics,
    progress_of,
    refuse_numerics,
    remove_strays,
    restart,
)
from shoal.observe.reader import read_events
from shoal.observe.rows import TrialState
from shoal.observe.snapshot import Folder, Snapshot
from shoal.planning import Planned, Planner, with_seconds
from shoal.recipe import Recipe
from shoal.resume import (
    Merged,
    StudyRecord,
    describe_study,
    merge,
    with_clone,
    with_points,
)
from shoal.runtime.messages import Settings
from shoal.runtime.pool import WorkerPool
from shoal.search.sampler import sample
from shoal.storage.files import Reserve, free_bytes, replace_file

RESERVE_BYTES = 16 * 2**20


class Asked(Protocol):
    """What is run: a ``shoal.Study``."""

    name: str
    recipe: Recipe
    space: Any
    trials: tuple[TrialSpec, ...]
    epochs: int | None
    steps: int | None
    eval_every: int | None
    metric: str
    mode: str
    seed: int
    sampler: Any
    directory: Path
    source: str
    policy: CheckpointPolicy

    def limits(self) -> Limits: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How a study is to be run this time."""

    hardware: Hardware
    technique: Technique | None = None
    callbacks: Sequence[Callback] = ()
    overwrite: bool = False
    resume: bool | None = None
    extend: int = 0
    clones: Sequence[CloneTrial] = ()
    retry_failed: bool = False
    accept_numerics: bool = False
    timeline: bool = True
    versions: dict[str, str] = field(default_factory=dict)


def plan_study(
    study: Asked,
    pool: WorkerPool,
    hardware: Hardware,
    technique: Technique | None,
    *,
    trials: Sequence[TrialSpec],
    settings: Settings,
    sink: Callable[[Sequence[events.Event]], None] = lambda happened: None,
) -> tuple[Planner, Planned]:
    """Measure and decide; the pool is configured for the study afterwards.

    Raises:
        PlanError: a trial fits in no way, or what is forced cannot be done.
    """
    pool.configure(hardware.devices, pack_recipe(study.recipe), settings)
    planner = Planner(study.name, pool, hardware.devices, study.recipe, technique, sink)
    planned = planner.plan(trials)
    _check_host_memory(planned.plan, hardware.host_memory)
    seconds = predict_seconds(planned.plan, steps_of(planned, settings))
    return planner, replace(planned, plan=with_seconds(planned.plan, seconds))


def settings_of(study: Asked, *, timeline: bool) -> Settings:
    """What every worker is told of a study."""
    policy = study.policy
    return Settings(
        steps=study.steps,
        epochs=study.epochs,
        eval_every=study.eval_every,
        directory=str(study.directory.resolve()),
        checkpoint_every_s=float(policy.every_s),
        timeline=timeline,
        keep=policy.keep,
        keep_finished="weights" if policy.keep_finished == "weights" else "all",
    )


@dataclass(frozen=True, slots=True)
class _Case:
    """What a run begins with."""

    place: StudyDirectory
    sinks: Sinks
    before: Snapshot  # of the runs before
    merged: Merged
    found: Restart
    todo: list[TrialSpec]


class Run:
    """A study being run; ``run`` once."""

    def __init__(self, study: Asked, request: Request, pool: WorkerPool) -> None:
        self._study, self._request, self._pool = study, request, pool
        self._settings = settings_of(study, timeline=request.timeline)
        self._began, self._began_at = time.time(), time.monotonic()
        self._hardware, self._door = request.hardware, Door()

    def run(self) -> None:
        """To the end, or to where it was stopped.

        Raises:
            SpecError, PlanError: before anything is trained.
            StorageError: the disk is full or failing; what is intact is in the message.
            TrialError: the first trials failed in the same way.
            SystemExit, KeyboardInterrupt: it was interrupted; every trial is saved.
        """
        request = self._request
        self._refuse_early()
        with ExitStack() as stack:
            interrupts = stack.enter_context(Interrupts(self._pool))
            place = stack.enter_context(
                StudyDirectory(self._study.directory, overwrite=request.overwrite)
            )
            if place.recorded is not None and request.resume is False:
                raise SpecError(
                    f"{place.path} already holds a study of this name. Go on with it "
                    "(resume=True), read it with shoal.open, pass overwrite=True (--overwrite) "
                    "to replace it, or choose another name."
                )
            before, worked_s = _read(place)
            merged = self._merge(place, before)
            found = self._restart(place, before, merged, worked_s)
            todo = [t for t in merged.trials if t.number in found.starts]
            self._hardware = _hardware_for(self._request.hardware, len(todo), found)
            sinks = Sinks(place.database, request.callbacks, check=place.check)
            case = _Case(place, sinks, before, merged, found, todo)
            if not todo:
                self._nothing_to_do(case)
                return
            stack.enter_context(ControlServer(place.path, self._door.deliver))
            stack.callback(self._pool.release)
            self._go_on(case, interrupts)

    # -- before the plan ------------------------------------------------------------------

    def _refuse_early(self) -> None:
        request, study = self._request, self._study
        exists = (study.directory / "study.json").exists()
        if request.resume and not exists:
            raise SpecError(
                f"there is no study in {study.directory} to resume. Run it without resume=True, "
                "or look for it with: shoal ls."
            )
        if request.overwrite and (request.resume or request.extend or request.clones):
            raise SpecError("overwrite=True deletes what resume=True goes on with. Choose one.")
        pack_recipe(study.recipe)  # before anything is made

    def _merge(self, place: StudyDirectory, before: Snapshot) -> Merged:
        asked = describe_study(self._study, self._study.policy.record())
        if place.recorded is None:
            merged = Merged(
                trials=tuple(t.to_spec() for t in asked.trials),
                ended=(),
                continued=(),
                added=tuple(t.number for t in asked.trials),
                changes=(),
                record=asked,
            )
        else:
            progress = progress_of(place.path, before, place.recorded.unit)
            merged = merge(place.recorded, progress, asked)
        return self._grown(merged)

    def _grown(self, merged: Merged) -> Merged:
        """With the trials that this call asks for beside the study's own."""
        record = merged.record
        if self._request.extend:
            record = self._more_points(record, self._request.extend)
        for clone in self._request.clones:
            record = with_clone(record, clone.trial, clone.changes, warm=clone.warm)
        known = {trial.number for trial in merged.trials}
        new = [t.to_spec() for t in record.trials if t.number not in known]
        words = [f"trial {t.number} was added" for t in new]
        return replace(
            merged,
            trials=(*merged.trials, *new),
            added=(*merged.added, *(t.number for t in new)),
            changes=(*merged.changes, *words),
            record=record,
        )

    def _more_points(self, record: StudyRecord, more: int) -> StudyRecord:
        study = self._study
        points = sample(study.space, record.sampled + more, study.seed, sampler=study.sampler)
        return with_points(record, points, more)

    def _restart(
        self,
        place: StudyDirectory,
        before: Snapshot,
        merged: Merged,
        worked_s: Mapping[int, float],
    ) -> Restart:
        again = list(merged.continued)
        if self._request.retry_failed:
            failed = [r.number for r in before.trials if r.state is TrialState.FAILED]
            again += [number for number in failed if number not in again]
        known = {row.number for row in before.trials}
        new = [n for n in merged.added if n not in known]
        for number in new:
            clear(place.path, number)
        warm = {trial.number for trial in merged.record.trials if trial.warm}
        length = merged.record.length
        found = restart(
            place.path, before, [*again, *new], length=length, warm=warm, worked_s=worked_s
        )
        for clone in merged.record.trials:
            fresh = clone.number in new and not found.starts[clone.number].restore
            if clone.warm and fresh and clone.parent is not None:
                found.starts[clone.number] = begin_warm(place.path, clone.parent, clone.number)
        return found

    def _nothing_to_do(self, case: _Case) -> None:
        """Every trial has ended: only what is asked for, or known of them, may be new."""
        changes, finished = case.merged.changes, case.found.finished
        said: list[events.Event] = [*finished]
        if changes:
            case.place.settle(case.merged.record)
            said.append(events.StudyChanged(time=self._began, changes=changes))
        if finished or case.before.stopped or not case.before.is_finished:
            started = self._started(len(case.merged.trials))
            said = [started, *said, self._over(Tally(finished=len(finished)))]
        case.sinks.write(said)
        self._keeper(case)

    # -- from the plan on -----------------------------------------------------------------

    def _go_on(self, case: _Case, interrupts: Interrupts) -> None:
        case.sinks.hold()  # what is refused leaves the record as it was
        case.sinks.write([self._started(len(case.merged.trials))])
        planner, planned = self._plan(case)
        changes = self._check(case, planned)
        case.place.settle(case.merged.record)
        case.sinks.release()
        remove_strays(case.found.strays)
        replace_file(case.place.path / "plan.json", planned.plan.to_json().encode())
        case.sinks.write(self._opening(case, planned, changes))
        try:
            tally = self._execute(case, planner, planned, interrupts)
        except BaseException as error:
            self._tell_why(case, error)
            raise
        case.sinks.write([self._over(tally)])
        if tally.error is not None:
            raise tally.error
        if interrupts.received is not None:
            interrupts.leave()

    def _tell_why(self, case: _Case, error: BaseException) -> None:
        """Record why the run ends, if the disk takes it; ``error`` is what counts."""
        with suppress(StorageError):
            case.sinks.write([self._over(Tally(reason=_words(error)))])

    def _plan(self, case: _Case) -> tuple[Planner, Planned]:
        request = self._request
        return plan_study(
            self._study,
            self._pool,
            self._hardware,
            request.technique,
            trials=case.todo,
            settings=self._settings,
            sink=case.sinks.write,
        )

    def _check(self, case: _Case, planned: Planned) -> list[str]:
        """Refuse what cannot fit on disk, and other bits than before."""
        others = [trial.number for trial in case.merged.trials if trial not in case.todo]
        self._study.policy.check(
            planned.plan,
            free_bytes(case.place.path),
            theirs=bytes_on_disk(case.place.path, [trial.number for trial in case.todo]),
            others=bytes_on_disk(case.place.path, others),
        )
        changes = check_numerics(planned.plan, case.found.numerics)
        if not self._request.accept_numerics:
            refuse_numerics(changes)
        return changes

    def _opening(self, case: _Case, planned: Planned, changes: list[str]) -> list[events.Event]:
        words = (*case.merged.changes, *changes)
        said: list[events.Event] = []
        if words:
            said.append(events.StudyChanged(time=time.time(), changes=words))
        said += planned_events(planned, case.todo, steps_of(planned, self._settings))
        return [*said, *case.found.happened, *case.found.finished]

    def _execute(
        self, case: _Case, planner: Planner, planned: Planned, interrupts: Interrupts
    ) -> Tally:
        place, sinks = case.place, case.sinks
        with ExitStack() as stack:
            reserve = Reserve(place.path / RESERVE, RESERVE_BYTES)
            reserve.take()
            stack.callback(reserve.release)
            keeper = self._keeper(case)
            sinks.add(keeper.see)
            limits = self._study.limits()
            if any(row.step for row in case.before.trials):
                limits.same_failures.passed()  # the recipe worked before
            execution = Execution(
                planned,
                self._pool,
                planner,
                self._settings,
                sinks.write,
                starts=case.found.starts,
                limits=limits,
                release_reserve=reserve.release,
            )
            commands = Commands(
                self._pool,
                execution,
                str(place.path),
                case.merged.record,
                more_points=self._more_points,
                grow=lambda record, new, specs: self._grow(case, record, new, specs),
            )
            sinks.add(commands.see)
            self._door.commands = commands
            interrupts.stop = execution.stop
            tally = execution.run()
            commands.ended()
        return tally

    def _keeper(self, case: _Case) -> Keeper:
        """What lets go of finished trials, told of those that finished before."""
        study = self._study
        keeper = Keeper(
            case.place.path,
            only_weights=study.policy.keep_finished == "weights",
            best=study.policy.best,
            metric=study.metric,
            mode=study.mode,
        )
        for row in case.before.trials:
            if row.state is TrialState.FINISHED and row.number not in case.found.starts:
                keeper.finished(row.number, row.metrics)
        for event in case.found.finished:
            keeper.see(event)
        return keeper

    def _grow(
        self,
        case: _Case,
        record: StudyRecord,
        planned: Planned,
        specs: Sequence[TrialSpec],
    ) -> None:
        """Make trials that came later part of the study.

        Raises:
            PlanError: their state fits neither the disk nor its budget, or not the host.
        """
        new = {spec.number for spec in specs}
        others = [trial.number for trial in record.trials if trial.number not in new]
        free, theirs = free_bytes(case.place.path), bytes_on_disk(case.place.path, others)
        self._study.policy.check(planned.plan, free, others=theirs)
        _check_host_memory(planned.plan, self._hardware.host_memory)
        case.place.settle(record)
        words = tuple(f"trial {spec.number} was added" for spec in specs)
        case.sinks.write([events.StudyChanged(time=time.time(), changes=words)])
        case.sinks.write(planned_events(planned, specs, steps_of(planned, self._settings)))

    def _started(self, trials: int) -> events.StudyStarted:
        study = self._study
        return events.StudyStarted(
            time=self._began,
            study=study.name,
            metric=study.metric,
            mode=study.mode,
            trials=trials,
            devices=tuple(asdict(device) for device in self._hardware.devices),
            source=study.source,
            versions={
                "torch": torch.__version__,
                "python": platform.python_version(),
                **self._request.versions,
            },
        )

    def _over(self, tally: Tally) -> events.StudyFinished:
        return events.StudyFinished(
            time=time.time(),
            finished=tally.finished,
            failed=tally.failed,
            seconds=time.monotonic() - self._began_at,  # a wall clock may jump
            stopped=tally.reason,
        )


def _read(place: StudyDirectory) -> tuple[Snapshot, dict[int, float]]:
    """What an earlier run came to, and the seconds that each trial had of a device."""
    folder, worked_s = Folder(), defaultdict[int, float](float)
    for event in read_events(place.path) if place.recorded else ():
        folder.add(event)
        if isinstance(event, events.StepFinished):
            worked_s[event.trial] += event.seconds
    return folder.snapshot(), dict(worked_s)


def _hardware_for(hardware: Hardware, trials: int, found: Restart) -> Hardware:
    """The devices for so many trials; as wide as those that began them, where that is open."""
    threads = {key["threads"] for key in found.numerics.values() if "threads" in key}
    if hardware.shared_cores is not None and len(threads) == 1:
        return hardware.with_threads(int(threads.pop() or 1), max(1, trials))
    return hardware.fewer_trials(max(1, trials))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip(": ")


def _check_host_memory(plan: Plan, budget: int | None) -> None:
    """Every trial's state lives on the host while the study runs; refuse what cannot fit."""
    copies = sorted((generation_bytes(job) for job in plan.jobs), reverse=True)
    copied = sum(copies[: len(plan.devices) * plan.active])  # while they are being written
    needed = sum(job.host_bytes for job in plan.jobs) + copied
    if budget is not None and needed > budget:
        largest = max(plan.jobs, key=lambda job: job.host_bytes)
        raise PlanError(
            f"{len(plan.jobs)} trials keep {format_bytes(needed)} of state on the host, of "
            f"{format_bytes(budget)} that it may use; the largest is trial {largest.trial} with "
            f"{format_bytes(largest.host_bytes)}. Run fewer trials in one study, or give "
            "host_memory= more."
        )
