"""What planning comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.core.plan import Job, Plan
from shoal.core.spec import JobMeasure
from shoal.core.technique import Spilled, Technique
from shoal.core.units import Bytes, Seconds
from shoal.memory.layout import TrialLayout
from shoal.planner.job import with_split_master
from shoal.planner.need import Need
from shoal.planner.pipeline import Staged
from shoal.planner.replicas import Replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what only the run needs beside it."""

    plan: Plan
    layouts: Mapping[int, TrialLayout]
    num_batches: Mapping[int, int | None]
    failures: Mapping[int, str]  # trial -> traceback: cannot even be built
    unvalidated: tuple[int, ...] = ()  # those that have no batches to validate with


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The technique of one signature, with the measure and layout that prove it."""

    measure: JobMeasure
    layout: TrialLayout
    technique: Technique
    why: tuple[str, ...]
    active: int  # trials that share a device then
    whole: Need | None = None  # resident
    staged: Staged | None = None  # of a pipeline
    replicated: Replicated | None = None  # of replicas

    @property
    def gang(self) -> int:
        """Devices that a trial of it has at a time."""
        if self.staged is not None:
            return self.staged.gang
        return self.replicated.technique.width or 1 if self.replicated is not None else 1


def with_split_masters(planned: Planned, why: str) -> Planned:
    """The same with less on the host: the float32 of what travels as bfloat16 in two parts.

    ``why`` is what jobs say that change.
    """
    layouts = planned.layouts
    pairs = [with_split_master(job, layouts[job.trial], why) for job in planned.plan.jobs]
    plan = replace(planned.plan, jobs=tuple(job for job, _ in pairs))
    return replace(planned, plan=plan, layouts={job.trial: layout for job, layout in pairs})


def with_seconds(plan: Plan, seconds: float) -> Plan:
    """The plan with its predicted duration."""
    return replace(plan, seconds=Seconds(seconds))


def with_homes_in_files(planned: Planned) -> Planned:
    """The same with the trials' homes in files: none of that is the host's memory."""

    def moved(job: Job) -> Job:
        if job.disk_bytes:
            return job
        home, technique = Bytes(planned.layouts[job.trial].num_bytes), job.technique
        if isinstance(technique, Spilled):
            technique = replace(technique, offload="disk")
        left = Bytes(job.host_bytes - home)
        return replace(job, technique=technique, host_bytes=left, disk_bytes=home)

    return replace(planned, plan=replace(planned.plan, jobs=tuple(map(moved, planned.plan.jobs))))
