"""``shoal bench``: what this machine can do, and from how many tokens spilling is free on it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.bench import FreeFrom, Kernel, Measured, Rate, free_from, save
from shoal.bench.run import run_bench
from shoal.core.errors import StorageError
from shoal.core.profile import Precision
from shoal.core.units import counted, format_seconds
from shoal.ui.failures import ExitCode
from shoal.ui.text import DASH

_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table: a title, rows under a header, and a line below.

    The first ``words`` columns, and any of the name ``limit``, are words; the others numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    strong: str = "none"  # the column that matters
    below: str = ""

    def is_number(self, column: int) -> bool:
        return column >= self.words and self.header[column] != "limit"


def bench(seconds: float, device: str | None, directory: str, *, as_json: bool) -> int:
    """Measure, print, and keep the result for the planner."""
    place = Path(directory)
    try:
        with _telling() as tell:
            measured = run_bench(seconds, device, place if place.is_dir() else None, tell=tell)
    except KeyboardInterrupt:
        print("stopped; nothing was kept", file=sys.stderr)
        return ExitCode.PAUSED
    kept = _keep(measured)
    if as_json:
        record = measured.to_dict()
        record["free_from"] = [_free_record(entry) for entry in free_from(measured)]
        print(json.dumps(record | {"kept_in": kept}, indent=2))
    else:
        show(measured, kept)
    return ExitCode.DONE


@contextlib.contextmanager
def _telling() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is measured now, where somebody may read it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("measuring") as status:
        yield lambda stage: status.update(f"measuring: {escape(stage)}")


def _keep(measured: Measured) -> str | None:
    """Where the figures are now; None, and why on standard error, where they could not go."""
    try:
        return str(save(measured))
    except (StorageError, OSError) as error:
        print(f"shoal: the figures were not kept: {error}", file=sys.stderr)
        return None


def _free_record(entry: FreeFrom) -> dict[str, Any]:
    return asdict(entry) | {"tokens": entry.tokens, "limit": entry.limit}


def show(measured: Measured, kept: str | None, console: Console | None = None) -> None:
    """All tables, as a terminal shows them best, or as plain lines in a pipe."""
    console = console or Console(highlight=False)
    if console.is_terminal:
        console.print(render(measured, kept))
    else:
        print(describe(measured, kept), file=console.file)


def render(measured: Measured, kept: str | None) -> RenderableType:
    """The screen."""
    head = Text("\n".join(_heading(measured)))
    head.stylize("bold", 0, len(_heading(measured)[0]))
    parts: list[RenderableType] = [head]
    for section in sections(measured):
        parts += [Text(f"\n{section.title}", style="bold"), _table(section)]
        if section.below:
            parts.append(Text(section.below, style="dim"))
    parts.append(Text("\n" + "\n".join(_closing(measured, kept)).strip()))
    return Group(*parts)


def _table(section: Section) -> Table:
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, header_style="dim", pad_edge=False, collapse_padding=True
    )
    for column, name in enumerate(section.header):
        table.add_column(
            name,
            justify="right" if section.is_number(column) else "left",
            style="bold green" if name == section.strong else "",
            no_wrap=True,
        )
    for row in section.rows:
        table.add_row(*map(escape, row))
    return table


def describe(measured: Measured, kept: str | None) -> str:
    """The same in plain text."""
    parts = ["\n".join(_heading(measured))]
    for section in sections(measured):
        lines = [section.title, *_lines(section), section.below]
        parts.append("\n".join(line for line in lines if line))
    parts.append("\n".join(_closing(measured, kept)))
    return "\n\n".join(parts)


def _lines(section: Section) -> Iterator[str]:
    """The table in plain text."""
    widths = [max(map(len, cells)) for cells in zip(section.header, *section.rows, strict=True)]
    for row in (section.header, *section.rows):
        cells = (
            cell.rjust(width) if section.is_number(column) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join(cells)}".rstrip()


def _heading(measured: Measured) -> list[str]:
    machine = measured.machine
    gpus = ", ".join(machine.gpus) or "no GPU"
    device = measured.device
    if device == "cpu":
        device = f"a virtual device of {counted(measured.threads, 'thread')}"
    return [
        f"{machine.cpu}, {counted(machine.cores, 'core')}, {gpus}, torch {machine.torch}",
        f"kernels and link of {device}; load {measured.load:.1f} before",
    ]


def _closing(measured: Measured, kept: str | None) -> list[str]:
    lines = [f"note: {note}" for note in measured.notes]
    return [*lines, f"kept in {kept}"] if kept else lines


def sections(measured: Measured) -> tuple[Section, ...]:
    """The tables, in the order in which they are read."""
    tables = (_memory, _matmuls, _block, _inputs, _free)
    return tuple(table(measured) for table in tables)


def _memory(measured: Measured) -> Section:
    host, link, disk, adamw = measured.host, measured.link, measured.disk, measured.optimizer
    rows = [
        _rate_row("host memory, copy", host.copy_all, host.copy_one),
        _rate_row("host memory, triad", host.triad_all, host.triad_one),
        _adamw_row(measured),
        _rate_row("link up, host to device", link.up),
        _rate_row("link down", link.down),
        _rate_row("link both ways at once", link.both),
    ]
    if disk is not None:
        how = "past the page cache" if disk.direct else "through the page cache"
        rows.append(_rate_row(f"disk write, {how}", disk.write))
        rows.append(_rate_row("disk read", disk.read))
    return Section(
        title="Memory, link, disk",
        header=("", "best", "median", "one core"),
        rows=tuple(rows),
        strong="best",
        below=f"AdamW: fused, float32, in chunks; {adamw.bytes_per_parameter} bytes a parameter, "
        f"{_speed(adamw.bytes_per_s)} of the memory.",
    )


def _rate_row(name: str, rate: Rate, one: Rate | None = None) -> tuple[str, ...]:
    return name, _speed(rate.best), _speed(rate.median), _speed(one.best) if one else ""


def _adamw_row(measured: Measured) -> tuple[str, ...]:
    adamw = measured.optimizer
    rates = (adamw.all.best, adamw.all.median, adamw.one.best)
    return ("AdamW on the host", *(f"{1e9 / rate:.2f} ns/param" for rate in rates))


def _matmuls(measured: Measured) -> Section:
    by_name: dict[str, dict[Precision, str]] = {}
    shapes: dict[str, str] = {}
    for matmul in measured.matmuls:
        best = _flops(matmul.flops_per_s.best)
        by_name.setdefault(matmul.name, {})[matmul.precision] = best
        shapes[matmul.name] = f"{matmul.rows} x {matmul.inner} x {matmul.columns}"
    rows = (
        (name, shapes[name], found.get("fp32", DASH), found.get("bf16", DASH))
        for name, found in by_name.items()
    )
    return Section(
        title="Matrix products of a transformer layer",
        header=("", "shape", "fp32", "bf16"),
        rows=tuple(rows),
        words=2,
    )


def _block(measured: Measured) -> Section:
    first = measured.blocks[0]
    names = list(dict.fromkeys(kernel.name for kernel in measured.kernels))
    kernels = {(kernel.name, kernel.precision): kernel for kernel in measured.kernels}
    rows = [
        (name, *_kernel_cells(kernels[name, "fp32"]), *_kernel_cells(kernels[name, "bf16"]))
        for name in names
    ]
    for name in ("forward", "backward"):
        cells = (_part_cells(measured, precision, name) for precision in ("fp32", "bf16"))
        rows.append((f"whole {name}", *(cell for pair in cells for cell in pair)))  # type: ignore[arg-type]
    return Section(
        title=f"One transformer block, width {first.width}, {first.heads} heads, "
        f"{first.tokens} tokens",
        header=("", "fp32", "fp32 rate", "bf16", "bf16 rate"),
        rows=tuple(rows),
    )


def _kernel_cells(kernel: Kernel) -> tuple[str, str]:
    rate = _flops(kernel.flops / kernel.seconds) if kernel.flops else DASH
    return _milliseconds(kernel.seconds), rate


def _part_cells(measured: Measured, precision: Precision, name: str) -> tuple[str, str]:
    block = measured.block(precision)
    seconds = block.forward_s if name == "forward" else block.backward_s
    flops = block.forward_flops if name == "forward" else block.backward_flops
    return _milliseconds(seconds), _flops(flops / seconds) if seconds > 0 else DASH


def _inputs(measured: Measured) -> Section:
    rows = []
    for entry in free_from(measured)[::2]:
        scheme = entry.scheme
        rows.append(
            (
                scheme.precision,
                scheme.optimizer,
                _flops(entry.flops_per_s),
                f"{scheme.up:g}",
                f"{scheme.down:g}",
                f"{scheme.host:g}",
                _speed(entry.host_bytes_per_s),
            )
        )
    link = measured.link
    return Section(
        title="What goes into the last table: bytes per parameter and step",
        header=("", "optimizer", "F, the block", "b up", "b down", "b host", "D, host memory"),
        rows=tuple(rows),
        words=2,
        below=f"B: up {_speed(link.up.best)}, down {_speed(link.down.best)}, both at once "
        f"{_speed(link.both.best)}. c: 8 FLOP, 6 without recompute.",
    )


def _free(measured: Measured) -> Section:
    rows = []
    for entry in free_from(measured):
        scheme = entry.scheme
        asked = (entry.up, entry.down, entry.both, entry.host, entry.tokens)
        rows.append(
            (
                scheme.precision,
                scheme.optimizer,
                "yes" if entry.recompute else "no",
                *map(_tokens, asked),
                entry.limit,
            )
        )
    return Section(
        title="Spilling is free from so many tokens a step on",
        header=("", "optimizer", "recompute", "up", "down", "both", "host", "free from", "limit"),
        rows=tuple(rows),
        words=3,
        strong="free from",
        below="T = F / c * max(b up / B up, b down / B down, b both / B both, b host / D)",
    )


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / _GIGA:.1f} GB/s"


def _flops(flops_per_s: float) -> str:
    if flops_per_s >= _TERA:
        return f"{flops_per_s / _TERA:.1f} TFLOP/s"
    return f"{flops_per_s / _GIGA:.1f} GFLOP/s"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else format_seconds(seconds)


def _tokens(tokens: float) -> str:
    """Three digits are all that such a figure has."""
    if tokens < 1000:
        return f"{tokens:.0f}"
    digits = len(str(int(tokens))) - 3
    return f"{round(tokens, -digits):,.0f}"
