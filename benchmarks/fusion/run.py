"""A full step of N models as one array, beside loops that train them one after another.

python benchmarks/fusion/run.py [--rounds 5] [--widths 4,16,64] [--only NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import WORKLOADS, Workload, loss

import common
from shoal.fusion import Array, Member
from shoal.recipe import Recipe
from shoal.rng import capture_rng

SECONDS = 0.6  # of each arm in each round, about
WIDEST = {  # 64 unless said: wider ones take long and gain no more
    **{"MobileNetV3-small": 16, "small CNN": 16, "DCGAN generator": 16, "wide MLP": 16},
    **{"Transformer LM of width 128": 16, "PointNet": 16, "ResNet-18": 4},
}


class Cost(NamedTuple):
    """Seconds of one step of all models."""

    cpu_s: float
    wall_s: float


def models(workload: Workload, width: int) -> list[nn.Module]:
    made = []
    for seed in range(width):
        torch.manual_seed(seed)
        made.append(workload.model({}))
    return made


def batches(workload: Workload, width: int) -> list[Any]:
    return [workload.batch(torch.Generator().manual_seed(seed)) for seed in range(width)]


def rate(slot: int) -> float:
    return 1e-4 * (1 + slot)


def array_step(workload: Workload, width: int) -> Callable[[], None]:
    """One step of an array; every slot has a learning rate of its own."""
    recipe = Recipe(model=workload.model, data=lambda hp: ([], None), loss=loss)
    members = [
        Member(
            recipe=recipe,
            hp={},
            module=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=rate(slot), fused=True),
            schedule=None,
            rng=capture_rng(),
        )
        for slot, model in enumerate(models(workload, width))
    ]
    array, data = Array(members), batches(workload, width)

    def step() -> None:
        stepped = array.step(data)
        assert not stepped.failures

    return step


def serial_step(workload: Workload, width: int, **options: Any) -> Callable[[], None]:
    """One step of each model in turn: the loop anyone would write, reading every loss."""
    made, data = models(workload, width), batches(workload, width)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=rate(slot), **options)
        for slot, model in enumerate(made)
    ]

    def step() -> None:
        for model, optimizer, batch in zip(made, optimizers, data, strict=True):
            model.train()
            optimizer.zero_grad(set_to_none=True)
            value = loss(model(batch[0]), batch)
            value.backward()
            optimizer.step()
            value.item()

    return step


def cost(step: Callable[[], None], repeats: int) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        step()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Cost(cpu / repeats, wall / repeats)


def measure(workload: Workload, width: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each arm, and how many times the array's step the others take."""
    arms = {
        "array": array_step(workload, width),
        "serial, fused AdamW": serial_step(workload, width, fused=True),
        "serial, default AdamW": serial_step(workload, width),
    }
    for step in arms.values():
        cost(step, 2)
    repeats = {name: max(1, int(SECONDS / cost(step, 1).wall_s)) for name, step in arms.items()}
    figures: dict[str, list[Cost]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, step in arms.items():
            figures[name].append(cost(step, repeats[name]))
    return {
        "ms_cpu": {n: common.spread([c.cpu_s * 1e3 for c in f]) for n, f in figures.items()},
        "ms_wall": {n: common.spread([c.wall_s * 1e3 for c in f]) for n, f in figures.items()},
        "times_cpu": _times(figures, "cpu_s"),
        "times_wall": _times(figures, "wall_s"),
    }


def _times(figures: dict[str, list[Cost]], what: str) -> dict[str, dict[str, float]]:
    return {
        name: common.spread(
            [
                getattr(other, what) / getattr(mine, what)
                for other, mine in zip(found, figures["array"], strict=True)
            ]
        )
        for name, found in figures.items()
        if name != "array"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widths", default="4,16,64")
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": options.rounds, "workloads": {}}
    for name, workload in WORKLOADS.items():
        if options.only not in name:
            continue
        found: dict[str, Any] = {"bar": workload.bar}
        for width in map(int, options.widths.split(",")):
            if width <= WIDEST.get(name, width):
                found[str(width)] = measure(workload, width, options.rounds)
                best = found[str(width)]["times_cpu"]["serial, fused AdamW"]["median"]
                print(
                    f"{name}, {width} models: {best:.2f} times the best serial loop",
                    file=sys.stderr,
                )
        found["best"] = max(
            found[w]["times_cpu"]["serial, fused AdamW"]["median"] for w in found if w.isdigit()
        )
        result["workloads"][name] = found
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
