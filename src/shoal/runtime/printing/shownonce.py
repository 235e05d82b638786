"""What code prints while a study is described and measured: each line once.

[Note: lines that come again]
A plan builds models many times: each trial's to look at it, some to measure, some to compare
their bits. What a library prints when it builds one (a report of what it loaded, a progress
bar) came as often, and hid what the plan said. Python shows a warning once to a process, and
this does so with a line. Lines that differ are all shown. A progress bar is a line that is
written over: it moves as it is written the first time, and what it is of tells it from others.
What is flushed before its line has ended is shown as it comes. Nothing of a trial's log is left
out: there all lines are, each time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Writer = tuple[int, int]
"""A thread, and a stream that it writes to."""

MOST_REMEMBERED = 10_000  # lines; later ones are all shown
_MAX_LINE = 2**16  # characters; a longer one is shown in pieces
_BAR = re.compile(r"\s*\d+%\|.*?\|\s*[\d.]+\w*/([\d.]+\w*).*", re.DOTALL)  # tqdm's
_NUMBER = re.compile(r"[\d.:,]+")


@dataclass
class _Line:
    """The line that a thread writes to a stream; ``goes``: whether it is shown, once decided."""

    text: str = ""
    goes: bool | None = None


class ShownOnce:
    """Decides what of a text is written; ``where`` says by whom it is written."""

    def __init__(self) -> None:
        self._seen = set[int]()
        self._lines: dict[Writer, _Line] = {}

    def passed(self, where: Writer, text: str) -> str:
        """What of ``text`` is to be written now."""
        *whole, rest = text.split("\n")
        pieces = [f"{line}\n" for line in whole] + [rest] * bool(rest)
        return "".join(self._piece(where, piece) for piece in pieces)

    def held(self, where: Writer) -> str:
        """The beginning of a line that waits for its end, to be written now."""
        line = self._lines.get(where)
        if line is None or line.goes is not None:
            return ""
        line.goes = True
        return line.text

    def waiting(self) -> list[Writer]:
        """Whose lines have not ended."""
        return list(self._lines)

    def _piece(self, where: Writer, piece: str) -> str:
        line = self._lines.setdefault(where, _Line())
        has_ended = piece.endswith("\n")
        if line.goes is None:
            piece = line.text = line.text + piece
            if has_ended or "\r" in piece or len(piece) > _MAX_LINE:
                line.goes = self._is_new(piece)
        if has_ended:
            del self._lines[where]
        return piece if line.goes else ""

    def _is_new(self, text: str) -> bool:
        told = hash(_told(text))
        if told in self._seen:
            return False
        if len(self._seen) < MOST_REMEMBERED:
            self._seen.add(told)
        return True


def _told(text: str) -> str:
    """What tells a line from others: of one that is written over, not how far it has come."""
    if "\r" not in text.rstrip("\r\n"):
        return text.rstrip("\r\n")
    first = next((part for part in text.split("\r") if part.strip()), "")
    bar = _BAR.sub(r" of \1", first)
    return "\r" + (bar if bar != first else _NUMBER.sub("#", first))
