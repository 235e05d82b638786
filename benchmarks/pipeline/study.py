"""Studies whose trials train in stages: what schedules and filled bubbles are worth end to end.

    python benchmarks/pipeline/study.py [--real | --copies] [--rounds 3] [--json FILE]

Workers, leases, links, programs and the training are shoal's and real. Kernels take an emulated
device's time, so that four devices do not share this machine's two cores; with ``--real`` there
are two devices that compute as fast as they can. ``--copies`` has pipelines that share a step's
micro-batches. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping
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

DEPTH, CONTEXT = 12, 64


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, and on what.

    ``scale``: how many times slower than the profile devices are, so that the arithmetic of all
    of them fits two cores; 0 where they are not emulated.
    """

    width: int
    rows: int  # of a micro-batch
    steps: int
    skipped: int  # steps that do not count
    scale: float


STAGES = Setting(width=64, rows=4, steps=14, skipped=3, scale=40_000.0)
REAL = Setting(width=192, rows=8, steps=14, skipped=3, scale=0.0)


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

    def pace(self, setting: Setting) -> dict[str, float]:
        """Steps a second of all trials together, and the share of time that devices compute.

        From the moment when all have done their first steps to the first one's end.
        """
        begin = max(at for step, at in self.steps if step == setting.skipped)
        end = min(at for step, at in self.steps if step == setting.steps)
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


def recipe_of(setting: Setting, micros: int) -> shoal.Recipe:
    return shoal.Recipe(
        model=functools.partial(model, setting.width),
        data=functools.partial(data, setting.rows, micros),
        loss=next_byte_loss,
        accumulate=micros,
    )


def train(
    pool: WorkerPool,
    technique: Any,
    setting: Setting = STAGES,
    *,
    devices: int,
    micros: int = 4,
    trials: int = 1,
    memory: str = "2GiB",
) -> dict[str, float]:
    """One study; its pace."""
    watched = Watched()
    hardware = (
        shoal.Hardware.emulated("rtx4090", devices, memory, setting.scale)
        if setting.scale
        else shoal.Hardware.virtual(devices, memory=memory)
    )
    with tempfile.TemporaryDirectory() as directory:
        shoal.Study(
            "pipeline",
            recipe_of(setting, micros),
            space=shoal.grid(lr=[1e-3 * (number + 1) for number in range(trials)]),
            steps=setting.steps,
            metric="train_loss",
            directory=directory,
        ).run(
            hardware=hardware,
            technique=technique,
            callbacks=[watched],
            progress=False,
            workers=pool,
        )
    return watched.pace(setting)


def staged(schedule: str, stages: int) -> shoal.Pipelined:
    return shoal.Pipelined(schedule=schedule, stages=stages, recompute=False)


Arms = Mapping[str, Callable[[WorkerPool], dict[str, float]]]


def schedules(devices: int, real: bool) -> Arms:
    """Each schedule by itself, then one whose bubbles other trials fill."""
    run = functools.partial(train, setting=REAL if real else STAGES, devices=devices)
    alone = ("naive", "gpipe", "flush", "zb-h1", "2bw")
    arms = {name: functools.partial(run, technique=staged(name, devices)) for name in alone}
    return arms | {
        f"flush, {trials} trials at once": functools.partial(
            run, technique=staged("flush", devices), trials=trials
        )
        for trials in (2, 3)
    }


def copies() -> Arms:
    """Four devices and eight micro-batches a step: as four stages, or as two copies of two."""
    run = functools.partial(train, devices=4, micros=8)
    return {
        f"{schedule}, {stages} stages, width {width}": functools.partial(
            run,
            technique=shoal.Pipelined(
                schedule=schedule, stages=stages, width=width, recompute=False
            ),
        )
        for schedule in ("flush", "zb-h1", "2bw")
        for stages, width in ((4, 1), (2, 2))
    }


RATIOS = {
    "2bw over naive": ("2bw", "naive"),
    "2bw over flush": ("2bw", "flush"),
    "zb-h1 over flush": ("zb-h1", "flush"),
    "two filled over one flush": ("flush, 2 trials at once", "flush"),
    "three filled over one flush": ("flush, 3 trials at once", "flush"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group()
    for name in ("real", "copies"):
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    asked = parser.parse_args()
    devices = 2 if asked.real else 4
    arms = copies() if asked.copies else schedules(devices, asked.real)
    begun = common.facts()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    with WorkerPool() as pool:
        pool.warm(devices)
        for _ in range(asked.rounds):
            for name, arm in arms.items():
                found[name].append(arm(pool))
                print(name, found[name][-1], file=sys.stderr, flush=True)
    rows = {
        name: {key: common.spread([one[key] for one in runs]) for key in runs[0]}
        for name, runs in found.items()
    }
    best = {name: row["steps_per_s"]["max"] for name, row in rows.items()}
    ratios = {
        name: best[over] / best[under]
        for name, (over, under) in RATIOS.items()
        if over in best and under in best
    }
    result = {"load_before": begun["load"], "devices": devices, "rounds": asked.rounds}
    common.finish({**result, "real": asked.real, "rows": rows, "ratios": ratios}, asked.json)


if __name__ == "__main__":
    main()
