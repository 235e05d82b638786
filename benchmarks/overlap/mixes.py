"""Random mixes of six trials, measured: how near they come to their roofline, and to paper.

    python benchmarks/overlap/mixes.py [--mixes 3] [--profiles h200 rtx4090] [--json FILE]

Studies on emulated devices, as in ``run.py``: the scheduler, the workers, the copies and the
training are real. Each mix is replayed by ``paper.py`` as well, from the plan's own figures. Exits
with 1, and writes nothing, where this machine fell behind. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import paper
from run import Kept, Refused, Watched, behind, together
from workload import CONTEXT, Member, recipe_of_mix

import common
import shoal
from shoal.core.event import ActionFinished
from shoal.core.plan import Job, Plan
from shoal.core.profile import PROFILES, Profile
from shoal.core.spec import TrialSpec
from shoal.device import trouble
from shoal.planning import planner
from shoal.planning.staleness import Staleness, Way
from shoal.program.costs import action_seconds
from shoal.program.ir import parse_action
from shoal.program.replay import Run
from shoal.runtime.pool import WorkerPool
from shoal.spill.generate import spilled_step

TRIALS = 6
TARGET = 0.95
COLUMNS = ("whole", "paper_whole", "full", "paper_full")
MEMORY = "4GiB"  # all six fit
DEPTHS = (8, 40)
TECHNIQUE = shoal.Spilled(optimizer="host", lookahead=1, keep=(), keep_turn=0, recompute=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A profile, slow enough for one core, the widths of its trials, and how long one takes.

    ``length_s``: of a trial's busiest resource, at least; at most twice that.
    """

    profile: str
    scale: float
    widths: tuple[int, int]
    length_s: float

    @property
    def slowed(self) -> Profile:
        return PROFILES[self.profile].slowed(self.scale)


CASES = {
    "h200": Case(profile="h200", scale=12000, widths=(18, 26), length_s=14),
    "rtx4090": Case(profile="rtx4090", scale=12000, widths=(12, 18), length_s=14),
}


def random_mix(seed: int, case: Case) -> list[Member]:
    """As in ``paper.random_mix``; just half of them clip."""
    draw, profile = random.Random(seed), case.slowed
    clips = draw.sample(range(TRIALS), TRIALS // 2)
    found = []
    for number in range(TRIALS):
        one = Member(
            depth=draw.randint(*DEPTHS),
            width=draw.randint(*case.widths),
            windows=1,
            steps=1,
            clip=number in clips,
        )
        balanced = one.host_s(profile) / one.compute_s(profile)
        one = replace(one, windows=max(1, round(balanced * 2 ** draw.uniform(-2, 2))))
        step_s = max(one.host_s(profile), one.compute_s(profile))
        steps = max(3, round(draw.uniform(1, 2) * case.length_s / step_s))
        found.append(replace(one, steps=steps))
    return found


# -- measured -----------------------------------------------------------------------------


@contextmanager
def a_shard_a_block(members: Sequence[Member]) -> Iterator[None]:
    """Have the planner settle each trial in as many shards as its model has blocks.

    A study has one technique for all its trials.
    """

    class ByDepth(Staleness):
        def way_of(self, trial: TrialSpec) -> Way:
            shards = members[int(trial.hp["member"])].depth
            return replace(super().way_of(trial), technique=replace(TECHNIQUE, shards=shards))

    before = planner.Staleness
    planner.Staleness = ByDepth
    try:
        yield
    finally:
        planner.Staleness = before


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A mix, once."""

    mix: tuple[Member, ...]
    plan: Plan
    works: tuple[paper.Work, ...]
    kept: Kept


def train(mix: Sequence[Member], case: Case, pool: WorkerPool) -> Measured:
    """One study of all of them on one emulated device."""
    watched = Watched()
    with tempfile.TemporaryDirectory() as directory, a_shard_a_block(mix):
        shoal.Study(
            "mix",
            recipe_of_mix(mix),
            space=shoal.grid(lr=[1e-3], member=list(range(len(mix)))),
            epochs=1,
            metric="train_loss",
            directory=directory,
        ).run(
            hardware=shoal.Hardware.emulated(case.profile, scale=case.scale, memory=MEMORY),
            technique=TECHNIQUE,
            callbacks=[watched],
            progress=False,
            workers=pool,
        )
        plan = Plan.from_json((Path(directory) / "mix" / "plan.json").read_text())
    works = works_of(watched.actions, plan.jobs, case.slowed)
    return Measured(mix=tuple(mix), plan=plan, works=tuple(works), kept=watched.kept)


def works_of(
    actions: Sequence[ActionFinished], jobs: Sequence[Job], profile: Profile
) -> Iterator[paper.Work]:
    """What was done, with the profile's seconds."""
    costs = {job.trial: paper.host_costs(job.shards, profile) for job in jobs}
    for one in actions:
        if one.stream in paper.Demand._fields:
            work_s = action_seconds(parse_action(one.action), costs[one.trial])
            yield paper.Work(one.trial, one.stream, one.start, one.end, work_s)


# -- on paper -----------------------------------------------------------------------------


def replayed(measured: Measured, profile: Profile) -> list[paper.Work]:
    """The same six jobs, as many at a time and by the same rule, in the order they began in."""
    begins: dict[int, float] = {}
    for work in measured.works:
        begins[work.trial] = min(begins.get(work.trial, work.start_s), work.start_s)
    runs = [
        Run(
            program=spilled_step(len(job.shards), clip=True, optimizer="host", lookahead=1),
            costs={0: paper.host_costs(job.shards, profile)},
            steps=measured.mix[int(job.hp["member"])].steps,
            trial=job.trial,
        )
        for job in sorted(measured.plan.jobs, key=lambda job: begins[job.trial])
    ]
    plan = measured.plan
    spans = paper.on_paper(runs, profile, active=plan.active, rule=plan.rule)
    return paper.works_of(spans, profile)


def result_of(measured: Measured, case: Case) -> dict[str, Any]:
    profile = case.slowed
    on_paper = replayed(measured, profile)
    pace, foreseen = (
        paper.pace_of_mix(works, measured.plan.active) for works in (measured.works, on_paper)
    )
    needs = paper.done_by(measured.works, float("inf"))
    expected = paper.done_by(on_paper, float("inf"))
    if any(abs(a - b) > 1e-6 * b for a, b in zip(needs, expected, strict=True)):
        raise RuntimeError(f"{needs} was done, and the jobs need {expected}")
    return {
        "trials": [
            {
                "depth": one.depth,
                "width": one.width,
                "tokens": CONTEXT * one.windows,
                "clip": one.clip,
                "steps": one.steps,
            }
            for one in measured.mix
        ],
        "places": measured.plan.active,
        "rule": measured.plan.rule,
        "needs_s": needs._asdict(),
        "took_s": length_s(measured.works),
        "paper_took_s": length_s(on_paper),
        "whole": pace.whole,
        "full": pace.full,
        "paper_whole": foreseen.whole,
        "paper_full": foreseen.full,
        "behind": behind(measured.kept),
    }


def length_s(works: Sequence[paper.Work]) -> float:
    return max(work.end_s for work in works) - min(work.start_s for work in works)


# -- the benchmark ------------------------------------------------------------------------


def measure(case: Case, seeds: Sequence[int], pool: WorkerPool) -> list[dict[str, Any]]:
    found, kept = [], []
    for seed in seeds:
        began = time.monotonic()
        measured = train(random_mix(seed, case), case, pool)
        result = {"seed": seed, **result_of(measured, case)}
        print(
            f"  {case.profile}, mix {seed}: {result['places']} at a time, whole "
            f"{result['whole']:.3f} (paper {result['paper_whole']:.3f}), full "
            f"{result['full']:.3f} ({result['paper_full']:.3f}) over {result['took_s']:.0f} s, "
            f"behind {result['behind']:.2%} ({time.monotonic() - began:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
        found.append(result)
        kept.append(measured.kept)
        if why := trouble(together(kept)):
            raise Refused(f"{case.profile}, mix {seed}: {why}")
    return found


def summary(mixes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: common.spread([mix[name] for mix in mixes]) for name in (*COLUMNS, "behind")
    }
    found["over_paper"] = common.spread([mix["whole"] / mix["paper_whole"] for mix in mixes])
    return found


def print_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'over the roofline':<24}" + "".join(f"{name:>13}" for name in COLUMNS))
    for profile, result in results.items():
        rows = [(f"{profile}, mix {mix['seed']}", mix) for mix in result["mixes"]]
        middle = {name: result[name]["median"] for name in COLUMNS}
        for label, row in [*rows, (f"{profile}, median", middle)]:
            print(f"{label:<24}" + "".join(f"{row[name]:>13.3f}" for name in COLUMNS))
        missed = "" if middle["whole"] >= TARGET else ", missed"
        print(f"{'':<24}the target for the whole is {TARGET}{missed}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--profiles", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    try:
        with WorkerPool() as pool:
            for name in options.profiles:
                mixes = measure(CASES[name], range(options.mixes), pool)
                results[name] = {"mixes": mixes, **summary(mixes)}
    except Refused as refused:
        print(f"refused: {refused}", file=sys.stderr)
        return 1
    print_table(results)
    common.finish({"profiles": results}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
