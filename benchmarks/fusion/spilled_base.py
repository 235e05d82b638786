"""LoRA trials over a base larger than the device: as one array in shards, and one by one.

python benchmarks/fusion/spilled_base.py [--rounds 3] [--lengths] [--json FILE]

Whole studies on one virtual device, as many trials as slots, interleaved. What crosses the link in
a step is counted by the plan, which moves those bytes and no others; seconds are of the training.
With ``--lengths`` batches are sequences of several lengths, which all trials read in one order, or
each in an order of its own: an array has a pass for each length of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import Any, Literal, NamedTuple

import torch
from base import model as over_a_base  # beside this file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.event import ActionFinished, StepFinished
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot

TRIALS = 8


class Case(NamedTuple):
    """A layer of width 1024 has 4.2 MB of frozen weights and 0.07 of others."""

    width: int
    layers: int
    rows: int  # of a batch
    order: Literal["rows", "one order", "orders of their own"] = "rows"  # or of sequences


CASES = [Case(1024, 12, 8), Case(1024, 12, 16)]
OF_LENGTHS = [Case(1024, 12, 2, "one order"), Case(1024, 12, 2, "orders of their own")]
LENGTHS = (2, 4, 6, 8)
MEMORY = "16MiB"
STEPS = 24
COUNTED = range(STEPS // 4, 3 * STEPS // 4)


def model(hp: Any) -> nn.Module:
    """The same base for all trials."""
    return over_a_base(hp["width"], hp["layers"])


def data(hp: Any) -> tuple[DataLoader, None]:
    """Rows of noise: only time is of interest."""
    random = torch.Generator().manual_seed(2)
    many = 8 * hp["rows"]
    labels = torch.randint(10, (many,), generator=random)
    if hp["order"] == "rows":
        x = torch.randn(many, hp["width"], generator=random)
        return DataLoader(TensorDataset(x, labels), batch_size=hp["rows"], shuffle=True), None
    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(many)]
    texts = [torch.randn(length, hp["width"], generator=random) for length in lengths]
    some = list(zip(texts, labels, strict=True))
    return DataLoader(some, hp["rows"], shuffle=True, collate_fn=padded), None


def padded(some: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """To the longest of the batch."""
    texts = nn.utils.rnn.pad_sequence([text for text, _ in some], batch_first=True)
    return texts, torch.stack([label for _, label in some])


def loss(output: Tensor, batch: Any) -> Tensor:
    """Of rows, or of the mean of a sequence."""
    return F.cross_entropy(output.mean(1) if output.dim() == 3 else output, batch[1])


def optimizer(named: Any, hp: Any) -> torch.optim.Optimizer:
    """Of what is trained."""
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=hp["lr"], fused=True)


def study(case: Case, directory: str, name: str) -> shoal.Study:
    """Trials that differ in rate, and in seed unless they have one order."""
    rates = [1e-4 * (number + 1) for number in range(TRIALS)]
    what = {name: [value] for name, value in case._asdict().items()}
    seed = {"seed": [5]} if case.order == "one order" else {}
    return shoal.Study(
        name,
        shoal.Recipe(model=model, data=data, loss=loss, optimizer=optimizer, share_data=True),
        space=shoal.grid(lr=rates, **what, **seed),
        steps=STEPS,
        directory=directory,
    )


class Watch:
    """What crosses the link in the steps of the middle, of all trials, and when steps ended."""

    def __init__(self) -> None:
        self.moved: dict[str, int] = {}
        self.ends: list[float] = []

    def __call__(self, event: Any) -> None:
        """Hear an event."""
        if isinstance(event, StepFinished):
            self.ends.append(event.time)
        elif isinstance(event, ActionFinished) and event.step in COUNTED:
            self.moved[event.stream] = self.moved.get(event.stream, 0) + event.bytes

    @property
    def step_s(self) -> float:
        """Seconds of a step of a trial: from the first that ended to the last."""
        return (max(self.ends) - min(self.ends)) / (len(self.ends) - 1)


ARMS: dict[str, dict[str, Any]] = {"one array": {"fuse": TRIALS}, "one by one": {"fuse": False}}


def run(case: Case, arm: str) -> dict[str, Any]:
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
    parser.add_argument("--lengths", action="store_true")
    parser.add_argument("--json")
    asked = parser.parse_args()
    results = []
    print(
        "| width, layers | batch | | MB over the link, a trial and step | ms, a trial and step |"
    )
    print("|---|---|---|---|---|")
    for case in OF_LENGTHS if asked.lengths else CASES:
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for _ in range(asked.rounds):
            for arm in ARMS:
                found[arm].append(run(case, arm))
        batch = f"{case.rows} {'rows' if case.order == 'rows' else f'texts, {case.order}'}"
        for arm, runs in found.items():
            crossed = runs[0]["moved"]
            megabytes = (crossed["up"] + crossed["down"]) / TRIALS / len(COUNTED) / 1e6
            took = statistics.median(run["step_ms"] for run in runs)
            figures = f"{arm} | {megabytes:.1f} | {took:.1f}"
            print(f"| {case.width}, {case.layers} | {batch} | {figures} |", flush=True)
        results.append({"case": case, "trials": TRIALS, "memory": MEMORY, "runs": found})
    if asked.json:
        about = {"torch": torch.__version__, "rounds": asked.rounds}
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump({**about, "cases": results}, file, indent=1)


if __name__ == "__main__":
    main()
