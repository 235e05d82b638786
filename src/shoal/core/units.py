"""Bytes and seconds as types, and how people write and read them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NewType

from shoal.core.errors import SpecError
from shoal.core.values import is_number, plain

Bytes = NewType("Bytes", int)
Seconds = NewType("Seconds", float)

_FACTORS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str) -> Bytes:
    """Bytes from a number or a string with a unit, such as ``"256MiB"`` or ``"1.5 GB"``.

    Raises:
        SpecError: the text is no size, or the size is not positive.
    """
    number = plain(size)
    if isinstance(number, bool) or not isinstance(number, int | str):
        raise SpecError(f"a size is bytes or a string such as '256MiB', got {size!r}")
    if isinstance(number, int):
        value = number
    else:
        match = _SIZE.fullmatch(number)
        if match is None or match[2].lower() not in _FACTORS:
            raise SpecError(
                f"cannot read the size {size!r}. Write a number and a unit, for example "
                "'256MiB', '8GiB' or '500MB'."
            )
        value = int(float(match[1]) * _FACTORS[match[2].lower()])
    if value <= 0:
        raise SpecError(f"a size must be positive, got {size!r}")
    return Bytes(value)


_SECONDS = {
    "": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "ms": 1e-3,
}  # fmt: skip


def parse_seconds(duration: float | str) -> Seconds:
    """Seconds from a number or a string with a unit, such as ``"5min"`` or ``"1.5 h"``.

    Raises:
        SpecError: the text is no duration, or it is negative.
    """
    value = plain(duration)
    if not isinstance(value, str) and not is_number(value):
        raise SpecError(f"a duration is seconds or a string such as '5min', got {duration!r}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _SECONDS:
            raise SpecError(
                f"cannot read the duration {duration!r}. Write a number and a unit, for example "
                "'30s', '5min' or '2h'."
            )
        value = float(match[1]) * _SECONDS[match[2].lower()]
    if not value >= 0:
        raise SpecError(f"a duration is not negative, got {duration!r}")
    return Seconds(float(value))


def format_bytes(size: int | float) -> str:
    """``size`` as a person reads it: ``"12.0 MiB"``; exact below one KiB."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def format_rate(bytes_per_s: float) -> str:
    """As ``format_bytes``, of each second: ``"1.5 GiB/s"``."""
    return f"{format_bytes(round(bytes_per_s))}/s"


def format_enough(size: int) -> str:
    """As ``format_bytes``, rounded up: who gives as much as it says gives enough."""
    unit = next((unit for unit in (2**10, 2**20, 2**30) if size < 1024 * unit), 2**40)
    return format_bytes(size if size < 1024 else math.ceil(10 * size / unit) * unit / 10)


def format_seconds(seconds: float) -> str:
    """As a person reads it: ``"0.35 ms"``, ``"850 ms"``, ``"12.3 s"``, ``"4m 05s"``."""
    if 0 < seconds < 0.00995:
        return f"{seconds * 1e3:.1f} ms" if seconds >= 0.000995 else f"{seconds * 1e3:.2f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m"


def format_foretold(seconds: float, trials: int) -> str:
    """The same, of what so many trials will take: none at all is what nobody can say."""
    if trials and not seconds:
        return "no time: how long trials are is not known"
    return format_seconds(seconds)


def format_value(value: object) -> str:
    """A hyperparameter: at most four digits of a float."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: ``"1 trial"``, ``"2 trials"``; "y" and "ch" need their plural."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def named_trials(numbers: Sequence[int]) -> str:
    """``"trial 3"``, ``"trials 0 to 3, 7"``."""
    return f"trial {numbers[0]}" if len(numbers) == 1 else f"trials {list_some(numbers)}"


_RUNS = 12


def list_some(numbers: Iterable[int]) -> str:
    """``"0 to 3, 7, 9 to 11, ..."``: runs of numbers, not more than ``_RUNS`` of them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    ]
    return ", ".join([*parts[:_RUNS], *(["..."] if len(parts) > _RUNS else [])])


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple
