"""Arrays of one shape are tried: which, ``planner/width.py`` decides; here they are asked for.

All workers that the study's trials would occupy build the same array and time it at the same
moments, since that is how it will be ([Note: all at once] in ``runtime/measuring/widths.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from shoal.core.errors import last_words
from shoal.core.spec import ArrayMeasure, TrialSpec, WidthMeasure
from shoal.core.units import Bytes, Seconds
from shoal.planner.width import MOST, ArrayPace, Candidate
from shoal.planning.asking import MAX_DEATHS, Asking
from shoal.runtime.pool import Gone, Worker
from shoal.runtime.wire.messages import (
    ArrayTry,
    MeasureArray,
    MeasuredArray,
    Refused,
    TimeArray,
    TimedArray,
)

AT_LENGTH, BRIEFLY = ArrayPace(5, 0.04), ArrayPace(1, 0.0)
FEWER, FEWER_S = 3, 0.25  # rounds that will do with slices so long
EVEN_S = 0.2  # so long a step alone is timed too, where one of the array takes that
LEAD_S = 0.02  # until all workers have heard

Next = Callable[[ArrayMeasure], Candidate | None]


class Room(NamedTuple):
    """What a device has room for, as far as states tell: an array of a width, a trial alone.

    How that one trains, whether batches vary in length, and whether what is frozen is there once.
    """

    has_array: Callable[[int], bool] = lambda width: True
    has_trial: bool = True
    captures: bool = False  # a trial alone
    varies: bool = False
    one_base: bool = False


ANY = Room()


def try_arrays(
    asking: Asking,
    trials: Sequence[TrialSpec],
    devices: int,
    next_candidate: Next,
    *,
    room: Room = ANY,
    pace: ArrayPace = AT_LENGTH,
) -> ArrayMeasure:
    """Measure candidates until ``next_candidate`` has no other, on so many devices at once.

    Those that have no ``room`` are not built. ``pace``: for how long each; by one round where
    nothing is chosen by it.
    """
    began = time.monotonic()
    measure = ArrayMeasure()
    tries = _Tries(asking, trials, devices, room, pace)
    while (candidate := next_candidate(measure)) is not None:
        measure = _tried(measure, candidate, tries)
        took_s = Seconds(time.monotonic() - began)
        last_s = Seconds(took_s - measure.took_s)
        first_s = measure.first_s or took_s
        measure = replace(measure, took_s=took_s, first_s=first_s, last_s=last_s)
    return measure


class _Tries(NamedTuple):
    """Who is asked about whom, and how long."""

    asking: Asking
    trials: Sequence[TrialSpec]
    devices: int
    room: Room
    pace: ArrayPace


def _tried(measure: ArrayMeasure, candidate: Candidate, tries: _Tries) -> ArrayMeasure:
    """The measure with one candidate more, also if a worker is killed meanwhile."""
    for _ in range(MAX_DEATHS):
        try:
            return _with(measure, candidate, tries)
        except _WorkerLost as error:
            words = str(error)
    return replace(measure, declined=words)


def _with(measure: ArrayMeasure, candidate: Candidate, asked: _Tries) -> ArrayMeasure:
    """The measure with one candidate more."""
    (width, kind), room, asking = candidate, asked.room, asked.asking
    some = tuple(asked.trials[:MOST])
    is_whole = room.has_array(width)
    order = MeasureArray(
        some,
        width,
        kind,
        is_whole=is_whole,
        alone_fits=room.has_trial,
        captures=room.captures,
        varies=room.varies,
        one_base=room.one_base,
    )
    built = asking.measure_arrays(order, asked.devices)
    _let_go(built, asked)
    tries: list[ArrayTry] = []
    for reply in built.values():
        if isinstance(reply, Refused):
            words = last_words(reply.error)
            return _declined(measure, candidate, words, is_kind=kind != "eager")
        if not isinstance(reply, MeasuredArray):
            raise _WorkerLost(reply)
        measure = replace(measure, overlaps=measure.overlaps or reply.found.overlaps)
        if reply.found.declined:
            return _declined(measure, candidate, reply.found.declined, is_kind=reply.found.is_kind)
        tries.append(reply.found)
    told = _timed(tries, built, asked)
    if isinstance(told, str):
        return _declined(measure, candidate, told, is_kind=True)
    notes = dict.fromkeys((*measure.notes, *(note for found in tries for note in found.notes)))
    return replace(
        measure,
        widths=(*measure.widths, found_of(candidate, tries, told)),
        notes=tuple(notes),
        valid_batches=max(found.valid_batches for found in tries),
        nodes=max(measure.nodes, *(found.nodes for found in tries)),
        overlaps=measure.overlaps or any(found.overlaps for found in tries),
        compiler=next((found.compiler for found in tries if found.compiler), measure.compiler),
    )


def _timed(
    tries: Sequence[ArrayTry], built: Mapping[Worker, object], asked: _Tries
) -> list[Sequence[Sequence[float]]] | str:
    """The rounds of each worker; in words, why there are none."""
    pace = asked.pace
    slices = slices_of(tries, pace.slice_s)
    if pace.rounds == 1:
        slices = (*slices[:2], 0.0, 0.0)
    if not any(slices):  # nothing has room
        return [[slices] for _ in tries]
    rounds = min(pace.rounds, FEWER if max(slices[:2]) >= FEWER_S else pace.rounds)
    order = TimeArray(asked.trials[0], time.monotonic() + LEAD_S, slices, rounds)
    timed = asked.asking.measure_arrays(order, asked.devices, only=built)
    told = [reply.rounds for reply in timed.values() if isinstance(reply, TimedArray)]
    refused = [reply for reply in timed.values() if isinstance(reply, Refused)]
    if refused:
        return last_words(refused[0].error)
    if len(told) < len(built):
        raise _WorkerLost(next((r for r in timed.values() if isinstance(r, Gone)), None))
    return list(told)


def _let_go(built: Mapping[Worker, object], asked: _Tries) -> None:
    """Where one worker has no array, those that built it need not keep theirs to be timed."""
    there = [worker for worker, reply in built.items() if _has_array(reply)]
    if 0 < len(there) < len(built):
        asked.asking.measure_arrays(
            TimeArray(asked.trials[0], time.monotonic(), (), 0), len(there), only=there
        )


def _has_array(reply: object) -> bool:
    return isinstance(reply, MeasuredArray) and not reply.found.declined


class _WorkerLost(Exception):
    """A worker ended while it had an array to build or to time."""

    def __init__(self, end: object) -> None:
        reason = getattr(end, "reason", "it is gone")
        super().__init__(f"a worker ended while arrays were measured: {reason}")


def _declined(
    measure: ArrayMeasure, candidate: Candidate, words: str, *, is_kind: bool
) -> ArrayMeasure:
    if not is_kind:
        return replace(measure, declined=words)
    found = WidthMeasure(width=candidate.width, kind=candidate.kind, declined=words)
    return replace(measure, widths=(*measure.widths, found))


def slices_of(tries: Sequence[ArrayTry], least_s: float) -> tuple[float, ...]:
    """Seconds of each contender's slice: room for one on the slowest device; 0 for none.

    A trial alone has as many steps as there is time for beside the array's: what passes over the
    machine meanwhile hits both of them.
    """
    longest = [max(column) for column in zip(*(found.once_s for found in tries), strict=True)]
    least = (max(least_s, min(EVEN_S, 1.2 * max(longest[:2]))),) * 2 + (least_s,) * 2
    some = zip(least, longest, strict=True)
    return tuple(max(at_least, 1.2 * once) if once else 0.0 for at_least, once in some)


def found_of(
    candidate: Candidate,
    tries: Sequence[ArrayTry],
    told: Sequence[Sequence[Sequence[float]]],
) -> WidthMeasure:
    """Of each worker the median of its rounds, and of the workers the slowest.

    Of what was not there in the rounds, what it took once.

    ``told``: for each worker, round and contender (``TimedArray``), seconds.
    """
    columns = [[_median([row[at] for row in rounds]) for rounds in told] for at in range(4)]
    once = list(zip(*(found.once_s for found in tries), strict=True))
    longest = [max(column) or max(roughly) for column, roughly in zip(columns, once, strict=True)]
    longest[:2] = [seconds / max(found.steps for found in tries) for seconds in longest[:2]]
    alone_s, step_s, alone_valid_s, valid_s = map(Seconds, longest)
    return WidthMeasure(
        width=candidate.width,
        kind=candidate.kind,
        step_s=step_s,
        alone_s=alone_s,
        valid_s=valid_s,
        alone_valid_s=alone_valid_s,
        unit_bytes=Bytes(max(found.unit_bytes for found in tries)),
        pool_bytes=Bytes(max(found.pool_bytes for found in tries)),
        build_s=Seconds(max(found.build_s for found in tries)),
        refill_s=Seconds(max(found.refill_s for found in tries)),
        noise=max(noise_of(rounds) for rounds in told),
        is_over=any(found.is_over for found in tries),
        evaluates_each=any(found.evaluates_each for found in tries),
        passes=max(found.passes for found in tries),
        lengths=next((found.lengths for found in tries if found.lengths), ""),
        looped=tuple(sorted({part for found in tries for part in found.looped})),
    )


def _median(seconds: Sequence[float]) -> float:
    """Of those rounds in which there was something."""
    there = [one for one in seconds if one]
    return median(there) if there else 0.0


def noise_of(rounds: Sequence[Sequence[float]]) -> float:
    """By what part the median of a worker's rounds may be off, of array to lone step.

    An array that had one round is taken to be as steady as a round of the trial alone.
    """
    ratios = [row[1] / row[0] for row in rounds if row[0] > 0 and row[1] > 0]
    if not ratios:
        return 0.0
    some = ratios if len(ratios) > 1 else [row[0] for row in rounds if row[0] > 0]
    middle = median(some)
    spread = median(abs(one - middle) for one in some)
    return min(0.5, 1.5 * spread / middle / math.sqrt(len(ratios)))
