"""Spilled stages: what is measured until they are settled, and the words for them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

from shoal.core.errors import PlanError
from shoal.core.spec import JobMeasure, TrialSpec
from shoal.core.technique import SPILLING, Pipelined, kept_shards, spans_of
from shoal.core.units import Bytes, Seconds, counted, format_bytes, format_seconds
from shoal.memory.layout import lenders
from shoal.planner.need import Need
from shoal.planner.pipeline import Staged
from shoal.planner.spilledstages import as_measured, fitted, smallest, spilled_candidates
from shoal.planner.stages import most_pieces
from shoal.planner.steptime import MESSAGE_S, Terms
from shoal.runtime.wire.messages import Measured, MeasureShards, Order

MARGINS = (1.0, 0.9, 0.8, 0.65)
"""What should fit is tried, and if it did not what should leave so much of the budget."""
MOST_MEASURED = 8

Found = tuple[Measured, Staged]


def may_spill(asked: Pipelined) -> bool:
    """Whether stages may be spilled that were asked for without a word about that."""
    is_open = asked.cuts is None and not asked.is_spilled
    return is_open and asked.width == 1 and asked.known_schedule in SPILLING


def head(trial: TrialSpec, asked: Pipelined) -> str:
    """How the words begin for that a trial cannot be a pipeline as asked."""
    stages = f" of {asked.stages} stages" if asked.stages else ""
    return f"trial {trial.number} was asked to train as a pipeline{stages}, but "


def best_on_paper(
    asked: Pipelined, terms: Terms, budget: Bytes, devices: int, trials: int
) -> Staged | None:
    """The best that should fit."""
    return next(iter(spilled_candidates(asked, terms, budget, devices, trials)), None)


def settle_spilled(
    trial: TrialSpec, asked: Pipelined, terms: Terms, budget: Bytes, devices: int, trials: int
) -> Generator[Order, Measured, Found | PlanError]:
    """The first candidate whose measured shards fit; or the words for that none does."""
    measured: dict[tuple[int, ...], Measured] = {}
    least: Staged | None = None
    for one in _tries(asked, terms, budget, devices, trials):
        edges = tuple(shard.layers[0] for shard in one.stages[1:])
        if edges not in measured:
            if len(measured) >= MOST_MEASURED:
                break
            measured[edges] = yield MeasureShards(trial, edges, apart=True)
        exact = measured[edges]
        if words := _cannot(asked, exact):
            return PlanError(f"{head(trial, asked)}{words}")
        found = fitted(asked, one, exact.measure.shards, terms, exact.layout, budget)
        if found is not None:
            return exact, found
        needed = as_measured(asked, one, exact.measure.shards, terms, exact.layout)
        least = min(least or needed, needed, key=lambda staged: staged.need.most)
    return _too_large(trial, asked, terms, budget, devices, least)


def _tries(
    asked: Pipelined, terms: Terms, budget: Bytes, devices: int, trials: int
) -> Iterator[Staged]:
    tried: set[Pipelined] = set()
    for margin in MARGINS:
        some = Bytes(int(margin * budget))
        for one in spilled_candidates(asked, terms, some, devices, trials):
            bare = replace(one.technique, keep=None, keep_gradients=None, recompute=None)
            if bare not in tried:
                tried.add(bare)
                yield one


def _cannot(asked: Pipelined, exact: Measured) -> str:
    """What the measured shards say against it; empty where nothing does."""
    shards = exact.measure.shards
    alone = [s.index for s in shards[:-1] if s.saved_bytes is None]
    if alone:
        return (
            f"shard {alone[0]} and another one would change the same buffer, in another order "
            "than one device does. Train this model with technique='spilled'."
        )
    if words := reads_beside(exact.measure, "shard"):
        return words
    stale = [
        s for s in shards if s.index in (asked.keep or ()) and s.parameter_bytes > s.owned_bytes
    ]
    if stale:
        return (
            f"shard {stale[0].index} is to stay on its device and borrows "
            f"{format_bytes(stale[0].parameter_bytes - stale[0].owned_bytes)} of tied "
            "parameters from another one, whose step would leave it an old copy. Leave it out of "
            "keep=."
        )
    return ""


def reads_beside(measure: JobMeasure, what: str) -> str:
    """Whether a stage would lack what is in no message; empty where none does."""
    if measure.beside is None:
        return ""
    first, stop = measure.shards[measure.beside].layers
    names = f"layers {first}..{stop - 1}"
    if measure.layers:
        names += f" ({measure.layers[first].name} to {measure.layers[stop - 1].name})"
    return (
        f"{what} {measure.beside}, {names}, reads something that layers before it leave beside "
        "what they return (in an attribute, a buffer of theirs or a global), and each stage has a "
        "process of its own. Have them return it and the forward hand it on, or use "
        "technique='spilled'."
    )


def too_many_shards(measure: JobMeasure, asked: Pipelined) -> str:
    """Whether more shards were asked for than there are pieces; or more stages."""
    most = most_pieces(measure.layers)
    if (asked.shards or 0) <= most:
        return ""
    return (
        f"{asked.shards} shards were asked for, and its model has "
        f"{counted(most, 'piece')} that may stand alone. Ask for at most {most}."
    )


def _too_large(
    trial: TrialSpec,
    asked: Pipelined,
    terms: Terms,
    budget: Bytes,
    devices: int,
    measured: Staged | None,
) -> PlanError:
    """Nothing fits: what needs the least needs where it needs the most, and what would help.

    That is of what was measured; where nothing seemed worth it, the finest cut on paper.
    """
    least = measured or smallest(asked, terms, devices)
    if least is None:
        return PlanError(
            f"{head(trial, asked)}its model cannot be cut into {asked.shards or 'several'} "
            "shards over these stages. Ask for fewer, or leave cuts= out."
        )
    stage, technique = least.neediest, least.technique
    first, stop = spans_of(technique, least.stages)[stage]
    layers = f"layers {least.stages[first].layers[0]}..{least.stages[stop - 1].layers[1] - 1}"
    largest = max(least.stages[first:stop], key=lambda shard: shard.backward_peak_bytes)
    outs = ["give the devices more memory", "make the batch smaller"]
    if asked.shards is not None:
        outs.append("leave shards= out to have as many shards as it takes")
    if asked.keep or asked.keep_gradients:
        outs.append("keep less on the devices")
    if technique.schedule == "gpipe":
        outs.append("use schedule='flush', which holds the activations of fewer micro-batches")
    return PlanError(
        f"{head(trial, asked)}it does not fit even if its stages are spilled: cut into "
        f"{technique.shards} shards over {technique.stages} stages, stage {stage} ({layers}) "
        f"{_needs(measured)} {format_bytes(least.needs[stage].most)} on a device of "
        f"{format_bytes(budget)}. Of that {format_bytes(largest.parameter_bytes)} are the "
        f"parameters of its largest shard, and {format_bytes(largest.backward_peak_bytes)} are "
        f"taken inside that shard's backward. {'; '.join(outs).capitalize()}."
    )


def _needs(measured: Staged | None) -> str:
    return "needs about" if measured is None else "was measured and needs"


def why_spilled(
    whole: Need, chosen: Staged, asked: Pipelined, terms: Terms, exact: Measured, budget: Bytes
) -> list[str]:
    """Why these stages are spilled so."""
    technique, count = chosen.technique, chosen.gang
    each = ", ".join(
        f"stage {stage} needs {format_bytes(need.most)}" for stage, need in enumerate(chosen.needs)
    )
    kept, moved = len(kept_shards(technique)), sum(need.moved for need in chosen.needs)
    cause = "spilled stages were asked for"
    if not asked.is_spilled:
        cause = "no cut has whole stages that all fit"
    named = f"{technique.shards} shards over {count} stages"
    named += " were asked for" if asked.shards else " are the quickest that fit"
    reasons = [
        f"whole, on one device, it would need {format_bytes(whole.total)}, and one has "
        f"{format_bytes(budget)}; {cause}; spilled, {each}",
        f"{named}; {counted(kept, 'stays on its device', 'stay on their devices')}, the others "
        f"move {format_bytes(moved)} in a step, over all links together",
        how_long(chosen.step_s, count, chosen.bubbles, terms.speeds.sources),
    ]
    if technique.schedule == "gpipe":
        reasons.append(
            "a shard runs all micro-batches of a step while it is there, so it is loaded twice a "
            "step: forwards, then backwards"
        )
    elif (technique.micro_batches or 1) > 1:
        reasons.append(
            "shards are loaded anew for each micro-batch; schedule='gpipe' loads them less often, "
            "and needs room for the inputs of all micro-batches"
        )
    if technique.schedule == "gpipe" and asked.keep_gradients is False:
        reasons.append(_GRADIENTS_STAY)
    if terms.measure.draws:
        reasons.append(
            "the model draws random numbers: its first stage draws those of the others ahead, in "
            "the order of training alone, and waits for the others where it cannot"
        )
    if exact.layout is not None and lenders(exact.layout):
        reasons.append("shards that share weights read them from the host anew after each step")
    return reasons


def how_long(step_s: Seconds, devices: int, bubbles: float, source: str) -> str:
    """How long a step of a pipeline takes, and what that was worked out with."""
    return (
        f"a step takes {format_seconds(step_s)} on {devices} devices, which stand idle "
        f"{bubbles:.0%} of it (bubbles); worked out with {source}, and {1e3 * MESSAGE_S:g} ms for "
        "each message between stages"
    )


_GRADIENTS_STAY = (
    "keep_gradients=False was asked for: with gpipe a shard's gradients are added up on the "
    "device in its one visit all the same, and leave it once a step; where the model draws what "
    "cannot be foretold, they wait there for the last micro-batch"
)
