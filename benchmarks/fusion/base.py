"""What is it worth that an array has its trials' frozen base once? Interleaved, one thread.

python benchmarks/fusion/base.py [--rounds 9] [--json FILE]

Layers with low-rank additions (LoRA) over weights that are frozen and the same in all trials: a
whole step (forward, backward, AdamW of the additions) of an array with one base, of an array in
which each slot has its own copy, and of the trials one after another, each as a plain loop.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.fusion import Member
from shoal.fusion.array import Array
from shoal.recipes.recipe import HyperParameters
from shoal.rng import capture_rng, seed_all

RANK = 8
CASES = [(256, 6, 8, 32), (512, 6, 8, 8), (512, 6, 8, 64), (1024, 4, 8, 8), (1024, 4, 4, 128)]
"""Width, layers, trials, rows of a batch."""


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.base(x) + self.up(self.down(x)))


def model(width: int, layers: int) -> nn.Module:
    """The same base whatever the seed."""
    made = nn.Sequential(*[Adapted(width) for _ in range(layers)], nn.Linear(width, 10))
    random = torch.Generator().manual_seed(1)
    for layer in made[:-1]:
        layer.base.weight.data.normal_(0.0, width**-0.5, generator=random)
        layer.base.bias.data.zero_()
    return made


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def members(width: int, layers: int, trials: int) -> list[Member]:
    """Trials that differ in seed and rate."""
    recipe = shoal.Recipe(model=lambda hp: nn.Identity(), data=lambda hp: ([], None), loss=loss)
    made = []
    for seed in range(trials):
        seed_all(seed)
        hp, module = HyperParameters({"lr": 1e-3 * (seed + 1)}), model(width, layers)
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=hp["lr"], fused=True)
        rng = capture_rng(torch.device("cpu"))
        made.append(
            Member(
                recipe=recipe, hp=hp, module=module, optimizer=optimizer, schedule=None, rng=rng
            )
        )
    return made


def one_after_another(trials: list[Member], batches: list[Any]) -> Callable[[], Any]:
    """Plain loops."""

    def step() -> None:
        for member, batch in zip(trials, batches, strict=True):
            member.optimizer.zero_grad()
            loss(member.module(batch[0]), batch).backward()
            member.optimizer.step()

    return step


def measured(case: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    """Medians of turns, in milliseconds, and bytes of weights."""
    width, layers, trials, rows = case
    batches = [(torch.randn(rows, width), torch.randint(10, (rows,))) for _ in range(trials)]
    arrays = {
        name: Array(members(width, layers, trials), one_base=name == "one base")
        for name in ("one base", "own copies")
    }
    ways: dict[str, Callable[[], Any]] = {
        name: lambda array=array: array.step(batches) for name, array in arrays.items()
    }
    ways["one after another"] = one_after_another(members(width, layers, trials), batches)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for work in ways.values():
        work()
    for _ in range(rounds):
        for name, work in ways.items():
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < 0.5:
                work()
                count += 1
            times[name].append((time.perf_counter() - began) / count * 1e3)
    held = {
        name: sum(p.untyped_storage().nbytes() for p in array.crew.stacked.parameters.values())
        for name, array in arrays.items()
    }
    against = {
        name: statistics.median(
            other / mine for other, mine in zip(times[name], times["one base"], strict=True)
        )
        for name in ("own copies", "one after another")
    }
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {"case": case, "ms": medians, "weights": held, "times as quick as": against}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| width, layers | trials | rows | one base, ms | own copies | one after another | MB |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for case in CASES:
        found = measured(case, asked.rounds)
        results.append(found)
        width, layers, trials, rows = case
        ratios = found["times as quick as"]
        held = [found["weights"][name] / 1e6 for name in ("one base", "own copies")]
        print(
            f"| {width}, {layers} | {trials} | {rows} | {found['ms']['one base']:.1f} | "
            f"{ratios['own copies']:.2f} | {ratios['one after another']:.2f} | "
            f"{held[0]:.0f} for {held[1]:.0f} |",
            flush=True,
        )
    if asked.json:
        about = {"torch": torch.__version__, "rounds": asked.rounds}
        with open(asked.json, "w") as file:
            json.dump({"about": about, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
