"""Seconds from a fresh environment to the first step, with pip's downloads at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import loops
import torch
from ours import ARMS as OURS
from report import reason
from task import Task

ROOT = Path(__file__).parents[2]
TORCH = f"torch=={torch.__version__.partition('+')[0]}"
RunArm = Callable[..., dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What pip is asked for, in turn, and the arms that take a first step with it."""

    name: str
    packages: Sequence[Sequence[str]]
    arms: Sequence[str]


def installations(source: Path) -> list[Installation]:
    """``source`` is a copy of this repository, so that nothing is built inside it."""
    return [
        Installation(
            name="torch",
            packages=[[TORCH, "numpy"]],
            arms=[loops.CHECKPOINTED, loops.FSDP2],
        ),
        Installation(
            name="DeepSpeed",
            packages=[
                [TORCH, "numpy", "setuptools", "wheel", "ninja"],
                ["--no-build-isolation", "deepspeed"],
            ],
            arms=[loops.ZERO3, loops.ZERO3_ADAM],
        ),
        Installation(name="shoal", packages=[[TORCH, str(source)]], arms=list(OURS)[:1]),
    ]


def measure(task: Task, run_arm: RunArm) -> dict[str, Any]:
    """Every installation twice: once to fill pip's cache, once by the clock."""
    one_step = replace(task, warm_up=0, steps=1, trials=1)
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        source = _copy_of_repository(Path(directory) / "source")
        for installation in installations(source):
            for attempt in ("unmeasured", "measured"):
                print(f"  {installation.name}, {attempt}", file=sys.stderr, flush=True)
                place = Path(directory) / "environment"
                try:
                    figures = _installed(installation, place)
                    if attempt == "measured":
                        figures["first_step_s"] = _first_steps(
                            installation, place, one_step, run_arm
                        )
                except subprocess.CalledProcessError as error:
                    figures = {"not_installed": reason(error.stderr)}
                finally:
                    shutil.rmtree(place, ignore_errors=True)
                found[installation.name] = figures
    return found


def _installed(installation: Installation, place: Path) -> dict[str, Any]:
    """Seconds for the environment and for pip."""
    began = time.monotonic()
    venv.create(place, with_pip=True)
    made = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for packages in installation.packages:
        command = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return {"environment_s": made - began, "pip_s": time.monotonic() - made}


def _first_steps(
    installation: Installation, place: Path, task: Task, run_arm: RunArm
) -> dict[str, Any]:
    """Seconds from the command to the end of the first step, by arm; DeepSpeed compiles in it."""
    found: dict[str, Any] = {}
    for arm in installation.arms:
        with tempfile.TemporaryDirectory() as extensions:
            figures = run_arm(
                arm,
                task,
                python=str(place / "bin" / "python"),
                environment={"TORCH_EXTENSIONS_DIR": extensions},
            )
        found[arm] = figures.get("first_step_s", figures.get("not_run"))
    return found


def _copy_of_repository(place: Path) -> Path:
    place.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", place / "src", ignore=ignored)
    return place
