"""How values and tables read in plain text; needs no terminal library."""

from __future__ import annotations

import math
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from shoal.core.seats import epochs_of
from shoal.core.spec import Scalar
from shoal.core.units import format_value
from shoal.observe.rows import TrialRow

DASH = "-"
_LABEL = re.compile(r"\w+ {2,}")
_KIND = re.compile(r"^(?:\w+\.)*[A-Z]\w*: ")


def format_metric(value: float | None) -> str:
    """A loss or a metric: four digits after the point where that says something."""
    if value is None:
        return DASH
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.3e}"


def format_steps(step: int, steps: int | None) -> str:
    """``12/100``, or ``12`` where the end is not known."""
    return str(step) if steps is None else f"{step}/{steps}"


def format_changes(changes: Mapping[str, tuple[Scalar, Scalar]]) -> str:
    """What hyperparameters became, and what they were."""
    words = (
        f"{n}={format_value(new)} (was {format_value(old)})" for n, (old, new) in changes.items()
    )
    return ", ".join(words) or "the same hyperparameters"


def how(row: TrialRow) -> str:
    """A trial's technique, and its shards where there are several, or how wide its array is."""
    technique = row.technique.lower() or DASH
    if epochs := epochs_of(row.numerics):
        widths = (width for width, _ in groupby(str(epoch.width) for epoch in epochs))
        found = f"array {'/'.join(widths)}"  # 1: by itself
        return f"{found}, {technique}" if technique == "spilled" else found
    return f"{technique} {row.shards}" if row.shards > 1 else technique


def align(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: str = "") -> str:
    """Rows under a header, columns two spaces apart.

    Numbers are set right, words left: a column is a number's when all its cells are,
    dashes aside. ``left`` is put before each line.
    """
    widths = [max(map(columns, column)) for column in zip(header, *rows, strict=True)]
    numeric = [all(map(_is_number, column)) for column in zip(*rows, strict=True)]
    numeric = numeric or [False] * len(header)
    lines = []
    for row in [header, *rows]:
        cells = (
            cell.rjust(len(cell) + more) if right else cell.ljust(len(cell) + more)
            for cell, width, right in zip(row, widths, numeric, strict=True)
            for more in [width - columns(cell)]
        )
        lines.append((left + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def columns(text: str) -> int:
    """How many a terminal shows it in: two for a Chinese character, none for a letter's mark."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def fits(text: str, width: int | None) -> bool:
    """Whether no line of it is wider than a terminal is; None is none."""
    return width is None or max(map(columns, text.splitlines())) <= width


def plain_reason(reason: str) -> str:
    """Why something was done, without the kind of error that it was told in."""
    return _KIND.sub("", reason, count=1)


def without_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], places: Iterable[int]
) -> tuple[list[str], list[list[str]]]:
    """A table that lacks some of its columns, by place: two may have one name."""
    left = set(places)
    kept = [index for index in range(len(header)) if index not in left]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


TITLE = 16  # of a column's title, where lines have no room for more


def short_titles(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Titles that make no column much wider than its cells."""
    cells = list(zip(*rows, strict=True)) or [()] * len(header)
    return [
        shorten(title, max(TITLE, *map(columns, column), 0))
        for title, column in zip(header, cells, strict=True)
    ]


def align_within(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    droppable: Sequence[int],
    left: Iterable[int] = (),
) -> str:
    """A table without the columns ``left``, of lines of at most ``width`` characters.

    Long titles are shortened first, then ``droppable`` columns left out in that order, and named.
    """
    gone, left_out = list(left), list[str]()
    text, titles = align(*without_columns(header, rows, gone)), header
    if not fits(text, width):
        titles = short_titles(header, rows)
        text = align(*without_columns(titles, rows, gone))
    for place in droppable:
        if fits(text, width):
            break
        if place not in gone:
            gone.append(place)
            left_out.append(header[place])
            text = align(*without_columns(titles, rows, gone))
    return text + f"\n(no room for {', '.join(left_out)})" * bool(left_out)


def wrap(text: str, width: int | None) -> str:
    """Each line of at most ``width`` characters, cut between words and indented from then on.

    Under a line's label, two blanks before the rest, nothing is written; a line with two blanks
    between other words is a table's, and stays.
    """
    if width is None:
        return text
    return "\n".join(_wrapped(line, width) for line in text.split("\n"))


def _wrapped(line: str, width: int) -> str:
    words = line.lstrip(" ")
    label = _LABEL.match(words)
    rest = words[label.end() :] if label else words
    if len(line) <= width or "  " in rest:
        return line
    hung = len(line) - len(rest)
    return textwrap.fill(
        rest,
        width,
        initial_indent=line[:hung],
        subsequent_indent=" " * (hung if label else hung + 2),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def terminal_width() -> int | None:
    """How wide a line of standard output may be; None where no terminal shows it."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _is_number(cell: str) -> bool:
    if cell == DASH:
        return True
    try:
        float(cell.partition("/")[0].removesuffix("%").strip())
    except ValueError:
        return False
    return True


def shorten(text: str, width: int) -> str:
    """``text`` on one line of at most ``width`` columns."""
    line = " ".join(text.split())
    if columns(line) <= width:
        return line
    kept = line[: max(0, width - 3)]
    while kept and columns(kept) > width - 3:
        kept = kept[:-1]
    return kept + "..."
