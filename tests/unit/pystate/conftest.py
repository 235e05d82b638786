from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for sentover.py


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("held_here")
    monkeypatch.setitem(sys.modules, "held_here", made)
    return made
