"""Rules that give trials leases: small, pure, and exchangeable (LeasePolicy in core/seams.py).

Which of the trials of one device goes first is in core/turns.py.

[Note: when a waiting trial takes a place]
With m devices no schedule ends before D = max(work left / m, longest trial left). Let a
trial's slack be D minus what it has left. A schedule that keeps all devices busy and
always runs the trials without slack ends at D: more than m trials without slack would
be more than m * D of work. So one may leave running trials alone until a waiting
one runs out of slack, and needs few moves; to alternate equal trials lease by lease
reaches the same D with a move per lease. Example, 3 equal trials on 2 devices:

    device 0   A A A A A A A A C C C C
    device 1   C C C C B B B B B B B B        one trial moves, once

Steps are whole and vary, and a move costs time, so "no slack" means "less than a few
leases", and near the end, where that is everybody, the rule is plain longest remaining
first. Source of the wrap-around: McNaughton (1959).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from shoal.core.seams import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestRemainingFirst:
    """Longest remaining time first, with hysteresis; see the note above.

    Compares what may well be left, ``remaining_s * (1 + doubt)``: a prediction that is
    too low by half would otherwise keep a trial waiting until it is too late. ``margin``
    is in leases: a waiting trial with less slack than that may preempt one that has
    at least a lease and a move less to do. ``margin=inf`` compares remaining times only.
    """

    margin: float = 4.0

    def rank(self, waiting: Standing) -> float:
        return _at_most_s(waiting)

    def is_close(self, first: Standing, other: Standing) -> bool:
        return _at_most_s(first) - _at_most_s(other) <= first.quantum_s

    def preempts(self, waiting: Standing, running: Standing, reach_s: float) -> bool:
        left_s = _at_most_s(waiting)
        if left_s - _at_most_s(running) <= waiting.quantum_s:
            return False
        return reach_s - left_s <= self.margin * waiting.quantum_s


@dataclass(frozen=True, slots=True)
class Fifo:
    """First added, first run, to its end: what a queue of jobs does."""

    def rank(self, waiting: Standing) -> float:
        return -waiting.arrival

    def is_close(self, first: Standing, other: Standing) -> bool:
        return False

    def preempts(self, waiting: Standing, running: Standing, reach_s: float) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Random:
    """Any waiting trial, to its end: the baseline that a rule has to beat."""

    rng: random.Random

    def rank(self, waiting: Standing) -> float:
        return self.rng.random()

    def is_close(self, first: Standing, other: Standing) -> bool:
        return False

    def preempts(self, waiting: Standing, running: Standing, reach_s: float) -> bool:
        return False


def _at_most_s(standing: Standing) -> float:
    return standing.remaining_s * (1 + standing.doubt)
