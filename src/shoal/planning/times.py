"""How long the trials of a study are, and what becomes of them on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.planning.changing import Changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What of a study says how long its trials are.

    ``total`` gives the steps of a trial, of the batches of an epoch and those of a step.
    ``eta``: of so many trials one goes on at a rung; None: nobody can say. ``prunes``: not all go
    on at rungs, where so many of a ``generation`` wait for each other. ``changes``: settings of a
    trial may change on the way.
    """

    total: Callable[[int | None, int], int | None] = lambda batches, each: None
    eval_every: int | None = None
    by_epochs: bool = False
    eta: int | None = None
    prunes: bool = False
    generation: int = 0
    changes: Changes | None = None
