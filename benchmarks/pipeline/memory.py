"""What a pipeline's stages hold: measured peaks beside the plan's, schedule by schedule.

    python benchmarks/pipeline/memory.py [--json FILE]

Four stages on four virtual devices, twelve micro-batches a step, nothing recomputed unless said.
Every tensor that a step allocates is counted, so neither time nor other programs matter. See
README.md.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import common
import shoal
from shoal.core.event import Event, PeakMeasured
from shoal.core.plan import Plan

STAGES, MICROS, STEPS = 4, 12, 4
CUTS = (5, 9, 13)
"""Two blocks a stage. Those that are chosen follow from times, and these are counts."""
WIDTH, BLOCKS, ROWS = 256, 8, 64


class Tower(nn.Module):
    """Equal blocks, so that stages are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
            for _ in range(BLOCKS)
        )
        self.leave = nn.Linear(WIDTH, 8)

    def forward(self, x_BC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BC = x_BC + block(x_BC)
        scores: Tensor = self.leave(x_BC)
        return scores


def data(hp: Any) -> tuple[list[tuple[Tensor, Tensor]], None]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(ROWS, WIDTH, generator=generator), torch.randint(8, (ROWS,)))
        for _ in range(2 * MICROS)
    ], None


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch[1])


def measure(schedule: str, predict: bool = False, recompute: bool = False) -> dict[str, Any]:
    """The peak of each stage, and what the plan said of the one that holds most.

    Of later steps, and of the very first one too, in which the optimizer makes its state before it
    is copied to its place.
    """
    technique = shoal.Pipelined(
        schedule=schedule, stages=STAGES, cuts=CUTS, recompute=recompute, predict=predict
    )
    with tempfile.TemporaryDirectory() as directory:
        first, _ = _run(technique, directory, steps=STEPS)
        peaks, plan = _run(technique, directory, steps=2 * STEPS)
    (job,) = plan.jobs
    most = max(peaks.values())
    return {
        "stages": dict(sorted(peaks.items())),
        "most": most,
        "first_step": max(first.values()),
        "planned": job.peak_bytes,
        "planned_over_measured": job.peak_bytes / max(most, *first.values()),
        "weights_of_a_stage": max(shard.owned_bytes for shard in job.shards),
        "total": sum(peaks.values()),
    }


def _run(technique: shoal.Pipelined, directory: str, *, steps: int) -> tuple[dict[str, int], Plan]:
    """Train to so many steps; the most that each device held, and the plan."""
    peaks: dict[str, int] = {}

    def watch(event: Event) -> None:
        if isinstance(event, PeakMeasured):
            peaks[event.device] = max(peaks.get(event.device, 0), event.peak_bytes)

    shoal.Study(
        "memory",
        shoal.Recipe(model=model, data=data, loss=loss, accumulate=MICROS),
        space={"lr": 1e-3},
        steps=steps,
        metric="train_loss",
        directory=directory,
    ).run(
        hardware=shoal.Hardware.virtual(STAGES, memory="256MiB"),
        technique=technique,
        callbacks=[watch],
        progress=False,
    )
    return peaks, Plan.from_json((Path(directory) / "memory" / "plan.json").read_text())


def model(hp: Any) -> Tower:
    return Tower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    asked = parser.parse_args()
    arms = {name: functools.partial(measure, name) for name in ("gpipe", "flush", "zb-h1", "2bw")}
    arms["2bw, predict"] = functools.partial(measure, "2bw", True)
    arms["zb-h1, recompute"] = functools.partial(measure, "zb-h1", recompute=True)
    rows = {name: arm() for name, arm in arms.items()}
    # Parameters, gradients and AdamW's two are the same in all; the rest is activations.
    held = {n: row["most"] - 4 * row["weights_of_a_stage"] for n, row in rows.items()}
    ratios = {
        "flush over gpipe, all": rows["flush"]["most"] / rows["gpipe"]["most"],
        "flush over gpipe, activations": held["flush"] / held["gpipe"],
        "2bw minus flush, in a stage's weights": (rows["2bw"]["most"] - rows["flush"]["most"])
        / rows["flush"]["weights_of_a_stage"],
    }
    common.finish(
        {"stages": STAGES, "micro_batches": MICROS, "rows": rows, "ratios": ratios}, asked.json
    )


if __name__ == "__main__":
    main()
