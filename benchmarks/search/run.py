"""64 trials on real data, start-up included: shoal beside Ray Tune, joblib, and one by one.

    python benchmarks/search/run.py --text FILE --json benchmarks/search/results.json

Each arm is a process of its own, from its first import to its best trial; arms take turns.
Needs ray[tune], joblib and scikit-learn beside shoal. ``--text`` is any file of real text.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import ctypes
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

ARMS = ("shoal", "unfused", "compiled", "ray", "ray-reuse", "joblib", "serial")
PR_SET_CHILD_SUBREAPER = 36
USUAL = tuple(arm for arm in ARMS if arm != "compiled")
PRUNING = ("shoal", "unfused", "ray", "ray-reuse")


def measured(arm: str, task: str, text: str, *, asha: bool, trials: int) -> dict[str, Any]:
    """One arm: wall and CPU seconds with all its processes, daemons too, and what it found."""
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
    _reap()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{arm} on {task} failed:\n{done.stderr[-3000:]}")
    cpu = sum(getattr(after, n) - getattr(before, n) for n in ("ru_utime", "ru_stime"))
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {"wall_s": wall, "cpu_s": cpu, **found}


def _reap(patience_s: float = 60.0) -> None:
    """Wait for what an arm left behind, such as Ray's daemons, so that its CPU time counts."""
    until = time.monotonic() + patience_s
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)


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
    arms = [arm for arm in asked.arms if not asked.asha or arm in PRUNING]
    # What outlives the process that started it comes to this one, not to the system's first.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
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
