"""A folder that costs no disk, where there is one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from faults.injector import memory


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        yield Path(name)
