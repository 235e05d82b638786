"""The search of a study that begins or goes on: from what is on record to what comes next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from shoal.core.errors import PlanError, ShoalError, SpecError, TrialError, WorkerError
from shoal.core.plan import Plan
from shoal.core.spec import TrialSpec
from shoal.execution.hunt import Hunt, Telling
from shoal.execution.trial import Start
from shoal.launch.cloning import clear
from shoal.launch.directory import StudyDirectory
from shoal.launch.request import Asked
from shoal.launch.starts import Restart
from shoal.observe.reader import read_events
from shoal.planning import Abandoned, Planned
from shoal.resume import Merged, with_searched
from shoal.resume.refuse import fewer_trials

MakePlan = Callable[[Sequence[TrialSpec]], Planned]


def begin_hunt(study: Asked, place: StudyDirectory, merged: Merged, found: Restart) -> Hunt:
    """The study's search, told all that is on record; an empty hunt of a study without one.

    Raises:
        SpecError: it came to more trials than are asked for now.
    """
    search = study.search.begin()
    if search is None:
        return Hunt()
    if study.search.is_adaptive and study.search.trials is not None:
        fewer_trials(merged.record, study.search.trials)
    for trial in merged.record.trials:
        if trial.origin != "cloned":
            search.enroll(trial.number, dict(trial.hp))
    tell = Telling(search, study.metric, study.mode)
    for event in (*(read_events(place.path) if place.recorded else ()), *found.finished):
        tell(event)
    for number in found.starts:
        search.reopen(number)
    return Hunt(search, tell, study.metric)


def more_trials(hunt: Hunt, place: StudyDirectory, merged: Merged, found: Restart) -> Merged:
    """The study with the trials that its search comes to from what is on record.

    Raises:
        SpecError: the sampler cannot serve the space.
        StorageError: the disk refuses.
    """
    points = hunt.search.more() if hunt.search is not None else []
    record = with_searched(merged.record, points)
    new = record.trials[len(merged.record.trials) :]
    for trial in new:
        clear(place.path, trial.number)
        found.starts[trial.number] = Start()
        hunt.enroll(trial.number, trial.hp)
    return replace(
        merged,
        trials=(*merged.trials, *(trial.to_spec() for trial in new)),
        added=(*merged.added, *(trial.number for trial in new)),
        changes=(*merged.changes, *_differing(hunt)),
        record=record,
    )


def _differing(hunt: Hunt) -> list[str]:
    first = hunt.search.differs_from if hunt.search is not None else None
    if first is None:
        return []
    return [
        f"the sampler would have given trial {first} another point than is on record (another "
        "version of Optuna, or a trial that was tried again?): what is on record counts"
    ]


def plan_some(make: MakePlan, trials: Sequence[TrialSpec], first: Plan) -> Planned:
    """Plan trials of a search; one that cannot be run fails, and the others are planned.

    One whose recipe returns what cannot be trained too: who is planned beside it is a matter of
    time, and may be nobody.

    Args:
        first: The study's plan: of which devices.

    Raises:
        Abandoned: the run ends.
    """
    try:
        return make(trials)
    except Abandoned:
        raise
    except (PlanError, SpecError, TrialError, WorkerError) as error:
        if len(trials) == 1:
            failures = {trials[0].number: f"{type(error).__name__}: {error}"}
            none = replace(first, jobs=(), failures=failures, notes=())
            return Planned(plan=none, layouts={}, num_batches={}, failures=failures)
    return _joined([plan_some(make, [trial], first) for trial in trials])


def plan_known_first(
    make: MakePlan,
    trials: Sequence[TrialSpec],
    new: Collection[int],
    try_built: Callable[[], Planned],
) -> Planned:
    """Plan trials of a search that goes on, of which ``new`` ones were never planned before.

    These fail alone if they cannot be run, as they would have in a run that nobody ended; unless
    what was planned before cannot be run now either.

    Args:
        try_built: Plans a trial by itself that was planned in an earlier run.

    Raises:
        PlanError, SpecError, TrialError, WorkerError: not only new ones cannot be run.
    """
    try:
        return make(trials)
    except (PlanError, SpecError, TrialError, WorkerError) as error:
        known = [trial for trial in trials if trial.number not in new]
        if len(known) == len(trials):
            raise
        first = make(known) if known else _nothing(try_built, error)
    later = [trial for trial in trials if trial.number in new]
    return _joined([first, plan_some(make, later, first.plan)])


def _nothing(try_built: Callable[[], Planned], error: ShoalError) -> Planned:
    """A plan without trials, where one that was planned before can be planned now.

    Raises:
        ShoalError: it cannot; the ``error`` of the others.
    """
    try:
        tried = try_built()
    except (PlanError, SpecError, TrialError, WorkerError):
        raise error from None
    none = replace(tried.plan, jobs=(), notes=(), warnings=())
    return Planned(plan=none, layouts={}, num_batches={}, failures={})


def _joined(planned: Sequence[Planned]) -> Planned:
    """Several plans as one."""
    whole = replace(
        planned[0].plan,
        jobs=tuple(job for part in planned for job in part.plan.jobs),
        failures={n: why for part in planned for n, why in part.plan.failures.items()},
    )
    return Planned(
        plan=whole,
        layouts={n: layout for part in planned for n, layout in part.layouts.items()},
        num_batches={n: count for part in planned for n, count in part.num_batches.items()},
        failures={n: why for part in planned for n, why in part.failures.items()},
    )
