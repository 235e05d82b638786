"""64 trials on real data, start-up included: shoal beside Ray Tune, joblib, and one by one.

    python benchmarks/search/run.py --text FILE --json benchmarks/search/results.json

Each arm is a process of its own, from its first import to its best trial; arms take turns.
Needs ray[tune], joblib and scikit-learn beside shoal. ``--text`` is any file of real text.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import shoal
from common import facts, finish, spread

ARMS = ("shoal", "unfused", "compiled", "ray", "joblib", "serial")
USUAL = tuple(arm for arm in ARMS if arm != "compiled")


def measured(arm: str, task: str, text: str, *, asha: bool, trials: int) -> dict[str, Any]:
    """One arm: wall and CPU seconds with all its processes, and what it found."""
    place = tempfile.mkdtemp()
    command = [sys.executable, str(HERE / "arm.py"), arm, task, "--directory", place]
    command += ["--text", text, "--trials", str(trials)] + ["--asha"] * asha
    # A package that pip installed has its bytecode; a checkout may be told to write none.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{arm} on {task} failed:\n{done.stderr[-3000:]}")
    cpu = sum(getattr(after, n) - getattr(before, n) for n in ("ru_utime", "ru_stime"))
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {"wall_s": wall, "cpu_s": cpu, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", default=["digits", "table", "text"])
    parser.add_argument("--arms", nargs="+", default=list(USUAL), choices=ARMS)
    parser.add_argument("--trials", type=int, default=0, help="of the 64, the first so many")
    parser.add_argument("--asha", action="store_true", help="with pruning, ours and Ray's alone")
    parser.add_argument("--json")
    asked = parser.parse_args()
    arms = [arm for arm in asked.arms if not asked.asha or arm in ("shoal", "unfused", "ray")]
    compileall.compile_dir(str(Path(shoal.__file__).parent), quiet=2)
    begun, rows = facts(), []
    for task in asked.tasks:
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for _ in range(asked.rounds):
            for arm in arms:
                runs[arm].append(
                    measured(arm, task, asked.text, asha=asked.asha, trials=asked.trials)
                )
                print(task, arm, runs[arm][-1], file=sys.stderr, flush=True)
        rows += [_row(task, arm, runs[arm], runs["shoal"]) for arm in arms]
    finish({"load_before": begun["load"], "asha": asked.asha, "rows": rows}, asked.json)


def _row(
    task: str, arm: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]]
) -> dict[str, Any]:
    last = runs[-1]
    return {
        "task": task,
        "arm": arm,
        "wall_s": spread([run["wall_s"] for run in runs]),
        "cpu_s": spread([run["cpu_s"] for run in runs]),
        "best_known_s": spread([run["best_known_s"] for run in runs]),
        "times_ours_wall": spread(
            [run["wall_s"] / our["wall_s"] for run, our in zip(runs, ours, strict=True)]
        ),
        "times_ours_cpu": spread(
            [run["cpu_s"] / our["cpu_s"] for run, our in zip(runs, ours, strict=True)]
        ),
        "best": last["best"],
        "loss": last["loss"],
        "widths": last.get("widths"),
        "kinds": last.get("kinds"),
    }


if __name__ == "__main__":
    main()
