"""What moves in a step beside the least that can, LRU, and everything in and out.

    python benchmarks/residency/run.py [--json FILE] [--only paper|measured]

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arms
import measured
import torch

from shoal.runtime.pool import WorkerPool

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import finish


def on_paper() -> dict[str, Any]:
    """The planner's figures for models that nobody builds."""
    parts: tuple[Callable[[], Any], ...] = (
        arms.small,
        arms.large,
        arms.four_trials,
        arms.planners_choice,
        arms.accumulated,
    )
    return {part.__name__: _timed(part) for part in parts}


def on_a_device() -> dict[str, Any]:
    """The bytes and the bits of models that train."""
    torch.set_num_threads(1)
    with WorkerPool() as pool:
        real = _timed(measured.real_steps, pool)
        return {"real_steps": real, "sixty_four_times": measured.sixty_four_times(pool)}


def _timed(part: Callable[..., Any], *args: Any) -> list[Any]:
    begin = time.monotonic()
    rows = list(part(*args))
    print(f"{part.__name__}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--only", choices=("paper", "measured"))
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.only != "measured":
        result["paper"] = on_paper()
    if options.only != "paper":
        result["measured"] = on_a_device()
    finish(result, options.json)


if __name__ == "__main__":
    main()
