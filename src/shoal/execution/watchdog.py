"""Which workers hang, and how long a dead one waits before it is replaced. Pure.

A worker counts what it gets done (units, copies, host steps) in shared memory. A count that
stands still for ``max(least_s, factor * p99 of a step)`` while the worker holds a lease is a
hang: a deadlock in user code, a data source that never answers, a stopped process. So is one
that stands still for ``first_s`` while the worker answers an order of the planner.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

LEAST_S = 60.0
FACTOR = 10.0
FIRST_S = 1800.0  # before any step has ended: compilation, a cache to build
_STEPS = 1000
_HEAD = "(most recent call first):\n"
_INNERMOST = re.compile(r'  File "(.+)", line (\d+) in (.+)')


@dataclass(slots=True)
class _Watched:
    work: object
    since: float
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))


class Watchdog:
    """Looks at what workers get done; ``now`` is of a clock that never jumps."""

    def __init__(
        self, *, least_s: float = LEAST_S, factor: float = FACTOR, first_s: float = FIRST_S
    ) -> None:
        self._least_s, self._factor, self._first_s = least_s, factor, max(first_s, least_s)
        self._watched: dict[str, _Watched] = {}

    def look(
        self, device: str, work: object, now: float, *, leased: bool, patient: bool = False
    ) -> float | None:
        """Take what it has got done; returns the seconds it stood still when that is a hang.

        Args:
            work: Anything that is another value once the worker gets on.
            leased: Whether it has something to do.
            patient: It may be building or measuring a model, which takes as long as a first step.
        """
        watched = self._watched.setdefault(device, _Watched(work, now))
        if work != watched.work or not leased:
            watched.work, watched.since = work, now
        still = now - watched.since
        if still <= self._least_s:  # no limit is below it, and this is asked often
            return None
        return still if still > self.limit_s(device, patient=patient) else None

    def step(self, device: str, seconds: float) -> None:
        """A step ended there."""
        if device in self._watched:
            self._watched[device].steps.append(seconds)

    def limit_s(self, device: str, *, patient: bool = False) -> float:
        """How long it may stand still."""
        watched = self._watched.get(device)
        if watched is None or not watched.steps:
            return self._first_s
        ordered = sorted(watched.steps)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        limit_s = max(self._least_s, self._factor * p99)
        return max(limit_s, self._first_s) if patient else limit_s

    def forget(self, device: str) -> None:
        """The worker is gone; another one starts from nothing."""
        self._watched.pop(device, None)


def words_of_hang(still_s: float, limit_s: float, stacks: str) -> str:
    """What is said of a worker that was ended for hanging; the last line says it in short.

    ``stacks`` are of all its threads, as ``faulthandler`` writes them.
    """
    place = place_of(stacks)
    where = f", at {place}" if place else ""
    return (
        f"its threads stood at:\n{stacks.strip()}\n"
        f"it got nothing done for {still_s:.0f} s{where}; {limit_s:.0f} s are allowed"
    )


def place_of(stacks: str) -> str:
    """Where the main thread stands, the last one of ``stacks``; empty if nobody answered."""
    frame = _INNERMOST.match(stacks.rpartition(_HEAD)[2])
    return f"{frame[1]}:{frame[2]} in {frame[3]}" if frame else ""


class Backoff:
    """Seconds to wait before the next start: none at first, then twice as long each time.

    A process that lived for ``calm_s`` starts the count anew.
    """

    def __init__(
        self, *, first_s: float = 1.0, most_s: float = 60.0, calm_s: float = 300.0
    ) -> None:
        self._first_s, self._most_s, self._calm_s = first_s, most_s, calm_s
        self._deaths: dict[str, tuple[int, float]] = {}

    def died(self, name: str, now: float) -> float:
        """It died now; how long to wait."""
        count, last = self._deaths.get(name, (0, now))
        count = 0 if now - last > self._calm_s else count
        self._deaths[name] = count + 1, now
        return 0.0 if count == 0 else min(self._most_s, self._first_s * 2.0 ** (count - 1))
