"""One run of a study, from its directory to its report.

[Note: in this order]
    hold the directory          a lock, the database; nothing of an earlier run is touched
    what ran before             the record, the events, the generations that verify: case.py
    merge                       what is asked for now with what ran; refusals change nothing
    plan                        measure; refuse what cannot fit in memory or on disk: plan.py
    settle                      the record is written: from here on it can be resumed
    run                         until all have ended, or somebody stops it
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from shoal.control import ControlServer
from shoal.core import event as events
from shoal.core.aim import Aim
from shoal.core.errors import StorageError
from shoal.core.plan import Plan
from shoal.core.spec import DeviceSpec, Scalar, TrialSpec, record_of
from shoal.core.studyfiles import PLAN, RECORD, RESERVE
from shoal.core.units import Bytes
from shoal.core.whys import unfused_counts
from shoal.execution.announce import planned_events, steps_of
from shoal.execution.floor import Tally
from shoal.execution.run import Execution
from shoal.execution.trial import Start
from shoal.kernels.kernelchoice import EXACT, STRICT, only_deterministic
from shoal.launch.case import Case, more_points, refuse_early, take_up
from shoal.launch.cloning import refuse_idle, refuse_other_epochs
from shoal.launch.commands import Commands, Door
from shoal.launch.directory import StudyDirectory
from shoal.launch.duration import likely_part
from shoal.launch.following import pins_of
from shoal.launch.keeping import Keeper
from shoal.launch.onrecord import keys_to_keep, place_to_follow
from shoal.launch.plan import check_disk, check_host_memory, fits_host, plan_study, spill_place
from shoal.launch.request import Asked, Request, settings_of
from shoal.launch.room import Room
from shoal.launch.saving import interval_of, with_interval
from shoal.launch.signals import Interrupted, Interrupts
from shoal.launch.starts import asked_seats, check_numerics, refuse_numerics, remove_strays
from shoal.launch.wishes import refuse_inexact, wish_beside
from shoal.observe.rows import TrialState
from shoal.planning import Planned, Planner, Wish
from shoal.recipes.named import name_recipe
from shoal.resume import StudyRecord
from shoal.runtime.pool import WorkerPool
from shoal.storage.files import Reserve, free_bytes, replace_file

RESERVE_BYTES = 16 * 2**20


class Run:
    """A study being run; ``run`` once."""

    def __init__(self, study: Asked, request: Request, pool: WorkerPool) -> None:
        self._study, self._request, self._pool = study, request, pool
        self._settings = settings_of(study, timeline=request.timeline)
        self._began, self._began_at = time.time(), time.monotonic()
        self._door = Door(heeds_signals=Interrupts.listen_here())
        self._about_disk: tuple[str, ...] = ()
        self._spill_dir = ""  # where trials are at home in files
        self._packed = b""  # the recipe
        self._room: Room  # once it is planned

    def run(self) -> None:
        """To the end, or to where it was stopped.

        Raises:
            SpecError, PlanError: before anything is trained.
            StorageError: the disk is full or failing; what is intact is in the message.
            TrialError: the first trials failed in the same way.
            SystemExit, KeyboardInterrupt: it was interrupted; every trial is saved.
        """
        self._warm_up()
        self._packed = refuse_early(self._study, self._request)
        try:
            self._run()
        except Interrupted as ending:  # a new study that was not planned yet leaves nothing
            ending.has_begun = (self._study.directory / RECORD).exists()
            raise

    def _run(self) -> None:
        study, request = self._study, self._request
        with ExitStack() as stack:
            interrupts = stack.enter_context(Interrupts(self._pool))
            place = stack.enter_context(
                StudyDirectory(study.directory, overwrite=request.overwrite)
            )
            case = take_up(study, request, place)
            if not case.todo:
                self._nothing_to_do(case)
                return
            stack.enter_context(ControlServer(place.path, self._door.deliver))
            stack.callback(self._pool.release)
            stack.enter_context(only_deterministic(self._is_strict(case)))
            self._go_on(case, interrupts)

    def _warm_up(self) -> None:
        """Have workers import torch while the recipe is packed and the directory is made.

        Of a study that ran before, how many are left to train is not known yet.
        """
        study, request = self._study, self._request
        if not (study.directory / RECORD).exists():
            trials = max(1, study.search.total or len(study.trials))
            used = request.hardware
            if request.plan is None:
                used = used.fewer_trials(trials, request.technique)
            self._pool.warm(len(used.devices))

    def _is_strict(self, case: Case) -> bool:
        """Whether it is asked for, or the study began so, or a plan that is followed is."""
        request = self._request
        keys = [] if request.accept_numerics else [*_recorded(case).values()]
        keys += [job.numerics for job in request.plan.jobs] if request.plan else []
        return request.strict or any(key.get(EXACT) == STRICT for key in keys)

    def _nothing_to_do(self, case: Case) -> None:
        """Every trial has ended: only what is asked for, or known of them, may be new."""
        changes, finished = case.merged.changes, case.found.finished
        said: list[events.Event] = [*finished]
        if changes:
            case.place.settle(case.merged.record)
            said.append(events.StudyChanged(time=self._began, changes=changes))
        ended = case.hunt.ran_out()
        news = [one for one in ended if events.ended_words(one) not in case.before.warnings]
        if finished or news or case.before.stopped or not case.before.is_finished:
            started = self._started(case)
            said = [started, *said, *ended, self._over(Tally(finished=len(finished)))]
        case.sinks.write(said)
        self._keeper(case)

    def _go_on(self, case: Case, interrupts: Interrupts) -> None:
        case.sinks.hold()  # what is refused leaves the record as it was
        case.sinks.write([self._started(case)])
        planner, planned = self._plan(case)
        changes = self._check(case, planned)
        interrupts.heed()
        case.place.settle(case.merged.record)
        case.sinks.release()
        case.place.drop_replaced()
        remove_strays(case.found.strays)
        replace_file(case.place.path / PLAN, planned.plan.to_json().encode())
        case.sinks.write(self._opening(case, planned, changes))
        try:
            tally = self._execute(case, planner, planned, interrupts)
        except BaseException as error:
            self._tell_why(case, error)
            raise
        case.sinks.write([self._over(tally)])
        if tally.error is not None:
            raise tally.error
        interrupts.heed()

    def _tell_why(self, case: Case, error: BaseException) -> None:
        """Record why the run ends, if the disk takes it; ``error`` is what counts."""
        with suppress(StorageError):
            case.sinks.write([self._over(Tally(reason=_words(error)))])

    def _plan(self, case: Case) -> tuple[Planner, Planned]:
        planner, planned = plan_study(
            self._study,
            self._pool,
            case.hardware,
            case.technique,
            trials=case.todo,
            settings=self._settings,
            sink=case.sinks.write,
            before=case.found.numerics,
            place=place_to_follow(case.keys, {trial.number for trial in case.todo}),
            fuse=self._request.fuse,
            fused=self._fused(case),
            recorded=_recorded(case),
            steps=_steps(case),
            reseats=self._request.accept_numerics,
            idle=self._idle(case),
            pins=pins_of(self._request.plan, case.found.numerics.keys()),
            new=case.unplanned,
            built=case.built,
            packed=self._packed,
        )
        decided = interval_of(self._study.policy, planned.plan, case.place.path)
        self._settings = replace(self._settings, checkpoint_every_s=float(decided.every_s))
        self._about_disk = (decided.why,) if decided.why else ()
        return planner, replace(planned, plan=with_interval(planned.plan, decided))

    def _fused(self, case: Case) -> Wish:
        """What was asked of arrays before, unless something else says how trials train now."""
        if self._request.plan is not None:
            return None
        return wish_beside(case.merged.record.fuse, self._request.technique)

    def _idle(self, case: Case) -> tuple[DeviceSpec, ...]:
        """Devices that no trial of a study that begins would have."""
        if case.found.numerics or self._request.plan is not None:
            return ()  # what goes on stays as it is, and what is planned
        return self._request.hardware.idle(case.hardware, case.technique)

    def _check(self, case: Case, planned: Planned) -> list[str]:
        """Refuse what cannot fit on disk, other bits than before, and clones of what is done."""
        if self._is_strict(case):
            refuse_inexact(planned.plan)
        known = {row.number for row in case.before.trials}
        new = [trial for trial in case.todo if trial.number not in known]
        starts, them = case.found.starts, case.merged.trials
        self._check_clones(new, starts, them, case.place.path, planned)
        todo = {trial.number for trial in case.todo}
        self._room = Room(case, self._study.policy, self._study.search.num_waiting)
        self._room.check(
            planned.plan,
            self._free(case, planned.plan),
            to_come=case.to_come,
            reserve=Bytes(0 if (case.place.path / RESERVE).exists() else RESERVE_BYTES),
        )
        kept = keys_to_keep(case.found.numerics, case.before.trials, todo)
        accepted = bool(case.merged.record.older)
        changes = check_numerics(planned.plan, kept, accepted=accepted)
        if not self._request.accept_numerics:
            refuse_numerics(changes)
        return changes + asked_seats(planned.plan, _recorded(case))

    def _check_clones(
        self,
        clones: Sequence[TrialSpec],
        starts: Mapping[int, Start],
        trials: Sequence[TrialSpec],
        place: Path,
        planned: Planned,
    ) -> None:
        """Refuse warm clones that cannot go on from their parents."""
        by_epochs = self._settings.epochs is not None
        counts = f"Study(epochs={self._settings.epochs})" * by_epochs
        if self._study.recipe.schedule_interval == "epoch":
            counts = counts or "Recipe(schedule_interval='epoch')"
        refuse_other_epochs(clones, starts, planned.num_batches, counts)
        refuse_idle(clones, starts, steps_of(planned, self._settings), trials, place)

    def _free(self, case: Case, plan: Plan) -> Bytes:
        """Bytes on the disk of the study's directory for other files than the trials' homes."""
        place = case.place.path
        free, homes = free_bytes(place), sum(job.disk_bytes for job in plan.jobs)
        if not homes or spill_place(plan, place).stat().st_dev != place.stat().st_dev:
            return free
        return Bytes(max(0, free - homes))

    def _opening(self, case: Case, planned: Planned, changes: list[str]) -> list[events.Event]:
        words = (*case.merged.changes, *changes, *self._about_disk)
        said: list[events.Event] = []
        if words:
            said.append(events.StudyChanged(time=time.time(), changes=words))
        plan = planned.plan
        said.append(
            events.StudyPlanned(
                time=time.time(),
                trials=len(plan.jobs),
                seconds=float(plan.seconds),
                warnings=plan.warnings,
                part=likely_part(planned, self._settings, self._study.search),
                unfused=unfused_counts(why for job in plan.jobs for why in job.why),
            )
        )
        recipe, totals = case.merged.record.recipe_number, steps_of(planned, self._settings)
        said += planned_events(planned, case.todo, totals, recipe=recipe)
        said += case.hunt.ran_out()
        return [*said, *case.found.happened, *case.found.finished]

    def _execute(
        self, case: Case, planner: Planner, planned: Planned, interrupts: Interrupts
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
            plan = planned.plan
            if plan.spill_dir:
                self._spill_dir = str(spill_place(plan, place.path))
                planned = replace(planned, plan=replace(plan, spill_dir=self._spill_dir))
            execution = Execution(
                planned,
                self._pool,
                planner,
                self._settings,
                sinks.write,
                starts=case.found.starts,
                limits=limits,
                release_reserve=reserve.release,
                hunt=case.hunt,
                fits_host=lambda jobs: fits_host(jobs, planned.plan, case.hardware.host_memory),
            )
            commands = Commands(
                self._pool,
                execution,
                str(place.path),
                case.merged.record,
                more_points=lambda record, more: more_points(self._study, record, more),
                grow=lambda *of: self._grow(case, *of),
                hunt=case.hunt,
            )
            sinks.add(commands.see)
            self._door.commands = commands
            interrupts.stop_by(execution.stop)
            tally = execution.run()
            commands.ended()
        return tally

    def _keeper(self, case: Case) -> Keeper:
        """What lets go of trials that ended, told of those that did so before.

        A run that was killed may have had that on record and not let go of them.
        """
        study = self._study
        keeper = Keeper(
            case.place.path,
            keep=study.policy.keep,
            only_weights=study.policy.keep_finished == "weights",
            best=study.policy.best,
            aim=Aim(study.metric, study.mode),
            keep_best=study.policy.keep_best,
        )
        for row in (row for row in case.before.trials if row.number not in case.found.starts):
            if row.state is TrialState.FINISHED:
                keeper.finished(row.number, row.metrics)
            elif row.state is TrialState.PRUNED:
                keeper.pruned(row.number)
            elif row.state is TrialState.FAILED:
                keeper.failed(row.number)
        for event in case.found.finished:
            keeper.see(event)
        return keeper

    def _grow(
        self,
        case: Case,
        record: StudyRecord,
        planned: Planned,
        specs: Sequence[TrialSpec],
        starts: Mapping[int, Start],
    ) -> None:
        """Make trials that came later part of the study.

        Raises:
            PlanError: their state fits neither the disk nor its budget, or not the host.
            SpecError: a clone has nothing left to train.
        """
        them = [trial.to_spec() for trial in record.trials]
        self._check_clones(specs, starts, them, case.place.path, planned)
        if self._is_strict(case):
            refuse_inexact(planned.plan)
        plan = replace(planned.plan, spill_dir=self._spill_dir)
        check_disk(plan, case.place.path)
        origins = {spec.number: record.trial(spec.number).origin for spec in specs}
        asked_for = sum(origin == "searched" for origin in origins.values())
        to_come = max(0, case.to_come - asked_for)
        self._room.check(plan, self._free(case, plan), to_come=to_come)
        by_hand = [number for number, origin in origins.items() if origin != "searched"]
        if by_hand:  # those of a search wait until there is room
            check_host_memory(planned.plan, case.hardware.host_memory)
        case.place.settle(record)
        if words := tuple(f"trial {number} was added" for number in by_hand):
            case.sinks.write([events.StudyChanged(time=time.time(), changes=words)])
        totals = steps_of(planned, self._settings)
        case.sinks.write(planned_events(planned, specs, totals, recipe=record.recipe_number))

    def _started(self, case: Case) -> events.StudyStarted:
        study = self._study
        return events.StudyStarted(
            time=self._began,
            study=study.name,
            metric=study.metric,
            mode=study.mode,
            trials=len(case.merged.trials) + case.to_come,
            devices=tuple(
                asdict(device, dict_factory=record_of) for device in case.hardware.devices
            ),
            source=study.source,
            recipe={} if study.source else name_recipe(study.recipe),
            by_epochs=study.epochs is not None,
            arguments=study.arguments,
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
            pruned=tally.pruned,
        )


def _recorded(case: Case) -> dict[int, Mapping[str, Scalar]]:
    """The numerics keys of trials that were planned before."""
    return {row.number: row.numerics for row in case.before.trials if row.numerics}


def _steps(case: Case) -> dict[int, int]:
    """Where trials go on; not of those that have done no step since they took over a state."""
    own = {row.number for row in case.before.trials if row.step}
    return {n: start.step for n, start in case.found.starts.items() if n in own or not start.warm}


def _words(error: BaseException) -> str:
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return "it was interrupted"
    return f"{type(error).__name__}: {error}".strip(": ")
