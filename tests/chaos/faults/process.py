"""A harness of its own process: it forks, and this one may have threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHAOS = Path(__file__).parents[1]
SOURCE = CHAOS.parents[1] / "src"


def output_of(module: str, *arguments: str, preload: Path | None = None) -> Any:
    """What ``python -m module`` says as JSON; its exit code only says whether that is good."""
    path = os.pathsep.join([str(CHAOS), str(SOURCE)])
    environment = os.environ | {"PYTHONPATH": path}
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
    done = subprocess.run(
        [sys.executable, "-m", module, "--json", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise AssertionError(f"{module} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)
