"""What a piece of work takes, of as many as are over in a slice of time.

[Note: others' work]
Where more wants to run than there are cores, the system hands them round in turns of some
milliseconds. A slice of a few short steps lies within one turn or loses one, and is off by as much
as all of it is long; a step of a wide array goes over many turns. So the seconds in which this
process could have run and had no core are not counted, of whatever is timed. How busy the machine
will be later nobody knows, and whoever trains then is slowed by it as much as anybody else.

Threads that wait beside one that runs lose no time: an array of steps of one's own has one for
each slot, and where 160 ms were computed their waits have left 88. So no work takes less than what
was computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

TASKS = Path("/proc/self/task")  # Linux's


def waited_s(tasks: Path = TASKS) -> float:
    """Seconds in which this process's threads could have run and had no core; 0 if untold."""
    nanoseconds = 0
    for told in tasks.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # the thread has ended, or is not counted
            nanoseconds += int(told.read_text().split()[1])
    return nanoseconds / 1e9


def finish(device: torch.device) -> None:
    """Wait until a GPU has done all that was launched there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_slice(
    work: Callable[[], object],
    until: float,
    *,
    settle: Callable[[], None] = lambda: None,
    waited: Callable[[], float] = lambda: 0.0,
    computed: Callable[[], float] = lambda: 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Seconds of one, of as many as are over at about ``until`` on ``clock``; at least one.

    ``settle`` waits for what work left under way; ``waited`` tells the seconds that do not count,
    ``computed`` those that do. The first one, which finds what another contender left in the
    caches, is not counted where there is time for a second.
    """

    def since(moment: tuple[float, float, float]) -> float:
        settle()
        took, ran = clock() - moment[1], computed() - moment[2]
        return min(took, max(took - max(0.0, waited() - moment[0]), ran, 1e-9))

    moment = waited(), clock(), computed()
    work()
    first = since(moment)
    last = clock()
    if last + (last - moment[1]) / 2 > until:
        return first
    moment, count = (waited(), clock(), computed()), 0
    while True:
        work()
        count += 1
        now = clock()
        if now + (now - last) / 2 > until:
            break
        last = now
    return since(moment) / count
