"""Which workers hang, and how long a dead one waits before it is replaced. Pure.

A worker counts what it gets done (units, copies, host steps) in shared memory. A count that
stands still for ``max(least_s, factor * p99 of a step)`` while the worker holds a lease is a
hang: a deadlock in user code, a data source that never answers, a stopped process. So is one
that stands still for ``first_s`` while the worker answers an order of the planner.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.frames import is_users

LEAST_S = 60.0
FACTOR = 10.0
FIRST_S = 1800.0  # before any step has ended: compilation, a cache to build
TOLD_S = 20.0  # then somebody is told, and again each time it has taken twice as long
_STEPS = 1000
_HEAD = "(most recent call first):\n"
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


@dataclass(slots=True)
class _Watched:
    work: object
    since: float
    told_s: float = 0.0  # how long it had stood still when that was last told
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))


class Watchdog:
    """Looks at what workers get done; ``now`` is of a clock that never jumps."""

    def __init__(
        self,
        *,
        least_s: float = LEAST_S,
        factor: float = FACTOR,
        first_s: float = FIRST_S,
        told_s: float = TOLD_S,
    ) -> None:
        self._least_s, self._factor, self._first_s = least_s, factor, max(first_s, least_s)
        self._told_s = told_s
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
            watched.work, watched.since, watched.told_s = work, now, 0.0
        still = now - watched.since
        if still <= self._least_s:  # no limit is below it, and this is asked often
            return None
        return still if still > self.limit_s(device, patient=patient) else None

    def to_tell(self, device: str, now: float) -> float | None:
        """The seconds it has stood still, where that is to be told and was not yet.

        Longer than a step is expected to take, and then less and less often.
        """
        watched = self._watched.get(device)
        if watched is None:
            return None
        still = now - watched.since
        if still <= max(self._told_s, 2 * watched.told_s) or still <= self._factor * _p99(
            watched.steps
        ):
            return None
        watched.told_s = still
        return still

    def step(self, device: str, seconds: float) -> None:
        """A step ended there."""
        if device in self._watched:
            self._watched[device].steps.append(seconds)

    def limit_s(self, device: str, *, patient: bool = False) -> float:
        """How long it may stand still."""
        watched = self._watched.get(device)
        if watched is None or not watched.steps:
            return self._first_s
        limit_s = max(self._least_s, self._factor * _p99(watched.steps))
        return max(limit_s, self._first_s) if patient else limit_s

    def forget(self, device: str) -> None:
        """The worker is gone; another one starts from nothing."""
        self._watched.pop(device, None)


def _p99(steps: Iterable[float]) -> float:
    ordered = sorted(steps)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


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
    """Where the main thread stands, the last one of ``stacks``, and where the user's code does.

    Empty if nobody answered.
    """
    frames = [_FRAME.match(line) for line in stacks.rpartition(_HEAD)[2].splitlines()]
    known = [frame for frame in frames if frame]
    if not known:
        return ""
    theirs = next((frame for frame in known if is_users(frame[1])), known[0])
    called = f", called from {_in_words(theirs)}" if theirs is not known[0] else ""
    return _in_words(known[0]) + called


def _in_words(frame: re.Match[str]) -> str:
    return f"{frame[1]}:{frame[2]} in {frame[3]}"


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
