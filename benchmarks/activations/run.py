"""Activations that stay, are computed again, or wait on the host: what each costs, by how much.

    python benchmarks/activations/run.py [--json FILE] [--paper]

On paper for real devices, by shoal's own planner and replay; and measured on emulated devices,
where the programs, the worker, its threads and copies are real and kernels and links take a
profile's time. ``--paper`` leaves the second out. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import paper

import common
import shoal
from shoal.core.event import ActionFinished, Event, PeakMeasured
from shoal.core.plan import Job, Plan
from shoal.core.profile import Profile, find_profile
from shoal.core.technique import Spilled
from shoal.examples.gpt import GPT, next_byte_loss
from shoal.planner.need import Request, moved_saved_bytes
from shoal.planner.price import Speeds, price
from shoal.runtime.pool import WorkerPool
from shoal.testing import compare, plain_loop

DEPTH, SHARDS, STEPS = 8, 10, 4
CASES = [(1600, 1024, 16), (1600, 16384, 1), (1600, 65536, 1), (4096, 2048, 8)]
CASES += [(4096, 32768, 1), (8192, 2048, 8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """A device to emulate, and the GPT of ``DEPTH`` blocks that trains there in float32."""

    profile: Profile
    scale: float
    width: int
    context: int
    memory: int


def emulated() -> list[Emulated]:
    """An H200 with the links it has, and with one of 400 GB/s each way: assumed."""
    h200 = find_profile("h200")
    wide = replace(
        h200, name="400 GB/s", up_bytes_per_s=4e11, down_bytes_per_s=4e11, both_bytes_per_s=None
    )
    return [
        Emulated(profile=wide, scale=4500, width=64, context=2048, memory=24 * 2**20),
        Emulated(profile=h200, scale=4500, width=32, context=4096, memory=32 * 2**20),
    ]


def arms() -> dict[str, Spilled]:
    """All of ``SHARDS`` shards travel; what becomes of activations differs."""
    base = Spilled(shards=SHARDS, optimizer="host", lookahead=1, keep=(), keep_turn=0)
    return {
        "recompute": replace(base, recompute=True),
        "keep": replace(base, spill_activations=()),
        "move too": base,
        "move all": replace(base, recompute=False),
    }


@dataclass(slots=True)
class Watched:
    """When each step began, bytes that moved of what was saved, and the peak."""

    began: dict[int, float] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    peak: PeakMeasured | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, PeakMeasured):
            self.peak = event
        if not isinstance(event, ActionFinished):
            return
        if event.stream == "compute":
            self.began.setdefault(event.step, event.start)
        elif event.action.endswith("saved"):
            self.moved[event.step] = self.moved.get(event.step, 0) + event.bytes


class Build:
    """A model of its own width, for workers."""

    def __init__(self, case: Emulated) -> None:
        self.width, self.context = case.width, case.context

    def __call__(self, hp: Any) -> torch.nn.Module:
        sizes = {"width": self.width, "depth": DEPTH, "heads": 2, "context": self.context}
        return GPT(**sizes, dropout=0.0)


class Windows:
    """A window a step."""

    def __init__(self, case: Emulated) -> None:
        self.context = case.context

    def __call__(self, hp: Any) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], None]:
        generator = torch.Generator().manual_seed(0)
        size = (1, self.context + 1)
        drawn = [torch.randint(256, size, generator=generator) for _ in range(STEPS)]
        return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in drawn], None


def measure(case: Emulated, technique: Spilled, pool: WorkerPool) -> dict[str, Any]:
    """Seconds of a step in emulated time, beside what the plan's replay says; and the bits."""
    watched = Watched()
    recipe = shoal.Recipe(model=Build(case), data=Windows(case), loss=next_byte_loss)
    with tempfile.TemporaryDirectory() as directory:
        study = shoal.Study(
            "activations", recipe, space={"lr": 1e-3}, steps=STEPS, directory=directory
        )
        report = study.run(
            hardware=shoal.Hardware.emulated(case.profile, scale=case.scale, memory=case.memory),
            technique=technique,
            callbacks=[watched],
            progress=False,
            workers=pool,
        )
        plan = Plan.from_json((Path(directory) / "activations" / "plan.json").read_text())
        trial = report.trials[0]
        assert not trial.error, trial.error
        plain = plain_loop(recipe, trial.hp, trial.seed, steps=STEPS)
        same = compare(plain, trial.load_state()).equal
    job, peak = plan.jobs[0], watched.peak
    assert peak is not None
    assert isinstance(job.technique, Spilled)
    steps = sorted(watched.began)[1:]  # the first one is counted, and finds everything empty
    took = (watched.began[steps[-1]] - watched.began[steps[0]]) / (len(steps) - 1)
    return {
        "step_s": took,
        "predicted_s": predicted_s(case, job),
        "keep": len(job.technique.keep_activations or ()),
        "move": len(job.technique.spill_activations or ()),
        "moved_bytes": watched.moved.get(steps[0], 0),
        "predicted_moved_bytes": 2 * moved_saved_bytes(job.shards, job.technique),
        "peak_bytes": peak.peak_bytes,
        "predicted_peak_bytes": peak.predicted_bytes,
        "waiting_bytes": job.waiting_bytes,
        "bitwise": same,
    }


def predicted_s(case: Emulated, job: Job) -> float:
    """A step by the replay that the planner prices with."""
    assert isinstance(job.technique, Spilled)
    slow = case.profile.slowed(case.scale)
    speeds = Speeds(up_bytes_per_s=slow.up_bytes_per_s, down_bytes_per_s=slow.down_bytes_per_s)
    request = Request(micro_batches=1, clip=False, technique=None, prefers="host")
    return price(job.shards, job.batch_bytes, job.technique, request, speeds, 1).step_s


def on_paper() -> Iterator[dict[str, object]]:
    """Every case on every profile."""
    for name in ("rtx4090", "h200", "v100"):
        for width, context, windows in CASES:
            case = paper.Case(
                profile=find_profile(name), width=width, context=context, windows=windows
            )
            row = paper.figures(case)
            steps = {arm: row[arm]["step_s"] for arm in paper.ARMS}  # type: ignore[index]
            print(name, width, context, case.tokens, steps, row["move too"])
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--paper", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {"paper": list(on_paper()), "measured": []}
    if not options.paper:
        with WorkerPool() as pool:
            for case in emulated():
                row: dict[str, Any] = {"profile": case.profile.name, "width": case.width}
                row |= {"context": case.context, "memory": case.memory}
                for name, technique in arms().items():
                    row[name] = measure(case, technique, pool)
                    print(case.profile.name, name, row[name])
                result["measured"].append(row)
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
