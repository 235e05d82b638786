"""Events as rows of the database, and rows as events.

[Note: two ways to write an event]
Most events are StepFinished, some Evaluated: each has a table with a column per field.
All others, and those two where a value does not fit its column (an integer beyond 64
bits, a metric that is no float), are a kind and JSON in ``events``. Readers take both.

A row may have been written by anybody. What is not of the types of its event is refused
with a ValueError, and the reader goes on without it.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import groupby, product
from operator import attrgetter, itemgetter
from types import NoneType, UnionType
from typing import Any

from shoal.core.event import Evaluated, Event, StepFinished, event_from_dict
from shoal.observe import jsonl

Row = tuple[Any, ...]
_INTEGER_BOUND = 1 << 63
_OPTIONAL_FLOAT = (float, NoneType)

# ---------------------------------------------------------------- steps

step_values = attrgetter(
    "time", "trial", "step", "epoch", "loss", "seconds", "device", "steps_per_epoch"
)
STEP_COLUMNS = "seq, time, trial, step, epoch, loss, seconds, device, steps_per_epoch"
_STEP_TYPES = frozenset(
    product(
        *((int,), _OPTIONAL_FLOAT, (int,), (int,), (int,), _OPTIONAL_FLOAT, _OPTIONAL_FLOAT),
        *((bytes,), (int, NoneType)),
    )
)


def step_of(row: Row, texts: dict[bytes, str]) -> StepFinished:
    """The event of a row of ``steps``; ``texts`` keeps the few names of devices."""
    if tuple(map(type, row)) not in _STEP_TYPES:
        raise ValueError(f"a step's row does not have the types of a step: {_shown(row)}")
    _, time, trial, step, epoch, loss, seconds, device, steps_per_epoch = row
    name = texts.get(device)
    if name is None:
        name = texts[device] = device.decode()
    return StepFinished(
        time=math.nan if time is None else time,
        trial=trial,
        step=step,
        epoch=epoch,
        loss=math.nan if loss is None else loss,
        seconds=math.nan if seconds is None else seconds,
        device=name,
        steps_per_epoch=steps_per_epoch,
    )


# ---------------------------------------------------------------- metrics

METRIC_COLUMNS = "seq, place, time, trial, step, epoch, name, value"
_METRIC_TYPES = frozenset(
    product(
        *((int,), (int,), _OPTIONAL_FLOAT, (int,), (int,), (int,)),
        *((bytes,), _OPTIONAL_FLOAT),
    )
)


def has_metric_rows(event: Evaluated) -> bool:
    """Whether the rows of ``metrics`` say all of it."""
    return bool(event.metrics) and all(type(v) is float for v in event.metrics.values())


def metric_rows(seq: int, event: Evaluated) -> Iterator[Row]:
    """A row for each metric, in their order."""
    at = (event.time, event.trial, event.step, event.epoch)
    for place, (name, value) in enumerate(event.metrics.items()):
        yield (seq, place, *at, name, value)


def evaluations_of(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """The rows of each evaluation, under its number; ``rows`` are in order."""
    return ((seq, list(group)) for seq, group in groupby(rows, key=itemgetter(0)))


def evaluation_of(rows: list[Row]) -> Evaluated:
    """The event of the rows of one number."""
    if any(tuple(map(type, row)) not in _METRIC_TYPES for row in rows):
        raise ValueError(f"a metric's row does not have the types of a metric: {_shown(rows[0])}")
    _, _, time, trial, step, epoch, _, _ = rows[0]
    return Evaluated(
        time=math.nan if time is None else time,
        trial=trial,
        step=step,
        epoch=epoch,
        metrics={name.decode(): math.nan if v is None else v for *_, name, v in rows},
    )


# ---------------------------------------------------------------- all others

EVENT_COLUMNS = "seq, time, kind, trial, body"


def event_row(seq: int, event: Event) -> Row:
    """Any event as a row of ``events``; the body alone is read back."""
    kind: Any = type(event)
    fields = {name: getattr(event, name) for name in kind.__slots__}
    trial = fields.get("trial")
    if type(trial) is not int or not -_INTEGER_BOUND <= trial < _INTEGER_BOUND:
        trial = None
    return seq, float(fields["time"]), kind.__name__, trial, jsonl.dumps(fields)


def event_of(kind: object, body: object) -> Event | None:
    """The event of a row of ``events``, or None for a kind of a later version."""
    if not (isinstance(kind, bytes) and isinstance(body, bytes)):
        raise ValueError("its kind and body are not texts")
    fields = jsonl.loads(body.decode())
    if not isinstance(fields, dict) or "event" in fields:
        raise ValueError("its body is no object of fields")
    event = event_from_dict({**fields, "event": kind.decode()})
    kind_made: Any = type(event)
    for name, fits in _checks(kind_made) if event is not None else ():
        if not fits(getattr(event, name)):
            raise ValueError(f"its {name} is {_shown(getattr(event, name))}")
    return event


Check = Callable[[object], bool]


@cache
def _checks(kind: type[Any]) -> tuple[tuple[str, Check], ...]:
    """Each field of a kind of event, and what its value has to be."""
    return tuple((name, _check(hint)) for name, hint in typing.get_type_hints(kind).items())


def _check(hint: Any) -> Check:
    """Whether a value from JSON is of a field's type; an integer may be a float's value."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is Any:
        return lambda value: True
    if origin in (UnionType, typing.Union):
        options = tuple(map(_check, arguments))
        return lambda value: any(fits(value) for fits in options)
    if origin is tuple:  # of any length, of one type
        fits = _check(arguments[0])
        return lambda value: type(value) is tuple and all(map(fits, value))
    if origin is Mapping:
        fits = _check(arguments[1])
        return lambda value: type(value) is dict and all(map(fits, value.values()))
    types = (float, int) if origin is float else (origin,)
    return lambda value: type(value) in types


def _shown(value: object) -> str:
    """A value for a warning: short, and nothing that a terminal would obey."""
    return ascii(value)[:80]
