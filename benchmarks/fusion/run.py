"""A full step of N models as one array, beside loops that train them one after another.

python benchmarks/fusion/run.py [--rounds 5] [--widths 4,16,64] [--only NAME] [--json FILE]
    [--kinds eager,traced,compiled] [--serial-compiled] [--plain-memory]

Arrays are run in each of their ways, in a process whose memory is set as that of shoal's workers
is; loops in plain processes, as anybody's are. ``--plain-memory`` has the arrays in a plain one
too. ``--serial-compiled`` adds a loop over compiled models.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from rivals import Cost, Processes, Step, batches, cost, models, rate, serial_step, started
from workloads import WORKLOADS, Workload, loss

import common
from shoal.core.spec import PassKind
from shoal.fusion import Array, Declined, Member, backend_of
from shoal.fusion.graphs.compiled import compiler
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.ownstep import Modes
from shoal.recipes.recipe import Recipe
from shoal.recipes.several import Models
from shoal.rng import capture_rng
from shoal.runtime.capture.captures import Captures
from shoal.workerenv import warm_up, worker_environment

BEST = "serial, fused AdamW"
SECONDS = 0.6  # of each arm in each round, about
WIDEST = {  # 64 unless said: wider ones take long and gain no more
    **{"MobileNetV3-small": 16, "small CNN": 16, "DCGAN generator": 16, "wide MLP": 16},
    **{"Transformer LM of width 128": 16, "PointNet": 16, "ResNet-18": 4},
    **{"MobileNetV3-large": 4, "DCGAN discriminator": 16, "DCGAN": 16},
    **{"BERT-mini": 4, "PointNet, segmentation": 4},
}
Arm = Callable[[int], Cost]


def recipe_of(workload: Workload) -> Recipe:
    """The models of a workload, with its loss or its step."""
    given: Any = {"step": workload.step} if workload.step else {"loss": loss}
    return Recipe(model=workload.model, data=lambda hp: ([], None), **given)


def array_step(
    workload: Workload, width: int, kind: PassKind = "eager", device: str = "cpu"
) -> Step:
    """One step of an array; every slot has a learning rate of its own.

    Raises:
        Declined: its passes cannot be run in this way.
    """
    recipe, where = recipe_of(workload), torch.device(device)
    made = models(workload, range(width), device)
    if workload.step:
        made = [Models(dict(model.items())) for model in made]
    members = [
        Member(
            recipe=recipe,
            hp={},
            module=model,
            optimizer=build_optimizer_of(recipe, model, {"lr": rate(slot)}),
            schedule=None,
            rng=capture_rng(where),
            modes=Modes(recipe, model) if workload.step else None,
        )
        for slot, model in enumerate(made)
    ]
    backend = backend_of(kind, launcher=Captures(recipe, where).launcher())
    array = Array(members, device=where, backend=backend)
    data = batches(workload, range(width), device)

    def step() -> None:
        stepped = array.step(data)
        assert not stepped.failures

    return step


class ArrayProcess:
    """Arrays in a process of their own, in one way after another."""

    def __init__(self, *, plain_memory: bool) -> None:
        environment = os.environ if plain_memory else worker_environment()
        self._pipe = started(serve_arrays, environment=environment)

    def take(self, name: str, width: int, kinds: Sequence[PassKind]) -> dict[str, Any]:
        """Seconds until it ran in each way, or why it does not; what was there is freed."""
        self._pipe.send((name, width, kinds))
        return self._pipe.recv()

    def cost(self, arm: str, repeats: int) -> Cost:
        self._pipe.send((arm, repeats))
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)


def serve_arrays(pipe: Connection) -> None:
    """What an ``ArrayProcess`` does."""
    torch.set_num_threads(1)
    warm_up()
    steps: dict[str, Step] = {}
    while (word := pipe.recv()) is not None:
        if len(word) == 2:
            arm, repeats = word
            pipe.send(cost(steps[arm], repeats))
            continue
        name, width, kinds = word
        steps.clear()
        gc.collect()
        torch.compiler.reset()
        made, found = arrays_of(WORKLOADS[name], width, kinds)
        steps |= made
        pipe.send(found)


def arrays_of(
    workload: Workload, width: int, kinds: Sequence[PassKind]
) -> tuple[dict[str, Step], dict[str, Any]]:
    """The arms by name; for each way seconds until it ran, or why it does not."""
    arms: dict[str, Step] = {}
    made: dict[str, Any] = {}
    for kind in dict.fromkeys(("eager", *kinds)):
        name = "array" if kind == "eager" else f"array, {kind}"
        if kind == "compiled" and not compiler():
            made[name] = "there is no C++ compiler"
            continue
        began = time.perf_counter()
        try:
            step = array_step(workload, width, kind)
            step()
        except Declined as error:
            made[name] = str(error)
        else:
            arms[name] = step
            made[name] = time.perf_counter() - began
    return arms, made


def measure(
    name: str,
    width: int,
    rounds: int,
    kinds: Sequence[PassKind],
    *,
    serial_compiled: bool,
    plain_memory: bool,
) -> dict[str, Any]:
    """Milliseconds of each arm, and how many times the array's step the others take."""
    workload, slots = WORKLOADS[name], range(width)
    torch.compiler.reset()
    arrays = ArrayProcess(plain_memory=plain_memory)
    made = arrays.take(name, width, kinds)
    arms: dict[str, Arm] = {
        arm: partial(arrays.cost, arm) for arm, took in made.items() if not isinstance(took, str)
    }
    arms[BEST] = partial(cost, serial_step(workload, slots, fused=True))
    arms["serial, default AdamW"] = partial(cost, serial_step(workload, slots))
    if serial_compiled:
        one = serial_step(workload, range(1), compiled=True, fused=True)
        arms["serial, compiled"] = lambda repeats: cost(one, repeats).times(width)
    processes = Processes()
    processes.take(name, width)
    arms["two processes"] = processes.cost
    figures = _interleaved(arms, rounds)
    processes.close()
    arrays.close()
    return {
        "ms_cpu": {n: common.spread([c.cpu_s * 1e3 for c in f]) for n, f in figures.items()},
        "ms_wall": {n: common.spread([c.wall_s * 1e3 for c in f]) for n, f in figures.items()},
        "times_cpu": _times(figures, "cpu_s"),
        "times_wall": _times(figures, "wall_s"),
        "best_serial_times": {
            name: common.spread(
                [b.cpu_s / c.cpu_s for b, c in zip(figures[BEST], found, strict=True)]
            )
            for name, found in figures.items()
            if name.startswith("array")
        },
        "until_it_ran": made,
    }


def _interleaved(arms: dict[str, Callable[[int], Cost]], rounds: int) -> dict[str, list[Cost]]:
    for arm in arms.values():
        arm(2)
    repeats = {name: max(1, int(SECONDS / arm(1).wall_s)) for name, arm in arms.items()}
    figures: dict[str, list[Cost]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            figures[name].append(arm(repeats[name]))
    return figures


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
    parser.add_argument("--kinds", default="eager,traced,compiled")
    parser.add_argument("--serial-compiled", action="store_true")
    parser.add_argument("--plain-memory", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory = "plain" if options.plain_memory else "as shoal's workers"
    result: dict[str, Any] = {"rounds": options.rounds, "memory": memory, "workloads": {}}
    for name, workload in WORKLOADS.items():
        if options.only not in name:
            continue
        found: dict[str, Any] = {"bar": workload.bar}
        for width in map(int, options.widths.split(",")):
            if width <= WIDEST.get(name, width):
                figures = found[str(width)] = measure(
                    name,
                    width,
                    options.rounds,
                    options.kinds.split(","),
                    serial_compiled=options.serial_compiled,
                    plain_memory=options.plain_memory,
                )
                told = [
                    f"{arm} {times['median']:.2f}"
                    for arm, times in figures["best_serial_times"].items()
                ]
                words = f"{name}, {width} models, times the best serial loop: {', '.join(told)}"
                print(words, figures["until_it_ran"], file=sys.stderr, flush=True)
        found["best"] = max(found[w]["times_cpu"][BEST]["median"] for w in found if w.isdigit())
        result["workloads"][name] = found
    common.finish(result, options.json)


if __name__ == "__main__":
    main()
