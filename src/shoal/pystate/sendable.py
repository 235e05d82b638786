"""What can go to a worker that the user's own modules hold: asked of a value beside its parts.

What has a registry, a file or a lock behind it cannot. Nothing here runs code of the user's.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import pathlib
import re
import sys
import types
import uuid
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.pystate.ofthread import OF_THREAD
from shoal.pystate.parts import SPACES, has_attributes
from shoal.pystate.values import STREAMS
from shoal.recipes.libraries import is_library
from shoal.source import MAINS

ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, tuple, frozenset))
"""Types whose values never change by themselves, and that a pickle has as they are."""
SIMPLE = ATOMS - {tuple, frozenset}
"""Those that have no parts."""
FLAT = (dict, list, set)
"""Containers that go as a whole where they have simple values alone."""
_IMMUTABLE: tuple[type, ...] = (
    *(pathlib.PurePath, re.Pattern, uuid.UUID, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(range, slice, np.generic, np.dtype),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.qscheme),
)
_CONTAINERS = (dict, list, set, collections.deque)
FIXED = (tuple, frozenset, int, float, complex, str, bytes)
"""What a class may extend whose objects get what they contain as they are made."""
REDUCED = frozenset(
    (
        *(collections.OrderedDict, collections.defaultdict, collections.deque),
        *(collections.Counter, types.SimpleNamespace),
    )
)
"""Types of the standard library that say how they are pickled, and have nothing else."""
_OPEN = (
    *(*SPACES, nn.Module, torch.utils.data.Dataset, torch.utils.data.Sampler),
    torch.distributions.Distribution,
)
"""What is looked into of torch and the standard library that is no container."""
_BASES = frozenset((object, *_CONTAINERS, *FIXED, *REDUCED))
_STORAGES = (torch.storage.TypedStorage, torch.storage.UntypedStorage)
CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_REDUCING = ("__reduce__", "__reduce_ex__")
MADE = (functools.partial, types.MethodType, types.MappingProxyType)
"""Types whose objects are made of parts for good."""
NUMBERLESS = (*_IMMUTABLE, *_STORAGES, *CODE, *MADE, enum.Enum, types.ModuleType)
"""Of objects that never change by themselves; nobody fills them."""


_ALWAYS = frozenset((*ATOMS, *_CONTAINERS, *MADE, types.FunctionType))
NUMBERS = frozenset((Tensor, nn.Parameter, np.ndarray))
"""Types of values that are many numbers."""


def is_of_main(value: Any) -> bool:
    """Whether it is what the main file defines, or an object of such a class."""
    return is_main_code(value) or type(value).__module__ in MAINS


def is_main_code(value: Any) -> bool:
    """Whether it is a function or class that the main file defines."""
    if isinstance(value, types.FunctionType):
        return home_of(value) in MAINS
    return isinstance(value, type) and value.__module__ in MAINS


def may_go(value: Any) -> bool:
    """Whether a value, beside its parts, can be made again in another process."""
    kind: Any = type(value)
    if kind is dict:
        return not _is_of_process(value)
    if kind in _ALWAYS:
        return True
    if isinstance(value, types.ModuleType):
        return value.__name__ not in MAINS and sys.modules.get(value.__name__) is value
    if _is_immutable(kind) or isinstance(value, STREAMS):
        return True
    if isinstance(value, (*CODE, *OF_THREAD)):
        return is_importable(value if isinstance(value, CODE) else kind)
    if isinstance(value, Tensor):
        return kind in NUMBERS and value.grad_fn is None
    if isinstance(value, np.ndarray):
        return kind in NUMBERS and value.dtype != object
    if has_tensors_alone(value):
        return True
    if not is_importable(kind):
        return False
    return isinstance(value, enum.Enum) or is_transparent(kind)


def goes_by_type(value: Any) -> bool:
    """Whether what may not go is to be asked of its type, which says what it is made of.

    Not where that may be a mark (``object()``), or has a registry behind it.
    """
    kind: Any = type(value)
    if kind is object or isinstance(value, (*_ASKED_BY_NOBODY, *OF_THREAD)):
        return False
    if isinstance(value, Tensor):
        is_plain = kind in NUMBERS and value.layout is torch.strided
        return value.device.type == "cpu" and value.grad_fn is None and not is_plain
    if may_go(value):
        return False
    package = str(kind.__module__).partition(".")[0]
    if package == "numpy":
        return not kind.__name__.startswith("_")
    return package in _BY_TYPE or not is_library(kind)


def is_table(value: Any) -> bool:
    """Whether it has numbers and texts, and nothing that its use changes by the way."""
    package = str(type(value).__module__).partition(".")[0]
    return isinstance(value, Tensor) or package in ("numpy", "pandas", "scipy")


_BY_TYPE = frozenset(
    ("argparse", "array", "builtins", "configparser", "decimal", "ipaddress", "itertools")
)
"""Of the standard library the modules whose types have nothing behind them."""
_ASKED_BY_NOBODY = (
    *(*CODE, types.ModuleType, types.MethodType, nn.Module),
    *(property, staticmethod, classmethod, dict),
)


@functools.cache
def _is_immutable(kind: Any) -> bool:
    return issubclass(kind, (*_IMMUTABLE, *_STORAGES)) and is_library(kind)


@functools.cache
def has_number(kind: Any) -> bool:
    """Whether objects of a type may change, so that others may refer to them by a number."""
    return not issubclass(kind, NUMBERLESS)


def has_tensors_alone(value: Any) -> bool:
    """Whether it is a module that only what has made it makes again: of it the tensors go.

    ``torch.nn.utils.parametrizations`` give a module a class of its own; TorchScript compiles it.
    """
    if not isinstance(value, nn.Module):
        return False
    return isinstance(value, torch.jit.ScriptModule) or not is_importable(type(value))


def _is_of_process(value: dict[Any, Any]) -> bool:
    """Whether it is ``sys.modules``, or what ``globals()`` gives."""
    if value is sys.modules:
        return True
    name = value.get("__name__") if "__spec__" in value else None
    home = sys.modules.get(name) if type(name) is str else None
    return home is not None and vars(home) is value


@functools.cache
def is_transparent(kind: type) -> bool:
    """Whether objects of a type are what they contain and their attributes, and nothing else.

    Of torch, NumPy and the standard library only containers, modules, data sets, samplers and
    distributions are: others have registries and the like behind them.
    """
    is_container = issubclass(kind, (*_CONTAINERS, *FIXED))
    is_known = is_container or issubclass(kind, _OPEN) or not is_library(kind)
    if not is_known or not (is_container or has_attributes(kind)):
        return False
    if not all(base in _BASES or _is_by_statement(base) for base in kind.__mro__):
        return False
    owners = (next(b for b in kind.__mro__ if name in vars(b)) for name in _REDUCING)
    return all(owner in REDUCED or owner is object for owner in owners)


def _is_by_statement(kind: type) -> bool:
    """Whether a class statement made it, and not C, which says itself what is in its objects."""
    is_of_c = isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)
    return bool(kind.__flags__ & _HEAP_TYPE) and not is_of_c


def home_of(function: types.FunctionType) -> str:
    """The module whose code it is; a wrapper has its ``__module__`` from what it wraps."""
    return str(function.__globals__.get("__name__"))


def is_importable(code: Any) -> bool:
    """Whether a worker finds a function or class by its name."""
    module, name = getattr(code, "__module__", None), getattr(code, "__qualname__", "")
    if not isinstance(module, str) or module in MAINS:
        return False
    if isinstance(code, types.FunctionType) and home_of(code) != module:
        return False
    home: Any = sys.modules.get(module)
    if isinstance(code, types.BuiltinFunctionType) and getattr(home, code.__name__, None) is code:
        return True
    found = home
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is code


def is_flat(value: Any) -> bool:
    """Whether a container has numbers and texts alone."""
    kinds = {*map(type, value), *(map(type, dict.values(value)) if type(value) is dict else ())}
    return SIMPLE.issuperset(kinds)


def num_others(value: Any) -> int:
    """How many items of a container are no numbers or texts."""
    items = itertools.chain(value, dict.values(value) if type(value) is dict else ())
    return sum(type(one) not in SIMPLE for one in items)


def base_of(kind: type) -> Any:
    """The type of containers that a class extends; ``object`` where it does not."""
    every = (*REDUCED, *_CONTAINERS, *FIXED, object)
    return next(base for base in every if base in kind.__mro__)
