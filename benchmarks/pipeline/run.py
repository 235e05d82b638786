"""One model over several stages: what is each schedule worth, and does paper say so before?

    python benchmarks/pipeline/run.py [--rounds 1] [--json FILE]

Kernels are slept, everything else is real: processes, programs, messages over gloo, waits. See
README.md beside this file.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from emulate import Kernels, run_ours, run_torch

import common
from shoal.core.technique import Schedule
from shoal.core.units import Seconds
from shoal.pipeline.processes import StageProcesses
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.stage import Ran
from shoal.program.costs import JobCosts
from shoal.program.ir import Action, Op
from shoal.program.replay import Run, replay
from shoal.testing import make_shard

KERNELS = Kernels(forward_s=0.03, inputs_s=0.03, weights_s=0.03, step_s=0.006, boundary=16384)
ARMS: tuple[Schedule, ...] = ("naive", "gpipe", "flush", "zb-h1", "2bw")
STAGES, STEPS = 4, 10
CALIBRATED, HELD_OUT = (2, 4), 8
BARS = {
    "m=4 2bw over naive": 3.5,
    "m=4 2bw over flush": 1.5,
    "m=8 2bw over flush": 1.25,
    "m=4 flush over torch 1F1B": 0.95,
}


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What a kernel's sleep takes longer, and what a message takes."""

    unit_s: float
    message_s: float


def pipeline(schedule: Schedule, stages: int, micro_batches: int, steps: int) -> Pipeline:
    return Pipeline(schedule=schedule, stages=stages, groups=(micro_batches,) * steps)


def steps_of(schedule: Schedule) -> int:
    """Steps of a naive pipeline do not overlap, so three of them tell as much as ten."""
    return 3 if schedule == "naive" else STEPS


def measured(crew: StageProcesses, what: Pipeline) -> float:
    """Seconds from the first unit to the end of the last, fill and drain included."""
    run = functools.partial(run_ours, pipeline=what, kernels=KERNELS)
    return _whole(crew.run(run, what.stages))


def _whole(ran: Sequence[Sequence[Ran]]) -> float:
    first = min(stage[0].start_s for stage in ran)
    return max(stage[-1].end_s for stage in ran) - first


def on_paper(what: Pipeline, over: Overheads, kernels: Kernels = KERNELS) -> float:
    """The same by replay, with what this machine was found to add."""

    def seconds(action: Action) -> Seconds | None:
        if action.op is Op.SEND:
            return Seconds(over.message_s)
        found = kernels.seconds(action, what.stages)
        return None if found is None else Seconds(found + over.unit_s)

    shards = tuple(make_shard(stage) for stage in range(what.stages))
    run = Run(
        program=what.program(),
        costs={0: JobCosts(shards=shards)},
        devices=tuple(range(what.stages)),
    )
    return replay([run], durations=seconds, keep_spans=False).makespan_s


def fitted(found: Sequence[tuple[Pipeline, float]]) -> Overheads:
    """The two overheads that explain the calibration runs best, in steps of 50 us."""
    grid = [step * 5e-5 for step in range(41)]

    def error(over: Overheads) -> float:
        return sum((on_paper(what, over) / took - 1) ** 2 for what, took in found)

    candidates = [Overheads(unit_s=u, message_s=m) for u in grid[::2] for m in grid[::4]]
    best = min(candidates, key=error)
    near = [Overheads(unit_s=u, message_s=best.message_s) for u in grid]
    return min(near, key=error)


def schedules(crew: StageProcesses, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds a step of every arm, by the number of micro-batches."""
    found: dict[str, dict[str, list[float]]] = {}
    for micros in (STAGES, 2 * STAGES):
        arms: dict[str, Any] = {
            name: functools.partial(_per_step, crew, name, micros) for name in ARMS
        }
        arms["torch 1F1B"] = functools.partial(_torch_per_step, crew, micros)
        found[f"m={micros}"] = common.interleaved(arms, rounds)
    return found


def _per_step(crew: StageProcesses, name: Schedule, micros: int) -> float:
    steps = steps_of(name)
    return measured(crew, pipeline(name, STAGES, micros, steps)) / steps


def _torch_per_step(crew: StageProcesses, micros: int) -> float:
    run = functools.partial(run_torch, micro_batches=micros, steps=STEPS, kernels=KERNELS)
    return _whole(crew.run(run, STAGES)) / STEPS


def prediction(crew: StageProcesses) -> dict[str, Any]:
    """Overheads from two and four stages, and how far eight are from their replay."""
    known = [
        pipeline(name, stages, stages, 6) for stages in CALIBRATED for name in ("flush", "2bw")
    ]
    over = fitted([(what, measured(crew, what)) for what in known])
    rows = {}
    for name in ("flush", "zb-h1", "2bw"):
        what = pipeline(name, HELD_OUT, HELD_OUT, 6)
        took, said = measured(crew, what), on_paper(what, over)
        rows[name] = {"measured_s": took, "replay_s": said, "error": said / took - 1}
    worst = max(abs(row["error"]) for row in rows.values())
    return {
        "unit_overhead_s": over.unit_s,
        "message_s": over.message_s,
        "stages": HELD_OUT,
        "rows": rows,
        "worst_error": worst,
    }


def beside(found: dict[str, dict[str, list[float]]], over: Overheads) -> dict[str, Any]:
    """Medians, with the replay's seconds and the ratios that bars are about."""
    table: dict[str, Any] = {}
    for key, arms in found.items():
        micros = int(key.removeprefix("m="))
        for name, seconds in arms.items():
            row = common.spread(seconds)
            if name in ARMS:
                steps = steps_of(name)
                row["replay"] = on_paper(pipeline(name, STAGES, micros, steps), over) / steps
            table[f"{key} {name}"] = row
    return table


def judged(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Every bar, with what was reached: how many times as quick the first arm is."""
    result = {}
    for name, bar in BARS.items():
        key, fast, _, slow = name.split(maxsplit=3)
        pairs = zip(found[key][slow], found[key][fast], strict=True)
        reached = statistics.median(a / b for a, b in pairs)
        result[name] = {"bar": bar, "reached": reached, "met": reached >= bar}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json")
    asked = parser.parse_args()
    with StageProcesses(HELD_OUT) as crew:
        paper = prediction(crew)
        over = Overheads(unit_s=paper["unit_overhead_s"], message_s=paper["message_s"])
        found = schedules(crew, asked.rounds)
    bars = judged(found)
    bars["8 stages on paper"] = {
        "bar": 0.05,
        "reached": paper["worst_error"],
        "met": paper["worst_error"] <= 0.05,
    }
    result = {"seconds_per_step": beside(found, over), "bars": bars, "paper": paper}
    common.finish(result | {"rounds": asked.rounds}, asked.json)
    sys.exit(0 if all(bar["met"] for bar in bars.values()) else 1)


if __name__ == "__main__":
    main()
