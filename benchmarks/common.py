"""What the benchmarks share: machine and version facts, medians, results as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def facts() -> dict[str, Any]:
    """Versions and machine, to stand beside every figure."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    ).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 2),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def interleaved(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run the arms in turn, ``rounds`` times, so that the machine's moods hit all alike."""
    figures: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            figures[name].append(arm())
    return figures


def ratios(figures: dict[str, list[float]], name: str, base: str) -> dict[str, float]:
    """Spread of one arm over another, round by round."""
    return spread([a / b for a, b in zip(figures[name], figures[base], strict=True)])


def keep(result: dict[str, Any], path: str | None) -> str:
    """Write the result with the facts when asked to, also what there is so far of it."""
    text = json.dumps({**facts(), **result}, indent=2)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n")
    return text


def finish(result: dict[str, Any], path: str | None) -> None:
    """Print the result, and keep it."""
    print(keep(result, path))
