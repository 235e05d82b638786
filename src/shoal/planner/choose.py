"""How one model trains on a device of a given size: resident if it fits, else in shards.

The order of preference, and what is compared:

1. resident: nothing moves. It needs parameters, state, gradients and activations at once.
2. spilled, for each (optimizer place, trials at a time, lookahead) with the fewest shards
   that fit, or with more where that moves clearly less: small shards leave more room for
   shards that stay. As many stay as there is room for. Each of these is
   replayed with the measured seconds, and the one whose step costs the least of the device's
   time is taken; of those that cost about the same, the one that moves the fewest bytes.
   With several micro-batches a step both loops are compared: over micro-batches outside, as in
   the plain loop, or over shards, which is taken where it costs clearly less.

A choice is made from layer measures, and holds only once the shards themselves have been
measured: ``fits`` decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from shoal.core.spec import JobMeasure, Order, Place
from shoal.core.technique import Spilled
from shoal.core.units import Bytes, Seconds
from shoal.planner.keep import ALIKE, keep_best
from shoal.planner.need import Request, goes_by_batch, place_asked, transfer_of
from shoal.planner.paper import Cutting, Paper, weight
from shoal.planner.price import Speeds
from shoal.spill.generate import route_with

Priced = tuple[Seconds, Cutting]
"""A choice, and about what a step with it costs."""


def choices(
    measure: JobMeasure,
    budget: Bytes,
    actives: Sequence[int],
    request: Request,
    speeds: Speeds,
) -> Iterator[Cutting]:
    """Spilled choices that should fit, for each number of trials at a time; the cheapest first."""
    of = _Choosing(measure, budget, actives, request, speeds, Paper(measure, request))
    phases = {
        order: _boundary_places(measure, budget, request, order)
        for order in orders_of(measure, request)
    }
    for phase in (0, 1):
        first, *second = [(order, places[phase]) for order, places in phases.items()]
        plain = of.priced(*first)
        if not second:
            yield from of.ranked(plain)
            continue
        if not plain and not phase:  # it has room where its inputs wait on the host
            plain = of.priced(first[0], phases[first[0]][1])
        least_s = _least_by_shard(measure, request, plain)
        if _least_s(plain) <= ALIKE * least_s:
            ranked = of.ranked(plain)
            yield from (replace(one, other_s=least_s, other_least=True) for one in ranked)
            continue
        may_wait = of.paper.may_wait  # on the host
        by_shard = [one for one in of.priced(*second[0]) if may_wait(one[1])]
        if of.is_quicker(by_shard, plain):
            plain_s = _told(_least_s(plain))
            fitting = filter(may_wait, of.ranked(by_shard))
            yield from (replace(one, other_s=plain_s) for one in fitting)
            yield from of.ranked(plain)
        else:
            by_shard_s = _told(_least_s(by_shard))
            yield from (replace(one, other_s=by_shard_s) for one in of.ranked(plain))


@dataclass(frozen=True, slots=True)
class _Choosing:
    """What choices for one model and device are compared by."""

    measure: JobMeasure
    budget: Bytes
    actives: Sequence[int]
    request: Request
    speeds: Speeds
    paper: Paper

    def priced(self, order: Order, places: Iterable[Place]) -> list[Priced]:
        """Those with this order whose inputs wait in one of these places, and their prices."""
        paper, budget, speeds = self.paper, self.budget, self.speeds
        found: list[Priced] = []
        leaner: list[Priced] = []
        for place, active in itertools.product(places, self.actives):
            for technique in _settings(self.measure, self.request, place, order):
                fewest = next(paper.by_shards(technique, budget, active), None)
                if fewest is not None:
                    best, *others = paper.best_counts(fewest, budget)
                    found.append((paper.step_s(best, speeds, budget), best))
                    leaner += [(paper.step_s(one, speeds, budget), one) for one in others]
        least = min((step_s for step_s, _ in found), default=Seconds(0.0))
        return found + [(least, one) for step_s, one in leaner if step_s <= least]  # no more time

    def ranked(self, found: Sequence[Priced]) -> Iterator[Cutting]:
        """The cheapest first, each with finer ones after it."""
        paper, budget = self.paper, self.budget
        for rank, choice in enumerate(_cheapest_first(found, self.request, paper, budget)):
            if not rank and (better := paper.refined(choice, self.speeds, budget)) != choice:
                yield better
            yield choice
            yield from paper.finer(choice, budget)

    def is_quicker(self, by_shard: Sequence[Priced], plain: Sequence[Priced]) -> bool:
        """Whether the best by shard is clearly quicker than the best plain one."""
        by_shard_s, plain_s = ALIKE * _least_s(by_shard), _least_s(plain)
        if by_shard_s >= plain_s or SURELY * by_shard_s < plain_s:
            return by_shard_s < plain_s
        by_shard_s, plain_s = (
            self._worked_out_s(next(self.ranked(one))) for one in (by_shard, plain)
        )
        return ALIKE * by_shard_s < plain_s

    def _worked_out_s(self, choice: Cutting) -> Seconds:
        """What a step takes with what stays worked out on paper, and not guessed."""
        room = self.paper.room(choice, self.budget)
        kept = keep_best(room, self.speeds)
        return Seconds(inf) if kept is None else room.step_s(kept[0], self.speeds)


SURELY = 4 / 3
"""What is so many times as quick by a guess is not worked out: what no guess knows of, activations
that wait on the host, spares a forward where there are two and a backward."""


def _told(step_s: float) -> Seconds | None:
    return None if step_s == inf else Seconds(step_s)


def about_s(
    measure: JobMeasure, budget: Bytes, request: Request, speeds: Speeds
) -> Seconds | None:
    """About what a step of one trial takes spilled, to be told beside another way; None: no fit.

    Each combination of settings with the fewest shards that should fit, and nothing finer.
    """
    paper = Paper(measure, request)
    order = orders_of(measure, request)[0]
    for places in _boundary_places(measure, budget, request, order):
        settings = (one for place in places for one in _settings(measure, request, place, order))
        fewest = (next(paper.by_shards(one, budget, 1), None) for one in settings)
        found = [paper.step_s(one, speeds, budget) for one in fewest if one is not None]
        if found:
            return min(found)
    return None


def _cheapest_first(
    found: Sequence[tuple[Seconds, Cutting]], request: Request, paper: Paper, budget: Bytes
) -> list[Cutting]:
    """By the seconds of a step, and where those are about the least by the bytes that move.

    Of the first of these the bytes are worked out, not guessed.
    """

    def least_bytes(choice: Cutting) -> tuple[float, bool]:
        moved = weight(choice, choice.moved_bytes)
        return moved, choice.technique.optimizer != request.prefers

    least = min((step_s for step_s, _ in found), default=0.0)
    alike = [choice for step_s, choice in found if step_s <= ALIKE * least]
    alike.sort(key=least_bytes)
    if len(alike) > 1:
        known = [paper.worked_out(choice, budget) for choice in alike[:WORKED_OUT]]
        alike[:WORKED_OUT] = sorted(known, key=least_bytes)
    dearer = sorted((one for one in found if one[0] > ALIKE * least), key=lambda one: one[0])
    all_ = alike + [choice for _, choice in dearer]
    return sorted(all_, key=lambda choice: not choice.fits)


WORKED_OUT = 3
"""Of so many choices that cost the same, the bytes that move are worked out and not guessed."""


def may_go_by_shard(measure: JobMeasure, request: Request) -> bool:
    """Whether a shard can run all micro-batches of a step, where somebody asks for that.

    Of a model that draws random numbers, where those of each micro-batch can be foretold.

    Who asks knows that no two layers share, or read from each other, what a forward changes.
    """
    knows = measure.num_batches is not None  # how many there are, when the step begins
    return request.micro_batches > 1 and knows and (measure.foretold or not measure.draws)


def orders_of(measure: JobMeasure, request: Request) -> tuple[Order, ...]:
    """The loops that are compared, the one that is taken at the same price first.

    By shard if that may be, a step ever has several micro-batches, nothing was found against it,
    and no forward was asked to run only once. It is a proposal: shards that were measured are
    rehearsed in both orders before one is taken.
    """
    forced = request.technique if isinstance(request.technique, Spilled) else Spilled()
    if request.micro_batches == 1:
        return ("micro",)  # both are the same then, and numbers drawn at random stay in order
    if forced.order is not None:
        return (forced.order,)
    once = forced.recompute is False or forced.keep_activations or forced.spill_activations
    several = (measure.num_batches or 0) > 1
    if once or not several or measure.in_turn or not may_go_by_shard(measure, request):
        return ("micro",)
    return ("micro", "shard")


def _least_by_shard(measure: JobMeasure, request: Request, plain: Sequence[Priced]) -> Seconds:
    """About what a step by shard takes at least, in no fewer shards than a ``plain`` one.

    It computes each forward twice but the last shard's, which hides behind nothing.
    """
    fewest = min((len(choice.cuts) + 1 for _, choice in plain), default=len(measure.layers))
    seconds = sum(layer.forward_s + layer.backward_s for layer in measure.layers)
    last = sum(layer.forward_s for layer in measure.layers) / fewest
    return Seconds(request.micro_batches * (seconds - last))


def _least_s(found: Sequence[Priced]) -> float:
    """The least that a step of those takes that fit; endless where none does."""
    return min((step_s for step_s, choice in found if choice.fits), default=inf)


WORTH = 0.1
"""Inputs of layers that could wait on the host are worth a thought from this part of a budget."""


def _boundary_places(
    measure: JobMeasure, budget: Bytes, request: Request, order: Order
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Where inputs may wait: what is compared, and what is tried when nothing of that fits."""
    forced = request.technique.boundaries if isinstance(request.technique, Spilled) else None
    if forced is not None:
        return (forced,), ()
    at_once = request.micro_batches if order == "shard" else 1
    private = at_once * sum(layer.private_bytes for layer in measure.layers)
    if private > WORTH * budget:
        return ("device", "host"), ()
    return ("device",), ("host",) if private else ()


def _settings(
    measure: JobMeasure, request: Request, boundaries: Place, order: Order
) -> Iterator[Spilled]:
    """The combinations that a forced technique leaves open, and what it names can be done in."""
    all_ = list(_all_settings(measure, request, boundaries, order))
    yield from [technique for technique in all_ if _can_save(technique)] or all_


def _can_save(technique: Spilled) -> bool:
    named = technique.keep_activations or ()
    return not named or set(named) <= set(route_with(technique, technique.shards or 0).may_save)


def _all_settings(
    measure: JobMeasure, request: Request, boundaries: Place, order: Order
) -> Iterator[Spilled]:
    forced = request.technique if isinstance(request.technique, Spilled) else Spilled()
    if forced.keep_turn is None and goes_by_batch(measure, request):
        forced = replace(forced, keep_turn=0)
    place = place_asked(forced, request)
    places: tuple[Place, ...] = (place,) if place else ("host", "device")
    for place, (lookahead, lookbehind) in itertools.product(places, _looks(forced)):
        yield replace(
            forced,
            optimizer=place,
            lookahead=lookahead,
            lookbehind=lookbehind,
            order=order,
            boundaries=boundaries,
            transfer=transfer_of(forced, place, measure),
        )


def _looks(forced: Spilled) -> Iterator[tuple[int, int]]:
    """How far loads are ahead, and gradients behind; what is ahead leaves nothing waiting."""
    for lookahead in (1, 0) if forced.lookahead is None else (forced.lookahead,):
        behind = (0,) if forced.lookbehind is None and not lookahead else ()
        for lookbehind in (1, *behind) if forced.lookbehind is None else (forced.lookbehind,):
            yield lookahead, lookbehind
