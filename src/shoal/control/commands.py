"""What can be asked of a study that runs: frozen records, and their strict JSON form.

One command is one JSON object on one line, its kind under ``command``:

    {"command": "StopTrial", "trial": 3}

The answer is one JSON object on one line too. ``error`` in it means refused, and says
why; ``text`` is what a person reads; all else is for scripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.observe import jsonl

MAX_LINE_BYTES = 64 * 2**10
_MAX_REASON = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStudy:
    """Save every trial where it is and end the study's process; it can be resumed.

    ``grace_s``: how long saving may take before workers are ended.
    """

    reason: str = ""
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTrial:
    """End one trial where it is; its state is kept, and the others go on."""

    trial: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Save and park all trials, and leave the devices idle until ``Continue``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Hand out leases again after ``Pause``, or after a full disk has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendTrials:
    """Add trials of the study's space: ``trials`` more, or as many as ``to`` in all lacks.

    ``again``: also where an equal order's trials have not all ended.

    Raises:
        SpecError: not exactly one of the two is given, or what no such order could mean.
    """

    trials: int | None = None
    to: int | None = None
    again: bool = False

    def __post_init__(self) -> None:
        _check("trials", self.trials)
        _check("to", self.to)
        if (self.trials is None) == (self.to is None):
            raise SpecError(
                "a study is extended by trials=N (--trials N), so many more, or by to=N (--to N), "
                f"so many in all, got trials={self.trials} and to={self.to}. Give one of them: "
                "--to where the number in all counts."
            )
        if self.again and self.to is not None:
            raise SpecError(
                f"again=True (--again) adds so many trials once more, and to={self.to} (--to) "
                "only what is missing. Give trials=N (--trials N) with it, or leave it out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneTrial:
    """Add a trial like ``trial`` with some hyperparameters changed.

    ``warm``: it goes on from the state of ``trial``; else it begins anew. ``again``: also
    where an equal order's clone has not ended.
    """

    trial: int
    changes: Mapping[str, Scalar] = field(default_factory=dict)
    warm: bool = True
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the study does now; the answer's ``state`` is ``running`` or ``paused``."""


Command = StopStudy | StopTrial | Pause | Continue | ExtendTrials | CloneTrial | Status
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Command.__args__}


def command_to_json(command: Command) -> str:
    """One line without its newline.

    Raises:
        SpecError: a value that no command could mean, or a line that is too long.
    """
    values = {f.name: getattr(command, f.name) for f in fields(command)}
    for name, value in values.items():
        _check(name, value)
    line = jsonl.dumps({"command": type(command).__name__, **values})
    if len(line) >= MAX_LINE_BYTES:
        raise SpecError(
            f"the command {type(command).__name__} is {len(line)} bytes as JSON, and at most "
            f"{MAX_LINE_BYTES} are read. Shorten its text."
        )
    return line


def command_from_json(text: str) -> Command:
    """The command of a line, believed only where every key and value is as it must be.

    Raises:
        SpecError: anything else; names the key and what was found.
    """
    record = _parse(text)
    kind = _KINDS.get(str(record.pop("command", "")))
    if kind is None:
        raise SpecError(f"a command's kind is one of {', '.join(_KINDS)}, under 'command'.")
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(record) - set(known))
    if unknown:
        raise SpecError(
            f"{kind.__name__} has no {unknown[0]!r}; it has {', '.join(known) or 'nothing'}."
        )
    for name, value in record.items():
        _check(name, value)
    for name, known_field in known.items():
        has_default = (known_field.default, known_field.default_factory) != (MISSING, MISSING)
        if name not in record and not has_default:
            raise SpecError(f"{kind.__name__} needs {name!r}, which is missing.")
    command: Command = kind(**record)
    return command


def _parse(text: str) -> dict[str, Any]:
    try:
        value = jsonl.loads(text)
    except ValueError as error:
        raise SpecError(f"a command is one JSON object on one line: {error}.") from None
    if not isinstance(value, dict):
        raise SpecError(f"a command is a JSON object, got {type(value).__name__}.")
    return value


# -- values -------------------------------------------------------------------------------


def _check(name: str, value: object) -> None:
    accepts, meaning = _VALUES[name]
    if not accepts(value):
        shown = repr(value)
        raise SpecError(f"{name} is {meaning}, got {shown[:80]}.")


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _is_count(value: object) -> bool:
    return value is None or _is_whole(value, 1)


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def _is_scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def _are_scalars(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(k, str) and _is_scalar(v) for k, v in value.items())


_VALUES: dict[str, tuple[Callable[[object], bool], str]] = {
    "reason": (
        lambda value: isinstance(value, str) and len(value) <= _MAX_REASON,
        f"a text of at most {_MAX_REASON} characters",
    ),
    "grace_s": (_is_seconds, "seconds from 0"),
    "trial": (lambda value: _is_whole(value, 0), "a trial's number, from 0"),
    "trials": (_is_count, "how many more trials, from 1"),
    "to": (_is_count, "how many trials in all, from 1"),
    "changes": (_are_scalars, "hyperparameters by name: numbers, strings, booleans or null"),
    "warm": (lambda value: isinstance(value, bool), "true or false"),
    "again": (lambda value: isinstance(value, bool), "true or false"),
}
