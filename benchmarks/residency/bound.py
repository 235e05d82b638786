"""A number of bytes below which no policy comes, for as many shards as one likes.

[Note: prices]
Put a price on every byte of room at some moments of the step: ``price[t]`` while unit t runs.
A policy is then charged for what it moves, and for what it holds. At t it can hold no more
beside the parts of the unit than ``room[t] - needs[t]``, so its moves alone cost at least

    what it is charged  -  sum over t of price[t] * (room[t] - needs[t])

and what it is charged is the sum over parts, each of which can be taken at its least, alone:

    parameters   between one use and the next they are held, at the prices on the way, or they
                 leave and are loaded again: 1 a byte. If they leave anywhere after a step on
                 the device and before the next they are stored: 1 a byte more
    state        held from step to step, or loaded and stored: 2 a byte
    gradients    with clipping held from B to STEP, or stored and loaded: 2 a byte

With the step on the host a shard that steps there loads its parameters for F and again for B,
unless they are held between the two, and stores its gradients: no price is paid for state. Or
it steps on the device, as above; the cheaper one counts. (A shard that changes its place from
step to step moves its state both ways and its parameters down for it, and what it may save by
it is one load of the parameters.)

This is the dual of a linear program, so every price gives a bound that holds, also for
policies that repeat after several steps or never, or leave with a piece of a part. ``least``
takes the best of a grid of prices at three moments: the turn from forward to backward, the
end of the last backward, the last step before the first forward. A moment is the unit there, or
the one next to it that needs the most: where the last shard is small, so is what its unit needs.

[Note: state minus budget]
What comes out, for many small shards: P bytes of parameters and as many of gradients, 2 P of
Adam's state, M bytes of room beside the parts of the unit.

    step on    clipping   bytes a step, at least the larger of
    device     no         7 P - 3 M           6 P - 2 M  =  2 (3 P - M)
    device     yes        10 P - 4 M          8 P - 2 M  =  2 (4 P - M)
    host       no         3 P - M
    host       yes        3 P - M             2 P - M / 2  =  (4 P - M) / 2

The first column fills the room with what saves most a byte, parameters; in the second all
parameters are there and the rest is the training state less the room, in and out. Prices:
1.5 at the turn and at the end, or 1 and 1; with clipping 1, 2 and 1 at the turn, the norm and
the end, or 2 at the norm alone; on the host 1 at the turn, or 0.5 at the norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from touches import USES, Step

from shoal.core.spec import Place, ShardSpec

GRID = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
COARSE = (0.0, 0.5, 1.0, 1.5, 2.0)
NEAR = 3  # units that are next to a moment
Prices = Mapping[int, float]
"""Index of a unit -> price of a byte while it runs."""


def least(step: Step) -> float:
    """Bytes a step, up and down, that every policy moves at least."""
    best = 0.0
    for number, chosen in enumerate(_moments(step)):
        moments = list(dict.fromkeys(chosen))
        spans = [_spans(step, shard, moments) for shard in range(len(step.shards))]
        for prices in itertools.product(COARSE if number else GRID, repeat=len(moments)):
            best = max(best, _at(step, spans, dict(zip(moments, prices, strict=True))))
    return best


def at(step: Step, prices: Prices) -> float:
    """The bound that these prices give; it may be below 0."""
    spans = [_spans(step, shard, list(prices)) for shard in range(len(step.shards))]
    return _at(step, spans, prices)


def _at(step: Step, spans: Sequence[_Spans], prices: Prices) -> float:
    charged = sum(
        _charged(shard, of_shard, step.place, prices)
        for shard, of_shard in zip(step.shards, spans, strict=True)
    )
    used = (step.accesses[t] for t in prices)
    spare = [access.room - step.needs(access) for access in used]
    return charged - sum(p * room for p, room in zip(prices.values(), spare, strict=True))


def _moments(step: Step) -> Iterator[tuple[int, ...]]:
    """The first B, the last B and the last STEP: where most wants to be there at once.

    With the step right behind its backward the tighter one of the two counts. Then the units
    next to these that need the most.
    """

    def spare(index: int) -> int:
        return step.accesses[index].room - step.needs(step.accesses[index])

    of = {kind: [t for t, a in enumerate(step.accesses) if a.kind == kind] for kind in USES}
    backward, stepping = of["B"], of["STEP"]
    first, last = backward[:NEAR], backward[-NEAR:]
    if step.place == "host":
        yield from itertools.product(
            _either(first[0], min(first, key=spare)), _either(last[-1], min(last, key=spare))
        )
    elif stepping[0] < backward[-1]:
        turn = _either(
            min(first[0], stepping[0], key=spare),
            min(first, key=spare),
            min(stepping[:NEAR], key=spare),
        )
        end = _either(
            min(last[-1], stepping[-1], key=spare),
            min(last, key=spare),
            min(stepping[-NEAR:], key=spare),
        )
        yield from itertools.product(turn, end)
    else:
        yield from itertools.product(
            _either(first[0], min(first, key=spare)),
            _either(last[-1], min(stepping[:NEAR], key=spare)),
            _either(stepping[-1], min(stepping[-NEAR:], key=spare)),
        )


def _either(*moments: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(moments))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """The priced moments on the way from one use of a shard's parts to the next."""

    again: tuple[int, ...] | None  # of parameters from F to B; None where there is no F
    gaps: tuple[tuple[int, ...], ...]  # of parameters, once round; steps on the device
    state: tuple[int, ...]
    gradients: tuple[int, ...]


def _spans(step: Step, shard: int, moments: Sequence[int]) -> _Spans:
    length = len(step.accesses)
    uses = {a.kind: t for t, a in enumerate(step.accesses) if a.shard == shard}

    def between(after: int, before: int) -> tuple[int, ...]:
        """Past the end of the step begins the next."""
        return tuple(t for t in moments if after < t < before or after < t + length < before)

    times = sorted(uses.values())
    gaps = [between(a, b) for a, b in itertools.pairwise([*times, times[0] + length])]
    return _Spans(
        again=between(uses["F"], uses["B"]) if "F" in uses else None,
        gaps=tuple(gaps),
        state=between(uses["STEP"], uses["STEP"] + length),
        gradients=between(uses["B"], uses["STEP"]),
    )


def _charged(shard: ShardSpec, spans: _Spans, place: Place, prices: Prices) -> float:
    """What a shard is charged at least, moves and prices together."""

    def price(moments: Sequence[int]) -> float:
        return sum(prices[t] for t in moments)

    gaps = [price(gap) for gap in spans.gaps]
    stays, travels = sum(gaps), 1 + sum(min(1.0, gap) for gap in gaps)
    here = (
        min(stays, travels) * shard.parameter_bytes
        + min(2.0, price(spans.state)) * shard.state_bytes
        + min(2.0, price(spans.gradients)) * shard.gradient_bytes
    )
    if place == "device":
        return here
    again = 0.0 if spans.again is None else min(1.0, price(spans.again))
    return min(here, (1 + again) * shard.parameter_bytes + shard.gradient_bytes)
