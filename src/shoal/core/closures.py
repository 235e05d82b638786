"""What a function takes from the function around it."""

from __future__ import annotations

from contextlib import suppress
from types import FunctionType
from typing import Any


def closed_over(function: FunctionType) -> dict[str, Any]:
    """The values by name, without those that are not assigned yet."""
    found = {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found
