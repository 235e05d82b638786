"""What a pickle of modules' values has in the place of what has no pickle of its own.

``reduced`` is the study's side: of an object what it contains and its attributes, so that no code
of its class runs. The rest is the worker's: what such a pickle is read as. ``Stream``, ``Made``,
``ByType``, ``Weights``, ``Large`` and ``Code`` still stand for something then, which
``bringing.Bringing`` finds or makes.
"""

from __future__ import annotations

import collections
import copyreg
import enum
import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.pystate.fingerprints import Fingerprint
from shoal.pystate.ofthread import OF_THREAD, OfThread, parts_of_thread
from shoal.pystate.parts import attributes_of, function_parts, has_attributes
from shoal.pystate.sendable import (
    FIXED,
    REDUCED,
    base_of,
    has_tensors_alone,
    home_of,
    is_importable,
    is_transparent,
)
from shoal.pystate.values import STREAMS, filler_of, state_of
from shoal.recipes.libraries import is_library

_MADE_OF: dict[type, Callable[[Any], dict[str, Any]]] = {
    functools.partial: lambda one: {"func": one.func, "args": one.args, "named": one.keywords},
    types.MethodType: lambda one: {"func": one.__func__, "self": one.__self__},
    types.MappingProxyType: lambda one: {"keys": tuple(one.keys()), "values": tuple(one.values())},
}
"""How objects of ``sendable.MADE`` show their parts."""
_MAKE: dict[type, Callable[..., Any]] = {
    functools.partial: lambda func, args, named: functools.partial(func, *args, **named),
    types.MethodType: lambda func, self: types.MethodType(func, self),
    types.MappingProxyType: lambda keys, values: types.MappingProxyType(
        dict(zip(keys, values, strict=True))
    ),
}
_REDUCED_ALONE = REDUCED - {collections.defaultdict}  # its function may be one that is KEPT
_CLASS_CELL = "__class__ "  # of methods with super()


class Own:
    """A function at the place where it is defined: what it keeps goes, not its name."""

    def __init__(self, function: types.FunctionType, parts: dict[str, Any]) -> None:
        self.function, self.parts = function, parts


def kept_by(function: types.FunctionType) -> dict[str, Any]:
    """What a function keeps: defaults, what it closes over, attributes."""
    parts = dict(function_parts(function, every_default=True))
    parts.pop(_CLASS_CELL, None)
    return parts


def reduced(value: Any) -> Any:
    """What a pickle has of an object in place of its class's own words; NotImplemented: those."""
    kind: Any = type(value)
    if kind is ByType:
        return ByType, (value.kind, value.digest), {"parts": value.parts}
    if kind is Own:
        return Code, (place_of(value.function),), {"parts": value.parts}
    if isinstance(value, types.ModuleType):
        return _module, (value.__name__,)
    if isinstance(value, types.BuiltinFunctionType):  # its maker may have another way
        module, name = str(value.__module__), str(value.__name__)
        is_there = getattr(sys.modules.get(module), name, None) is value
        return (_function, (module, name)) if is_there else NotImplemented
    if kind is types.FunctionType and not is_importable(value):
        return Code, (place_of(value),), {"parts": kept_by(value)}
    if isinstance(value, STREAMS):
        is_here = isinstance(value, torch.Generator) and value.device.type != "cpu"
        return Stream, (None if is_here or not is_library(kind) else kind, state_of(value))
    if isinstance(value, OF_THREAD):
        return OfThread, (kind,), {"parts": dict(parts_of_thread(value))}
    if has_tensors_alone(value):
        return Weights, (kind.__name__,), {"parts": weights_of(value)}
    if kind in _MADE_OF:
        return Made, (kind.__name__,), {"parts": dict(_MADE_OF[kind](value))}
    if isinstance(value, enum.Enum):
        is_named = value.name in kind.__members__
        return (_member, (kind, value.name)) if is_named else NotImplemented
    if kind in _REDUCED_ALONE or kind in FIXED or not is_transparent(kind):
        return NotImplemented
    return _reduce_object(value)


def _reduce_object(value: Any) -> tuple[Any, ...]:
    kind: Any = type(value)
    base, items = base_of(kind), None
    attributes = dict(attributes_of(value)) if has_attributes(kind) else {}
    if base in FIXED:
        known = _plain(base, value)
        return new_fixed, (kind, known), (None, attributes), None, None, fill
    if base is not object:
        items = dict(dict.items(value)) if issubclass(base, dict) else list(base.__iter__(value))
    return new, (kind,), (items, attributes), None, None, fill


def _plain(base: Any, value: Any) -> Any:
    """As one of the type that its class extends."""
    if base in (tuple, frozenset):
        return list(base.__iter__(value))
    return _PLAIN[base](value)


_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
}


def new_fixed(kind: type, items: Any) -> Any:
    """A tuple, frozenset, number or text of a class's own."""
    if issubclass(kind, Lost):
        return kind()
    return base_of(kind).__new__(kind, items)


def new(kind: type) -> Any:
    """An object with nothing in it yet."""
    base = base_of(kind)
    return (object if base is types.SimpleNamespace else base).__new__(kind)


def fill(made: Any, state: tuple[Any, dict[str, Any]]) -> None:
    """The inverse of what a pickle has of such an object."""
    items, attributes = state
    if isinstance(made, Lost):
        return
    if isinstance(made, dict):
        refill_raw(made, items)
    elif items is not None and (filler := filler_of(made)) is not None:
        filler(made, items)
    parts = attributes_of(made)
    for name, value in attributes.items():
        parts[name] = value


def refill_raw(made: dict[Any, Any], items: dict[Any, Any]) -> None:
    """By a dictionary's own methods: a class may forbid changes in its."""
    base: Any = collections.OrderedDict if isinstance(made, collections.OrderedDict) else dict
    if list(base.__iter__(made)) != list(items):
        base.clear(made)
    for key, one in items.items():
        if not base.__contains__(made, key) or base.__getitem__(made, key) is not one:
            base.__setitem__(made, key, one)


class Lost:
    """In the place of what a worker cannot import; it leaves there what it has."""

    def __new__(cls, *given: Any, **named: Any) -> Lost:
        return super().__new__(cls)

    def __init__(self, *given: Any, **named: Any) -> None: ...


def _module(name: str) -> Any:
    """A module that a worker imports as well, if it can."""
    try:
        return importlib.import_module(name)
    except Exception:  # whatever its own code raises
        return Lost()


def _function(module: str, name: str) -> Any:
    return getattr(_module(module), name, Lost())


def _member(kind: Any, name: str) -> Any:
    """Of an enumeration, whatever the member's value is."""
    return Lost() if issubclass(kind, Lost) or name not in kind.__members__ else kind[name]


class Stream:
    """Where a random generator stood."""

    def __init__(self, kind: Any, state: Any) -> None:
        self.kind, self.state = kind, state

    def made(self) -> Any:
        """Another one, which stands nowhere yet; None where only one that is there will do."""
        if self.kind is np.random.Generator:
            return self.kind(getattr(np.random, self.state["bit_generator"])())
        return None if self.kind is None else self.kind()


class Made:
    """What is made of parts for good; ``kind`` names its type, which no module may have."""

    parts: dict[str, Any]

    def __init__(self, kind: str) -> None:
        self.kind = next(one for one in _MADE_OF if one.__name__ == kind)

    def parts_of(self, here: Any) -> dict[str, Any]:
        """Those of an object of this process, if it is such a one."""
        return _MADE_OF[self.kind](here) if type(here) is self.kind else {}

    def made(self, parts: dict[str, Any]) -> Any:
        """One of these parts."""
        return _MAKE[self.kind](**parts)


class ByType:
    """What a type says its object is made of (``__reduce_ex__``), by ``parts_by_type``.

    ``digest`` is that of the object; None where nobody can tell.
    """

    parts: dict[str, Any]

    def __init__(self, kind: str, digest: int | None) -> None:
        self.kind, self.digest = kind, digest

    def begun(self, function: Any, arguments: Any) -> Any:
        """The object, as far as its type makes it at once."""
        return function(*arguments)

    def complete(self, made: Any, rest: dict[str, Any]) -> None:
        """Have it hold the rest, as a pickle does."""
        state = rest.get("state")
        if "put" in rest:
            rest["put"](made, state)
        elif hasattr(made, "__setstate__"):
            if "state" in rest:
                made.__setstate__(state)
        elif state is not None:
            attributes, slots = state if isinstance(state, tuple) else (state, None)
            vars(made).update(attributes or {})
            for name, one in (slots or {}).items():
                setattr(made, name, one)
        for one in rest.get("items", ()):
            made.append(one)
        for key, one in rest.get("pairs", ()):
            made[key] = one


def name_of(kind: Any) -> str:
    """The full name of a type."""
    return f"{kind.__module__}.{kind.__qualname__}"


def parts_by_type(value: Any) -> dict[str, Any] | None:
    """What ``ByType`` has of a value; None of what is pickled by its name.

    Raises:
        Exception: its type has no pickle, or whatever its code raises.
    """
    known = copyreg.dispatch_table.get(type(value))
    found = value.__reduce_ex__(4) if known is None else known(value)
    if isinstance(found, str):
        return None
    parts = dict(zip(_REDUCTION, found, strict=False))
    listed = {name: list(parts[name]) for name in ("items", "pairs") if parts.get(name)}
    return {name: one for name, one in parts.items() if one is not None} | listed


_REDUCTION = ("func", "args", "state", "items", "pairs", "put")


DECLARED = "(values)"
"""By this name a class has what ``declared_in`` gives; it is before names of a module's."""


def declared_in(home: type | types.ModuleType) -> dict[str, Any]:
    """What is compared at once: an enumeration's values, defaults that pydantic has.

    Of an installed module numbers, texts and containers at its top level.
    """
    if isinstance(home, types.ModuleType):
        known = list(vars(home).items())
        return {n: v for n, v in known if not n.startswith("__") and isinstance(v, _DECLARED)}
    if issubclass(home, enum.Enum):
        return {name: member._value_ for name, member in home.__members__.items()}
    fields = vars(home).get("__pydantic_fields__")
    if not isinstance(fields, dict):
        return {}
    return {name: getattr(one, "default", None) for name, one in fields.items()}


_DECLARED = (type(None), bool, int, float, str, bytes, dict, list, set, tuple, frozenset)


class Weights:
    """The tensors of a module that a worker has to have made by itself, and its modes."""

    parts: dict[str, Any]

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def is_that_of(self, here: Any) -> bool:
        """Whether an object of this process is such a module."""
        if not isinstance(here, nn.Module) or type(here).__name__ != self.kind:
            return False
        return weights_of(here).keys() == self.parts.keys()


def weights_of(module: nn.Module) -> dict[str, Any]:
    """Its parameters and buffers by name; by path with a space whether a part of it trains."""
    tensors = dict(nn.Module.named_parameters(module)) | dict(nn.Module.named_buffers(module))
    modes = {f"{path} ": one.training for path, one in nn.Module.named_modules(module)}
    return tensors | modes


class Large:
    """In the place of what is too large to be sent, or cannot go: a worker is to have the same.

    ``is_sure``: that a trial is another one where it has not; else that is told.
    """

    def __init__(self, fingerprint: Fingerprint, *, is_sure: bool = True) -> None:
        self.fingerprint, self.is_sure = fingerprint, is_sure


class Code:
    """What a function keeps whose code a worker has."""

    parts: dict[str, Any]

    def __init__(self, place: tuple[str, str, int]) -> None:
        self.place = place

    def is_that_of(self, here: Any) -> bool:
        """Whether a function of this process has this code."""
        return type(here) is types.FunctionType and place_of(here) == self.place


def place_of(function: types.FunctionType) -> tuple[str, str, int]:
    """Where its code stands."""
    code = function.__code__
    return home_of(function), code.co_qualname, code.co_firstlineno
