"""How many steps of "2bw" are run together: up to the next stop. Pure.

[Note: stops]
Steps of "2bw" overlap, and at a stop the pipeline runs empty: at an evaluation, at the end of an
epoch, of a lease and of the trial, and after ``MOST_S`` seconds, so that nobody waits long for a
stop. Between two of them the steps are one program:

    steps   | 1 2 3 4 5 | 6 7 | 8 9 10 11 12 | ...      eval_every=7, five steps in 8 s

What a trial stops at is known before it runs, but for what others do to its lease; ``Stops`` goes
through a training as its first stage does, with a lease that is topped up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.scheduler.standing import TrialStanding

MOST_S = 8.0
"""Predicted seconds of steps that are run together."""
STEADY_S = 6.0
"""Half a lease of a trial whose steps overlap: when so much is left of one it is topped up."""
HORIZON = 500
"""Steps of a training that are gone through; later stops are as frequent."""


def steps_together(
    step: int,
    step_s: float,
    *,
    left: int | None,
    lease_left: int | None = None,
    eval_every: int | None = None,
) -> int:
    """How many steps follow ``step`` finished ones before the next stop; one at least.

    ``left``: to the end of the epoch or the trial; ``lease_left``: to the end of the lease.
    """
    ends = [round(MOST_S / step_s), left, lease_left]
    if eval_every is not None:
        ends.append(eval_every - step % eval_every)
    return max(1, min(end for end in ends if end is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """Where a study has its trials stop; None: not known, or never.

    ``steps`` or ``epochs`` are those of a trial. ``each_step``: its state is saved after each.
    """

    steps: int | None = None
    epochs: int | None = None
    eval_every: int | None = None
    each_step: bool = False

    def per_step(self, step_s: float, epoch: int | None) -> float:
        """How many stops a step has, of those that end an ``epoch`` of so many steps too."""
        if self.each_step:
            return 1.0
        runs = list(self._runs(step_s, epoch))
        return len(runs) / sum(runs)

    def _runs(self, step_s: float, epoch: int | None) -> Iterator[int]:
        """Steps that are run together, one program after the other."""
        total, step = self._total(epoch), 0
        lease = _lease(total, step_s)
        until = lease.lease_left
        while step < min(total or HORIZON, HORIZON):
            ends = [end - step for end in (total,) if end is not None]
            ends += [epoch - step % epoch] if epoch else []
            size = steps_together(
                step,
                step_s,
                left=min(ends, default=None),
                lease_left=until,
                eval_every=self.eval_every,
            )
            yield size
            step += size
            left = size
            while left:  # at once up to where the lease is asked for more
                some = min(left, max(1, lease.lease_left - lease.lease_steps // 2))
                left, lease.lease_left = left - some, lease.lease_left - some
                if lease.steps_left is not None:
                    lease.steps_left -= some
                until = lease.lease_left  # the answer to a last step comes after the next begins
                if 0 < until <= lease.lease_steps // 2:
                    lease.lease_left += lease.next_steps()
            until = until or lease.lease(("",))

    def _total(self, epoch: int | None) -> int | None:
        if self.steps is not None or not (self.epochs and epoch):
            return self.steps
        return self.epochs * epoch


def _lease(steps: int | None, step_s: float) -> TrialStanding:
    """A trial that has its lease, as the study's process knows it."""
    trial = TrialStanding(
        trial=0,
        steps_left=steps,
        step_s=step_s,
        switch_s=0.0,
        arrival=0,
        lease_s=2 * STEADY_S,
        least_s=2 * STEADY_S,
    )
    trial.lease(("",))
    return trial
