"""Whether the disk has room for what a run saves: all of its trials, those to come among them."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.plan import Job, Plan
from shoal.core.units import Bytes
from shoal.launch.case import Case
from shoal.launch.policy import (
    Beside,
    CheckpointPolicy,
    as_saved_in,
    bytes_on_disk,
    shared_on_disk,
)
from shoal.observe.rows import TrialState

_LETS_GO = (TrialState.FINISHED, TrialState.PRUNED)


class Room:
    """Looked at before anything trains, and again whenever trials are added.

    Args:
        waiting: How many trials may have begun and not ended, where they wait for each other;
            None for all of them.
    """

    def __init__(self, case: Case, policy: CheckpointPolicy, waiting: int | None) -> None:
        self._policy, self._waiting, self._place = policy, waiting, case.place.path
        todo = {trial.number for trial in case.todo}
        ended = {row.number for row in case.before.trials if row.state in _LETS_GO}
        ended |= {event.trial for event in case.found.finished}
        numbers = [trial.number for trial in case.merged.trials if trial.number not in todo]
        self._ended = [number for number in numbers if number in ended]
        self._others = [number for number in numbers if number not in ended]
        self._jobs: dict[int, Job] = {}

    def check(
        self, plan: Plan, free: Bytes, *, to_come: int, reserve: Bytes | None = None
    ) -> None:
        """Refuse trials whose generations cannot fit beside those of the trials before.

        Args:
            to_come: Trials that the search will ask for later.

        Raises:
            PlanError: more is needed than ``free``, or than the budget.
        """
        jobs = self._jobs | {job.trial: job for job in plan.jobs}
        stays, place, seen = self._policy.stays, self._place, set[tuple[int, int]]()
        plan = as_saved_in(place, replace(plan, jobs=tuple(jobs.values())))
        before, copies = (*self._ended, *self._others), self._policy.copies
        shared = shared_on_disk(place, before, plan, copies, seen)
        ended = [bytes_on_disk(place, [n], newest=stays, seen=seen) for n in self._ended]
        theirs = sum(shared.values()) + bytes_on_disk(place, sorted(jobs), seen=seen)
        self._policy.check(
            plan,
            free,
            reserve=reserve or Bytes(0),
            theirs=Bytes(theirs),
            others=bytes_on_disk(place, self._others, seen=seen),
            beside=Beside(
                to_come=to_come, waiting=self._waiting, ended=ended, shared=shared.keys()
            ),
        )
        self._jobs = jobs
