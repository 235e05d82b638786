"""The live table in a notebook: one HTML table, refreshed in place.

What it shows is what the terminal shows: the same ``render``, its texts and tables turned
into HTML. Every text is escaped: names and errors are the user's and anybody's.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.core.event import Event
from shoal.observe.snapshot import Folder, Snapshot
from shoal.ui.dashboard import render

REFRESH_S = 0.5
WIDTH, HEIGHT = 200, 48  # in characters and lines: what ``render`` is told to fill
_COLORS = {"red": "#c62828", "green": "#2e7d32", "cyan": "#00838f"}
_MONO = "font-family: monospace; white-space: pre;"


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel; imports nothing to tell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


class NotebookTable:
    """A callback of a study: draws under the cell, at most every ``REFRESH_S`` seconds.

    Used as the terminal's screens are: a context manager around the run.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._folder = Folder()
        self._handle: Any = None  # of the one output, once there is one
        self._next_s = 0.0
        self._is_stale = self._broken = False

    def __call__(self, event: Event) -> None:
        if self._broken:
            return
        try:
            self._folder.add(event)
            self._is_stale = True
            if self._clock() >= self._next_s:
                self._draw()
        except Exception as error:  # a screen must not stop what it shows
            self._give_up(error)

    def look_back(self, before: Snapshot) -> None:
        """Go on from what the study came to before."""
        self._folder = before.folder()

    def __enter__(self) -> NotebookTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_stale and not self._broken:
            try:
                self._draw()
            except Exception as failure:
                self._give_up(failure)

    def _draw(self) -> None:
        from IPython.display import HTML, display  # it is there: a kernel runs this

        shown = HTML(to_html(render(self._folder.snapshot(), WIDTH, HEIGHT)))
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)
        self._next_s, self._is_stale = self._clock() + REFRESH_S, False

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        print(f"the table stopped, the study goes on: {error!r}", file=sys.stderr)


def to_html(screen: RenderableType) -> str:
    """A screen of texts, tables and bars as HTML."""
    match screen:
        case Group():
            return f'<div class="shoal">{"".join(map(to_html, screen.renderables))}</div>'
        case Table():
            return _table(screen)
        case ProgressBar():
            done = f"{screen.completed:g}", f"{screen.total or 1:g}"
            return f'<progress value="{done[0]}" max="{done[1]}"></progress>'
        case Text():
            return f'<div style="{_MONO} {_css(str(screen.style))}">{_spans(screen) or " "}</div>'
    return f"<div>{html.escape(str(screen))}</div>"


def _table(table: Table) -> str:
    """Rows of cells; a grid, which has no header, gets none."""
    sides = ["right" if column.justify == "right" else "left" for column in table.columns]
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    header = [Text(str(column.header)) for column in table.columns]
    lines = [_row("th", header, sides)] if table.show_header else []
    lines += [_row("td", row, sides) for row in rows]
    return f'<table style="{_MONO}">{"".join(lines)}</table>'


def _row(tag: str, cells: Sequence[RenderableType], sides: Sequence[str]) -> str:
    shown = (_cell(tag, cell, side) for cell, side in zip(cells, sides, strict=True))
    return f"<tr>{''.join(shown)}</tr>"


def _cell(tag: str, content: RenderableType, side: str) -> str:
    if not isinstance(content, Text):
        return f"<{tag}>{to_html(content)}</{tag}>"
    css = f"text-align: {side}; {_css(str(content.style))}".strip()
    return f'<{tag} style="{css}">{_spans(content)}</{tag}>'


def _spans(text: Text) -> str:
    """A text with the styles of its parts."""
    parts = []
    for part in text.divide(sorted({at for span in text.spans for at in (span.start, span.end)})):
        css = " ".join(_css(str(span.style)) for span in part.spans)
        shown = html.escape(part.plain)
        parts.append(f'<span style="{css}">{shown}</span>' if css else shown)
    return "".join(parts)


def _css(style: str) -> str:
    known = []
    for word in style.split():
        if word == "bold":
            known.append("font-weight: bold;")
        elif word == "dim":
            known.append("opacity: 0.6;")
        elif word in _COLORS:
            known.append(f"color: {_COLORS[word]};")
    return " ".join(known)
