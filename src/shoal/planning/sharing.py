"""How many trials share a device, where they are not all of one kind, and which goes first.

[Note: the mix]
What is best for many trials of one kind is settled with each kind. Trials of different kinds
fill each other's gaps: one is bound by the host's memory, another by the device, and one of
short steps waits long for one of long steps. So their mix is replayed, some steps of each, with
more and more of them at a time, as long as what they need fits. What stays on the device is
divided anew each time: a place costs room; and who goes first is chosen anew, by the rules below.
Then it is replayed with steps on the host in one piece: where that is quicker they are not cut
into chunks.

[Note: the rule of a mix]
At last the trials, of one kind too, are replayed by each rule that says which of them goes first
(core/turns.py). Another one than usual is taken where that is quicker by more than a replay may
be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.core.turns import DEFAULT, RULES
from shoal.core.units import Bytes
from shoal.planner.keep import ALIKE
from shoal.planner.need import Request, fits, need
from shoal.planner.price import Speeds, mix_s, run_of
from shoal.planning.planned import Settled
from shoal.program.replay import Run

MOST = 6
"""Trials of a mix that share a device at most, and as many are replayed."""
WORTH = 1.002
"""One more place has to make the mix so many times as fast; what it costs is replayed with it."""

Again = Callable[[Settled, int], Settled | None]
"""What stays of a kind where so many share the device; None where it does not fit."""
Kinds = Mapping[str, Settled]


class Shared(NamedTuple):
    """The kinds as they train, how many trials share a device, and the rule of who goes first."""

    kinds: dict[str, Settled]
    places: int
    rule: str = DEFAULT


def share(
    settled: Kinds,
    present: Sequence[str],
    active: int,
    again: Again,
    request: Request,
    budget: Bytes,
    speeds: Speeds,
    *,
    by_epochs: bool = False,
) -> Shared:
    """The kinds as they train at the best number of places, that number, and the best rule.

    Args:
        present: The kind of each trial of a device, in order.
        active: How many are best for one kind: the least that is considered.
        by_epochs: Trials end after as many epochs, not steps.
    """
    some = present[:MOST]
    lengths = _lengths(settled, by_epochs)
    mix = _Mix(some=some, lengths=lengths, request=request, budget=budget, speeds=speeds)
    best, places = dict(settled), active
    if len(set(some)) > 1:
        best, places = _placed(mix, best, active, again)
        best = _in_one_piece(mix, best, places)
    return _ordered(mix, best, places)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mix:
    """The kinds of the trials that are replayed, and how many steps each kind has."""

    some: Sequence[str]
    lengths: Mapping[str, int]
    request: Request
    budget: Bytes
    speeds: Speeds

    def seconds(self, settled: Kinds, active: int, rule: str = DEFAULT) -> float:
        """What they take with so many at a time, in the order of a rule."""
        runs = {
            kind: replace(self._run(one), steps=self.lengths[kind])
            for kind, one in settled.items()
            if kind in self.some
        }
        return mix_s([runs[kind] for kind in self.some], active, rule)

    def best_s(self, settled: Kinds, active: int) -> float:
        """What they take by the rule they would go by; another than usual has to be worth it."""
        usual_s = self.seconds(settled, active)
        if active < 2 or len(self.some) < 2:
            return usual_s
        others = (self.seconds(settled, active, rule) for rule in RULES if rule != DEFAULT)
        return min(usual_s, ALIKE * min(others))

    def _run(self, one: Settled) -> Run:
        measure = one.measure
        return run_of(
            measure.shards, measure.batch_bytes, one.technique, self.request, self.speeds
        )

    def fits(self, settled: Kinds, active: int) -> bool:
        """Whether the device has room for any so many of them."""
        needs = [
            need(s.measure, s.measure.shards, s.technique, self.request, s.layout)
            for s in settled.values()
        ]
        return fits(needs, self.budget, active)


def _placed(
    mix: _Mix, settled: Kinds, active: int, again: Again
) -> tuple[dict[str, Settled], int]:
    """The kinds at the best number of places, ``active`` or more."""
    best, places = dict(settled), active
    if len(mix.some) <= active:
        return best, places
    taken_s = first_s = mix.best_s(best, active)
    for more in range(active + 1, len(mix.some) + 1):
        found = {kind: again(one, more) for kind, one in settled.items()}
        fitting = {kind: one for kind, one in found.items() if one is not None}
        if len(fitting) < len(found) or not mix.fits(fitting, more):
            break
        took_s = mix.best_s(fitting, more)
        if took_s * WORTH < taken_s:
            best, places, taken_s = fitting, more, took_s
    if places > active:
        why = (
            f"beside trials of other kinds {places} share the device: on paper their mix takes "
            f"{taken_s / first_s:.0%} of the time that {active} at a time take"
        )
        best = {kind: replace(one, why=(*one.why, why)) for kind, one in best.items()}
    return best, places


def _in_one_piece(mix: _Mix, settled: Kinds, active: int) -> dict[str, Settled]:
    """With steps on the host that are not cut, where the mix is through sooner so."""
    chunked = {kind for kind in mix.some if _has_chunks(settled[kind])}
    if active < 2 or not chunked:
        return dict(settled)
    whole = {kind: _uncut(one) for kind, one in settled.items()}
    part = mix.best_s(whole, active) / mix.best_s(settled, active)
    if part * ALIKE > 1:  # chunks bound waits, for about the same time
        return dict(settled)
    why = (
        f"steps on the host are in one piece: on paper the trials that share the device take "
        f"{part:.0%} of the time that they take in chunks"
    )
    return {
        kind: replace(one, why=(*one.why, why)) if kind in chunked else one
        for kind, one in whole.items()
    }


def _ordered(mix: _Mix, settled: dict[str, Settled], active: int) -> Shared:
    """With the rule by which the mix is through soonest."""
    if active < 2 or len(mix.some) < 2:
        return Shared(settled, active)
    taken = {rule: mix.seconds(settled, active, rule) for rule in RULES}
    best = min(RULES, key=taken.__getitem__)
    part = taken[best] / taken[DEFAULT]
    if part * ALIKE > 1:
        return Shared(settled, active)
    why = (
        f"trials that share the device go {best}: on paper they take {part:.0%} of the "
        f"time that they take {DEFAULT}"
    )
    kinds = {kind: replace(one, why=(*one.why, why)) for kind, one in settled.items()}
    return Shared(kinds, active, best)


def _has_chunks(one: Settled) -> bool:
    return any(shard.step_chunks for shard in one.measure.shards)


def _uncut(one: Settled) -> Settled:
    shards = tuple(replace(shard, step_chunks=()) for shard in one.measure.shards)
    return replace(one, measure=replace(one.measure, shards=shards))


def _lengths(settled: Kinds, by_epochs: bool) -> dict[str, int]:
    """How many steps the kinds have, beside each other."""
    batches = {kind: one.measure.num_batches for kind, one in settled.items()}
    return {kind: (count or 1) if by_epochs else 1 for kind, count in batches.items()}
