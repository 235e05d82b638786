"""The live table of a running study, and plain lines where there is no terminal.

A screen is one function of a Snapshot (``render``); ``LiveTable`` and ``PlainLines``
are the two callbacks that show it. Both are told every event by the study, in the
study's own process, and never raise into it; or by ``shoal watch``, in another one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import IO, NamedTuple, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.core.event import (
    Event,
    StudyFinished,
    WorkerStalled,
)
from shoal.core.spec import varying_names
from shoal.core.units import counted, format_bytes, format_seconds, format_value
from shoal.observe.rows import DeviceRow, TrialRow, TrialState
from shoal.observe.snapshot import Folder, Snapshot
from shoal.observe.states import counts_of, state_on_record, trial_state
from shoal.ui.lines import (
    PlainLines,
    describe_behind,
    describe_stall,
    describe_stop,
    describe_wait,
    total_steps,
)
from shoal.ui.text import (
    DASH,
    format_metric,
    format_steps,
    how,
    short_titles,
    shorten,
)

REFRESH_S = 0.25
_GAP = 2  # blanks between two columns
_BAR = (8, 30)  # of progress: the least and the greatest width
_LOW = 16  # lines of a terminal that has none to spare
_NAME = 12  # characters of the study's name that are always shown
_STYLES = {
    TrialState.PENDING: "dim",
    TrialState.RUNNING: "cyan",
    TrialState.FINISHED: "green",
    TrialState.FAILED: "red",
    TrialState.STOPPED: "yellow",
    TrialState.PRUNED: "magenta",
}


class Screen(Protocol):
    """A callback of a study that draws: a context manager around the run."""

    def __call__(self, event: Event) -> None: ...
    def look_back(self, before: Snapshot) -> None: ...
    def __enter__(self) -> Screen: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def make_screen(stream: IO[str] | None = None) -> LiveTable | PlainLines:
    """A live table where ``stream`` (standard error unless given) is a terminal, else lines."""
    console = Console(file=stream or sys.stderr, highlight=False)
    return LiveTable(console) if console.is_terminal else PlainLines(console.file)


class LiveTable:
    """One table, drawn again at most every ``REFRESH_S`` seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._folder = Folder()
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._next_s = 0.0
        self._broken = False

    def __call__(self, event: Event) -> None:
        if self._broken:
            return
        try:
            self._folder.add(event)
            now = self._clock()
            if now >= self._next_s or isinstance(event, StudyFinished):
                self._draw()
                self._next_s = now + REFRESH_S
        except Exception as error:  # a screen must not stop what it shows
            self._broken = True
            print(f"the live table stopped, the study goes on: {error!r}", file=sys.stderr)

    def catch_up(self, events: Iterable[Event]) -> None:
        """Draw once, after all of them."""
        self._folder.add_all(events)
        self._draw()

    def tell(self, events: Iterable[Event]) -> None:
        """The same, if there are any; unlike a call it raises what goes wrong."""
        if new := list(events):
            self.catch_up(new)

    def look_back(self, before: Snapshot) -> None:
        """Go on from what the study came to before."""
        self._folder = before.folder()

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def _draw(self) -> None:
        size = self._console.size
        screen = render(self._folder.snapshot(), size.width, size.height)
        self._live.update(screen, refresh=True)


# ---------------------------------------------------------------- the table


class Column(NamedTuple):
    """One column; of those that do not fit, the one with the largest ``drop`` goes first."""

    title: str
    cells: list[Text]
    drop: int
    right: bool = True

    @property
    def width(self) -> int:
        return max(len(self.title), *(cell.cell_len for cell in self.cells), 1)


def render(snapshot: Snapshot, width: int = 80, height: int = 24) -> RenderableType:
    """The screen of a study: what runs and what was best, the devices, the time left."""
    if not snapshot.trials:
        return _planning(snapshot)
    shown = snapshot.devices[: max(1, height // 4)]
    devices = [_device_line(row, is_over=snapshot.is_finished) for row in shown]
    stalls = [_stall_line(row.stalled) for row in snapshot.devices if row.stalled]
    devices += [] if snapshot.is_finished else stalls
    failures = _failure_lines(snapshot)
    late = [*describe_behind(snapshot), *(f"warning: {one}" for one in snapshot.warnings)]
    behind = [_one_line(words, "yellow") for words in late]
    unfused = [] if snapshot.is_finished else snapshot.unfused  # then the ending has it
    behind += [_one_line(f"unfused {words}", "dim") for words in unfused]
    waits = [_one_line(describe_wait(wait)) for wait in snapshot.waits]
    footer = _footer(snapshot, width if height > _LOW else None)
    below = len(devices) + len(waits) + len(failures) + len(behind) + len(footer)
    room = max(1, height - below - 6)
    rows = choose_rows(snapshot, room)
    hidden = snapshot.total - len(rows)
    more = [Text(f"... and {counted(hidden, 'more trial')}", style="dim")] if hidden > 0 else []
    blank = Text("")
    return Group(
        _title(snapshot, width),
        blank,
        _table(snapshot, rows, width),
        *more,
        *failures,
        blank,
        *devices,
        *waits,
        *behind,
        *footer,
    )


def _one_line(words: str, style: str = "") -> Text:
    return Text(words, style=style, no_wrap=True, overflow="ellipsis")


def _planning(snapshot: Snapshot) -> RenderableType:
    """Before there is a plan: what took long when it was last heard of, and whose worker died."""
    name = f"{snapshot.study}: {counted(snapshot.total, 'trial')}; " if snapshot.study else ""
    began = snapshot.started or 0.0
    return Group(
        Text(f"{name}planning, each distinct model is measured once ...", style="dim"),
        *(
            Text(f"after {format_seconds(wait.time - began)}  {describe_wait(wait)}")
            for wait in snapshot.waits
        ),
        *(_device_line(row) for row in snapshot.devices if row.restarts),
    )


def choose_rows(snapshot: Snapshot, room: int) -> list[TrialRow]:
    """The trials to show: all in order if they fit, else those that run, failed, or lead."""
    if snapshot.total <= room:
        known = {row.number: row for row in snapshot.trials}
        numbers = sorted(known) if len(known) == snapshot.total else range(snapshot.total)
        return [known.get(number, TrialRow(number=number)) for number in numbers]
    sign = 1.0 if snapshot.mode == "min" else -1.0
    best = sorted(
        (row for row in snapshot.trials if row.best is not None and row.is_done),
        key=lambda row: sign * (row.best or 0.0),
    )
    running = [row for row in snapshot.trials if row.state is TrialState.RUNNING]
    failed = [row for row in snapshot.trials if row.state is TrialState.FAILED]
    waiting = [row for row in snapshot.trials if row.state is TrialState.PENDING]
    order = [*running, *best[:3], *failed[-2:], *best[3:], *failed[:-2], *waiting]
    unique = {row.number: row for row in order}
    return list(unique.values())[:room]


def _table(snapshot: Snapshot, rows: list[TrialRow], width: int) -> Table:
    columns = fit(_columns(snapshot, rows), width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=True,
            style="default",
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


def fit(columns: list[Column], width: int) -> list[Column]:
    """The columns that fit side by side, long titles shortened; those kept keep their order."""

    def is_too_wide(some: list[Column]) -> bool:
        return sum(column.width + _GAP for column in some) - _GAP > width

    short = columns
    if is_too_wide(columns):
        titles = short_titles([column.title for column in columns], _rows_of(columns))
        short = [c._replace(title=title) for c, title in zip(columns, titles, strict=True)]
    places = list(range(len(columns)))
    while len(places) > 1 and is_too_wide([short[place] for place in places]):
        places.remove(max(places, key=lambda place: columns[place].drop))
    shown = [short[place] for place in places]
    for index in reversed(range(len(places))):  # whole again where there is room: the metric first
        longer = [*shown[:index], columns[places[index]], *shown[index + 1 :]]
        shown = shown if is_too_wide(longer) else longer
    return shown


def _rows_of(columns: list[Column]) -> list[list[str]]:
    cells = zip(*(column.cells for column in columns), strict=True)
    return [[cell.plain for cell in row] for row in cells]


def _columns(snapshot: Snapshot, rows: list[TrialRow]) -> list[Column]:
    names = varying_names(row.hp for row in snapshot.trials)
    study = state_on_record(snapshot)

    def plain(cells: list[str]) -> list[Text]:
        return [Text(cell) for cell in cells]

    settings = [
        Column(name, plain([_setting(row, name) for row in rows]), drop=20 + index)
        for index, name in enumerate(names)
    ]
    leader = snapshot.best
    best = [
        Text(format_metric(row.best), style="bold" if leader and row is leader else "")
        for row in rows
    ]
    return [
        Column("#", plain([str(row.number) for row in rows]), drop=0),
        *settings,
        Column("how", plain([how(row) for row in rows]), drop=60, right=False),
        Column("device", plain([row.device or DASH for row in rows]), drop=70, right=False),
        Column("state", [_state(row, study) for row in rows], drop=1, right=False),
        Column("step", plain([format_steps(row.step, row.steps) for row in rows]), drop=3),
        Column("loss", plain([format_metric(row.smooth_loss) for row in rows]), drop=4),
        Column("steps/s", plain([_speed(row) for row in rows]), drop=50),
        Column(f"best {snapshot.metric}", best, drop=2),
    ]


def _setting(row: TrialRow, name: str) -> str:
    return shorten(format_value(row.hp[name]), 16) if name in row.hp else DASH


def _state(row: TrialRow, study: str) -> Text:
    return Text(trial_state(row, study), style=_STYLES[row.state])


def _speed(row: TrialRow) -> str:
    if row.state is not TrialState.RUNNING or row.speed is None:
        return DASH
    return f"{row.speed:.1f}" if row.speed >= 0.1 else f"{row.speed:.2g}"


# ---------------------------------------------------------------- title and footer


def _title(snapshot: Snapshot, width: int) -> RenderableType:
    total = total_steps(snapshot)
    trials, steps = counted(snapshot.total, "trial"), counted(snapshot.steps_done, "step")
    if total:
        share = 100 * snapshot.steps_done / total
        steps = f"{share:.0f} % of {counted(total, 'step')}"
    room = width - len(trials) - len(steps) - 3 * _GAP
    name = shorten(snapshot.study, max(_NAME, room + _GAP))
    bar = min(_BAR[1], room - len(name))
    cells: list[RenderableType] = [Text.assemble((name, "bold"), f"  {trials}"), Text(steps)]
    line = Table.grid(padding=(0, _GAP))
    line.add_column(no_wrap=True)
    if total and bar >= _BAR[0]:
        line.add_column(width=bar)
        cells.insert(1, bar_of(total, snapshot.steps_done))
    line.add_column(no_wrap=True)
    line.add_row(*cells)
    return line


def bar_of(total: int, done: int) -> ProgressBar:
    """In the colours of trials that run and of those that finished: red is for what failed."""
    running, finished = _STYLES[TrialState.RUNNING], _STYLES[TrialState.FINISHED]
    return ProgressBar(
        total=total, completed=done, complete_style=running, finished_style=finished
    )


def _device_line(row: DeviceRow, *, is_over: bool = False) -> Text:
    peak = format_bytes(row.peak_bytes) if row.peak_bytes else DASH
    budget = format_bytes(row.budget_bytes)
    busy = "" if row.busy is None else f"  busy {100 * row.busy:.0f} %"
    is_idle = is_over or not row.trials
    speed = "" if row.speed is None or is_idle else f"  {row.speed:.1f} steps/s"
    trials = ", ".join(map(str, row.trials))
    running = (
        f"  trials {trials}" if len(row.trials) > 1 else f"  trial {trials}" if trials else ""
    )
    restarts = f"  worker restarts {row.restarts}" if row.restarts else ""
    text = f"{row.name}  peak {peak} of {budget}{restarts}{busy}{speed}{running}"
    style = "red" if row.restarts else "default"
    return _one_line(text, style)


def _stall_line(stall: WorkerStalled) -> Text:
    return _one_line(describe_stall(stall), "yellow")


def _failure_lines(snapshot: Snapshot) -> list[Text]:
    failed = [row for row in snapshot.trials if row.state is TrialState.FAILED]
    return [
        _one_line(f"trial {row.number} failed at step {row.step}: {row.error_line}", "red")
        for row in failed[-2:]
    ]


def _footer(snapshot: Snapshot, width: int | None) -> list[Text]:
    """In one line, or in two where one of ``width`` has no room for how long it will take."""
    counts = counts_of(snapshot)
    times = f"elapsed {format_seconds(snapshot.seconds)}    {_end(snapshot)}"
    whole = f"{counts}    {times}"
    lines = [whole] if width is None or len(whole) <= width else [counts, times]
    return [_one_line(line, "bold") for line in lines]


def _end(snapshot: Snapshot) -> str:
    if snapshot.stopped:
        return describe_stop(snapshot.stopped)
    if snapshot.is_finished:
        return "done"
    if snapshot.is_paused:
        return "paused"
    return "ETA " + (
        DASH if snapshot.eta_seconds is None else format_seconds(snapshot.eta_seconds)
    )
