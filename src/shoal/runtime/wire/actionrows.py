"""How finely a device's actions are told: each one, until there are many short ones.

[Note: short units in a row]
A study of small models takes thousands of units a second, and a row for each was 85 MB in three
minutes, which every reader had to go through. So after the first ``FINE`` actions of a device in a
run, units of one trial that follow each other are one row, ``24 units``: it begins with the first
and is as long as all of them took, so what a device computed adds up as before. Whatever takes
longer, or is of another stream or trial, is told by itself.
"""

from __future__ import annotations

from typing import NamedTuple

FINE = 20_000
SHORT_S = 0.005


class Row(NamedTuple):
    """An action, or several; ``start`` and ``end`` in Unix seconds."""

    stream: str
    trial: int
    step: int  # of the first
    action: str
    start: float
    end: float
    num_bytes: int


class ActionRows:
    """Joins the short units of a device after its first ``fine`` actions."""

    def __init__(self, fine: int = FINE) -> None:
        self._fine = fine
        self._first: Row | None = None  # of those that are being joined
        self._count, self._seconds, self._bytes = 0, 0.0, 0

    def add(self, row: Row) -> list[Row]:
        """What is to be told now that ``row`` happened."""
        if self._fine > 0:
            self._fine -= 1
            return [row]
        is_short = row.stream == "compute" and row.end - row.start < SHORT_S
        joins = is_short and self._first is not None and self._first.trial == row.trial
        told = [] if joins else self.rest()
        if not is_short:
            return [*told, row]
        if self._first is None:
            self._first = row
        self._count += 1
        self._seconds += row.end - row.start
        self._bytes += row.num_bytes
        return told

    def rest(self) -> list[Row]:
        """What was kept to be joined, before others hear of what came after it."""
        first, count = self._first, self._count
        if first is None:
            return []
        joined = first._replace(
            action=f"{count} units",
            end=first.start + self._seconds,
            num_bytes=self._bytes,
        )
        self._first, self._count, self._seconds, self._bytes = None, 0, 0.0, 0
        return [first if count == 1 else joined]
