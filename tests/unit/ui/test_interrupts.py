"""Ctrl-C before there is a study: whoever swallows it only delays it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shoal.ui.interrupts import heeding_interrupts
from shoal.ui.train import open_study

FILE = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except:
    pass
"""


def test_one_that_a_file_swallows_ends_the_command_when_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text(FILE + "import shoal\nstudy = None\n")
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        open_study(str(tmp_path / "it.py"))

    assert signal.getsignal(signal.SIGINT) is before


def test_one_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heeding_interrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
