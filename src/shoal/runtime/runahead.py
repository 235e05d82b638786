"""How far the thread that serves a GPU is ahead of it, where several trials share the GPU.

[Note: in line]
A GPU computes units in the order in which they were submitted, and one whose weights are still on
their way holds up all behind it, of other trials too. So where there is a choice, a unit is
submitted when what it needs is there, and only as long before its turn as the thread takes to
submit the next one:

    compute      A F3 | A F4 |......| A F5   B F0         all of A's step, then all of B's
    up            A 4 |  A 5        |  A 6

    compute      A F3 | A F4 | B F0 | A F5 | B F1         what is ready, two ahead
    up            A 4 |  A 5        |  A 6

A trial that is alone is submitted as fast as its code runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from shoal.core.seams import Candidate
from shoal.device import Device, Event
from shoal.program.costs import unit_seconds
from shoal.program.ir import Action, Op
from shoal.runtime.interpret import Seat
from shoal.runtime.seats.stay import Stay
from shoal.runtime.session import Session

UNITS = 2
"""So many may be submitted and not over, whatever they take: one computes, one waits."""
LEAD_S = 2e-3
"""And as many as take so long: the thread takes about as long for one unit."""
PAUSES_S = 5e-5, 1e-3
"""The first pause while nobody is ready, and the longest; each is twice the one before."""

Candidates = dict[int, Candidate]
"""Of trials, of arrays and of members of gangs, by a trial."""


class RunAhead:
    """The units of one GPU that were submitted and are not over; of another device it has none."""

    def __init__(self, device: Device) -> None:
        self._device, self._is_gpu = device, device.spec.kind == "cuda"
        self._units: deque[tuple[Event, float]] = deque()
        self._pause_s = PAUSES_S[0]

    def waited(self) -> bool:
        """Wait for a unit to be over where the GPU has enough to do; whether it had."""
        enough = self._is_busy() and len(self._units) >= UNITS
        if not enough or sum(seconds for _, seconds in self._units) < LEAD_S:
            return False
        self._units[0][0].wait()
        return True

    def ready(self, ready: Candidates, stays: Mapping[int, Stay]) -> Candidates:
        """Those of the candidates that would not wait on the GPU; all of them if it is idle.

        Or nobody, after a moment: then what they need may have come.
        """
        if not self._is_gpu:
            return ready
        found = {t: c for t, c in ready.items() if t not in stays or stays[t].seat.is_ready()}
        if found or not self._is_busy():
            return found or ready
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSES_S[1])
        return found

    def submitted(self, seconds: float) -> None:
        """The unit that was submitted last takes so long."""
        if self._is_gpu and (event := self._device.so_far()) is not None:
            self._forget_what_is_over()
            self._units.append((event, seconds))
            self._pause_s = PAUSES_S[0]

    def _is_busy(self) -> bool:
        self._forget_what_is_over()
        return bool(self._units)

    def _forget_what_is_over(self) -> None:
        while self._units and self._units[0][0].done:
            self._units.popleft()


def seconds_of(seat: Seat[Session], action: Action | None) -> float:
    """How long a unit computes, as it was measured."""
    if action is None or action.op is Op.SYNC:
        return 0.0
    shard = seat.session.job.shards[action.shard]
    return shard.step_s if action.op is Op.STEP else unit_seconds(action, shard)
