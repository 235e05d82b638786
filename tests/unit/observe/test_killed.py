"""A writer that is killed at any moment loses nothing that it acknowledged."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killing.py")


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_acknowledged_outlives_any_kill(tmp_path, seed):
    command = [sys.executable, str(PROGRAM), str(tmp_path / "study"), "40", str(seed)]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("events after 40 kills\n")
