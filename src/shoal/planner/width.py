"""How wide an array is to be, and how its passes run, so that it never loses. Pure.

[Note: what is compared]
Not the step of a trial in the widest array, but when the last trial of the shape is through, on
all devices: with slots that stay empty, trials that end early, validation, and what it costs to
build arrays, to fill slots again, to trace and to compile. The trials one by one are always among
what is compared, measured in the same rounds, and win a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.core.spec import NO_SECONDS, ArrayMeasure, PassKind, WidthMeasure
from shoal.core.units import Bytes, Seconds, counted, format_bytes, format_seconds
from shoal.planner.lanes import Load, array_s, serial_s

MOST = 64  # slots
WORTH = 0.95
"""An array has to take less than this part of the time; what it costs in the bits' class, and in
waiting for each other, is not for nothing."""

MIDDLE = 16  # slots
CLOSE = 0.7
"""Narrower arrays are looked at where the best so far take more than this part of the time."""
HOPELESS = 1.6
"""No other way to run passes is tried where arrays take so many times the trials one by one."""
COMPILE_S = 0.08
"""Seconds to be reckoned with to compile an operation of a graph, forward and backward."""
PAYS = 10.0
"""Nothing is compiled, not even to see, for less than so many times what compiling takes."""
SPENDS = 0.04
"""Part of the trials' time one by one that measuring may take, beyond its first candidate."""
LOOKS = 6
"""Steps of an array that looking for its shards is reckoned to take."""
LEAST_S, MOST_S = 2.0, 20.0  # what it may take at least, and at most
NARROWER, AS_GRAPH = 0.2, 0.3
"""By what part narrower arrays, and graphs of eager ones, may be hoped to end sooner."""
SHORT_S = 60.0
"""Trials that are through in less are looked at for less long."""
FIRST_LOOK, EACH_SLOT = 80, 20
"""Steps of a trial alone that a first look is reckoned to take: to compare a few trials with
themselves alone, in float64, and more for each slot, to build the array and to time it."""
RISKED = 0.12
"""Part of the trials' time one by one that such a look may be, since it may find nothing."""
ORDER: tuple[PassKind, ...] = ("eager", "traced", "compiled", "branches")  # of two, the first

Fits = Callable[[WidthMeasure], bool]


class Candidate(NamedTuple):
    """What may be measured next."""

    width: int
    kind: PassKind


def widths_to_try(trials: int, devices: int) -> tuple[int, ...]:
    """A few: powers of four, and all of a device's trials, for ``trials`` on ``devices``."""
    each = min(MOST, math.ceil(trials / devices))
    powers = [width for width in (4, 16) if 3 * width <= 2 * each]
    return (*powers, each) if each > 1 else ()


# -- what is measured -------------------------------------------------------------------


class ArrayPace(NamedTuple):
    """For how long a candidate is timed: rounds, and seconds of a contender in each."""

    rounds: int
    slice_s: float


def pace(load: Load) -> ArrayPace:
    """In proportion to what there is to train."""
    return ArrayPace(3, 0.02) if load.is_known and load.alone_s < SHORT_S else ArrayPace(5, 0.04)


def why_no_look(load: Load) -> str:
    """Why arrays are not even measured, in words; empty if they are.

    Trials that end early leave slots idle, so that of these it takes more to be worth a look.
    """
    least_s = LEAST_S if len(set(load.steps)) == 1 else SHORT_S
    if not load.is_known or not math.isfinite(load.step_s):
        return ""
    seconds, look_s = format_seconds(load.alone_s), _first_look_s(load)
    if load.alone_s >= least_s and look_s <= RISKED * load.alone_s:
        return ""
    found = f"one by one all are through in about {seconds}, too soon for arrays to be measured"
    return found + f", which takes some {format_seconds(look_s)}" * (look_s > 0)


def _first_look_s(load: Load) -> float:
    """Seconds that the first candidate may take; 0 where Python takes most of a step."""
    widths = _next_widths((), ArrayMeasure(), load, lambda found: True)
    if load.is_light or not widths:
        return 0.0
    return (FIRST_LOOK + EACH_SLOT * widths[0]) * load.step_s


def next_candidate(measure: ArrayMeasure, load: Load, fits: Fits) -> Candidate | None:
    """What is worth a look after what was measured so far; None: it is enough.

    Widths first, from ``MIDDLE``: wider while that gains, narrower where it does not. Then a graph
    of the best one, or of the best two, and compiled code where it may bring back its price. Of
    light trials the widths are tried as graphs, and eagerly where that is none, or brings nothing.
    Last, on a device that may run them side by side, the slots' own passes, in the best width.
    """
    if measure.declined:
        return None
    return _as_one(measure, load, fits) or _side_by_side(measure, load, fits)


def _side_by_side(measure: ArrayMeasure, load: Load, fits: Fits) -> Candidate | None:
    """Also where stacked kernels lose by far: these are other ones."""
    if not measure.overlaps or any(found.kind == "branches" for found in measure.widths):
        return None
    able = [found for found in measure.widths if not found.declined and fits(found)]
    if able and _is_dear(None, measure, load, fits):
        return None
    if not able:  # as one: each by itself may do
        return Candidate(min(found.width for found in measure.widths), "branches")
    best = min(able, key=lambda found: (_part(found, load, measure.valid_batches), found.width))
    return Candidate(best.width, "branches")


def _as_one(measure: ArrayMeasure, load: Load, fits: Fits) -> Candidate | None:
    batches, tried = measure.valid_batches, {(f.width, f.kind) for f in measure.widths}
    if load.is_light and (width := _needs_eager(measure, load, fits)) is not None:
        return Candidate(width, "eager")
    looked = [f for f in measure.widths if f.kind == "eager" or (load.is_light and _is_graph(f))]
    for width in _next_widths(looked, measure, load, fits):
        if not looked or not _is_dear(width, measure, load, fits):
            is_graph = load.is_light and all(map(_is_graph, measure.widths))
            return Candidate(width, "traced" if is_graph else "eager")
    if looked and _is_dear(None, measure, load, fits):
        return None
    able = [found for found in looked if not found.declined and fits(found)]
    ranked = sorted(able, key=lambda found: _part(found, load, batches))
    if not ranked or _part(ranked[0], load, batches) > HOPELESS:
        return None
    for width in list(dict.fromkeys(found.width for found in ranked))[:2]:
        if (width, "traced") not in tried:
            return Candidate(width, "traced")
    if any(kind == "compiled" for _, kind in tried) or why_not_compiled(measure, load):
        return None
    quick = [found for found in measure.widths if not found.declined and fits(found)]
    return Candidate(min(quick, key=lambda f: _part(f, load, batches)).width, "compiled")


def _is_graph(found: WidthMeasure) -> bool:
    return found.kind == "traced"


def _needs_eager(measure: ArrayMeasure, load: Load, fits: Fits) -> int | None:
    """The width that was tried as a graph, and should have been eager.

    One that gains nothing may still do so without the making of the graph.
    """
    eager = {found.width for found in measure.widths if found.kind == "eager"}
    for found in filter(_is_graph, measure.widths):
        free, is_none = replace(found, build_s=Seconds(0.0)), bool(found.declined)
        might = gains(free, load, measure.valid_batches) and not gains(
            found, load, measure.valid_batches
        )
        if found.width not in eager and (is_none or not fits(found) or might):
            return found.width
    return None


def _next_widths(
    looked: Sequence[WidthMeasure], measure: ArrayMeasure, load: Load, fits: Fits
) -> list[int]:
    """Those that may do better, the likeliest first."""
    widths = widths_to_try(len(load.steps), load.devices)
    done = {found.width for found in looked}
    if not done:
        return [max(w for w in widths if w <= MIDDLE or w == min(widths))] if widths else []
    parts = dict.fromkeys(done, math.inf)
    for found in filter(fits, looked):
        part = _part(found, load, measure.valid_batches)
        parts[found.width] = min(parts[found.width], part)
    best = min(parts, key=lambda width: (parts[width], width))
    wider = [width for width in widths if width > max(done)]
    less = [width for width in widths if width < min(done)]
    return [
        *(wider[:1] if best == max(done) and parts[best] < 1 else ()),
        *(less[-1:] if best == min(done) and (parts[best] > CLOSE or load.closes_ranks) else ()),
    ]


def _part(found: WidthMeasure, load: Load, valid_batches: int) -> float:
    """What the trials take as arrays, as a part of what they take one by one, beside them.

    Candidates are compared by this: a machine is not as quick in one minute as in the next.
    """
    alone = serial_s(found, load, valid_batches)
    return array_s(found, load, valid_batches) / alone if alone > 0 else math.inf


def why_not_compiled(measure: ArrayMeasure, load: Load) -> str:
    """In words, why nothing is compiled to see what it takes; empty if it may be."""
    if not measure.compiler:
        return "there is no C++ compiler (g++ or clang++), or the device is no CPU"
    if not measure.nodes:
        return "there is no graph of a step to compile"
    if not load.is_known:
        return "how long the trials are is not known"
    if load.varies:
        return (
            "floats in the trials' code differ or change on the way, and compiled code holds them"
        )
    usable = [f for f in measure.widths if not f.declined and not f.is_over]
    if not usable:
        return "no array has room"
    shortest = min(
        min(array_s(f, load, measure.valid_batches), serial_s(f, load, measure.valid_batches))
        for f in usable
    )
    price = COMPILE_S * measure.nodes
    if shortest < PAYS * price:
        return (
            f"compiling is reckoned at {format_seconds(price)}, which trials that are "
            f"through in {format_seconds(shortest)} do not bring back"
        )
    return ""


def _is_dear(width: int | None, measure: ArrayMeasure, load: Load, fits: Fits) -> bool:
    """Whether looking at the next candidate costs more than it may gain, or in all too much.

    It is taken to take as long as the last one did, slot by slot. None: a graph of one that is
    known.
    """
    last = measure.widths[-1]
    next_s = measure.last_s * (width or last.width) / last.width
    usable = next((found for found in measure.widths if not found.declined), last)
    if load.is_known and next_s > _hope_s(width, measure, load, fits):
        return True
    return measure.took_s - measure.first_s + next_s > _allowance(usable, measure, load)


def _hope_s(width: int | None, measure: ArrayMeasure, load: Load, fits: Fits) -> float:
    """Seconds by which all trials may be through sooner, if the next candidate does well.

    A wider array shares among more trials what a step costs whoever takes part: of that a step of
    one trial alone, beside one of an array, tells how much there is.
    """
    batches = measure.valid_batches
    able = [found for found in measure.widths if not found.declined and fits(found)]
    able = [found for found in able if found.step_s > 0]
    if not able:
        return math.inf
    best = min(able, key=lambda found: (_part(found, load, batches), found.width))
    soonest_s = min(array_s(best, load, batches), serial_s(best, load, batches))
    if width is None:
        return AS_GRAPH * soonest_s
    if width < best.width:
        return NARROWER * soonest_s
    each_s = (best.step_s - best.alone_s) / (best.width - 1)
    shared_s = max(0.0, best.alone_s - max(0.0, each_s))
    return soonest_s * min(1.0, shared_s * (1 - best.width / width) / best.step_s)


def _allowance(found: WidthMeasure, measure: ArrayMeasure, load: Load) -> float:
    """Seconds after the first candidate, after which no other one is measured."""
    if not load.is_known:
        return LEAST_S * 2
    return min(MOST_S, max(LEAST_S, SPENDS * serial_s(found, load, measure.valid_batches)))


# -- arrays that do not fit ---------------------------------------------------------------


def worth_spilling(
    measure: ArrayMeasure, load: Load, fits: Fits, without: Collection[int] = ()
) -> WidthMeasure | None:
    """The array that does not fit and would end first, if it would gain were nothing to move.

    And no less than looking for its shards takes. ``without``: widths that have none.
    """
    batches = measure.valid_batches
    eager = [f for f in measure.widths if not f.declined and f.kind == "eager"]
    able = [at_best(found, measure) for found in eager]
    over = [f for f in able if not fits(f) and f.width not in without and gains(f, load, batches)]
    best = min(over, key=lambda f: (_part(f, load, batches), f.width), default=None)
    if best is None:
        return None
    rival = _best(measure, load, fits)
    least = WORTH * _part(rival, load, batches) if rival is not None else 1.0
    alone_s, part = serial_s(best, load, batches), _part(best, load, batches)
    saves_s, looking_s = (least - part) * alone_s, max(LEAST_S, LOOKS * best.step_s)
    return best if part < least and (saves_s > looking_s or not load.is_known) else None


def at_best(found: WidthMeasure, measure: ArrayMeasure) -> WidthMeasure:
    """An array that was not there, as one may hope it is were there room for it.

    Between the widest one that was there as it is, and as quick as that slot by slot; without any,
    all slots in the time of one. What it is worth is told by its shards: this only says whether to
    look at them.
    """
    if not found.is_over:
        return found
    there = [f for f in measure.widths if not f.declined and not f.is_over and f.alone_s > 0]
    if not there:
        return replace(found, step_s=found.alone_s, valid_s=found.alone_valid_s)
    widest = max(there, key=lambda f: (f.width, -f.step_s))
    part = math.sqrt(found.width / widest.width)
    valid = widest.valid_s / widest.alone_valid_s if widest.alone_valid_s > 0 else 0.0
    return replace(
        found,
        step_s=Seconds(part * found.alone_s * widest.step_s / widest.alone_s),
        valid_s=Seconds(part * found.alone_valid_s * valid),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InShards:
    """What an array in shards is reckoned to take.

    ``build_s``: to cut the model; ``visit_s``: to bring what stays on the device home and back, as
    is done for trials that come and leave. ``passes`` and ``lengths`` are as in ``WidthMeasure``.
    """

    shards: int
    moved_bytes: Bytes
    step_s: Seconds
    valid_s: Seconds = NO_SECONDS
    build_s: Seconds = NO_SECONDS
    visit_s: Seconds = NO_SECONDS
    passes: float = 1.0
    lengths: str = ""


def when_spilled(found: WidthMeasure, spilled: InShards) -> WidthMeasure:
    """The same array in shards: a step as it was replayed, validation slower by as much.

    An array that was there as a whole is no quicker in shards. Where one trial follows another in
    a slot all that stays comes home twice: for the one that leaves, and for the one that comes.
    """
    step_s = max(spilled.step_s, found.step_s)
    slower = step_s / found.step_s if found.step_s > 0 else 1.0
    return replace(
        found,
        step_s=step_s,
        valid_s=max(Seconds(found.valid_s * slower), spilled.valid_s),
        build_s=Seconds(found.build_s + spilled.build_s + spilled.visit_s),
        refill_s=Seconds(found.refill_s + 2 * spilled.visit_s),
        shards=spilled.shards,
        passes=spilled.passes,
        lengths=spilled.lengths or found.lengths,
        moved_bytes=spilled.moved_bytes,
        is_over=False,
        evaluates_each=False,
    )


# -- the choice ---------------------------------------------------------------------------


class WidthChoice(NamedTuple):
    """Width 1 stands for the trials one by one."""

    width: int
    kind: PassKind
    why: tuple[str, ...]


def choose(measure: ArrayMeasure, load: Load, fits: Fits) -> WidthChoice:
    """With what all trials end first; the trials one by one, unless an array is sure to gain."""
    if measure.declined:
        return WidthChoice(1, "eager", (f"unfused: {measure.declined}",))
    best = _best(measure, load, fits)
    lines = (*_table(measure, load, fits, best), *_costs(measure, load))
    able = [found for found in measure.widths if not found.declined and fits(found)]
    if not able:
        told = next((f.declined for f in measure.widths if f.declined), "")
        words = told or "no array of its shape fits the device"
        return WidthChoice(1, "eager", (f"unfused: {words}", *lines))
    if best is None:
        words = "unfused: arrays were measured and gain nothing"
        return WidthChoice(1, "eager", (words, *lines))
    took, alone = (of(best, load, measure.valid_batches) for of in (array_s, serial_s))
    words = (
        f"as arrays of {best.width}, {best.kind}{_in_shards(best)}: all are through in "
        f"{format_seconds(took)}, one by one in {format_seconds(alone)}"
        f"{_some(measure.notes)}"
    )
    return WidthChoice(best.width, best.kind, (words, *lines))


def praise(found: WidthMeasure, notes: Sequence[str], trials: int) -> str:
    """What an array that was asked for takes, in words; so many ``trials`` have its shape."""
    there = min(trials, found.width)
    alone = format_seconds(there * found.alone_s)
    idle = found.width - there
    empty = f", {counted(idle, 'slot')} of which {'is' if idle == 1 else 'are'} empty" * bool(idle)
    return (
        f"a step of {found.width} as one array, {found.kind}{_in_shards(found)}{empty}, takes "
        f"{format_seconds(found.step_s)}, one after another {alone}{_some(notes)}"
    )


def gains(found: WidthMeasure, load: Load, valid_batches: int) -> bool:
    """Whether it ends so much sooner than the trials one by one that noise cannot be why."""
    took = array_s(found, load, valid_batches) * (1 + found.noise)
    return took < WORTH * serial_s(found, load, valid_batches)


def _best(measure: ArrayMeasure, load: Load, fits: Fits) -> WidthMeasure | None:
    """The candidate that ends first; of the compiled ones, one that is sure to be sooner."""
    batches = measure.valid_batches
    able = [
        found
        for found in measure.widths
        if not found.declined and fits(found) and gains(found, load, batches)
    ]

    def score(found: WidthMeasure) -> tuple[float, int, int]:
        sure = (1 + max(found.noise, 1 - WORTH)) if found.kind == "compiled" else 1.0
        return _part(found, load, batches) * sure, found.width, ORDER.index(found.kind)

    return min(able, key=score, default=None)


def _table(measure: ArrayMeasure, load: Load, fits: Fits, best: WidthMeasure | None) -> list[str]:
    lines = []
    for found in measure.widths:
        name = f"{found.width} wide, {found.kind}"
        name += _in_shards(found)
        if found.declined:
            lines.append(f"{name}: none, {found.declined}")
            continue
        if found.is_over:
            lines.append(f"{name}: over the device's budget, so it was not timed")
            continue
        took, alone = (of(found, load, measure.valid_batches) for of in (array_s, serial_s))
        takes = f"{format_bytes(found.unit_bytes)} a unit"
        if found.shards:
            takes = f"{format_bytes(found.moved_bytes)} moved a step"
        figures = (
            f"{format_seconds(found.step_s / found.width)} a step and trial (alone "
            f"{format_seconds(found.alone_s)}), {takes}, "
            f"all through in {format_seconds(took)} (one by one "
            f"{format_seconds(alone)})"
        )
        lines.append(f"{name}: {figures}: {_verdict(found, measure, load, fits, best)}")
    return lines


def _verdict(
    found: WidthMeasure, measure: ArrayMeasure, load: Load, fits: Fits, best: WidthMeasure | None
) -> str:
    took, alone = (of(found, load, measure.valid_batches) for of in (array_s, serial_s))
    if found is best:
        return "taken"
    if not fits(found):
        return "over the device's budget"
    if took >= alone:
        return f"slower than one by one by {100 * (took / alone - 1):.0f} %"
    if not gains(found, load, measure.valid_batches):
        noise = max(found.noise, 1 - WORTH)
        return (
            f"sooner by {100 * (1 - took / alone):.0f} %, which is not surely more than the noise "
            f"({100 * noise:.0f} %)"
        )
    return "not the soonest"


def _costs(measure: ArrayMeasure, load: Load) -> list[str]:
    """What was not measured and why, and what measuring took."""
    lines = []
    if measure.widths and not any(found.kind == "compiled" for found in measure.widths):
        lines.append(f"compiled: not tried, {why_not_compiled(measure, load) or NOT_WORTH}")
    if measure.took_s:
        lines.append(f"measuring this took {format_seconds(measure.took_s)}")
    return lines


NOT_WORTH = "measuring more would cost more than it could bring, or arrays lose by far"


def _in_shards(found: WidthMeasure) -> str:
    return f", spilled in {counted(found.shards, 'shard')}" if found.shards else ""


def _some(notes: Sequence[str]) -> str:
    return f"; {'; '.join(notes[:3])}" if notes else ""
