"""Rules that choose among the trials of one device: small, pure, exchangeable (UnitPolicy).

The worker and the replay ask the same rule, at each unit on the device and at each turn at the
host's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from shoal.core.errors import SpecError
from shoal.core.seams import Candidate, UnitPolicy


class Upload(NamedTuple):
    """A copy up the link: whose it is, and how manieth of the trial's own in order of its list.

    Activations on their way back for a backward have a stream of their own, so they do not wait
    for weights of their trial that wait for a slot. On the link they pass weights of another
    trial, and those of their own that are needed later: these then wait, not a backward. They do
    not pass what is needed sooner.
    """

    trial: int
    place: int

    def may_pass(self, weights: Upload) -> bool:
        return self.trial != weights.trial or self.place < weights.place


@dataclass(frozen=True, slots=True)
class LongestLeftFirst:
    """The trial with the most left, in whole steps, goes first; of those alike the oldest step.

    Trials of one device that all go on to its end keep all of it busy for longest: nobody is
    left alone with a step that only a neighbour could hide. Who has less left gets what the
    others leave, so no resource stands still meanwhile. Counted in steps of the longest
    of them, so that two do not take turns unit by unit: equal trials would all compute and then
    all copy, where one that is ahead has its copies hidden by the other's units.
    """

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        quantum_s = max(candidate.step_s for candidate in candidates) or 1.0

        def rank(candidate: Candidate) -> tuple[int, int, bool, float, int]:
            return -round(candidate.remaining_s / quantum_s), *_age(candidate)

        return min(candidates, key=rank)


@dataclass(frozen=True, slots=True)
class MostStepsLeftFirst:
    """The trial with the most steps left goes first, however long they are; then the oldest step.

    Trials with as many steps go on step by step together, so each has neighbours to its end, and
    one of short steps is not kept waiting until one of long steps has as little left as it has.
    """

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        def rank(candidate: Candidate) -> tuple[int, int, bool, float, int]:
            step_s = candidate.step_s or 1.0
            return -round(candidate.remaining_s / step_s), *_age(candidate)

        return min(candidates, key=rank)


@dataclass(frozen=True, slots=True)
class ShortestStepFirst:
    """The trial whose steps are the shortest goes first; of those alike the oldest step.

    Shortest processing time first: who waits for a resource waits for short units, and those of
    short steps soon wait for another resource, which leaves this one to the others. On paper it
    wins most often where links are slow, or some trials step on the device.
    """

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda candidate: (candidate.step_s, *_age(candidate)))


DEFAULT = "longest left first"
RULES: Mapping[str, UnitPolicy] = MappingProxyType(
    {
        DEFAULT: LongestLeftFirst(),
        "most steps left first": MostStepsLeftFirst(),
        "shortest step first": ShortestStepFirst(),
    }
)
"""What a plan may name."""


def rule_of(name: str) -> UnitPolicy:
    """The rule that a plan names.

    Raises:
        SpecError: there is none of that name.
    """
    if (found := RULES.get(name)) is None:
        known = ", ".join(map(repr, RULES))
        raise SpecError(
            f"a plan has the trials of a device go by {name!r}, which is no rule; known are "
            f"{known}. Plan the study again with this version of shoal."
        )
    return found


def _age(candidate: Candidate) -> tuple[int, bool, float, int]:
    return (candidate.ticket, not candidate.warm, -candidate.remaining_s, candidate.trial)
