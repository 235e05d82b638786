"""Several spilled trials on one emulated device: does the host's step hide behind kernels?

    python benchmarks/overlap/run.py [--rounds 3] [--json FILE] [--profiles h200 rtx4090]

The scheduler, the programs, the worker, its threads and copies are shoal's and real, and so is
the training; kernels, links and the host's memory take a profile's time. Exits with 1, and
writes nothing, where this machine fell behind those times. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import hydrasrule
import paper
from workload import CASES, CONTEXT, SHARDS, STEPS, Case, recipe_of

import common
import shoal
from shoal.core.event import ActionFinished, EmulationMeasured, Event
from shoal.core.plan import Job, Plan
from shoal.core.profile import PROFILES, Profile
from shoal.core.units import Seconds
from shoal.device import Fidelity, trouble
from shoal.program.ir import Program, parse_action
from shoal.program.replay import Run, replay
from shoal.runtime.pool import WorkerPool
from shoal.spill.generate import spilled_step

TRIALS = 4
HYDRA = 2  # trials at a time that Hydra's rule is given
MEMORY = "64MiB"  # three trials fit
MIX_SEEDS = range(7)
EVERY_TIME = shoal.Spilled(shards=SHARDS, lookahead=1, keep=(), recompute=True)  # a shard travels
TECHNIQUE = dataclasses.replace(EVERY_TIME, optimizer="host", keep_turn=0)
BY_HYDRA = dataclasses.replace(
    EVERY_TIME, optimizer="device", keep_gradients=0, boundaries="device"
)


# -- measured -----------------------------------------------------------------------------


@dataclass(slots=True)
class Watched:
    """What a study's events say."""

    actions: list[ActionFinished] = field(default_factory=list)
    kept: dict[str, Fidelity] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        if isinstance(event, ActionFinished):
            self.actions.append(event)
        elif isinstance(event, EmulationMeasured):
            told = Fidelity(
                works=event.works,
                emulated_s=Seconds(event.emulated_s),
                behind_s=Seconds(event.behind_s),
                overruns=event.overruns,
                overrun_s=Seconds(event.overrun_s),
            )
            self.kept = together([self.kept, {event.stream: told}])

    def pieces(self, job: Job) -> list[paper.Piece]:
        """Those of the compute stream."""
        return [
            paper.Piece(
                a.trial,
                parse_action(a.action).op,
                a.start,
                a.end,
                paper.work_seconds(a.action, job.shards),
            )
            for a in self.actions
            if a.stream == "compute"
        ]


Kept = Mapping[str, Fidelity]
"""How well the machine kept up, by stream."""


def together(several: Iterable[Kept]) -> dict[str, Fidelity]:
    """Their sums, by stream."""
    found: dict[str, Fidelity] = {}
    for kept in several:
        for stream, one in kept.items():
            before = found.get(stream, Fidelity())
            found[stream] = Fidelity(
                works=before.works + one.works,
                emulated_s=Seconds(before.emulated_s + one.emulated_s),
                behind_s=Seconds(before.behind_s + one.behind_s),
                overruns=before.overruns + one.overruns,
                overrun_s=Seconds(before.overrun_s + one.overrun_s),
            )
    return found


def behind(kept: Kept) -> float:
    """The largest share of emulated time by which a stream fell behind."""
    return max((k.behind_s / k.emulated_s for k in kept.values() if k.emulated_s), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An arm, once."""

    pace: paper.Pace
    active: int  # trials on the device at a time, as planned
    whole_busy: float  # from the first step's end to the last one's, changes of trials included
    kept: Kept
    job: Job


def train(
    case: Case,
    recipe: shoal.Recipe,
    pool: WorkerPool,
    *,
    trials: int,
    technique: shoal.Spilled = TECHNIQUE,
) -> Measured:
    """One study on one emulated device."""
    watched = Watched()
    with tempfile.TemporaryDirectory() as directory:
        study_of(recipe, trials, directory).run(
            hardware=hardware_of(case),
            technique=technique,
            callbacks=[watched],
            progress=False,
            workers=pool,
        )
        plan = Plan.from_json((Path(directory) / "overlap" / "plan.json").read_text())
    job = plan.jobs[0]
    pieces, step_s = watched.pieces(job), compute_s(job)
    ends = [piece.end_s for piece in pieces if piece.op is paper.Op.SYNC]
    inside = sum(p.work_s for p in pieces if min(ends) <= p.start_s)
    return Measured(
        pace=paper.pace(pieces, active=plan.active, step_s=step_s),
        active=plan.active,
        whole_busy=inside / (max(ends) - min(ends)),
        kept=watched.kept,
        job=job,
    )


def study_of(recipe: shoal.Recipe, trials: int, directory: str) -> shoal.Study:
    return shoal.Study(
        "overlap",
        recipe,
        space=shoal.grid(lr=[1e-3 * (number + 1) for number in range(trials)]),
        steps=STEPS,
        metric="train_loss",
        directory=directory,
    )


def hardware_of(case: Case) -> shoal.Hardware:
    return shoal.Hardware.emulated(case.profile, scale=case.scale, memory=MEMORY)


def balanced_windows(case: Case, pool: WorkerPool) -> int:
    """Windows a step for which the host's step takes as long as the kernels, as planned."""
    windows = case.about()
    with tempfile.TemporaryDirectory() as directory:
        study = study_of(recipe_of(case, windows), TRIALS, directory)
        plan = study.plan(
            hardware=hardware_of(case), technique=TECHNIQUE, progress=False, workers=pool
        )
    job = plan.jobs[0]
    host_s = sum(s.step_s for s in paper.host_costs(job.shards, case.slowed).shards)
    return max(1, round(windows * host_s / compute_s(job)))


def compute_s(job: Job) -> float:
    """Kernel seconds of a step, by the profile."""
    return sum(s.forward_s for s in job.shards[:-1]) + sum(s.backward_s for s in job.shards)


# -- on paper -----------------------------------------------------------------------------


def predictions(job: Job, profile: Profile, active: int) -> dict[str, Any]:
    """Busy fractions and steps a second by replay, with the costs of the measured job."""
    costs = paper.host_costs(job.shards, profile)
    program = spilled_step(len(job.shards), clip=True, optimizer="host", lookahead=1)
    step_s = paper.demand(program, costs).compute

    def runs(count: int) -> list[Run]:
        return [
            Run(program=program, costs={0: costs}, steps=STEPS, trial=number)
            for number in range(count)
        ]

    found: dict[str, paper.Pace] = {}
    for name, count in (("four trials", active), ("one at a time", 1)):
        shipped = replay(runs(count)).spans
        refined = paper.on_paper(runs(count), profile)
        for way, spans in (("replay", shipped), ("paper", refined)):
            found[f"{name}, {way}"] = paper.pace(
                paper.pieces_of(spans), active=count, step_s=step_s
            )
    alone_s = replay([Run(program=program, costs={0: costs})], keep_spans=False).makespan_s
    found["serial, paper"] = paper.Pace(step_s / alone_s, 1 / alone_s, alone_s)
    for name, everything in (("hydra", True), ("hydra, only what is used", False)):
        for count in (HYDRA, 1):
            found[f"{name}, {count} at a time"] = hydra_on_paper(job, profile, everything, count)
    unshared = dataclasses.replace(profile, both_bytes_per_s=None)
    found[f"hydra, {HYDRA} at a time, links not shared"] = hydra_on_paper(
        job, unshared, True, HYDRA
    )
    return {name: pace._asdict() for name, pace in found.items()}


def hydra_on_paper(job: Job, profile: Profile, everything: bool, count: int) -> paper.Pace:
    program: Program = paper.hydra_step(len(job.shards), everything=everything)
    costs = paper.device_costs(job.shards, profile)
    runs = [
        Run(program=program, costs={0: costs}, steps=STEPS, trial=number)
        for number in range(count)
    ]
    step_s = paper.demand(program, costs).compute
    pieces = paper.pieces_of(paper.on_paper(runs, profile))
    return paper.pace(pieces, active=count, step_s=step_s)


def mixes(profile: Profile) -> dict[str, Any]:
    """How near random mixes come to their roofline, by the number of trials at a time."""
    length_s = 30 * PROFILES["h200"].host_bytes_per_s / profile.host_bytes_per_s
    drawn = [paper.random_mix(seed, profile, length_s=length_s) for seed in MIX_SEEDS]
    found: dict[str, Any] = {}
    for active in (2, 3, 6):
        paces = [paper.replay_mix(mix, profile, active=active) for mix in drawn]
        found[str(active)] = {
            "whole": common.spread([pace.whole for pace in paces]),
            "full": common.spread([pace.full for pace in paces]),
        }
    chosen = [paper.planned(mix, profile) for mix in drawn]
    paces = [
        paper.replay_mix(mix, profile, active=one.places, rule=one.rule)
        for mix, one in zip(drawn, chosen, strict=True)
    ]
    found["as planned"] = {
        "places": [one.places for one in chosen],
        "rules": [one.rule for one in chosen],
        "whole": common.spread([pace.whole for pace in paces]),
        "full": common.spread([pace.full for pace in paces]),
    }
    return found


# -- the benchmark ------------------------------------------------------------------------


class Refused(Exception):
    """This machine did not keep up with the profile's times."""


def rounds_of(
    case: Case, windows: int, count: int, pool: WorkerPool, serial: WorkerPool, other: WorkerPool
) -> dict[str, list[Measured]]:
    """Every arm ``count`` times, in turn. The workers of ``other`` go by Hydra's rule."""
    plain, waiting = recipe_of(case, windows), recipe_of(case, windows, serial=True)

    def by_hydra() -> Measured:
        recipe = recipe_of(case, windows, by_hydra=True)
        with hydrasrule.in_place():
            return train(case, recipe, other, trials=HYDRA, technique=BY_HYDRA)

    arms: dict[str, Callable[[], Measured]] = {
        "four trials": lambda: train(case, plain, pool, trials=TRIALS),
        "one at a time": lambda: train(case, plain, pool, trials=1),
        "serial": lambda: train(case, waiting, serial, trials=1),
        "Hydra's rule": by_hydra,
    }
    found: dict[str, list[Measured]] = {name: [] for name in arms}
    for number in range(count):
        for name, arm in arms.items():
            began, measured = time.monotonic(), arm()
            print(
                f"  {case.profile}, round {number + 1}, {name}: busy {measured.pace.busy:.3f}, "
                f"{measured.pace.steps_per_s:.3f} steps/s over {measured.pace.seconds:.1f} s, "
                f"behind {behind(measured.kept):.2%} ({time.monotonic() - began:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
            found[name].append(measured)
    for name, measures in found.items():
        if why := trouble(together(measured.kept for measured in measures)):
            raise Refused(f"{case.profile}, {name}: {why}")
    return found


def result_of(case: Case, windows: int, found: dict[str, list[Measured]]) -> dict[str, Any]:
    job = found["four trials"][0].job
    profile = case.slowed
    active = found["four trials"][0].active
    foreseen = predictions(job, profile, active)
    costs = paper.host_costs(job.shards, profile)
    program = spilled_step(len(job.shards), clip=True, optimizer="host", lookahead=1)
    needs = paper.demand(program, costs)
    rates = {name: [m.pace.steps_per_s for m in arm] for name, arm in found.items()}
    busy = {name: [m.pace.busy for m in arm] for name, arm in found.items()}

    def over(name: str) -> dict[str, float]:
        return common.spread([r / foreseen[name]["steps_per_s"] for r in rates["four trials"]])

    return {
        "scale": case.scale,
        "at_a_time": active,
        "width": case.width,
        "tokens_a_step": windows * CONTEXT,
        "parameters": sum(shard.owned_bytes for shard in job.shards) // 4,
        "seconds_a_step": needs._asdict(),
        "host_over_compute": needs.host / needs.compute,
        "busy": {name: common.spread(values) for name, values in busy.items()},
        "whole_busy": {
            name: common.spread([m.whole_busy for m in arm]) for name, arm in found.items()
        },
        "steps_per_s": {name: common.spread(values) for name, values in rates.items()},
        "busy_over_replay": common.spread(
            [b / foreseen["four trials, replay"]["busy"] for b in busy["four trials"]]
        ),
        "over_paper": {
            name: common.spread([rate / foreseen[PAPER[name]]["steps_per_s"] for rate in arm])
            for name, arm in rates.items()
        },
        "over_one_at_a_time": common.ratios(rates, "four trials", "one at a time"),
        "over_serial": common.ratios(rates, "four trials", "serial"),
        "hydra_at_a_time": found["Hydra's rule"][0].active,
        "over_hydra": common.ratios(rates, "four trials", "Hydra's rule"),
        "over_hydra_replayed": over("hydra, 2 at a time"),
        "over_hydra_alone": over("hydra, 1 at a time"),
        "over_hydra_unshared": over("hydra, 2 at a time, links not shared"),
        "over_hydra_of_what_is_used": over("hydra, only what is used, 2 at a time"),
        "predicted": foreseen,
        "behind": {name: behind(together(m.kept for m in arm)) for name, arm in found.items()},
        "mixes": mixes(PROFILES[case.profile]),
    }


PAPER = {
    "four trials": "four trials, paper",
    "one at a time": "one at a time, paper",
    "serial": "serial, paper",
    "Hydra's rule": f"hydra, {HYDRA} at a time",
}
"""What each arm comes to there."""

TARGETS = (
    ("busy, four trials", 0.93, lambda r: r["busy"]["four trials"]),
    ("busy over the replay's", 0.95, lambda r: r["busy_over_replay"]),
    ("steps/s over one at a time", 1.55, lambda r: r["over_one_at_a_time"]),
    ("steps/s over a serial optimizer", 1.75, lambda r: r["over_serial"]),
    ("steps/s over Hydra's rule", 3.0, lambda r: r["over_hydra"]),
    ("  replayed", None, lambda r: r["over_hydra_replayed"]),
    ("  one trial at a time", None, lambda r: r["over_hydra_alone"]),
    ("  links not shared", None, lambda r: r["over_hydra_unshared"]),
    ("  only what a unit uses", None, lambda r: r["over_hydra_of_what_is_used"]),
    ("mixes over roofline, as planned", 0.95, lambda r: r["mixes"]["as planned"]["whole"]),
    ("mixes over roofline, 2 at a time", None, lambda r: r["mixes"]["2"]["whole"]),
    ("mixes over roofline, 3 at a time", None, lambda r: r["mixes"]["3"]["whole"]),
    ("mixes over roofline, all 6", None, lambda r: r["mixes"]["6"]["whole"]),
    ("  until a place stays empty, 2", None, lambda r: r["mixes"]["2"]["full"]),
    ("  until a place stays empty, 3", None, lambda r: r["mixes"]["3"]["full"]),
    ("  until a place stays empty, all 6", None, lambda r: r["mixes"]["6"]["full"]),
)


def print_table(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        print(f"\n{name}: {result['tokens_a_step']} tokens a step, scale {result['scale']:.0f}")
        for label, target, pick in TARGETS:
            figures = pick(result)
            spread = f"{figures['min']:.3f} to {figures['max']:.3f}"
            verdict = "" if target is None else f"{target:>6.2f}"
            missed = "" if target is None or figures["median"] >= target else "  missed"
            print(f"{label:<36}{figures['median']:>7.3f}{spread:>18}{verdict}{missed}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--profiles", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    try:
        with WorkerPool() as pool, WorkerPool() as serial, WorkerPool() as other:
            for name in options.profiles:
                case = CASES[name]
                windows = balanced_windows(case, pool)
                found = rounds_of(case, windows, options.rounds, pool, serial, other)
                results[name] = result_of(case, windows, found)
    except Refused as refused:
        print(f"refused: {refused}", file=sys.stderr)
        return 1
    print_table(results)
    common.finish({"rounds": options.rounds, "profiles": results}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
