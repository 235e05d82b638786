"""How long the trials of a study are, and what becomes of them on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.plan import Job
from shoal.planner.lanes import Load, shortened
from shoal.planning.changing import Changes

LIKELY = 1000
"""Steps that a trial is taken to have, where nobody can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What of a study says how long its trials are.

    ``total`` gives the steps of a trial, of the batches of an epoch and those of a step.
    ``eta``: of so many trials one goes on at a rung; None: nobody can say. ``prunes``: not all go
    on at rungs, where so many of a ``generation`` wait for each other, and at most so many trials
    train ``at_once`` before others end; None: nobody can say. ``changes``: settings of a trial may
    change on the way.
    """

    total: Callable[[int | None, int], int | None] = lambda batches, each: None
    eval_every: int | None = None
    by_epochs: bool = False
    eta: int | None = None
    prunes: bool = False
    generation: int = 0
    at_once: int | None = None
    changes: Changes | None = None

    def load(
        self,
        jobs: Sequence[Job],
        num_batches: Mapping[int, int | None],
        devices: int,
        *,
        varies: bool,
    ) -> Load:
        """What these jobs' trials, of one shape, are to train."""
        each = jobs[0].micro_batches
        batches = [num_batches.get(job.trial) for job in jobs]
        totals = [self.total(count, each) for count in batches]
        every = self.eval_every
        if every is None and self.by_epochs and batches[0]:
            every = -(-batches[0] // each)
        steps = tuple(total or LIKELY for total in totals)
        closes_ranks = bool(self.eta) and len(set(steps)) == 1
        if self.eta and closes_ranks:
            steps = shortened(steps[0], len(steps), every, self.eta)
        return Load(
            steps=steps,
            devices=devices,
            every=every,
            is_known=all(total is not None for total in totals),
            closes_ranks=closes_ranks,
            generation=self.generation,
            varies=varies or self.changes is not None,
            step_s=jobs[0].step_s or math.inf,
        )
