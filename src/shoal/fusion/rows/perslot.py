"""A number that differs from slot to slot, where a model's Python code expects one float.

[Note: per-slot numbers]
Trials of an array may differ in floats that their modules and losses keep: a dropout rate, a
label smoothing, the weight of a loss term. The array runs one copy of the module's code, in
which such a float is a ``PerSlot``: a float by type, so that torch's argument parsers take it,
with one value for each slot. Python's arithmetic on it works value by value; a comparison
holds if it does for every slot, fails if for none, and otherwise is a ``Disagreement``. What
reaches a tensor operation is seen by ``SlotMode``, which knows what to do. As a plain C double
it is NaN: code that reads it past all this makes a loss that nobody takes for a number. Code that
hides it (``max(0.1, math.exp(-rate))``) is found by a dry run, in which it stands for others.
What errors say of it is about what users know: a hyperparameter, and the trials' values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shoal.fusion.declined import Disagreement

OF_EACH = "a hyperparameter of which each trial has its own"
"""How such a number calls itself where code makes words of it."""

IN_TORCH = (
    "Compute it where the model is built, or with torch: its operations and Python's arithmetic "
    "know each trial's own."
)
"""What to do about code that wants one number."""

MOST_TOLD = 6  # values

_SYMBOLS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}

_STANDS_FOR: ContextVar[float] = ContextVar("as a plain number", default=math.nan)


@contextmanager
def standing_for(value: float) -> Iterator[None]:
    """Numbers that are made inside are ``value`` as a plain C double."""
    token = _STANDS_FOR.set(value)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)


class PerSlot(float):
    """One float per slot, in the order of the slots."""

    values: tuple[float, ...]

    def __new__(cls, values: Sequence[float]) -> PerSlot:
        made = super().__new__(cls, _STANDS_FOR.get())
        made.values = tuple(float(value) for value in values)
        return made

    def __repr__(self) -> str:
        return f"{OF_EACH} ({told(self.values)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return PerSlot, (self.values,)

    def __hash__(self) -> int:
        return hash(self.values)

    def __bool__(self) -> bool:
        return _agreed("is true", [bool(value) for value in self.values], self)

    def __float__(self) -> float:
        if len(set(self.values)) > 1:
            raise Disagreement(f"the model's code makes one number of {self!r}. {IN_TORCH}")
        return self.values[0]

    def __int__(self) -> int:
        return int(float(self))


def _agreed(question: str, answers: Sequence[bool], about: PerSlot) -> bool:
    if len(set(answers)) > 1:
        raise Disagreement(
            f"code asks whether a hyperparameter {question}; for the values "
            f"{told(about.values)} the answers differ."
        )
    return answers[0]


def told(values: Sequence[float]) -> str:
    """The values that trials have, for a reader: each once, and not too many."""
    some = list(dict.fromkeys(f"{value:.6g}" for value in values))
    more = len(some) - MOST_TOLD
    return ", ".join(some[:MOST_TOLD]) + (f" and {more} more" if more > 0 else "")


def in_words(error: BaseException) -> str:
    """What an error says, where it speaks of the type of such numbers in words of a user's."""
    text = str(error)
    for name in (f"'{PerSlot.__name__}' object", f"'{PerSlot.__name__}'", PerSlot.__name__):
        text = text.replace(name, OF_EACH)
    return text


def _of(value: object, slot: int) -> Any:
    return value.values[slot] if isinstance(value, PerSlot) else value


def _arithmetic(operation: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def apply(self: PerSlot, *others: Any) -> Any:
        if not all(isinstance(other, int | float) for other in others):
            return NotImplemented
        pairs = [[_of(v, slot) for v in (self, *others)] for slot in range(len(self.values))]
        return PerSlot([operation(*(reversed(pair) if swapped else pair)) for pair in pairs])

    return apply


def _comparison(name: str, operation: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def apply(self: PerSlot, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        answers = [operation(v, _of(other, slot)) for slot, v in enumerate(self.values)]
        return _agreed(f"is {_SYMBOLS[name]} {other!r}", answers, self)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(PerSlot, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(PerSlot, f"__r{_name}__", _arithmetic(getattr(operator, _name), swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(PerSlot, f"__{_name}__", _arithmetic(getattr(operator, _name)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(PerSlot, f"__{_name}__", _comparison(_name, getattr(operator, _name)))


def values_of(number: float, width: int) -> tuple[float, ...]:
    """``number`` for each of ``width`` slots."""
    return number.values if isinstance(number, PerSlot) else (number,) * width
