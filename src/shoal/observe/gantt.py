"""A study's timeline as one SVG: what every device and stream did, and for which trial.

[Note: two ways to draw a row]
    slices   a rectangle per run of actions of one trial; runs closer than half a
             pixel are one
    shares   where such runs are still thinner than pixels: the row is cut into
             columns, and in each the trials are stacked by their share of its time, so
             that height means busy and nothing is drawn that is not there

Below the whole study is a close-up of a moment in which the actions can be read.
Text sizes are guesses from the number of characters; there is no font to measure.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from shoal.core.units import counted
from shoal.observe.timeline import (
    Slice,
    Timeline,
    busy_fractions,
    covered,
    read_study_timeline,
    typical_seconds,
)

WIDTH = 1200
_LEFT, _RIGHT = 128, 1090  # of the time axis; labels left of it, percentages right
_HEIGHTS = {"compute": 30}
_THIN, _THIN_DETAIL = 12, 16  # other streams, in the whole and in the close-up
_COLUMN_PX = 2  # of a row drawn as shares
_DETAIL_UNITS = 16  # compute actions that the close-up shows at least
_LEGEND_MOST = 40
_MARGIN = 6  # pixels that a text leaves free in its box
_CHARACTER_PX = 0.64  # a character's width over the font's size

# Told apart with any colour vision (after Okabe & Ito, and Tol's "muted"); each with the
# ink that reads on it. Later trials take the same colours with stripes.
_PALETTE = (
    ("#0072B2", "#fff"),
    ("#E69F00", "#000"),
    ("#009E73", "#fff"),
    ("#CC79A7", "#000"),
    ("#56B4E9", "#000"),
    ("#D55E00", "#fff"),
    ("#F0E442", "#000"),
    ("#332288", "#fff"),
    ("#999933", "#000"),
    ("#882255", "#fff"),
    ("#88CCEE", "#000"),
    ("#666666", "#fff"),
)
_MEANINGS = {
    "F": "F forward",
    "B": "B forward and backward",
    "I": "I backward for the inputs",
    "W": "W backward for the weights",
    "STEP": "STEP the optimizer's",
    "LOAD": "LOAD host to device (up)",
    "STORE": "STORE device to host (down)",
    "SEND": "SEND, RECV between devices",
    "SYNC": "SYNC the gradients' norm",
}
_STYLE = (
    "text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#222}"
    ".s{font-size:11px}.t{font-size:10px}.g{stroke:#ddd;stroke-width:1}"
    ".m{fill:#666}.b{font-weight:bold}.r{text-anchor:end}.c{text-anchor:middle}"
)


class Box(NamedTuple):
    """A rectangle of one trial in a row; x and width in pixels, y and height in the row's 0..1."""

    x: float
    width: float
    y: float
    height: float
    trial: int
    text: str = ""
    beside: bool = False  # the text stands to the right


@dataclass(frozen=True, slots=True)
class Axis:
    """Seconds to pixels."""

    start: float
    end: float

    @property
    def scale(self) -> float:
        """Pixels per second."""
        return (_RIGHT - _LEFT) / max(self.end - self.start, 1e-12)

    def __call__(self, seconds: float) -> float:
        return _LEFT + (seconds - self.start) * self.scale


def write_gantt(study_dir: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write the chart of a study's directory to ``out``, an SVG file.

    Raises:
        SpecError: no action was recorded there.
    """
    Path(out).write_text(draw_gantt(read_study_timeline(study_dir)), encoding="utf-8")


def draw_gantt(timeline: Timeline) -> str:
    """The chart as SVG text, 1200 pixels wide."""
    trials = timeline.trials
    whole = Axis(0.0, timeline.seconds)
    moment = detail_window(timeline)
    parts = [_title(timeline)]
    legend, y = _legend(timeline, 62)
    parts += legend
    top = y + 14
    panel, y = _panel(timeline, whole, top, with_busy=True)
    if moment is not None:
        parts += _zoom(whole, moment, top, y)
    parts += panel
    if moment is not None:
        span = moment.end - moment.start
        y += 52
        parts.append(_text(_LEFT, y - 10, f"{_time(span, span)} in detail", "s b"))
        panel, y = _panel(timeline, moment, y, with_busy=False)
        parts += panel
    parts.append(_text(_LEFT, y + 26, _words_told(timeline), "t m"))
    return _document(parts, trials, y + 40)


def _words_told(timeline: Timeline) -> str:
    """What the actions that are there mean."""
    rows = timeline.rows.values()
    found = {word.partition("@")[0] for row in rows for p in row for word in p.action.split()[:2]}
    told = [meaning for word, meaning in _MEANINGS.items() if word in found]
    numbers = "s0, m0, ...: which shard or stage of the model, which micro-batch of the step"
    return "; ".join([*told, numbers])


def _document(parts: Sequence[str], trials: Sequence[int], height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}">\n<style>{_STYLE}</style>\n'
    )
    patterns = "".join(_pattern(trial) for trial in trials if trial >= len(_PALETTE))
    page = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>'
    return "\n".join([head, f"<defs>{patterns}</defs>", page, *parts, "</svg>\n"])


def _title(timeline: Timeline) -> str:
    trials, devices = len(timeline.planned or timeline.trials), len(timeline.devices)
    mean = sum(busy_fractions(timeline).values()) / devices
    words = (
        f"{counted(trials, 'trial')} on {counted(devices, 'device')}, "
        f"{timeline.seconds:.4g} s, {mean:.0%} busy"
    )
    title = f'<text x="20" y="30" font-size="18" class="b">{escape(timeline.study)}</text>'
    return title + f'\n<text x="20" y="48" class="s m">{words}</text>'


def _legend(timeline: Timeline, y: float) -> tuple[list[str], float]:
    """Swatches in lines of the chart's width, and where they end."""
    trials = timeline.trials
    parts, x = [], 20.0
    for trial in trials[:_LEGEND_MOST]:
        width = timeline.widths.get(trial)
        name = f"trial {trial}" + f", array of {width}" * bool(width)
        room = 68 + 68 * bool(width)
        if x > WIDTH - 22 - room:
            x, y = 20.0, y + 17
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_fill(trial)}"/>')
        parts.append(_text(x + 16, y + 10, name, "s"))
        x += room
    if len(trials) > _LEGEND_MOST:
        parts.append(_text(x, y + 10, f"and {len(trials) - _LEGEND_MOST} more", "s m"))
    return parts, y + 12


def _panel(
    timeline: Timeline, axis: Axis, y: float, *, with_busy: bool
) -> tuple[list[str], float]:
    """A row per device and stream over a time axis, and where it ends."""
    parts: list[str] = []
    top = y
    if with_busy:
        parts.append(_text(WIDTH - 20, y - 5, "busy", "t m r"))
        if any(_is_dense(row, axis) for row in timeline.rows.values()):
            note = "many short actions: height is the share of the time at work"
            parts.append(_text(_RIGHT, y - 5, note, "t m r"))
    for device in timeline.devices:
        parts.append(_text(20, y + 19, device, "s b"))
        for stream in timeline.streams(device):
            height = _HEIGHTS.get(stream, _THIN if with_busy else _THIN_DETAIL)
            parts += _row(timeline.rows[device, stream], axis, y, height)
            middle = y + height / 2 + 4
            parts.append(_text(_LEFT - 8, middle, stream, "t m r"))
            if with_busy:
                share = covered(timeline.rows[device, stream]) / max(axis.end, 1e-12)
                style = "s b r" if stream == "compute" else "t m r"
                parts.append(_text(WIDTH - 20, middle, f"{share:.0%}", style))
            y += height + 3
        y += 9
    grid = _grid(axis, top, y - 6)
    resumes = [x for x in timeline.resumes if axis.start < x < axis.end]
    marks = [mark for x in resumes for mark in _resume(axis(x), top, y - 6)]
    return [*grid, *parts, *marks], y + 12


def _row(row: Sequence[Slice], axis: Axis, y: float, height: float) -> Iterator[str]:
    yield (
        f'<rect x="{_LEFT}" y="{y:g}" width="{_RIGHT - _LEFT}" height="{height}" fill="#f4f4f4"/>'
    )
    draw = shares if _is_dense(row, axis) else spelled if _has_room(row, axis) else merged
    boxes = draw(row, axis)
    paths: dict[int, list[str]] = {}
    for box in boxes:
        paths.setdefault(box.trial, []).append(
            f"M{box.x:.1f} {y + box.y * height:.1f}h{box.width:.2f}"
            f"v{box.height * height:.1f}h-{box.width:.2f}z"
        )
    for trial, path in sorted(paths.items()):
        yield f'<path d="{"".join(path)}" fill="{_fill(trial)}"/>'
    yield from (_label(box, y, height) for box in boxes if box.text)


def _is_dense(row: Sequence[Slice], axis: Axis) -> bool:
    """Whether a rectangle per run would be thinner than a column of shares."""
    boxes = merged(row, axis)
    if len(boxes) > (_RIGHT - _LEFT) / _COLUMN_PX / 2:
        return True
    drawn = sum(box.width for box in boxes)
    busy = sum(piece.end - piece.start for piece in _visible(row, axis)) * axis.scale
    return drawn > 2 * busy + 20  # the gaps between the slices would be drawn as work


def merged(row: Sequence[Slice], axis: Axis) -> list[Box]:
    """A box per run of slices of one trial with gaps under half a pixel."""
    boxes: list[Box] = []
    for piece in _visible(row, axis):
        x, end = max(axis(piece.start), _LEFT), min(axis(piece.end), _RIGHT)
        last = boxes[-1] if boxes else None
        if last is not None and last.trial == piece.trial and x - (last.x + last.width) < 0.5:
            boxes[-1] = last._replace(width=max(end, last.x + last.width) - last.x)
        else:
            boxes.append(Box(x, max(end - x, 0.25), 0.0, 1.0, piece.trial))
    return boxes


def spelled(row: Sequence[Slice], axis: Axis) -> list[Box]:
    """A box per slice with its action's text, in it or in the free space behind it."""
    pieces = list(_visible(row, axis))
    boxes = []
    for index, piece in enumerate(pieces):
        x, end = max(axis(piece.start), _LEFT), min(axis(piece.end), _RIGHT)
        following = pieces[index + 1].start if index + 1 < len(pieces) else axis.end
        inside = _words(piece, end - x)
        text = inside or _words(piece, axis(following) - end)
        seam = 0.6 if end - x > 3 else 0.0  # neighbours can be told apart
        width = max(end - x - seam, 0.25)
        boxes.append(Box(x, width, 0.0, 1.0, piece.trial, text, beside=not inside))
    return boxes


def shares(row: Sequence[Slice], axis: Axis) -> list[Box]:
    """Columns in which each trial's height is its share of the time."""
    columns: list[dict[int, float]] = [{} for _ in range((_RIGHT - _LEFT) // _COLUMN_PX)]
    for piece in _visible(row, axis):
        first = (max(axis(piece.start), _LEFT) - _LEFT) / _COLUMN_PX
        last = (min(axis(piece.end), _RIGHT) - _LEFT) / _COLUMN_PX
        for index in range(int(first), min(math.ceil(last), len(columns))):
            part = min(last, index + 1) - max(first, index)
            columns[index][piece.trial] = columns[index].get(piece.trial, 0.0) + part
    boxes = []
    for index, column in enumerate(columns):
        bottom = 1.0
        for trial, share in sorted(column.items()):
            height = min(share, bottom)
            bottom -= height
            boxes.append(Box(_LEFT + index * _COLUMN_PX, _COLUMN_PX, bottom, height, trial))
    return boxes


def _has_room(row: Sequence[Slice], axis: Axis) -> bool:
    """Whether actions are wide enough for words."""
    return axis.scale * typical_seconds(row) > 8


def _visible(row: Sequence[Slice], axis: Axis) -> Iterator[Slice]:
    return (piece for piece in row if piece.end > axis.start and piece.start < axis.end)


def _words(piece: Slice, width: float) -> str:
    """The longest form of the action that fits in ``width`` pixels, or nothing."""
    words = [word for word in piece.action.split() if word != f"t{piece.trial}"]
    forms = (" ".join(words[:count]) for count in range(len(words), 0, -1))
    room = (width - _MARGIN) / (10 * _CHARACTER_PX)
    return next((form for form in forms if len(form) <= room), "")


def _label(box: Box, y: float, height: float) -> str:
    baseline = y + height / 2 + 3.5
    if box.beside:
        return _text(box.x + box.width + 2, baseline, box.text, "t")
    ink = _PALETTE[box.trial % len(_PALETTE)][1]
    return (
        f'<text x="{box.x + box.width / 2:.1f}" y="{baseline:.1f}" class="t c" '
        f'style="fill:{ink}">{escape(box.text)}</text>'
    )


def _fill(trial: int) -> str:
    return f"url(#t{trial})" if trial >= len(_PALETTE) else _PALETTE[trial][0]


def _pattern(trial: int) -> str:
    """Stripes on the colour: one direction a round through the palette."""
    color, ink = _PALETTE[trial % len(_PALETTE)]
    angle = 45 + 45 * (trial // len(_PALETTE) - 1)
    return (
        f'<pattern id="t{trial}" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({angle})"><rect width="5" height="5" fill="{color}"/>'
        f'<rect width="1.2" height="5" fill="{ink}" fill-opacity="0.35"/></pattern>'
    )


def _grid(axis: Axis, top: float, bottom: float) -> Iterator[str]:
    step = nice_step(max(axis.end - axis.start, 1e-6) / 8)
    tick = math.ceil(axis.start / step - 1e-9)
    while tick * step <= axis.end + step * 1e-9:
        x = axis(tick * step)
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom + 4}" class="g"/>'
        yield _text(x, bottom + 16, _time(tick * step, step), "t m c")
        tick += 1


def _resume(x: float, top: float, bottom: float) -> Iterator[str]:
    yield (
        f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#c00" '
        'stroke-dasharray="4 3"/>'
    )
    yield _text(x, top - 5, "resumed", "t m c")


def _zoom(whole: Axis, moment: Axis, top: float, bottom: float) -> Iterator[str]:
    """The moment's place in the whole, and lines from there to the close-up."""
    left, right = whole(moment.start), whole(moment.end)
    if right - left < 2:
        left, right = left - 1, right + 1
    points = (
        f"{left:.1f},{top - 3} {right:.1f},{top - 3} {right:.1f},{bottom - 26} "
        f"{_RIGHT},{bottom + 50} {_LEFT},{bottom + 50} {left:.1f},{bottom - 26}"
    )
    yield f'<polygon points="{points}" fill="#000" fill-opacity="0.07"/>'


def detail_window(timeline: Timeline) -> Axis | None:
    """About a second of the study in which actions can be read, or None for a short study.

    Of windows all along the study the one with most (device, stream, trial) in it, and
    of equals the one nearest the middle.
    """
    compute = [row for (_, stream), row in timeline.rows.items() if stream == "compute"]
    typical = min((typical_seconds(row) for row in compute), default=0.0)
    span = nice_step(max(typical, 1e-9) * _DETAIL_UNITS)
    if typical < 1.0 / _DETAIL_UNITS:
        span = min(span, 1.0)
    if span * 1.5 > timeline.seconds:
        return None
    starts = [(timeline.seconds - span) * index / 40 for index in range(41)]
    middle = (timeline.seconds - span) / 2
    best = max(starts, key=lambda s: (_variety(timeline, s, s + span), -abs(s - middle)))
    return Axis(best, best + span)


def _variety(timeline: Timeline, start: float, end: float) -> int:
    found = 0
    for row in timeline.rows.values():
        first = bisect_left(row, start, key=lambda piece: piece.start)
        stop = bisect_left(row, end, key=lambda piece: piece.start)
        found += len({piece.trial for piece in row[first:stop]})
    return found


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _time(seconds: float, step: float) -> str:
    """Seconds with the digits that ``step`` needs."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{seconds:.{digits}f} s"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{escape(text)}</text>'
