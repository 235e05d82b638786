"""One trial as the run sees it: its job, how far it is, and what of it is safe."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from shoal.core.plan import Job
from shoal.core.seats import Epoch
from shoal.core.spec import Place, Scalar
from shoal.core.technique import steps_on_host
from shoal.memory.layout import TrialLayout
from shoal.runtime.wire.messages import Progress, Settings
from shoal.search import Exploit

SAME_WAY = 3
"""A trial that failed in the same way so often is FAILED, whatever retries are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a trial begins in this run: anew, or from a generation of an earlier one."""

    step: int = 0
    restore: str = ""  # the generation's directory
    warm: bool = False  # it is a parent's
    metrics: Mapping[str, float] = field(default_factory=dict)
    has_run: bool = False  # in an earlier run
    device_s: float = 0.0  # in earlier runs
    hp: Mapping[str, Scalar] | None = None  # it has now, where they are not those it began with


@dataclass(slots=True)
class TrialRun:
    """A trial that has not ended. ``descriptor`` is its host region's; the run closes it."""

    job: Job
    layout: TrialLayout
    total: int | None  # steps, where known
    halt: int | None = None  # the step at which it waits for its generation
    step: int = 0
    until: int = 0
    device: str = ""  # that has it leased now
    leases: int = 0  # that it was granted
    is_parked: bool = False  # leased on paper only: it waits to be saved
    home: str = ""  # where it ran last
    others: tuple[str, ...] = ()  # beside ``home``, where its later stages ran last
    parked_at: str = ""  # whose worker has its session, at a step boundary
    is_new_there: bool = False  # its worker has still to build it: no step has ended there
    descriptor: int | None = None
    progress: Progress | None = None
    restore: str = ""
    warm: bool = False
    seats: tuple[Epoch, ...] = ()  # that it had, or will have (again), of those on record
    inherits: Mapping[int, Exploit] = field(default_factory=dict)  # by step, as is on record
    inherited_at: int = -1  # the step at which its state became another one's
    metrics: Mapping[str, float] = field(default_factory=dict)
    deaths: int = 0  # of workers that ran its code, since it last got further
    died_at: int = -1  # the step from which it went on after the last one
    failures: list[tuple[str, str]] = field(default_factory=list)  # signatures, one a retry
    rungs: int = 0  # how often it was planned smaller
    growth: float = 1.0  # its batches take so many times what the first one took
    started: float = 0.0  # on the monotonic clock
    has_run: bool = False
    device_s: float = 0.0
    saved_step: int = 0
    saved_path: str = ""  # relative to the study
    saved_at: float = field(default_factory=time.monotonic)
    save_s: float = 0.0  # how long the last generation took
    after_save: list[Callable[[], None]] = field(default_factory=list)

    @property
    def homes(self) -> tuple[str, ...]:
        """All devices that it ran on last, the first stage's first."""
        return (self.home, *self.others) if self.home else ()

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices that have it leased now."""
        return (self.device, *self.others) if self.device else ()

    @property
    def steps_left(self) -> int | None:
        """Steps to its end, or to where it waits or leaves its array."""
        stops = [step for step in (self.halt, self.leaves_at) if step is not None]
        end = min(stops, default=self.total)
        return None if end is None else max(0, end - self.step)

    @property
    def is_halted(self) -> bool:
        """Whether it came to where it waits for its generation."""
        return self.halt is not None and self.step >= self.halt

    @property
    def leaves_at(self) -> int | None:
        """The step at which it leaves its array for good; None: no such step is to come."""
        leaves = self.job.array is not None and bool(self.seats) and self.seats[-1].for_good
        return self.seats[-1].step if leaves else None

    @property
    def leaves_now(self) -> bool:
        """Whether it came to where it leaves its array for good."""
        return self.leaves_at is not None and self.step >= self.leaves_at

    def before_halt(self, step: int) -> int:
        """``step``, or where it waits or leaves its array if that comes first."""
        return min(s for s in (step, self.halt, self.leaves_at) if s is not None)

    @property
    def lost_step(self) -> int | None:
        """The first step at which it went on from another one's state, and has that no more."""
        lost = (s for s in self.inherits if s > self.step or s == self.step != self.inherited_at)
        return min(lost, default=None)

    @property
    def is_dirty(self) -> bool:
        """Whether its host region is ahead of its newest generation."""
        return self.progress is not None and self.progress.step > self.saved_step

    def may_try_again(self, failure: tuple[str, str], retries: int) -> bool:
        """Whether a trial that failed so is to be tried again; notes the failure.

        Not after its retries, and not when it failed in the same way ``SAME_WAY`` times.
        """
        self.failures.append(failure)
        return len(self.failures) <= retries and self.failures.count(failure) < SAME_WAY

    @property
    def place(self) -> Place:
        """Where its optimizer steps; part of the numerics key."""
        technique = self.job.technique
        return "host" if steps_on_host(technique) else "device"

    def take_over(self, exploit: Exploit, path: str, relative: str) -> None:
        """It goes on from a generation that has another trial's state, and with other ``hp``."""
        self.job = replace(self.job, hp=exploit.hp)
        self.inherits = {**self.inherits, self.step: exploit}
        self.inherited_at = self.saved_step = self.step
        self.progress = None
        self.leave_home()
        self.restore, self.saved_path, self.warm = path, relative, True
        self.saved_at = time.monotonic()

    def leave_home(self) -> None:
        """No worker has its session any more."""
        self.home = self.parked_at = ""
        self.others = ()

    def rejob(self, job: Job, layout: TrialLayout) -> None:
        """Another job for the same trial; its region is of the old one's shape."""
        self.close()
        self.job, self.layout = job, layout

    def close(self) -> None:
        """Give the host region back."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def total_steps(settings: Settings, num_batches: int | None, accumulate: int) -> int | None:
    """The steps of a trial, where they are known before it runs."""
    if settings.steps is not None:
        return settings.steps
    if num_batches is None or settings.epochs is None:
        return None
    return settings.epochs * -(-num_batches // accumulate)
