"""A look at the disk of a study, and how often its trials are saved by it.

[Note: a brief look]
A study of less than ``LEAST_BYTES`` is not worth it. A look takes a tenth of a second, and less
where ``shoal bench`` measured a disk of this kind within a day. What would change the plan is
looked at once more, since a disk that somebody else used for a moment is not slow.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from shoal.bench import Measured, load
from shoal.bench.disk import file_system, glance
from shoal.core.plan import Plan
from shoal.core.units import Bytes
from shoal.device.pace import SystemClock
from shoal.launch.policy import CheckpointPolicy, as_saved_in, changing_bytes
from shoal.planner.saving import DiskSpeed, Interval, States, interval
from shoal.runtime.saving.saver import SHARE

LEAST_BYTES = 64 * 2**20  # of states that train at a time
LOOK_S = 0.1  # of which there may be two
RECENT_LOOK_S = 0.025
RECENT_S = 24 * 3600.0


def interval_of(policy: CheckpointPolicy, plan: Plan, directory: Path) -> Interval:
    """How often the trials of a plan are saved in ``directory``, and why, by a look at its disk.

    As the policy says, without a word, where there is little to save or nothing can be written.
    """
    as_asked = Interval(every_s=policy.every_s)
    place = _existing(directory)
    states = states_of(as_saved_in(place, plan))
    if states.together < LEAST_BYTES:
        return as_asked
    measured = load()
    expected = _expected(measured, place)
    is_recent = measured is not None and 0 <= time.time() - measured.taken_at < RECENT_S
    look_s = RECENT_LOOK_S if expected is not None and is_recent else LOOK_S
    found: float | None = None
    decided = as_asked
    for budget_s in (look_s, LOOK_S):
        seen = glance(place, budget_s, SystemClock())
        if seen is None:
            return as_asked
        found = max(seen, found or 0.0)
        disk = DiskSpeed(place=str(directory), bytes_per_s=found, expected_bytes_per_s=expected)
        decided = interval(states, disk, policy.every_s, is_named=policy.is_named, share=SHARE)
        if not decided.why:
            break
    return decided


def with_interval(plan: Plan, decided: Interval) -> Plan:
    """The plan that says what the disk changed, if it did."""
    return replace(plan, notes=(*plan.notes, f"  {decided.why}")) if decided.why else plan


def states_of(plan: Plan) -> States:
    """What is saved again and again of the largest trials that may train at a time."""
    sizes = sorted((changing_bytes(job) for job in plan.jobs), reverse=True)[: plan.at_once]
    return States(
        together=Bytes(sum(sizes)), largest=Bytes(max(sizes, default=0)), trials=len(sizes)
    )


def _existing(directory: Path) -> Path:
    """It, or the deepest directory above it that is there: a plan makes none."""
    path = directory.resolve()
    return next((above for above in (path, *path.parents) if above.is_dir()), path)


def _expected(measured: Measured | None, place: Path) -> float | None:
    """What ``shoal bench`` saw a disk write that has the same file system."""
    if measured is None or measured.disk is None:
        return None
    kind = measured.disk.file_system
    return measured.disk.write.best if kind and kind == file_system(place) else None
