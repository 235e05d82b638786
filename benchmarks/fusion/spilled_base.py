"""LoRA trials over a base larger than the device: as one array in shards, and one by one.

python benchmarks/fusion/spilled_base.py [--rounds 3] [--json FILE]

Whole studies on one virtual device, as many trials as slots, interleaved. What crosses the link in
a step is counted by the plan, which moves those bytes and no others; seconds are of the training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import Any

import torch
from base import loss  # beside this file
from base import model as over_a_base
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.event import ActionFinished, StepFinished
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot

TRIALS = 8
CASES = [(1024, 12, 8), (1024, 12, 16)]
"""Width, layers, rows of a batch; a layer has 4.2 MB of frozen weights and 0.07 of others."""
MEMORY = "16MiB"
STEPS = 24


def model(hp: Any) -> nn.Module:
    """The same base for all trials."""
    return over_a_base(hp["width"], hp["layers"])


def data(hp: Any) -> tuple[DataLoader, None]:
    """Rows of noise: only time is of interest."""
    random = torch.Generator().manual_seed(2)
    x = torch.randn(8 * hp["rows"], hp["width"], generator=random)
    labels = torch.randint(10, (len(x),), generator=random)
    return DataLoader(TensorDataset(x, labels), batch_size=hp["rows"], shuffle=True), None


def optimizer(named: Any, hp: Any) -> torch.optim.Optimizer:
    """Of what is trained."""
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=hp["lr"], fused=True)


def study(case: tuple[int, int, int], directory: str, name: str) -> shoal.Study:
    """Trials that differ in seed and rate."""
    width, layers, rows = case
    rates = [1e-4 * (number + 1) for number in range(TRIALS)]
    return shoal.Study(
        name,
        shoal.Recipe(model=model, data=data, loss=loss, optimizer=optimizer, share_data=True),
        space=shoal.grid(lr=rates, width=[width], layers=[layers], rows=[rows]),
        steps=STEPS,
        directory=directory,
    )


class Watch:
    """What crosses the link in a step of the middle, of all trials, and when steps ended."""

    def __init__(self) -> None:
        self.moved: dict[str, int] = {}
        self.ends: list[float] = []

    def __call__(self, event: Any) -> None:
        """Hear an event."""
        if isinstance(event, StepFinished):
            self.ends.append(event.time)
        elif isinstance(event, ActionFinished) and event.step == STEPS // 2:
            self.moved[event.stream] = self.moved.get(event.stream, 0) + event.bytes

    @property
    def step_s(self) -> float:
        """Seconds of a step of a trial: from the first that ended to the last."""
        return (max(self.ends) - min(self.ends)) / (len(self.ends) - 1)


ARMS: dict[str, dict[str, Any]] = {"one array": {"fuse": TRIALS}, "one by one": {"fuse": False}}


def run(case: tuple[int, int, int], arm: str) -> dict[str, Any]:
    """A whole study."""
    watch = Watch()
    hardware = shoal.Hardware.virtual(devices=1, memory=MEMORY)
    with tempfile.TemporaryDirectory() as directory:
        made = study(case, directory, "it")
        report = made.run(hardware=hardware, progress=False, callbacks=[watch], **ARMS[arm])
        rows = Snapshot.of(read_outline(report.directory)).trials
    ways = sorted({f"{row.technique}, {'array' in row.numerics}" for row in rows})
    assert report.count("FINISHED") == TRIALS, report
    return {"moved": watch.moved, "step_ms": watch.step_s * 1e3, "ways, in an array": ways}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    asked = parser.parse_args()
    results = []
    print("| width, layers | rows | | MB over the link, a trial and step | ms, a trial and step |")
    print("|---|---|---|---|---|")
    for case in CASES:
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for _ in range(asked.rounds):
            for arm in ARMS:
                found[arm].append(run(case, arm))
        width, layers, rows = case
        for arm, runs in found.items():
            crossed = runs[0]["moved"]
            megabytes = (crossed["up"] + crossed["down"]) / TRIALS / 1e6
            took = statistics.median(run["step_ms"] for run in runs)
            print(
                f"| {width}, {layers} | {rows} | {arm} | {megabytes:.1f} | {took:.1f} |",
                flush=True,
            )
        results.append({"case": case, "trials": TRIALS, "memory": MEMORY, "runs": found})
    if asked.json:
        about = {"torch": torch.__version__, "rounds": asked.rounds}
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump({**about, "cases": results}, file, indent=1)


if __name__ == "__main__":
    main()
