"""Emulated time: when work on an emulated device is over, and waiting until then.

[Note: due times]
Real arithmetic runs, then its thread sleeps until the profile's time is over. A thread that
sleeps wakes up late: by a tenth of a millisecond on an idle machine, by 5 ms when another
Python thread holds the interpreter, by more when other programs have the cores. Added up, that
is several per cent of a run. So every piece of work has a *due* time beside the real one:

    due start   the latest due end of what it waits for: its stream, its resource, its events
    due end     due start + seconds of the profile

and its thread sleeps until the due end, however late it began. What overslept is a debt that
the next sleep on the same stream repays, and whoever waited for the event counts from when
it was due, not from when it was seen.

Two limits keep that honest. Work that begins more than ``PATIENCE_S`` after all that it
waited for was over begins now: the stream was idle, and idle time is not repaid. And a stream
that is more than ``MAX_DEBT_S`` late, because this machine takes longer than the profile, is
forgiven the rest: that time is lost, counted in ``Fidelity.behind_s``, and a benchmark can
refuse the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from shoal.core.profile import TOLERANCE
from shoal.core.seams import Clock
from shoal.core.spec import NO_SECONDS
from shoal.core.turns import Upload
from shoal.core.units import Seconds, format_seconds

PATIENCE_S = 0.02
MAX_DEBT_S = 0.1


class SystemClock:
    """The machine's own monotonic time."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Mark(NamedTuple):
    """The end of a piece of work: when it was due, and when its thread had it done."""

    due: float
    real: float


NEVER = Mark(-inf, -inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How well this machine kept to the emulated times of one kind of stream, in seconds.

    ``overruns`` are pieces of work whose real arithmetic took longer than the profile's time,
    by ``overrun_s`` altogether; later work may have made up for it. ``behind_s`` is what was
    not made up for.
    """

    works: int = 0
    emulated_s: Seconds = NO_SECONDS
    overruns: int = 0
    overrun_s: Seconds = NO_SECONDS
    behind_s: Seconds = NO_SECONDS

    def describe(self, stream: str) -> str:
        """One line for a person."""
        if not self.works:
            return f"{stream}: nothing was emulated"
        kept = (
            f"fell behind by {format_seconds(self.behind_s)}" if self.behind_s > 0 else "kept up"
        )
        return (
            f"{stream}: {kept} over {format_seconds(self.emulated_s)} of emulated time in "
            f"{self.works} pieces; {self.overruns} of them took this machine longer than the "
            f"profile, by {format_seconds(self.overrun_s)} in all"
        )


def trouble(fidelity: Mapping[str, Fidelity], tolerance: float = TOLERANCE) -> str:
    """Why an emulated run is not to be believed; empty when it kept up."""
    late = {
        stream: kept
        for stream, kept in fidelity.items()
        if kept.behind_s > tolerance * kept.emulated_s
    }
    if not late:
        return ""
    lines = "; ".join(kept.describe(stream) for stream, kept in late.items())
    return (
        f"the emulation fell behind by more than {tolerance:.0%}: {lines}. Emulate a slower "
        "device (a larger scale), smaller models, or run it on an idle machine."
    )


@dataclass(slots=True)
class _Tally:
    """The counts of one stream so far."""

    works: int = 0
    emulated_s: float = 0.0
    overruns: int = 0
    overrun_s: float = 0.0
    lost_s: float = 0.0
    late_s: float = 0.0  # now, beyond what a sleep took too long

    def fidelity(self) -> Fidelity:
        counts = dataclasses.asdict(self)
        behind_s = counts.pop("lost_s") + counts.pop("late_s")
        return Fidelity(behind_s=Seconds(behind_s), **counts)


class Resource:
    """Something that serves one request at a time, first come, first served."""

    def __init__(self) -> None:
        self._free_at = -inf
        self._lock = threading.Lock()

    def take(self, at: float, seconds: float) -> float:
        """Ask at the due time ``at`` for ``seconds``; when they will be over."""
        with self._lock:
            self._free_at = max(at, self._free_at) + seconds
            return self._free_at


class Wire:
    """One direction of a link: carries one copy at a time, and knows when it was busy.

    Threads of the two directions are late by different amounts, so whether the other
    direction is busy is asked by due times: of its present copy and of the one before.

    Activations may pass the copy that is under way (``core.turns.Upload``), which ``leave`` then
    tells that it is not over yet.
    """

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._carries: Upload | None = None
        self._passed_until, self._passed_s = -inf, 0.0
        self._begin, self._end = inf, -inf  # of the present copy, or of the last one
        self._before = (inf, -inf)

    @contextlib.contextmanager
    def carry(self, at: float, upload: Upload | None = None) -> Iterator[float]:
        """Hold the wire from the due time at which it is free, which is given, until ``leave``.

        ``upload`` is what others may pass; None where nobody may.
        """
        with self._turn:
            with self._lock:
                begin = max(at, self._end)
                self._before = self._begin, self._end
                self._begin, self._end = begin, inf
                self._carries = upload
            try:
                yield begin
            finally:
                with self._lock:
                    self._carries = None
                    if self._end == inf:
                        self._end, self._passed_s = begin, 0.0

    def leave(self, at: float) -> bool:
        """The copy was over at the due time ``at``; False if others have passed it: it is not."""
        with self._lock:
            if self._passed_s:
                return False
            self._end, self._carries = at, None
            return True

    def passed(self) -> float:
        """For how many seconds others had the wire since the last call, while it was held."""
        with self._lock:
            seconds, self._passed_s = self._passed_s, 0.0
            return seconds

    def pass_by(self, at: float, seconds: float, upload: Upload) -> tuple[float, float] | None:
        """Have the wire for ``seconds`` from the due time ``at``, or when another has passed.

        The due times of its begin and its end; None if there is nothing that it may pass.
        """
        with self._lock:
            if self._carries is None or not upload.may_pass(self._carries):
                return None
            begin = max(at, self._begin, self._passed_until)
            self._passed_until = end = begin + seconds
            self._passed_s += seconds
            return begin, end

    def is_busy(self, at: float) -> bool:
        """Whether a copy was under way at the due time ``at``."""
        before_begin, before_end = self._before
        return self._begin <= at < self._end or before_begin <= at < before_end


class Pace:
    """The emulated time of one device, for all of its threads.

    Attributes:
        compute: Where the compute stream is. Kept by the device, on its own thread.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.compute = NEVER
        self._epoch = time.time() - clock.now()
        self._lock = threading.Lock()
        self._tallies: defaultdict[str, _Tally] = defaultdict(_Tally)

    def begin(self, marks: Iterable[Mark]) -> float:
        """The due start of what begins now and waited for ``marks``."""
        now = self.clock.now()
        due = real = -inf
        for mark in marks:
            due, real = max(due, mark.due), max(real, mark.real)
        return due if now - real <= PATIENCE_S else max(due, now)

    def issued(self) -> float:
        """The due time at which the compute thread submits something now."""
        return self.begin((self.compute,))

    def free(self, start: float, elapsed_s: float) -> Mark:
        """The end of work that takes its real time."""
        return Mark(start + elapsed_s, self.clock.now())

    def end(self, stream: str, due: float, *, seconds: float, elapsed_s: float) -> Mark:
        """Wait until ``due``, the end of work of ``seconds`` that really took ``elapsed_s``."""
        mark = self.wait(stream, due)
        with self._lock:
            tally = self._tallies[stream]
            tally.works += 1
            tally.emulated_s += seconds
            if elapsed_s > seconds:
                tally.overruns += 1
                tally.overrun_s += elapsed_s - seconds
        return mark

    def wait(self, stream: str, due: float) -> Mark:
        """Wait until ``due``, in the midst of a piece of work."""
        now = self.clock.now()
        sleeps = now < due
        if sleeps:
            self.clock.sleep(due - now)
            now = self.clock.now()
        late = max(0.0, now - due)
        lost = max(0.0, late - MAX_DEBT_S)
        with self._lock:
            tally = self._tallies[stream]
            tally.late_s = 0.0 if sleeps else late - lost
            tally.lost_s += lost
        return Mark(due + lost, now)

    def unix(self, due: float) -> float:
        """Unix seconds of a due time."""
        return self._epoch + due

    def fidelity(self) -> dict[str, Fidelity]:
        """How well each kind of stream kept up so far; only those that emulated something."""
        with self._lock:
            return {stream: tally.fidelity() for stream, tally in self._tallies.items()}

    def forget(self) -> None:
        """Count anew from here: what went before was a warm-up."""
        with self._lock:
            self._tallies.clear()
