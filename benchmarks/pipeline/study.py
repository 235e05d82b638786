"""Studies whose trials train in stages: what schedules and filled bubbles are worth end to end.

    python benchmarks/pipeline/study.py [--real] [--rounds 3] [--json FILE]

Workers, leases, links, programs and the training are shoal's and real. Kernels take an emulated
device's time, so that four devices do not share this machine's two cores; with ``--real`` there
are two devices that compute as fast as they can. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import common
import shoal
from shoal.core.event import ActionFinished, EmulationMeasured, Event, StepFinished
from shoal.examples.gpt import GPT, next_byte_loss
from shoal.runtime.pool import WorkerPool

DEPTH, CONTEXT, STEPS, SKIPPED = 12, 64, 14, 3
SCALE = 40_000.0  # times slower than the profile: four devices' arithmetic on two cores
WIDTH, ROWS = 64, 4
REAL_WIDTH, REAL_ROWS = 192, 8


@dataclass(slots=True)
class Watched:
    """What a study's events say."""

    computed: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)  # number, time
    behind_s: float = 0.0
    emulated_s: float = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, ActionFinished) and event.stream == "compute":
            self.computed.setdefault(event.device, []).append((event.start, event.end))
        elif isinstance(event, StepFinished):
            self.steps.append((event.step, event.time))
        elif isinstance(event, EmulationMeasured):
            self.behind_s += event.behind_s
            self.emulated_s += event.emulated_s

    def pace(self, trials: int) -> dict[str, float]:
        """Steps a second of all trials together, and the share of time that devices compute.

        From the moment when all have done their first steps to the first one's end.
        """
        begin = max(at for step, at in self.steps if step == SKIPPED)
        end = min(at for step, at in self.steps if step == STEPS)
        done = sum(begin < at <= end for _, at in self.steps)
        shift = max(at for _, at in self.steps) - max(
            e for s in self.computed.values() for _, e in s
        )
        inside = sum(
            max(0.0, min(stop + shift, end) - max(start + shift, begin))
            for spans in self.computed.values()
            for start, stop in spans
        )
        behind = {"behind": self.behind_s / self.emulated_s} if self.emulated_s else {}
        busy = inside / (end - begin) / len(self.computed)
        return {"steps_per_s": done / (end - begin), "busy": busy, **behind}


def model(width: int, hp: Any) -> GPT:
    return GPT(width=width, depth=DEPTH, heads=2, context=CONTEXT, dropout=0.0)


def data(rows: int, micros: int, hp: Any) -> tuple[list[tuple[Tensor, Tensor]], None]:
    generator = torch.Generator().manual_seed(0)
    shape = (rows, CONTEXT + 1)
    windows = [torch.randint(0, 256, shape, generator=generator) for _ in range(8 * micros)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in windows], None


def recipe_of(micros: int, real: bool) -> shoal.Recipe:
    width, rows = (REAL_WIDTH, REAL_ROWS) if real else (WIDTH, ROWS)
    return shoal.Recipe(
        model=functools.partial(model, width),
        data=functools.partial(data, rows, micros),
        loss=next_byte_loss,
        accumulate=micros,
    )


def train(
    pool: WorkerPool, technique: Any, *, devices: int, micros: int, trials: int, real: bool
) -> dict[str, float]:
    """One study; its pace."""
    watched = Watched()
    memory = "2GiB"
    hardware = (
        shoal.Hardware.virtual(devices, memory=memory)
        if real
        else shoal.Hardware.emulated("rtx4090", devices, memory, SCALE)
    )
    with tempfile.TemporaryDirectory() as directory:
        shoal.Study(
            "pipeline",
            recipe_of(micros, real),
            space=shoal.grid(lr=[1e-3 * (number + 1) for number in range(trials)]),
            steps=STEPS,
            metric="train_loss",
            directory=directory,
        ).run(
            hardware=hardware,
            technique=technique,
            callbacks=[watched],
            progress=False,
            workers=pool,
        )
    return watched.pace(trials)


def staged(schedule: str, stages: int) -> shoal.Pipelined:
    return shoal.Pipelined(schedule=schedule, stages=stages, recompute=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    asked = parser.parse_args()
    devices, micros = (2, 4) if asked.real else (4, 4)
    begun = common.facts()
    with WorkerPool() as pool:
        pool.warm(devices)
        run = functools.partial(train, pool, devices=devices, micros=micros, real=asked.real)
        arms: dict[str, Callable[[], dict[str, float]]] = {
            name: functools.partial(run, staged(name, devices), trials=1)
            for name in ("naive", "gpipe", "flush", "zb-h1", "2bw")
        }
        for trials in (2, 3):
            arms[f"flush, {trials} trials at once"] = functools.partial(
                run, staged("flush", devices), trials=trials
            )
        found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for _ in range(asked.rounds):
            for name, arm in arms.items():
                found[name].append(arm())
                print(name, found[name][-1], file=sys.stderr, flush=True)
    rows = {
        name: {key: common.spread([one[key] for one in runs]) for key in runs[0]}
        for name, runs in found.items()
    }
    best = {name: row["steps_per_s"]["max"] for name, row in rows.items()}
    ratios = {
        "2bw over naive": best["2bw"] / best["naive"],
        "2bw over flush": best["2bw"] / best["flush"],
        "zb-h1 over flush": best["zb-h1"] / best["flush"],
        "two filled over one flush": best["flush, 2 trials at once"] / best["flush"],
        "three filled over one flush": best["flush, 3 trials at once"] / best["flush"],
    }
    result = {"load_before": begun["load"], "devices": devices, "micro_batches": micros}
    result["rounds"] = asked.rounds
    common.finish({**result, "real": asked.real, "rows": rows, "ratios": ratios}, asked.json)


if __name__ == "__main__":
    main()
