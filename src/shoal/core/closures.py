"""What a function takes from the function around it."""

from __future__ import annotations

from collections.abc import Iterable
from types import CellType, FunctionType
from typing import Any


class Unassigned:
    """What a cell has that nothing was assigned to yet, or nothing any more."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "nothing"


UNASSIGNED = Unassigned()


def contents_of(cells: Iterable[CellType] | None) -> list[Any]:
    """What each cell of a ``__closure__`` has; ``UNASSIGNED`` where it has nothing."""
    return [_content(cell) for cell in cells or ()]


def closed_over(function: FunctionType) -> dict[str, Any]:
    """The values by name, without those that are not assigned yet."""
    named = zip(function.__code__.co_freevars, contents_of(function.__closure__), strict=True)
    return {name: value for name, value in named if value is not UNASSIGNED}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return UNASSIGNED
