"""What a user's files have put into other modules, as a worker makes it: and what it puts back."""

from __future__ import annotations

import functools
import importlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from cloudpickle.cloudpickle import _function_setstate

from shoal.core.closures import closed_over


class Named(NamedTuple):
    """What a module of the user's has at its top level, for a worker to import."""

    module: str
    name: str


class Gone(NamedTuple):
    """In the place of what a user's file has deleted."""


class Change(NamedTuple):
    """What a user's file put into another module, or into a class or dictionary there.

    ``is_sure``: that it did, and not the import of one of the user's modules, as a worker's does.
    """

    module: str
    path: str  # of that class or dictionary; empty: the module itself
    name: Any  # of an item its key
    value: Any
    is_item: bool = False
    is_sure: bool = True

    @property
    def full_name(self) -> str:
        return ".".join(str(part) for part in (self.module, self.path, self.name) if part != "")

    def make(self) -> Callable[[], object] | None:
        """Have it so in this process; returns what puts back what was there.

        None: the module is not to be had here, so no recipe that comes here has it either.
        """
        try:
            home: Any = importlib.import_module(self.module)
            home = operator.attrgetter(self.path)(home) if self.path else home
        except Exception:  # whatever its own code raises; a recipe's import raises it again
            return None
        name, known = self.name, home if self.is_item else vars(home)
        put: Callable[..., object] = setattr
        drop: Callable[..., object] = delattr
        if self.is_item:
            kind: Any = OrderedDict if isinstance(home, OrderedDict) else dict
            put, drop, known = kind.__setitem__, kind.pop, dict(dict.items(home))
        if not self.is_sure and name in known and _is_like(self.value, known[name]):
            return None
        if isinstance(self.value, Unsent):
            _left[f"{self.full_name} {self.value.why}"] = None
            return None
        before = functools.partial(drop, home, name)
        if name in known:
            before = functools.partial(put, home, name, known[name])
        value = self.value
        if isinstance(value, Gone):
            if name not in known:
                return None
            drop(home, name)
            return before
        if isinstance(value, Named):
            value = getattr(importlib.import_module(value.module), value.name)
        put(home, name, value)
        return before


class Unsent(NamedTuple):
    """In the place of a function or class that cannot be sent: what it is, and why it stays."""

    known_by: Any  # its code, or a class's module and name
    why: str


def known_by(value: Any) -> Any:
    """What tells whether a worker's import makes the same function or class, or wraps it so."""
    function = function_of(value)
    if isinstance(function, type):
        return function.__module__, function.__qualname__
    return getattr(function, "__code__", None)


def function_of(value: Any) -> Any:
    """A function, or the one that something is around."""
    while (name := AROUND.get(type(value))) is not None:
        value = getattr(value, name)
    return value


AROUND = {
    **dict.fromkeys((staticmethod, classmethod), "__func__"),
    property: "fget",
    **dict.fromkeys(
        (functools.partial, functools.partialmethod, functools.cached_property), "func"
    ),
}


def _is_like(came: Any, here: Any, met: frozenset[int] = frozenset()) -> bool:
    """Whether it is what an import makes here, down to the numbers that it closes over."""
    if isinstance(came, Unsent):
        return bool(came.known_by == known_by(here))
    if type(came) is not type(here):
        return False
    if isinstance(came, int | float | complex | str | None):
        return bool(came == here)
    if id(came) in met:  # it calls itself
        return True
    function, other = function_of(came), function_of(here)
    if not isinstance(function, FunctionType):
        return not isinstance(function, type) or known_by(function) == known_by(other)
    if not isinstance(other, FunctionType) or function.__code__ != other.__code__:
        return False
    mine, theirs, met = closed_over(function), closed_over(other), met | {id(came)}
    return all(name in theirs and _is_like(one, theirs[name], met) for name, one in mine.items())


_left: dict[str, None] = {}  # in words, of changes that could not be sent and are not there


def left_undone() -> tuple[str, ...]:
    """In words, what the last changes would have been that could not be sent."""
    return tuple(_left)


_undoing: list[Callable[[], object]] = []  # of the changes that this process has made


_before: list[Callable[[], object]] = []  # the same of modules' globals, made as code was read


def set_function_and_note(function: FunctionType, state: tuple[Any, dict[str, Any]]) -> None:
    """As cloudpickle completes a function; what its globals, a module's, were is noted."""
    known = function.__globals__
    for name in state[1]["__globals__"]:
        undo = functools.partial(known.__setitem__, name, known.get(name))
        _before.append(undo if name in known else functools.partial(known.pop, name, None))
    _function_setstate(function, state)


def undo_changes() -> None:
    """Put back what this process has changed for what it was given before."""
    for made in (_undoing, _before):
        while made:
            made.pop()()


def with_changes(changes: Iterable[Change], value: Any) -> Any:
    """``value``, which has come to a worker with them; those of what came before are put back."""
    while _undoing:
        _undoing.pop()()
    _left.clear()
    _undoing.extend(undo for change in changes if (undo := change.make()) is not None)
    return value


def cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    """A function with ``functools.lru_cache`` around it, as a worker makes it: nothing is cached.

    ``parameters``: of the cache there was.
    """
    made: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return made
