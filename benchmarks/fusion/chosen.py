"""What ``fuse="auto"`` chooses for each workload, and studies trained so beside unfused ones.

python benchmarks/fusion/chosen.py [--rounds 1] [--seconds 30] [--only NAME ...] [--json FILE]
    [--device cuda:0]

Per workload as many trials as two devices have slots in the widest array that ``run.py`` times,
each with a learning rate of its own, and as many steps as unfused take about ``--seconds``. An arm
is a process of its own, from its first import: planning, measuring and all.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from run import WIDEST, recipe_of
from workloads import WORKLOADS

import shoal
from common import facts, finish, keep, spread
from shoal.core.plan import Plan

BATCHES = 8
USUAL = 16  # as wide as an array is tried


class Batches:
    """A few batches, for every trial the same."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, hp: Any) -> tuple[list[Any], None]:
        draws = torch.Generator().manual_seed(0)
        return [WORKLOADS[self.name].batch(draws) for _ in range(BATCHES)], None


def study_of(name: str, steps: int, trials: int, directory: str) -> shoal.Study:
    """So many trials of a workload."""
    return shoal.Study(
        name="chosen",
        recipe=replace(recipe_of(WORKLOADS[name]), data=Batches(name)),
        space=shoal.grid(lr=[1e-3 * (1 + 0.01 * number) for number in range(trials)]),
        steps=steps,
        directory=directory,
    )


def one(name: str, fuse: bool | str, steps: int, device: str = "") -> dict[str, Any]:
    """Plan and train; what was chosen, and why. Without a ``device``, on two virtual ones."""
    trials = 2 * (USUAL if device else min(USUAL, WIDEST.get(name, USUAL)))
    hardware = shoal.Hardware.virtual(devices=2, memory="3GiB")
    if device:
        hardware = shoal.Hardware.parse(device, "16GiB")
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        study = study_of(name, steps, trials, directory)
        if steps > 1:
            study.run(hardware=hardware, fuse=fuse)
            plan = Plan.from_json((study.directory / "plan.json").read_text())
        else:
            plan = study.plan(hardware=hardware, fuse=fuse)
        trained = time.time()
    places = [job.array for job in plan.jobs if job.array]
    return {
        "trials": trials,
        "step_s": plan.jobs[0].step_s,
        "technique": str(plan.jobs[0].technique),
        "width": places[0].width if places else 1,
        "kind": places[0].kind if places else None,
        "why": [line for line in plan.jobs[0].why if "array" in line],
        "wall_s": trained - BEGAN,
    }


def measured(name: str, fuse: str, steps: int, device: str) -> dict[str, Any]:
    """An arm in a process of its own."""
    command = [sys.executable, __file__, "--one", name, "--fuse", fuse, "--steps", str(steps)]
    command += ["--device", device] if device else []
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"{name}, fuse={fuse}: {found.stderr[-2000:]}")
    return dict(json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--json")
    parser.add_argument("--device", default="", help="a GPU, such as cuda:0")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--fuse", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=1, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        fuse = "auto" if asked.fuse == "auto" else False
        print(json.dumps(one(asked.one, fuse, asked.steps, asked.device)))
        return
    begun, rows = facts(), []
    for name in asked.only:
        rows.append(row(name, asked.seconds, asked.rounds, asked.device))
        result = {"load_before": begun["load"], "seconds": asked.seconds, "rows": rows}
        keep(result, asked.json)
    finish(result, asked.json)


def row(name: str, seconds: float, rounds: int, device: str) -> dict[str, Any]:
    """One workload: arms in turn."""
    first = measured(name, "never", 1, device)
    at_once = 1 if device else 2
    steps = max(20, round(at_once * seconds / (first["trials"] * first["step_s"])))
    runs = [
        [measured(name, fuse, steps, device) for fuse in ("auto", "never")] for _ in range(rounds)
    ]
    found = told(name, steps, runs)
    print(found, file=sys.stderr, flush=True)
    return found


def told(name: str, steps: int, runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, and what the last round chose."""
    last = runs[-1][0]
    return {
        "workload": name,
        "trials": last["trials"],
        "steps": steps,
        "widths": [auto["width"] for auto, _ in runs],
        "technique": last["technique"],
        "kind": last["kind"],
        "why": last["why"],
        "auto_s": spread([auto["wall_s"] for auto, _ in runs]),
        "unfused_s": spread([unfused["wall_s"] for _, unfused in runs]),
        "times": spread([unfused["wall_s"] / auto["wall_s"] for auto, unfused in runs]),
    }


BEGAN = time.time()

if __name__ == "__main__":
    main()
