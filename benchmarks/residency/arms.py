"""The arms on paper: shoal's plan, the least there can be, LRU and Hydra's rule. In bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import bound
from optimum import Solver
from plans import Case, Planned, even, finest, gpt, parameters_of, plan, priced
from rules import belady, hydra, lru
from touches import Step, fits, in_turns, one_trial

from shoal.core.profile import find_profile
from shoal.core.spec import JobMeasure, Order, Place, ShardSpec
from shoal.core.technique import heads_of, turned_shards, waiting_gradients
from shoal.planner.price import Speeds
from shoal.planning.speeds import speeds_of
from shoal.testing import make_device

RATIOS = (1.25, 2, 4, 8)
PLACES: tuple[Place, ...] = ("device", "host")
MODELS = {"24 blocks, width 1024": (24, 1024), "48 blocks, width 1600": (48, 1600)}
TOKENS = 1024  # in a step
LAYERS = {1.25: 6, 2: 6, 4: 8, 8: 12}  # as many as the solver can do, and as few as can fit
PROFILE = "rtx4090"

Row = dict[str, Any]


def budget_of(measure: JobMeasure, ratio: float) -> int:
    """The training state, 16 bytes a parameter, over ``ratio``."""
    return int(4 * parameters_of(measure) / ratio)


def small() -> Iterator[Row]:
    """A few equal shards, where the optimum is found by looking at every state."""
    for ratio, place, clip in itertools.product(RATIOS, PLACES, (False, True)):
        measure = even(LAYERS[ratio])
        budget, shards = budget_of(measure, ratio), finest(measure)
        case = Case(
            measure=measure, budget=budget, place=place, clip=clip, shards=len(measure.layers)
        )
        step = one_trial(shards, budget, place=place, clip=clip)
        best = Solver(step).least()
        row: Row = {"state_over_budget": ratio, "step_on": place, "clip": clip}
        row |= {"shards": len(shards), "shard_bytes": shards[0].parameter_bytes, "budget": budget}
        row |= {"optimum": _number(best), "bound": bound.least(step), "lru": _number(lru(step))}
        row["belady"] = _number(belady(step))
        row["hydra"] = hydra(shards, place=place, clip=clip)
        row["shoal"] = {
            _named(ahead): _of(plan(case, lookahead=ahead), best, row["hydra"])
            for ahead in (1, 0, None)
        }
        yield row


def large() -> Iterator[Row]:
    """GPT-like chains, beside the bound of any policy."""
    for name, ratio, place, clip in itertools.product(MODELS, RATIOS, PLACES, (False, True)):
        measure = gpt(*MODELS[name], TOKENS)
        budget = budget_of(measure, ratio)
        case = Case(measure=measure, budget=budget, place=place, clip=clip)
        plans = {ahead: plan(case, lookahead=ahead) for ahead in (1, 0, None)}
        cuts = _cuts(measure, plans.values())
        least = _least(case, cuts)
        of_hydra = hydra(cuts[0], place=place, clip=clip)
        row: Row = {"model": name, "state_over_budget": ratio, "step_on": place, "clip": clip}
        row |= {"state": 4 * parameters_of(measure), "budget": budget, "least": least}
        row["least_lent"] = lent = _least(case, cuts, lend=True)
        row |= {"lru": _rule(lru, case, cuts), "belady": _rule(belady, case, cuts)}
        row["hydra"] = of_hydra
        row["shoal"] = {
            _named(ahead): _of(found, least, of_hydra, lent) | _beside_slots(case, found)
            for ahead, found in plans.items()
        }
        if place == "host":
            row["shoal"]["no shard steps on the device"] = _of(
                plan(case, mixes=False), least, of_hydra, lent
            )
        yield row


def four_trials() -> Iterator[Row]:
    """Four equal trials on one device: one there at a time, or two that share it."""
    for name, ratio, place, clip in itertools.product(MODELS, RATIOS, PLACES, (False, True)):
        measure = gpt(*MODELS[name], TOKENS)
        case = Case(measure=measure, budget=budget_of(measure, ratio), place=place, clip=clip)
        alone, two = plan(case), plan(case, actives=(2,))
        of_hydra = hydra(finest(measure), place=place, clip=clip)
        least = _least(case, _cuts(measure, [alone]))
        least_two = _least(case, _cuts(measure, [two]), trials=2)
        row: Row = {"model": name, "state_over_budget": ratio, "step_on": place, "clip": clip}
        row |= {"one at a time": _of(alone, least, of_hydra), "least": least}
        row |= {"two share": _of(two, least_two, of_hydra), "least_two": least_two}
        row["lru_two"] = _rule(lru, case, _cuts(measure, [two]), trials=2)
        row["belady_two"] = _rule(belady, case, _cuts(measure, [two]), trials=2)
        row["hydra"] = of_hydra
        yield row


def planners_choice() -> Iterator[Row]:
    """What the planner takes for four trials where nothing is forced and copies take time.

    Beside it the plan that moves the fewest bytes, and how many times the seconds of the choice
    a step of that takes.
    """
    profile = find_profile(PROFILE)
    speeds = speeds_of(make_device(profile=profile))
    for name, ratio, clip in itertools.product(MODELS, RATIOS, (False, True)):
        measure = gpt(*MODELS[name], TOKENS, profile)
        case = Case(measure=measure, budget=budget_of(measure, ratio), place=None, clip=clip)
        found = plan(case, actives=(1, 2, 3), speeds=speeds)
        row: Row = {"model": name, "state_over_budget": ratio, "clip": clip, "profile": PROFILE}
        if found is not None:
            place = found.technique.optimizer
            assert place is not None
            row |= _of(found, None, hydra(found.shards, place=place, clip=clip))
            row |= {"active": found.active, "step_on": place}
            row["fewest"] = _fewest(case, found, speeds)
        yield row


def _fewest(case: Case, chosen: Planned, speeds: Speeds) -> Row | None:
    """The fewest bytes that the planner knows of, with one trial at a time."""
    few = plan(case)
    if few is None:
        return None
    place = few.technique.optimizer
    assert place is not None
    seconds = [priced(case, one, speeds) for one in (few, chosen)]
    over = few.moved / hydra(few.shards, place=place, clip=case.clip)
    return {"step_on": place, "bytes": few.moved, "over_hydra": over} | {
        "times": seconds[0] / seconds[1]
    }


def accumulated() -> Iterator[Row]:
    """Four micro-batches a step at 4 times the budget: one after another, and as the planner says.

    Of a model that draws no random numbers, where copies take time. Planned bytes of a step.
    """
    profile = find_profile(PROFILE)
    speeds = speeds_of(make_device(profile=profile))
    for name, clip in itertools.product(MODELS, (False, True)):
        measure = gpt(*MODELS[name], TOKENS, profile)
        measure = replace(measure, draws=False, num_batches=100)
        budget = budget_of(measure, 4)
        case = Case(measure=measure, budget=budget, place=None, clip=clip, micro_batches=4)
        row: Row = {"model": name, "clip": clip, "profile": PROFILE, "micro_batches": 4}
        for arm, order in ARMS.items():
            if found := plan(replace(case, order=order), speeds=speeds):
                technique = found.technique
                row[arm] = {"bytes": found.moved, "order": technique.order}
                row[arm] |= {"shards": len(found.shards), "step_on": technique.optimizer}
        yield row


ARMS: dict[str, Order | None] = {"one after another": "micro", "the planner's choice": None}


def _cuts(measure: JobMeasure, plans: Iterable[Planned | None]) -> list[tuple[ShardSpec, ...]]:
    """The shards of these plans, and a shard a layer."""
    return [*dict.fromkeys(found.shards for found in plans if found), finest(measure)]


def _steps(
    case: Case, cuts: Sequence[Sequence[ShardSpec]], trials: int = 1, lend: bool = False
) -> Iterator[Step]:
    """A step of each cut that fits at all."""
    assert case.place is not None
    for shards in cuts:
        options: Row = {"place": case.place, "clip": case.clip, "batch": case.batch}
        if trials == 1:
            step = one_trial(shards, case.budget, lend=lend, **options)
        else:
            step = in_turns(shards, trials, case.budget, **options)
        if all(fits(step, access) for access in step.accesses):
            yield step


def _least(
    case: Case, cuts: Sequence[Sequence[ShardSpec]], trials: int = 1, lend: bool = False
) -> float | None:
    """Bytes that a step of one trial moves at least, whichever of the cuts it is made with."""
    found = [bound.least(step) / trials for step in _steps(case, cuts, trials, lend)]
    return min(found, default=None)


def _rule(
    rule: Callable[[Step], Fraction],
    case: Case,
    cuts: Sequence[Sequence[ShardSpec]],
    trials: int = 1,
) -> float | None:
    """A pool's bytes with the cut that suits it best."""
    found = [float(rule(step)) / trials for step in _steps(case, cuts, trials)]
    return min(found, default=None)


def _beside_slots(case: Case, found: Planned | None) -> Row:
    """Beside the least that moves where the slots that wait for the next loads are set aside."""
    if found is None:
        return {}
    assert case.place is not None
    room = case.budget - found.slots
    step = one_trial(found.shards, room, place=case.place, clip=case.clip, batch=case.batch)
    if not all(fits(step, access) for access in step.accesses):
        return {"over_least_beside_slots": None}
    return {"over_least_beside_slots": _ratio(found.moved, bound.least(step))}


def _of(
    found: Planned | None,
    least: float | Fraction | None,
    of_hydra: int,
    lent: float | None = None,
) -> Row:
    """What shoal plans, beside the least and Hydra's rule; nothing where nothing fits."""
    if found is None:
        return {}
    technique = found.technique
    return {
        "shards": len(found.shards),
        "lookahead": technique.lookahead,
        "kept": len(technique.keep or ()),
        "weights_kept": len(technique.keep_weights),
        "turned": len(turned_shards(technique, len(found.shards))),
        "lookbehind": technique.lookbehind,
        "gradients_kept": len(waiting_gradients(technique, len(found.shards))),
        "head_bytes": sum(heads_of(technique).values()),
        "bytes": found.moved,
        "bytes_a_visit": found.change,
        "reserved": found.reserved,
        "peak": found.peak,
        "over_least": _ratio(found.moved, least),
        "over_lent": _ratio(found.moved, lent),
        "over_hydra": _ratio(found.moved, of_hydra),
    }


def _named(lookahead: int | None) -> str:
    return "the planner's lookahead" if lookahead is None else f"lookahead {lookahead}"


def _ratio(value: float, base: float | Fraction | None) -> float | None:
    """None where nothing need move; 1 where nothing does."""
    if not base:
        return None if value or base is None else 1.0
    return round(float(value / base), 4)


def _number(value: Fraction | None) -> float | None:
    return None if value is None else round(float(value), 1)
