"""A virtual device that takes the time of a real one: its links, host memory and kernels.

The arithmetic and the copies are real, so the bits are those of any virtual device; then
each thread sleeps until the profile's time is over. What is due when: ``device.pace``.

    compute     the seconds that ``compute`` is given; its real time where none are given
    up, down    bytes / bandwidth of the link, one copy after another whichever trial's it is;
                where both directions share the link, in slices of ``SLICE_S``
    host        the seconds that ``submit`` is given, one piece of work after another, as
                ``host_turns`` has it: the trials share the host's memory bandwidth
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable

import torch

from shoal.core.profile import Direction
from shoal.core.seams import Clock
from shoal.core.spec import DeviceSpec
from shoal.core.turns import Upload
from shoal.core.units import Seconds
from shoal.device.pace import NEVER, Fidelity, Mark, Pace, Resource, SystemClock
from shoal.device.streams import Event, Piece, Ran, ThreadEvent, ThreadStream, Turns, Work
from shoal.device.virtual import VirtualDevice

SLICE_S = 2e-3  # of a copy, where the other direction may slow it down


class PacedEvent(ThreadEvent):
    """The completion of work on an emulated stream; its span is when it was due."""

    __slots__ = ("_pace", "begin", "mark")

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace
        self.begin, self.mark = 0.0, NEVER

    def span(self) -> tuple[float, float]:
        if self.mark is NEVER:  # what it waited for had failed
            return super().span()
        return self._pace.unix(self.begin), self._pace.unix(self.mark.due)


class PacedRan(Ran):
    """The event of emulated compute; its span is when it was due."""

    __slots__ = ("_begin", "_pace", "mark")

    def __init__(self, work: Work, begin: float, seconds: float | None, pace: Pace) -> None:
        began = pace.clock.now()
        super().__init__(work)
        elapsed_s = pace.clock.now() - began
        self._pace, self._begin = pace, begin
        if seconds is None or self.error is not None:
            self.mark = pace.free(begin, elapsed_s)
        else:
            due = begin + seconds
            self.mark = pace.end("compute", due, seconds=seconds, elapsed_s=elapsed_s)

    def span(self) -> tuple[float, float]:
        return self._pace.unix(self._begin), self._pace.unix(self.mark.due)


class _Here(threading.local):
    """Where the calling thread's piece of work is in emulated time.

    ``first`` is when its first copy got the link.
    """

    at: float | None = None
    first: float | None = None


class PacedStream(ThreadStream):
    """An up, down or host stream whose work takes the profile's time."""

    def __init__(self, name: str, notify: Work, device: EmulatedDevice) -> None:
        self._device, self._pace = device, device.pace
        self._mark = NEVER
        super().__init__(name, notify)

    def _event(self) -> PacedEvent:
        return PacedEvent(self._pace)

    def _paced(self, piece: Piece, event: PacedEvent, waits: tuple[Event, ...]) -> Work:
        """``seconds`` are of the host's memory; where there are none, as long as copies take."""
        return functools.partial(self._run_paced, event, piece, waits, self._pace.issued())

    def _run_paced(
        self, event: PacedEvent, piece: Piece, waits: tuple[Event, ...], issued: float
    ) -> None:
        """The stream's own thread was there all along, so it begins when all is due."""
        here, clock, (work, seconds) = self._device.here, self._pace.clock, piece
        begin = max([issued, self._mark.due, *(mark.due for mark in marks_of(waits))])
        due = None if seconds is None else self._device.host.take(begin, seconds)
        here.at, here.first, began = begin, None, clock.now()
        try:
            work()
            elapsed_s = clock.now() - began
            if due is not None and seconds is not None:
                mark = self._pace.end("host", due, seconds=seconds, elapsed_s=elapsed_s)
                begin = due - seconds
            elif here.first is not None:
                mark = Mark(here.at, clock.now())
                begin = here.first
            else:
                mark = self._pace.free(begin, elapsed_s)
        except BaseException:
            mark = self._pace.free(begin, clock.now() - began)
            raise
        finally:
            here.at = None
            if event.mark is NEVER:  # the first piece of the work
                event.begin = begin
            self._mark = event.mark = mark


class EmulatedDevice(VirtualDevice):
    """A CPU worker at the pace of a real device.

    Attributes:
        pace: Its emulated time, and how well this machine keeps to it.
        host: The host memory's bandwidth, as far as it is this device's.
        here: The emulated time of the calling stream.
    """

    def __init__(self, spec: DeviceSpec, clock: Clock | None = None) -> None:
        super().__init__(spec)
        assert spec.profile is not None
        self.profile = spec.profile
        self.pace = Pace(clock or SystemClock())
        self.host, self.host_turns = Resource(), Turns()
        self.here = _Here()

    def _stream(self, name: str) -> PacedStream:
        return PacedStream(name, self.notify, self)

    def compute(
        self, work: Work, after: Iterable[Event] = (), *, seconds: float | None = None
    ) -> PacedRan:
        """Run ``work`` here, and return when ``seconds`` of emulated time are over."""
        waits = tuple(after)
        for event in waits:
            event.wait()
        begin = self.pace.begin((self.pace.compute, *marks_of(waits)))
        ran = PacedRan(work, begin, seconds, self.pace)
        self.pace.compute = ran.mark
        return ran

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        direction: Direction,
        *,
        upload: Upload | None = None,
        passes: bool = False,
    ) -> None:
        """Copy inside a stream, and return when the link is through with it."""
        if self.spec.poison:
            time.sleep(self._random.uniform(0, 2e-3))
        clock, began = self.pace.clock, self.pace.clock.now()
        target.copy_(source)
        elapsed_s = clock.now() - began
        in_stream = self.here.at is not None
        at = clock.now() if self.here.at is None else self.here.at
        seconds, over = self.profile.link_seconds(source.nbytes, direction), None
        if passes and upload:
            over = self._pass_by(seconds, direction, at, elapsed_s, upload)
        if over is None:
            over = self._cross(seconds, direction, at, elapsed_s, None if passes else upload)
        self.here.at = over if in_stream else None

    def _pass_by(
        self, seconds: Seconds, direction: Direction, at: float, elapsed_s: float, upload: Upload
    ) -> float | None:
        """Cross the link past the copy under way there, if that may be; when it is over."""
        takes = seconds * self._slower(direction, at)
        span = self._wires[direction].pass_by(at, takes, upload)
        if span is None:
            return None
        begin, due = span
        self.here.first = begin if self.here.first is None else self.here.first
        return self.pace.end(direction, due, seconds=seconds, elapsed_s=elapsed_s).due

    def _cross(
        self,
        seconds: Seconds,
        direction: Direction,
        at: float,
        elapsed_s: float,
        upload: Upload | None,
    ) -> float:
        """Have the link for ``seconds``, from the due time ``at`` or when it is free.

        When they are over. A copy slows down while the other direction is seen to be busy: to
        within a slice, and for as long as the other's thread is late to begin.
        """
        wire, left_s = self._wires[direction], float(seconds)
        with wire.carry(at, upload) as at:
            self.here.first = at if self.here.first is None else self.here.first
            while left_s > SLICE_S and self.profile.both_bytes_per_s is not None:
                left_s -= SLICE_S
                due = at + SLICE_S * self._slower(direction, at)
                at = self.pace.wait(direction, due).due
            due = at + left_s * self._slower(direction, at)
            at = self.pace.end(direction, due, seconds=seconds, elapsed_s=elapsed_s).due
            while not wire.leave(at):
                at = self.pace.wait(direction, at + wire.passed()).due
        return at

    def _slower(self, direction: Direction, at: float) -> float:
        """How many times longer a copy takes because of the other direction."""
        profile, both = self.profile, self.profile.both_bytes_per_s
        other = self._wires["down" if direction == "up" else "up"]
        if both is None or not other.is_busy(at):
            return 1.0
        return max(1.0, (profile.up_bytes_per_s + profile.down_bytes_per_s) / both)

    def fidelity(self) -> dict[str, Fidelity]:
        """How well this machine kept to the emulated times so far, by kind of stream."""
        return self.pace.fidelity()


def marks_of(events: Iterable[Event]) -> list[Mark]:
    """When events were due; those of streams that are not emulated, when they were over."""
    return [mark for event in events if (mark := getattr(event, "mark", None)) is not None]
