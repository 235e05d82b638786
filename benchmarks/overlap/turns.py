"""Which of the trials of a device should go first: rules replayed on mixes of many kinds.

    python benchmarks/overlap/turns.py [--mixes 100] [--kinds equal few] [--json FILE]

Replays, no device. For each kind of mix what other rules take, in times of the usual one, and what
the planner's choice among its rules comes to. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import paper
from chunks import Trial

import common
from shoal.core.profile import PROFILES, Profile
from shoal.core.seams import Candidate, UnitPolicy
from shoal.core.turns import DEFAULT, RULES
from shoal.core.units import Seconds
from shoal.memory import chunks
from shoal.planner.keep import ALIKE
from shoal.planner.price import MIX_STEPS
from shoal.program import replay as replays
from shoal.program.replay import Run, replay
from shoal.spill.generate import spilled_step

LONGEST = 6  # the most steps of a trial of a mix, in times of the fewest
LATER = 3  # what is planned is judged by so many times the steps that are replayed for it,
OFF = 0.1  # with each cost wrong by up to so much
PLANNED = "as planned"


# -- mixes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Trials of one device, how many at a time, and how many steps each has beside the others."""

    runs: tuple[Run, ...]
    times: tuple[float, ...]
    places: int

    def with_steps(self, least: int) -> list[Run]:
        return [
            replace(run, steps=max(1, round(least * times)))
            for run, times in zip(self.runs, self.times, strict=True)
        ]


def equal(draw: random.Random, profile: Profile, count: int) -> tuple[list[Trial], list[float]]:
    return [_trial(draw, profile)] * count, [1.0] * count


def lengths(draw: random.Random, profile: Profile, count: int) -> tuple[list[Trial], list[float]]:
    return [_trial(draw, profile)] * count, [draw.uniform(1, 4) for _ in range(count)]


def bound(draw: random.Random, profile: Profile, count: int) -> tuple[list[Trial], list[float]]:
    """Every second one is bound by the host's memory, the others by the device."""
    doubled = [draw.uniform(-2.5, -1) if n % 2 else draw.uniform(1, 2.5) for n in range(count)]
    return [_trial(draw, profile, doubled=d) for d in doubled], []


def long(draw: random.Random, profile: Profile, count: int) -> tuple[list[Trial], list[float]]:
    """One has 3 to 8 times as much to do as each of the others."""
    seconds = [draw.uniform(3, 8), *(draw.uniform(0.7, 1.3) for _ in range(count - 1))]
    draw.shuffle(seconds)
    return [_trial(draw, profile) for _ in range(count)], seconds


def alike(draw: random.Random, profile: Profile, count: int) -> tuple[list[Trial], list[float]]:
    """Each has about as much to do."""
    seconds = [draw.uniform(1, 2) for _ in range(count)]
    return [_trial(draw, profile) for _ in range(count)], seconds


def steps(draw: random.Random, profile: Profile, count: int) -> tuple[list[Trial], list[float]]:
    """Each has as many steps, as in a study that ends after steps."""
    return [_trial(draw, profile) for _ in range(count)], []


def few(draw: random.Random, profile: Profile, count: int) -> tuple[list[Trial], list[float]]:
    """Few large shards."""
    trials = [
        replace(_trial(draw, profile, depth=draw.randint(2, 4)), blocks=draw.choice([1, 4, 16]))
        for _ in range(count)
    ]
    return trials, [draw.uniform(1, 2) for _ in range(count)]


Draw = Callable[[random.Random, Profile, int], tuple[list[Trial], list[float]]]
KINDS: Mapping[str, Draw] = {
    "equal": equal,
    "lengths": lengths,
    "bound": bound,
    "link": alike,
    "long": long,
    "alike": alike,
    "steps": steps,
    "few": few,
    "device": alike,
}


def _trial(
    draw: random.Random, profile: Profile, *, doubled: float | None = None, depth: int = 0
) -> Trial:
    """``doubled``: how often its tokens are twice those for which host and device are as busy."""
    doubled = draw.uniform(-2, 2) if doubled is None else doubled
    one = paper.Mixed(
        depth=depth or draw.randint(3, 9),
        width=64 * draw.randint(16, 64),
        tokens=max(1, round(paper.balanced_tokens(profile) * 2**doubled)),
        clip=draw.random() < 0.5,
        steps=1,
    )
    return Trial(one=one)


def mix_of(kind: str, seed: int) -> tuple[Mix, Mix]:
    """With the host's steps in chunks, and in one piece."""
    draw = random.Random(f"{kind} {seed}")
    profile = PROFILES[draw.choice(["h200", "rtx4090"])]
    if kind == "link":
        by = 2 ** draw.uniform(1, 4)
        up, down = profile.up_bytes_per_s / by, profile.down_bytes_per_s / by
        profile = replace(profile, up_bytes_per_s=up, down_bytes_per_s=down, both_bytes_per_s=None)
    count = draw.randint(2, 6)
    trials, seconds = KINDS[kind](draw, profile, count)
    places = draw.randint(2, min(4, count))
    on_device = [kind == "device" and draw.random() < 0.5 for _ in trials]
    cut, whole = (
        tuple(
            _on_the_device(trial, profile) if there else trial.run(profile, least_s, 0)
            for trial, there in zip(trials, on_device, strict=True)
        )
        for least_s in (chunks.CHUNK_S, None)
    )
    counts = [
        wanted / paper.demand(run.program, run.costs[0]).roofline_s
        for wanted, run in zip(seconds, whole, strict=bool(seconds))
    ] or [1.0] * count
    times = tuple(min(LONGEST, each / min(counts)) for each in counts)
    return (
        Mix(runs=cut, times=times, places=places),
        Mix(runs=whole, times=times, places=places),
    )


def _on_the_device(trial: Trial, profile: Profile) -> Run:
    one = trial.one
    program = spilled_step(one.depth, clip=one.clip, optimizer="device", lookahead=1)
    return Run(program=program, costs={0: paper.device_costs(one.shards(profile), profile)})


def measured_wrong(mix: Mix, seed: str) -> Mix:
    """The same, with what it takes in truth."""
    draw = random.Random(seed)

    def off() -> float:
        return draw.uniform(1 - OFF, 1 + OFF)

    def in_truth(run: Run) -> Run:
        costs = run.costs[0]
        shards = tuple(
            replace(
                shard,
                forward_s=Seconds(shard.forward_s * off()),
                backward_s=Seconds(shard.backward_s * off()),
                step_s=Seconds(shard.step_s * off()),
            )
            for shard in costs.shards
        )
        up, down = costs.up_bytes_per_s * off(), costs.down_bytes_per_s * off()
        wrong = replace(costs, shards=shards, up_bytes_per_s=up, down_bytes_per_s=down)
        return replace(run, costs={0: wrong})

    return replace(mix, runs=tuple(map(in_truth, mix.runs)))


# -- rules that the planner does not have -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """A candidate, and what else a rule might ask for.

    ``unit_s``: of what would run; ``alone_s``: of a step of its trial by itself; ``scarce_s``: of
    a step on the resource that all trials together need most.
    """

    one: Candidate
    unit_s: float
    alone_s: float
    scarce_s: float

    @property
    def steps(self) -> float:
        return self.one.remaining_s / self.one.step_s if self.one.step_s else 0.0


Rank = Callable[[Known, Sequence[Known]], tuple[float, ...]]
"""Who ranks least goes first; of those alike who has waited longest."""


def by_left(each_s: Callable[[Known], float], grain: float = 1.0) -> Rank:
    """Most left first, by what a step takes of something, in whole steps of the longest."""

    def rank(known: Known, ready: Sequence[Known]) -> tuple[float, ...]:
        quantum_s = grain * max(map(each_s, ready)) or 1.0
        return -round(known.steps * each_s(known) / quantum_s), known.one.ticket

    return rank


_RANDOM = random.Random(0)
OTHERS: Mapping[str, Rank] = {
    "longest left, two steps": by_left(lambda known: known.one.step_s, 2.0),
    "longest alone": by_left(lambda known: known.alone_s),
    "longest on the scarce": by_left(lambda known: known.scarce_s),
    "oldest step": lambda known, _: (known.one.ticket,),
    "shortest left": lambda known, _: (known.one.remaining_s, known.one.ticket),
    "shortest unit": lambda known, _: (known.unit_s, known.one.ticket),
    "first come": lambda known, _: (),
    "at random": lambda known, _: (_RANDOM.random(),),
}


class _Ranked(replays._Replay):
    """The replay with one of those."""

    def __init__(self, runs: Sequence[Run], active: int, rank: Rank) -> None:
        numbered = [replace(run, trial=number) for number, run in enumerate(runs)]
        super().__init__(numbered, RULES[DEFAULT], None, False, active)
        self._rank = rank
        self._unit_s: dict[int, float] = {}  # of the trials that are asked about
        demands = [paper.demand(run.program, run.costs[0]) for run in runs]
        whole = paper.total(d.times(run.steps) for d, run in zip(demands, runs, strict=True))
        scarce = whole.index(max(whole))
        self._scarce_s = [demand[scarce] for demand in demands]
        self._alone_s = [_alone_s(run) for run in runs]

    def _offer(self, lane: Any, round_: Any) -> None:
        self._unit_s[lane.trial] = lane.lines[lane.head].seconds
        super()._offer(lane, round_)

    def _next_of(self, waiting: Sequence[Any]) -> int:
        before = dict(self._unit_s)
        for lane, name in waiting:
            line = lane.lines[lane.queues[name][0][1]]
            self._unit_s[lane.trial] = line.chunks[lane.chunk] if line.chunks else line.seconds
        chosen = super()._next_of(waiting)
        self._unit_s = before
        return chosen

    def _choose(self, candidates: Sequence[Candidate]) -> int:
        ready = [
            Known(
                one,
                self._unit_s[one.trial],
                self._alone_s[one.trial],
                self._scarce_s[one.trial],
            )
            for one in candidates
        ]
        return min(range(len(ready)), key=lambda index: self._rank(ready[index], ready))


def _alone_s(run: Run) -> float:
    """What a step takes where the trial is alone: the last of three."""
    two, three = (
        replay([replace(run, steps=count)], keep_spans=False).makespan_s for count in (2, 3)
    )
    return three - two


# -- what they take -----------------------------------------------------------------------


def by_rule(mix: Mix, rule: UnitPolicy, least: int = MIX_STEPS) -> float:
    """Seconds."""
    numbered = [replace(run, trial=n) for n, run in enumerate(mix.with_steps(least))]
    return replay(numbered, policy=rule, keep_spans=False, active=mix.places).makespan_s


def by_rank(mix: Mix, rank: Rank) -> float:
    ranked = _Ranked(mix.with_steps(MIX_STEPS), mix.places, rank)
    ranked.run()
    return ranked.timeline().makespan_s


def play(kind: str, seed: int) -> dict[str, float]:
    """What a mix takes by each rule, in times of the usual one; and by the planner's choice."""
    cut, whole = mix_of(kind, seed)
    usual_s, whole_s = by_rule(cut, RULES[DEFAULT]), by_rule(whole, RULES[DEFAULT])
    mix = cut
    if whole_s * ALIKE <= usual_s:  # as planning/sharing.py has it
        mix, usual_s = whole, whole_s
    took = {name: by_rule(mix, rule) / usual_s for name, rule in RULES.items() if name != DEFAULT}
    best = min(took, key=took.__getitem__)
    took |= {name: by_rank(mix, rank) / usual_s for name, rank in OTHERS.items()}
    is_taken = took[best] * ALIKE <= 1
    return took | {PLANNED: _in_truth(mix, best, f"{kind} {seed}") if is_taken else 1.0}


def _in_truth(mix: Mix, rule: str, seed: str) -> float:
    """In times of the usual rule; both know what was planned, and things take what they take."""
    truth = measured_wrong(mix, seed)

    def took_s(name: str) -> float:
        device, on_paper = (
            replays._Replay(
                [replace(r, trial=n) for n, r in enumerate(one.with_steps(LATER * MIX_STEPS))],
                *(RULES[name], None, False, one.places),
            )
            for one in (truth, mix)
        )
        for lane, planned in zip(device._lanes, on_paper._lanes, strict=True):
            lane.step_s = planned.step_s
        device.run()
        return device.timeline().makespan_s

    return took_s(rule) / took_s(DEFAULT)


def describe(found: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """By rule; ``best by``: the part of the mixes where it is, and where no other one here is."""
    least = [min(v for name, v in one.items() if name != PLANNED) for one in found]
    described = {}
    for name in found[0]:
        values = [one[name] for one in found]
        bests = [v for v, most in zip(values, least, strict=True) if v <= most]
        described[name] = {
            "median": median(values),
            "quickest": min(values),
            "slowest": max(values),
            **_parts("quicker by", [1 / v for v in values], len(values)),
            **_parts("slower by", values, len(values)),
        }
        if name != PLANNED:
            described[name] |= _parts("best by", [1 / v for v in bests], len(values))
    taken = [one[PLANNED] for one in found if one[PLANNED] != 1.0]
    described[PLANNED] |= {"taken": len(taken) / len(found), "mean": mean(taken or [1.0])}
    return described


def _parts(words: str, times: Sequence[float], count: int) -> dict[str, float]:
    """How many of so many are more than a little above 1."""
    return {f"{words} {p:.1%}": sum(t > 1 + p for t in times) / count for p in (0.002, 0.02)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixes", type=int, default=100, help="of each kind")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    found = {kind: [play(kind, seed) for seed in range(options.mixes)] for kind in options.kinds}
    every = [one for some in found.values() for one in some]
    results = {kind: describe(some) for kind, some in {**found, "all": every}.items()}
    for kind, rows in results.items():
        print(kind)
        for name, row in rows.items():
            values = "  ".join(f"{key} {value:.3f}" for key, value in row.items())
            print(f"  {name:26}{values}")
    common.finish({"mixes": options.mixes, "kinds": results}, options.json)


if __name__ == "__main__":
    main()
