"""shoal beside what a user would pick instead: the same task, all in one run.

    python benchmarks/peers/run.py [--rounds 3] [--deepspeed-python PYTHON] [--json FILE]
    python benchmarks/peers/run.py --install [--json FILE]

Every arm is a process of its own, in turn, round after round. Exits with 1 where an arm's losses
are not those of plain PyTorch with checkpointing. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import arm as entry
import install
import loops
import ours
from processes import MemoryWatch
from report import CLOSE, agreement, reason, table, without_folders
from task import Task

import common

BASE = loops.CHECKPOINTED
DEEPSPEED = (loops.ZERO3, loops.ZERO3_ADAM)
ARMS = (*loops.BUILDERS, *ours.ARMS)
SOURCE = Path(__file__).parents[2] / "src"
LOOK_S = 0.05
LIMIT_S = 600.0
Figures = dict[str, Any]


def run_arm(
    name: str,
    task: Task,
    *,
    python: str = sys.executable,
    seed: int = 0,
    count: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Figures:
    """One arm in a process of its own, its memory watched from here."""
    script = str(Path(entry.__file__))
    command = [python, script, name, task.to_json(), "--seed", str(seed)]
    settings = {"OMP_NUM_THREADS": str(task.threads)}
    if (
        name in loops.BUILDERS or python == sys.executable
    ):  # else it is the shoal that was installed
        settings["PYTHONPATH"] = str(SOURCE)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.time()
        with subprocess.Popen(
            command + ["--count"] * count,
            stdout=out,
            stderr=err,
            env={**os.environ, **settings, **(environment or {})},
        ) as process:
            watch = _watched(process)
        out.seek(0)
        err.seek(0)
        lines = [line for line in out if line.startswith(entry.MARK)]
        if process.returncode or not lines:
            late = f"it took longer than {LIMIT_S:.0f} s"
            return {"not_run": late if time.time() - began > LIMIT_S else reason(err.read())}
    figures: Figures = json.loads(lines[-1].removeprefix(entry.MARK))
    figures["first_step_s"] = figures.pop("first_step_at") - began
    figures["peak_rss_bytes"] = watch.peak_rss_bytes
    figures["own_bytes"] = watch.peak_own_bytes - figures.pop("before_bytes")
    return figures


def _watched(process: subprocess.Popen[Any]) -> MemoryWatch:
    """Waits for the end of a process, or ends it when it takes too long."""
    watch, until = MemoryWatch(process.pid), time.monotonic() + LIMIT_S
    while process.poll() is None:
        watch.look()
        if time.monotonic() > until:
            process.kill()
        time.sleep(LOOK_S)
    return watch


def rounds_of(task: Task, names: list[str], count: int, python: str) -> dict[str, list[Figures]]:
    """Every arm ``count`` times, in turn; one that fails is not tried again."""
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(count):
        for name in names:
            if any("not_run" in figures for figures in found[name]):
                continue
            began = time.monotonic()
            figures = run_arm(
                name,
                task,
                python=python if name in DEEPSPEED else sys.executable,
                count=number == 0 and name in loops.BUILDERS,
            )
            said = figures.get("not_run") or f"{1 / figures['seconds_a_step']:.3f} steps/s"
            took = time.monotonic() - began
            print(f"  round {number + 1}, {name}: {said} ({took:.0f} s)", file=sys.stderr)
            found[name].append(figures)
    return found


def references(task: Task, found: Mapping[str, list[Figures]]) -> dict[str, list[float]]:
    """The losses that plain PyTorch with checkpointing has, by seed."""
    seeds = {s for runs in found.values() for run in runs for s in run.get("losses", {})}
    losses: dict[str, list[float]] = dict(found[BASE][0]["losses"])
    for seed in sorted(seeds - set(losses)):
        losses |= run_arm(BASE, task, seed=int(seed))["losses"]
    return losses


def losses_of(
    name: str, runs: list[Figures], expected: Mapping[str, list[float]], precision: str
) -> tuple[bool, str]:
    """Whether all trials of an arm have the expected losses in all rounds, and in words."""
    within = CLOSE[precision] if name in loops.BUILDERS else 0.0  # shoal's are bitwise or wrong
    said = [
        agreement(losses, expected[seed], within=within)
        for run in runs
        for seed, losses in run["losses"].items()
    ]
    worst = [words for same, words in said if not same] or [w for _, w in said if w != "bitwise"]
    return all(same for same, _ in said), max(worst, default="bitwise")


def summary(
    name: str, found: Mapping[str, list[Figures]], task: Task, expected: Mapping[str, list[float]]
) -> Figures:
    runs = found[name]
    if "not_run" in runs[-1]:
        return {"not_run": runs[-1]["not_run"]}
    rate = {n: [1 / r["seconds_a_step"] for r in found[n]] for n in (name, BASE)}
    cpu = {n: [r["cpu_seconds_a_step"] for r in found[n]] for n in (name, BASE)}
    first, trials = runs[0], len(runs[0]["losses"])
    same, words = losses_of(name, runs, expected, task.precision)
    uncounted = runs[1:] or runs  # in the first round bytes were counted, which takes memory
    told = ("at_a_time", "budget_bytes", "shards", "lookahead", "kept", "weights_kept")
    result: Figures = {
        "losses": words,
        "losses_agree": same,
        "trials": trials,
        "steps_per_s": common.spread(rate[name]),
        "steps_per_s_over_base": common.ratios(rate, name, BASE),
        "cpu_seconds_a_step": common.spread(cpu[name]),
        "cpu_over_base": common.ratios(cpu, name, BASE),
        "device_peak_bytes": max(run.get("device_peak_bytes", 0) for run in runs),
        "own_bytes_a_parameter": common.spread(
            [run["own_bytes"] / (run["at_a_time"] * task.parameters()) for run in uncounted]
        ),
        "peak_rss_mib": common.spread([run["peak_rss_bytes"] / 2**20 for run in uncounted]),
        "first_step_s": common.spread([run["first_step_s"] for run in runs]),
        **{key: first[key] for key in (*told, "boundaries", "version", "torch") if key in first},
    }
    if "host_bytes" in first:
        result["host_bytes_a_parameter"] = first["host_bytes"] / task.parameters()
    if first.get("notes"):
        result["notes"] = first["notes"]
    return result


def compared(task: Task, names: list[str], count: int, python: str) -> Figures:
    """The result of all rounds."""
    found = rounds_of(task, names, count, python)
    if "not_run" in found[BASE][-1]:
        sys.exit(f"{BASE} did not run: {found[BASE][-1]['not_run']}")
    expected = references(task, found)
    return {
        "task": dataclasses.asdict(task),
        "tokens_a_step": task.tokens,
        "parameters": task.parameters(),
        "state_bytes": 16 * task.parameters(),
        "budget_bytes": ours.budget_of(task),
        "rounds": count,
        "base": BASE,
        "arms": {name: summary(name, found, task, expected) for name in names},
    }


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="only these, and the base")
    parser.add_argument("--install", action="store_true", help="from pip to the first step")
    parser.add_argument("--deepspeed-python", default=sys.executable, metavar="PYTHON")
    for field in dataclasses.fields(Task):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default)
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    task = Task(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Task)})
    command = {
        "command": without_folders(" ".join(["python benchmarks/peers/run.py", *sys.argv[1:]]))
    }
    if options.install:
        common.finish(command | {"installations": install.measure(task, run_arm)}, options.json)
        return
    names = [n for n in ARMS if not options.arms or n in {BASE, *options.arms}]
    result = compared(task, names, options.rounds, options.deepspeed_python)
    common.finish(command | result, options.json)
    print(table(result["arms"]), file=sys.stderr)
    if wrong := [n for n, arm in result["arms"].items() if not arm.get("losses_agree", True)]:
        sys.exit(f"not the losses of {BASE}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
