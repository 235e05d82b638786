"""What values consist of that are no containers: objects, functions, modules, by name.

Each is a mapping whose values can be looked at and, but for those that are tensors of a module or
what a wrapper wraps, replaced.
"""

from __future__ import annotations

import argparse
import collections
import functools
import types
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from shoal.core.closures import UNASSIGNED, contents_of
from shoal.pystate.ofthread import OF_THREAD, parts_of_thread
from shoal.recipes.libraries import is_library

SPACES = (
    *(types.SimpleNamespace, argparse.Namespace),
    *(collections.UserDict, collections.UserList, collections.ChainMap),
)
"""Of the standard library what is looked into like objects of the user's."""
TENSORS = frozenset(("_parameters", "_buffers", "_modules", "training"))
RECURRENT = frozenset(("_flat_weights", "_flat_weight_refs"))  # lists of a layer's own parameters
STEPPED = frozenset(("state", "param_groups", "defaults", "step"))  # a schedule wraps the last
"""An optimizer's attributes that are looked after in other ways."""
Parts = MutableMapping[str, Any]


def parts_of(value: Any) -> Parts | None:
    """By name what a value of the user's consists of; None of what is no such one."""
    if isinstance(value, types.FunctionType):
        return function_parts(value) if not is_library(value) else _wrapped(value)
    if isinstance(value, types.MethodType):
        return {"self": value.__self__}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, nn.Module):
        return _Module(value)
    if isinstance(value, torch.optim.Optimizer):
        return _Optimizer(value)
    if isinstance(value, OF_THREAD):
        return parts_of_thread(value)
    if isinstance(value, type | types.ModuleType):
        return None
    kind = type(value)
    is_users = issubclass(kind, SPACES) or not is_library(kind)
    return _Object(value) if is_users and has_attributes(kind) else None


def function_parts(function: types.FunctionType, *, every_default: bool = False) -> Parts:
    """What a function keeps; of defaults those that may change in place, or all."""
    return _Function(function, (defaults_of if every_default else changing_defaults)(function))


def attributes_of(value: Any) -> Parts:
    """Of any object, those in slots too."""
    return _Object(value)


def has_attributes(kind: type) -> bool:
    """Whether objects of a type have attributes of their own; none of their code is asked."""
    return bool(kind.__dictoffset__ or _slots(kind))


def _attributes_of(value: Any) -> dict[str, Any]:
    found = object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else {}
    return found if isinstance(found, dict) else {}


def is_code(value: Any) -> bool:
    """Whether a value is called, and not replaced, by who has it."""
    return isinstance(value, types.FunctionType | types.MethodType | functools.partial | nn.Module)


def _wrapped(function: types.FunctionType) -> Parts | None:
    """What a library's function calls that it wraps."""
    return {"wrapped": function.__wrapped__} if hasattr(function, "__wrapped__") else None


class _Named(MutableMapping[str, Any]):
    def __len__(self) -> int:
        return sum(1 for _ in self)


_UNSET = object()


class _Object(_Named):
    """An object's attributes, those in slots too."""

    def __init__(self, value: Any) -> None:
        self._value, self._all = value, _attributes_of(value)
        self._slots = _slots(type(value))

    def __iter__(self) -> Iterator[str]:
        yield from list(self._all)
        yield from (name for name in self._slots if name in self)

    def __contains__(self, name: object) -> bool:
        return self.get(str(name), _UNSET) is not _UNSET

    def __getitem__(self, name: str) -> Any:
        if name in self._all:
            return self._all[name]
        try:
            return self._slots[name].__get__(self._value)
        except AttributeError as error:  # nothing was assigned yet
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            self._slots[name].__set__(self._value, value)  # a frozen object's as well
        else:
            self._all[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._slots:
            self._slots[name].__delete__(self._value)
        else:
            del self._all[name]


def _slots(kind: type) -> dict[str, Any]:
    """What classes name in ``__slots__``; members of types in C are no state, and often fixed.

    But for the function that a ``defaultdict`` calls.
    """
    owner: type = collections.defaultdict
    factory = {"default_factory": vars(owner)["default_factory"]}
    return (factory if issubclass(kind, owner) else {}) | {
        name: member
        for owner in kind.__mro__
        if "__slots__" in vars(owner)
        for name, member in vars(owner).items()
        if isinstance(member, types.MemberDescriptorType)
    }


class _Function(_Named):
    """What a function closes over, its attributes, and defaults that may change in place.

    A cell's name ends in a space here, and a default's in ``=``.
    """

    def __init__(self, function: types.FunctionType, defaults: dict[str, Any]) -> None:
        self._function, self._all, self._defaults = function, vars(function), defaults
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = {f"{name} ": cell for name, cell in cells}

    def __iter__(self) -> Iterator[str]:
        yield from (name for name, cell in self._cells.items() if _is_filled(cell))
        yield from self._defaults
        yield from list(self._all)

    def __getitem__(self, name: str) -> Any:
        if name in self._defaults:
            return self._defaults[name]
        if name not in self._cells:
            return self._all[name]
        if not _is_filled(self._cells[name]):
            raise KeyError(name)
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        elif name in self._defaults:
            _set_default(self._function, name.removesuffix("="), value)
        else:
            self._all[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._defaults:
            raise TypeError("a function has its defaults always")
        if name in self._cells:
            del self._cells[name].cell_contents
        else:
            del self._all[name]


def changing_defaults(function: types.FunctionType) -> dict[str, Any]:
    """The default values of arguments that code may keep something in."""
    every = defaults_of(function)
    return {name: value for name, value in every.items() if not isinstance(value, _FIXED)}


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """The default values of arguments."""
    some = function.__defaults__ or ()
    if not some and not function.__kwdefaults__:
        return {}
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(some) : code.co_argcount]
    defaults = dict(zip(names, some, strict=True)) | (function.__kwdefaults__ or {})
    return {f"{name}=": value for name, value in defaults.items()}


def _set_default(function: types.FunctionType, name: str, value: Any) -> None:
    if (named := function.__kwdefaults__) is not None and name in named:
        named[name] = value
        return
    some, code = list(function.__defaults__ or ()), function.__code__
    some[code.co_varnames.index(name) - code.co_argcount] = value
    function.__defaults__ = tuple(some)


_FIXED = (
    *(type(None), bool, int, float, complex, str, bytes, range, frozenset, type),
    *(torch.dtype, torch.device, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)
"""Types of values that hold nothing else later."""


def _is_filled(cell: types.CellType) -> bool:
    return contents_of([cell])[0] is not UNASSIGNED


class _Module(_Named):
    """A module's tensors by name, which stay, and the attributes of it and of those inside.

    These are called ``PATH NAME``. Of library's modules there are only the tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self._shown = {
            path: Shown(vars(one), hidden_of(one))
            for path, one in module.named_modules()
            if not is_library(type(one))
        }

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        for path, shown in self._shown.items():
            yield from (f"{path} {name}" for name in shown)

    def __getitem__(self, name: str) -> Any:
        if name in self._tensors:
            return self._tensors[name]
        path, _, name = name.rpartition(" ")
        return self._shown[path][name]

    def __setitem__(self, name: str, value: Any) -> None:
        path, space, name = name.rpartition(" ")
        if space and path in self._shown:
            self._shown[path][name] = value

    def __delitem__(self, name: str) -> None:
        path, space, name = name.rpartition(" ")
        if space and path in self._shown:
            del self._shown[path][name]


class _Optimizer(_Named):
    """An optimizer that another one steps with, as SAM and Lookahead do.

    ``state N`` is what it has of its Nth parameter, ``group N NAME`` an option of a group; and
    attributes, of the user's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups, kind = optimizer.param_groups, type(optimizer)
        every = [parameter for group in groups for parameter in group["params"]]
        self._state = optimizer.state
        self._parameters = {f"state {number}": one for number, one in enumerate(every)}
        self._groups = {f"group {number}": group for number, group in enumerate(groups)}
        attributes = {} if is_library(kind) else _attributes_of(optimizer)
        self._shown = Shown(attributes, STEPPED | hooks())

    def __iter__(self) -> Iterator[str]:
        yield from (name for name, one in self._parameters.items() if one in self._state)
        for where, group in self._groups.items():
            yield from (f"{where} {name}" for name in group if name != "params")
        yield from self._shown

    def __getitem__(self, name: str) -> Any:
        holder, key = self._place(name)
        if key not in holder:  # a state makes what is asked for
            raise KeyError(name)
        return holder[key]

    def __setitem__(self, name: str, value: Any) -> None:
        holder, key = self._place(name)
        holder[key] = value

    def __delitem__(self, name: str) -> None:
        holder, key = self._place(name)
        del holder[key]

    def _place(self, name: str) -> tuple[MutableMapping[Any, Any], Any]:
        if name in self._parameters:
            return self._state, self._parameters[name]
        where = " ".join(name.split(" ")[:2])
        if where in self._groups:
            return self._groups[where], name[len(where) + 1 :]
        return self._shown, name


class Shown(_Named):
    """Those attributes of an object that may be state."""

    def __init__(self, attributes: dict[str, Any], hidden: frozenset[str]) -> None:
        self._all, self._hidden = attributes, hidden

    def __iter__(self) -> Iterator[str]:
        yield from [name for name in self._all if name not in self._hidden]

    def __getitem__(self, name: str) -> Any:
        if name in self._hidden:
            raise KeyError(name)
        return self._all[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._all[name] = value

    def __delitem__(self, name: str) -> None:
        del self._all[name]


def hidden_of(module: nn.Module) -> frozenset[str]:
    """The attributes of a module that are torch's, or are looked after elsewhere."""
    return TENSORS | hooks() | (RECURRENT if isinstance(module, nn.RNNBase) else frozenset())


@functools.cache
def hooks() -> frozenset[str]:
    """The names under which torch keeps hooks, of modules and of optimizers."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    names = (*vars(nn.Module()), *vars(optimizer), *_HOOKS_OF_TENSORS)
    return frozenset(name for name in names if "_hooks" in name)


_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(owner: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The hooks of a module, an optimizer or a parameter, by kind: their keys are counts."""
    known = getattr(owner, "__dict__", {})
    for name in sorted(hooks()):
        kept = getattr(owner, name, None) if isinstance(owner, nn.Parameter) else known.get(name)
        if isinstance(kept, dict) and kept:
            users = (hook for hook in kept.values() if not _is_ours(hook))
            yield name, {str(number): hook for number, hook in enumerate(users)}


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "shoal"
