"""What is replayed: the device on paper, other rules as programs, random mixes. Pure.

[Note: what is added to the replay]
``shoal.program.replay`` gives every direction of the link its full speed. An emulated device has
a link whose directions may share. That is added here, as ``device/emulated.py`` has it: a copy
that begins while the other direction is busy takes ``slower`` times as long.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, log2
from typing import NamedTuple

from shoal.core.profile import Profile
from shoal.core.spec import ShardSpec
from shoal.core.turns import DEFAULT, RULES, rule_of
from shoal.core.units import Bytes, Seconds
from shoal.device.flops import host_step_bytes, step_bytes
from shoal.planner.keep import ALIKE
from shoal.planner.price import mix_s
from shoal.planning.sharing import WORTH
from shoal.program import replay as replays
from shoal.program.costs import JobCosts, action_seconds
from shoal.program.ir import Action, Op, Part, Program, parse_action, single
from shoal.program.needs import computes
from shoal.program.replay import Run, Span
from shoal.spill.generate import spilled_step

PARAM, STATE, GRAD = Part.PARAM, Part.STATE, Part.GRAD
FP32 = 4  # bytes


# -- costs --------------------------------------------------------------------------------


def host_costs(shards: Sequence[ShardSpec], profile: Profile) -> JobCosts:
    """What the interpreter gives an emulated device for a trial that steps on the host."""
    stepping = (
        replace(shard, step_s=profile.host_seconds(host_step_bytes(shard))) for shard in shards
    )
    return _costs(stepping, profile)


def device_costs(shards: Sequence[ShardSpec], profile: Profile) -> JobCosts:
    """The same where it steps on the device."""
    stepping = (
        replace(shard, step_s=profile.memory_seconds(step_bytes(shard))) for shard in shards
    )
    return _costs(stepping, profile)


def _costs(shards: Iterable[ShardSpec], profile: Profile) -> JobCosts:
    return JobCosts(
        shards=tuple(shards),
        up_bytes_per_s=profile.up_bytes_per_s,
        down_bytes_per_s=profile.down_bytes_per_s,
    )


def slower(profile: Profile) -> float:
    """How many times longer a copy takes while the other direction is busy."""
    if profile.both_bytes_per_s is None:
        return 1.0
    one_way = profile.up_bytes_per_s + profile.down_bytes_per_s
    return max(1.0, one_way / profile.both_bytes_per_s)


class Demand(NamedTuple):
    """Seconds that something keeps each resource of a device busy."""

    compute: float = 0.0
    up: float = 0.0
    down: float = 0.0
    host: float = 0.0

    @property
    def roofline_s(self) -> float:
        """No schedule takes less: the busiest resource is never idle."""
        return max(self)

    def times(self, count: float) -> Demand:
        return Demand(*(count * seconds for seconds in self))


def total(demands: Iterable[Demand]) -> Demand:
    """What several need together."""
    return Demand(*map(sum, zip(*demands, strict=True)))


def demand(program: Program, costs: JobCosts) -> Demand:
    """What one run of a program needs of a device."""
    seconds = dict.fromkeys(Demand._fields, 0.0)
    for action in program:
        stream = _stream(action)
        if stream is not None:
            seconds[stream] += action_seconds(action, costs)
    return Demand(**seconds)


def _stream(action: Action) -> str | None:
    if computes(action):
        return "compute"
    return {Op.LOAD: "up", Op.STORE: "down", Op.STEP: "host"}.get(action.op)


# -- the device on paper ------------------------------------------------------------------


class _Paper(replays._Replay):
    """The replay, with a shared link."""

    def __init__(
        self, runs: Sequence[Run], active: int, slowdown: float, rule: str = DEFAULT
    ) -> None:
        super().__init__(runs, rule_of(rule), None, True, active)
        self._slowdown = slowdown

    def _start(self, lane: replays._Lane, round_: replays._Round, index: int) -> None:
        line = lane.lines[index]
        if line.stream not in ("up", "down"):
            super()._start(lane, round_, index)
            return
        other = lane.device.links.get("down" if line.stream == "up" else "up")
        if other is None or not other.busy:
            super()._start(lane, round_, index)
            return
        alone_s = line.seconds
        line.seconds = alone_s * self._slowdown
        super()._start(lane, round_, index)
        line.seconds = alone_s


def on_paper(
    runs: Sequence[Run],
    profile: Profile,
    *,
    active: int | None = None,
    rule: str = DEFAULT,
) -> tuple[Span, ...]:
    """What happens when on a device of this profile, by the rules of the note above."""
    paper = _Paper(runs, len(runs) if active is None else active, slower(profile), rule)
    paper.run()
    return paper.timeline().spans


# -- how busy a device is -----------------------------------------------------------------


class Piece(NamedTuple):
    """Work of a trial on the compute stream: when, and how long the profile says it takes."""

    trial: int
    op: Op
    start_s: float
    end_s: float
    work_s: float


class Pace(NamedTuple):
    """How fast a device went while ``active`` trials were on it.

    ``steps`` are those of one trial's length: so much work over the seconds of a step.
    """

    busy: float  # fraction
    steps_per_s: float
    seconds: float


def pieces_of(spans: Iterable[Span]) -> list[Piece]:
    """The compute stream of a replay."""
    return [
        Piece(s.trial, s.action.op, s.start_s, s.end_s, s.end_s - s.start_s)
        for s in spans
        if s.stream == "compute"
    ]


def work_seconds(text: str, shards: Sequence[ShardSpec]) -> float:
    """How long the profile says an F or B takes, given in its text form; 0 for all else."""
    action = parse_action(text)
    shard = shards[action.shard]
    return {Op.F: shard.forward_s, Op.B: shard.backward_s}.get(action.op, 0.0)


def pace(pieces: Sequence[Piece], *, active: int, step_s: float, warm_up: int = 2) -> Pace:
    """Over all the time in which just ``active`` trials were in the midst of their steps.

    A trial is from the end of the compute of step ``warm_up`` to the end of that of its last
    step. SYNC is where a step's compute ends, so every step clips. ``step_s`` is what a step
    computes.
    """
    ends: dict[int, list[float]] = {}
    for piece in pieces:
        if piece.op is Op.SYNC:
            ends.setdefault(piece.trial, []).append(piece.end_s)
    stays = [(sorted(times)[warm_up - 1], max(times)) for times in ends.values()]
    moments = sorted({moment for stay in stays for moment in stay})
    seconds = work = 0.0
    for begin, end in itertools.pairwise(moments):
        if sum(first <= begin and end <= last for first, last in stays) == active:
            seconds += end - begin
            work += sum(_inside(piece, begin, end) for piece in pieces)
    if not seconds:
        raise ValueError(f"there was no time in which {active} trials were past step {warm_up}")
    return Pace(work / seconds, work / step_s / seconds, seconds)


def _inside(piece: Piece, begin: float, end: float) -> float:
    """The part of a piece's work that lies between two moments."""
    length = piece.end_s - piece.start_s
    shared = min(piece.end_s, end) - max(piece.start_s, begin)
    return piece.work_s * shared / length if shared > 0 and length > 0 else 0.0


# -- other rules --------------------------------------------------------------------------


class _Visit(NamedTuple):
    """A unit of a shard, and what comes before it and leaves after it."""

    shard: int
    computes: tuple[Action, ...]
    loads: tuple[Part, ...]
    stores: tuple[Part, ...]


def hydra_step(num_shards: int, *, everything: bool) -> Program:
    """Hydra's rule: a shard comes and goes with every unit, written back whatever it did.

    Clipped, with the step on the device, two slots. ``everything``: parameters, state, and
    gradients where there are any, at every unit; else only what the unit uses.
    """
    here = (PARAM, STATE) if everything else (PARAM,)
    last = num_shards - 1
    visits = [_Visit(s, (Action(Op.F, s, 0),), here, here) for s in range(last)]
    for shard in reversed(range(num_shards)):
        visits.append(_Visit(shard, (Action(Op.B, shard, 0),), here, (*here, GRAD)))
    visits[-1] = visits[-1]._replace(computes=(*visits[-1].computes, Action(Op.SYNC)))
    for shard in range(num_shards):
        step = (Action(Op.STEP, shard),)
        visits.append(_Visit(shard, step, (PARAM, STATE, GRAD), (PARAM, STATE)))
    return single(_buffered(visits))


def _buffered(visits: Sequence[_Visit]) -> Iterable[Action]:
    """Each visit's load before the unit of the visit before, unless that has the same shard."""
    early = [
        index for index in range(1, len(visits)) if visits[index - 1].shard != visits[index].shard
    ]
    for index, visit in enumerate(visits):
        if index not in early:
            yield Action(Op.LOAD, visit.shard, parts=visit.loads)
        if index + 1 in early:
            following = visits[index + 1]
            yield Action(Op.LOAD, following.shard, parts=following.loads)
        yield from visit.computes
        yield Action(Op.STORE, visit.shard, parts=visit.stores)
        made = {GRAD} if GRAD in visit.stores else set()
        here = (*visit.loads, *made) if GRAD not in visit.loads else (PARAM, STATE)
        yield Action(Op.DROP, visit.shard, parts=tuple(here))


# -- mixes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """One trial of a mix: a transformer, its tokens a step, and whether it clips."""

    depth: int
    width: int
    tokens: int
    clip: bool
    steps: int

    def shards(self, profile: Profile) -> tuple[ShardSpec, ...]:
        """One block a shard; 12 width^2 parameters, 2 FLOPs a token and parameter forward."""
        parameters = 12 * self.width**2
        size = Bytes(FP32 * parameters)
        forward_s = profile.kernel_seconds(2 * parameters * self.tokens)
        none = Bytes(0)
        return tuple(
            ShardSpec(
                index=index,
                layers=(index, index + 1),
                parameter_bytes=size,
                owned_bytes=size,
                state_bytes=Bytes(2 * size),
                gradient_bytes=size,
                boundary_bytes=none,
                carry_bytes=none,
                forward_peak_bytes=none,
                backward_peak_bytes=none,
                step_peak_bytes=none,
                forward_s=forward_s,
                backward_s=Seconds(3 * forward_s),
                step_s=Seconds(0.0),
            )
            for index in range(self.depth)
        )

    def program(self) -> Program:
        return spilled_step(self.depth, clip=self.clip, optimizer="host", lookahead=1)

    def costs(self, profile: Profile) -> JobCosts:
        return host_costs(self.shards(profile), profile)

    def demand(self, profile: Profile) -> Demand:
        """Of one step."""
        return demand(self.program(), self.costs(profile))


def balanced_tokens(profile: Profile) -> float:
    """Tokens a step for which the host's step takes as long as the kernels, in float32.

    8 FLOPs a token and parameter with recomputing, 40 bytes a parameter of host memory.
    """
    return 40 / profile.host_bytes_per_s * profile.fp32_flops_per_s / 8


def random_mix(seed: int, profile: Profile, *, trials: int = 6, length_s: float) -> list[Mixed]:
    """Trials of different depths, widths and tokens, half of them clipping or so.

    Tokens from a quarter of ``balanced_tokens`` to four times that. Each takes as many steps
    as fill between one and two ``length_s`` of its own busiest resource.
    """
    draw = random.Random(seed)
    drawn = []
    for _ in range(trials):
        one = Mixed(
            depth=draw.randint(8, 40),
            width=64 * draw.randint(16, 64),
            tokens=round(balanced_tokens(profile) * 2 ** draw.uniform(-log2(4), log2(4))),
            clip=draw.random() < 0.5,
            steps=1,
        )
        wanted_s = draw.uniform(1, 2) * length_s
        steps = max(3, round(wanted_s / one.demand(profile).roofline_s))
        drawn.append(replace(one, steps=steps))
    return drawn


class Planned(NamedTuple):
    """How many of a mix at a time, and by which rule."""

    places: int
    rule: str


def planned(mix: Sequence[Mixed], profile: Profile, *, least: int = 3) -> Planned:
    """What the planner would choose, where all fit."""
    runs = [
        Run(program=one.program(), costs={0: one.costs(profile)}, steps=one.steps) for one in mix
    ]
    best, best_s = Planned(least, DEFAULT), inf
    for count in range(least, len(mix) + 1):
        taken = {rule: mix_s(runs, count, rule) for rule in RULES}
        rule = min(RULES, key=taken.__getitem__)
        if taken[rule] * ALIKE > taken[DEFAULT]:
            rule = DEFAULT
        priced_s = taken[rule] * (1 if rule == DEFAULT else ALIKE)
        if priced_s * (WORTH if best_s < inf else 1) < best_s:
            best, best_s = Planned(count, rule), priced_s
    return best


class MixPace(NamedTuple):
    """How near a mix comes to its roofline: altogether, and until a place stays empty."""

    whole: float
    full: float


def in_turn(mix: Sequence[Mixed], profile: Profile, active: int) -> list[Mixed]:
    """The order in which a study on one device gives places: as numbered, then the longest."""

    def predicted_s(trial: Mixed) -> float:
        needs = trial.demand(profile)
        return trial.steps * (needs.compute + needs.host)

    return [*mix[:active], *sorted(mix[active:], key=predicted_s, reverse=True)]


def replay_mix(
    mix: Sequence[Mixed], profile: Profile, *, active: int, rule: str = DEFAULT
) -> MixPace:
    """The roofline of the mix over what it takes with ``active`` trials at a time."""
    runs = [
        Run(program=m.program(), costs={0: m.costs(profile)}, steps=m.steps, trial=number)
        for number, m in enumerate(in_turn(mix, profile, active))
    ]
    return pace_of_mix(works_of(on_paper(runs, profile, active=active, rule=rule), profile))


class Work(NamedTuple):
    """What a trial had of a resource: when, and how long the profile says it takes."""

    trial: int
    stream: str
    start_s: float
    end_s: float
    work_s: float


def works_of(spans: Iterable[Span], profile: Profile) -> list[Work]:
    """All of a replay."""
    found = []
    for span in spans:
        if span.stream in Demand._fields:
            work_s = span.end_s - span.start_s
            if span.stream in ("up", "down"):  # slower while the other direction is busy
                work_s = profile.link_seconds(span.moved, span.stream)
            found.append(Work(span.trial, span.stream, span.start_s, span.end_s, work_s))
    return found


def pace_of_mix(works: Sequence[Work], places: int | None = None) -> MixPace:
    """From the first of it to the last, and to when a trial ends and no other waits.

    ``places``: trials wait until all but so many have ended; None: until all have begun, which
    is sooner where a place is given on before a trial's end.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for work in works:
        begins[work.trial] = min(begins.get(work.trial, inf), work.start_s)
        ends[work.trial] = max(ends.get(work.trial, 0.0), work.end_s)
    begin_s, end_s = min(begins.values()), max(ends.values())
    if places is None:
        full_s = min(end for end in ends.values() if end >= max(begins.values()))
    else:
        full_s = sorted(ends.values())[len(ends) - places]
    whole, done = done_by(works, end_s), done_by(works, full_s)
    return MixPace(whole.roofline_s / (end_s - begin_s), done.roofline_s / (full_s - begin_s))


def done_by(works: Iterable[Work], until_s: float) -> Demand:
    """What was needed of each resource for what was done until a moment."""
    seconds = dict.fromkeys(Demand._fields, 0.0)
    for work in works:
        length_s = work.end_s - work.start_s
        part = min(1.0, (until_s - work.start_s) / length_s) if length_s else 1.0
        if work.start_s < until_s:
            seconds[work.stream] += part * work.work_s
    return Demand(**seconds)
