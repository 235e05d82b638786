"""How one model trains on a device of a given size: resident if it fits, else in shards.

The order of preference, and what is compared:

1. resident: nothing moves. It needs parameters, state, gradients and activations at once.
2. spilled, for each (optimizer place, trials at a time, lookahead) with the fewest shards
   that fit, or with more where that moves clearly less: small shards leave more room for
   shards that stay. As many stay as there is room for. Each of these is
   replayed with the measured seconds, and the one whose step costs the least of the device's
   time is taken; of those that cost about the same, the one that moves the fewest bytes.

A choice is made from layer measures, and holds only once the shards themselves have been
measured: ``fits`` decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shoal.core.spec import JobMeasure, Order, Place
from shoal.core.technique import Spilled
from shoal.core.units import Bytes, Seconds
from shoal.planner.keep import ALIKE
from shoal.planner.need import Request, place_asked, transfer_of
from shoal.planner.paper import Choice, Paper, weight
from shoal.planner.price import Speeds
from shoal.spill.generate import route_of


def choices(
    measure: JobMeasure,
    budget: Bytes,
    actives: Sequence[int],
    request: Request,
    speeds: Speeds,
) -> Iterator[Choice]:
    """Spilled choices that should fit, for each number of trials at a time; the cheapest first."""
    paper = Paper(measure, request)

    def found(places: Iterable[Place]) -> Iterator[Choice]:
        priced: list[tuple[Seconds, Choice]] = []
        leaner: list[tuple[Seconds, Choice]] = []
        for place, active in itertools.product(places, actives):
            for technique in _settings(measure, request, place):
                fewest = next(paper.by_shards(technique, budget, active), None)
                if fewest is not None:
                    best, *others = paper.best_counts(fewest, budget)
                    priced.append((paper.step_s(best, speeds, budget), best))
                    leaner += [(paper.step_s(one, speeds, budget), one) for one in others]
        least = min((step_s for step_s, _ in priced), default=Seconds(0.0))
        priced += [(least, one) for step_s, one in leaner if step_s <= least]  # for no more time
        for rank, choice in enumerate(_cheapest_first(priced, request, paper, budget)):
            if not rank and (better := paper.refined(choice, speeds, budget)) != choice:
                yield better
            yield choice
            yield from paper.finer(choice, budget)

    first, last = _boundary_places(measure, budget, request)
    yield from found(first)
    yield from found(last)


def about_s(
    measure: JobMeasure, budget: Bytes, request: Request, speeds: Speeds
) -> Seconds | None:
    """About what a step of one trial takes spilled, to be told beside another way; None: no fit.

    Each combination of settings with the fewest shards that should fit, and nothing finer.
    """
    paper = Paper(measure, request)
    for places in _boundary_places(measure, budget, request):
        settings = (one for place in places for one in _settings(measure, request, place))
        fewest = (next(paper.by_shards(one, budget, 1), None) for one in settings)
        found = [paper.step_s(one, speeds, budget) for one in fewest if one is not None]
        if found:
            return min(found)
    return None


def _cheapest_first(
    found: Sequence[tuple[Seconds, Choice]], request: Request, paper: Paper, budget: Bytes
) -> list[Choice]:
    """By the seconds of a step, and where those are about the least by the bytes that move.

    Of the first of these the bytes are worked out, not guessed.
    """

    def least_bytes(choice: Choice) -> tuple[float, bool]:
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

    It is not chosen by itself: layers that share statistics, or read each other's, would see
    them in another order, and nothing that is measured shows that.
    """
    knows = measure.num_batches is not None  # how many there are, when the step begins
    return request.micro_batches > 1 and knows and (measure.foretold or not measure.draws)


WORTH = 0.1
"""Inputs of layers that could wait on the host are worth a thought from this part of a budget."""


def _boundary_places(
    measure: JobMeasure, budget: Bytes, request: Request
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Where inputs may wait: what is compared, and what is tried when nothing of that fits."""
    forced = request.technique.boundaries if isinstance(request.technique, Spilled) else None
    if forced is not None:
        return (forced,), ()
    private = sum(layer.private_bytes for layer in measure.layers)
    if private > WORTH * budget:
        return ("device", "host"), ()
    return ("device",), ("host",) if private else ()


def _settings(measure: JobMeasure, request: Request, boundaries: Place) -> Iterator[Spilled]:
    """The combinations that a forced technique leaves open, and what it names can be done in."""
    all_ = list(_all_settings(measure, request, boundaries))
    yield from [technique for technique in all_ if _can_save(technique)] or all_


def _can_save(technique: Spilled) -> bool:
    named = technique.keep_activations or ()
    return not named or set(named) <= set(route_of(technique, technique.shards or 0).may_save)


def _all_settings(measure: JobMeasure, request: Request, boundaries: Place) -> Iterator[Spilled]:
    forced = request.technique if isinstance(request.technique, Spilled) else Spilled()
    order: Order = forced.order or "micro"
    if request.micro_batches == 1:
        order = "micro"  # both are the same then, and numbers drawn at random stay in order
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
