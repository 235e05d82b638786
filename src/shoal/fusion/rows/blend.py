"""One object for the code of all slots, out of each slot's own.

What is equal stays; floats that differ become a ``PerSlot``; functions, partials and plain
objects of equal code are made anew around what differs in them.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.closures import UNASSIGNED, closed_over, contents_of
from shoal.fusion.declined import Declined
from shoal.fusion.rows.keptparts import named_parts, with_names
from shoal.fusion.rows.perslot import PerSlot
from shoal.fusion.rows.sealed import seal
from shoal.recipes.bound import Rest

HIDDEN = frozenset(
    ("_parameters", "_buffers", "_modules", "training", "_flat_weights", "_flat_weight_refs")
)
"""Attributes of a module that are no settings. The last two are recurrent layers' lists."""


_PLAIN = (bool, int, float, complex, np.generic, str, bytes, type, type(None))


def blend(values: Sequence[Any], where: str) -> Any:
    """One value for all of ``values``, one per slot.

    Raises:
        Declined: they differ in more than floats; says where.
    """
    first = values[0]
    _decline_trained(first, where)
    if all(value is first for value in values) or same(values):
        return first
    kinds = {type(value) for value in values}
    if kinds <= {int, float}:
        return PerSlot(values)
    if len(kinds) == 1:
        maker = _maker(first)
        if maker is not None:
            return maker(values, where)
    raise Declined(f"{where} differs between trials: {first!r} and others.")


def same(values: Sequence[Any]) -> bool:
    """Whether values are equal, told without trusting an odd ``__eq__``."""
    first = values[0]
    kind = type(first)
    if any(type(value) is not kind for value in values):
        return False
    if isinstance(first, Tensor):
        return all(
            v.shape == first.shape and v.dtype == first.dtype and torch.equal(v, first)
            for v in values
        )
    if isinstance(first, np.ndarray):
        return not first.dtype.hasobject and all(
            v.shape == first.shape and v.dtype == first.dtype and v.tobytes() == first.tobytes()
            for v in values
        )
    if isinstance(first, _PLAIN):
        return all(value == first for value in values)
    if isinstance(first, torch.dtype | torch.device | torch.Size | types.ModuleType):
        return all(value == first for value in values)
    if kind in (tuple, list) or _is_named(kind):
        lengths = {len(value) for value in values}
        return len(lengths) == 1 and all(same(items) for items in zip(*values, strict=True))
    if kind in (set, frozenset, range) or hasattr(kind, "__members__"):  # an Enum, or torch's
        return all(value == first for value in values)
    return False


def _maker(first: Any) -> Any:
    if isinstance(first, Rest):
        return lambda values, where: seal(values[0])
    if isinstance(first, nn.Module):
        return _module
    if isinstance(first, functools.partial):
        return _partial
    if isinstance(first, types.FunctionType):
        return _function
    if isinstance(first, types.MethodType):
        return _method
    if isinstance(first, Mapping) and isinstance(first, dict):
        return _mapping
    if type(first) in (tuple, list) or _is_named(type(first)):
        return _sequence
    return _plain if hasattr(first, "__dict__") and not isinstance(first, Tensor) else None


def _sequence(values: Sequence[Any], where: str) -> Any:
    if len({len(value) for value in values}) > 1:
        raise Declined(f"{where} differs in length between trials.")
    kind, items = type(values[0]), [blend(one, where) for one in zip(*values, strict=True)]
    return kind(*items) if _is_named(kind) else kind(items)


def _is_named(kind: type) -> bool:
    """Whether this is a ``namedtuple``."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _mapping(values: Sequence[dict[Any, Any]], where: str) -> Any:
    first = values[0]
    if any(list(value) != list(first) for value in values):
        raise Declined(f"{where} has other keys in other trials.")
    made = copy.copy(first)
    for key in first:
        made[key] = blend([value[key] for value in values], f"{where}[{key!r}]")
    return made


def _partial(values: Sequence[functools.partial[Any]], where: str) -> Any:
    function = blend([value.func for value in values], where)
    args = blend([value.args for value in values], where)
    return functools.partial(function, *args, **blend([value.keywords for value in values], where))


def _function(values: Sequence[types.FunctionType], where: str) -> Any:
    first = values[0]
    if any(value.__code__ != first.__code__ for value in values):
        raise Declined(f"{where} is other code in other trials.")
    cells = [contents_of(value.__closure__) for value in values]
    made = types.FunctionType(
        first.__code__,
        first.__globals__,
        first.__name__,
        blend([value.__defaults__ for value in values], where),
        tuple(_cell(items, where) for items in zip(*cells, strict=True)),
    )
    made.__kwdefaults__ = blend([value.__kwdefaults__ for value in values], where)
    return made


def _cell(items: Sequence[Any], where: str) -> types.CellType:
    if all(item is UNASSIGNED for item in items):
        return types.CellType()
    return types.CellType(blend(items, f"{where}, what it closes over"))


def _method(values: Sequence[types.MethodType], where: str) -> Any:
    function = blend([value.__func__ for value in values], where)
    return types.MethodType(function, blend([value.__self__ for value in values], where))


def _module(values: Sequence[nn.Module], where: str) -> Any:
    """For a module beside the model, such as a loss; it may hold no tensors of its own."""
    if any(list(m.parameters()) or list(m.buffers()) for m in values):
        raise Declined(
            f"{where} is a module with tensors, which would be one trial's for all. Make it a "
            "part of the model, and call it by its name there."
        )
    return blend_settings(copy.deepcopy(values[0]), values, where)


def _plain(values: Sequence[Any], where: str) -> Any:
    made = copy.copy(values[0])
    settings = blend([vars(value) for value in values], where)
    vars(made).update(settings)
    return made


def blend_settings(made: nn.Module, modules: Sequence[nn.Module], where: str) -> nn.Module:
    """Give ``made``, a copy of the first of ``modules``, what they all have between them.

    Where attributes have parameters of the model, their names are there (``keptparts``), and
    tensors for a pass (``installed``).

    Raises:
        Declined: something that differs cannot differ inside an array.
    """
    others = [dict(module.named_modules()) for module in modules]
    parts = [named_parts(module) for module in modules]
    inside = {id(child) for child in modules[0].modules()}
    for path, child in made.named_modules():
        peers = [other[path] for other in others]
        for name in vars(child):
            if name in HIDDEN:
                continue
            values = [vars(peer)[name] for peer in peers]
            if name.endswith("_hooks"):
                if "state_dict" in name:
                    continue  # no pass calls them, and copies of torch's own have other attributes
                _blend_hooks(vars(child)[name], values, f"{where}.{path}".rstrip("."), inside)
                continue
            named = [with_names(one, its) for one, its in zip(values, parts, strict=True)]
            if named[0] is not values[0]:
                vars(child)[name] = blend(named, f"{where}.{path}.{name}".replace("..", "."))
                continue
            _decline_trained(values[0], f"{where}.{path}.{name}".replace("..", "."))
            if all(value is values[0] for value in values) or same(values):
                continue
            if not (_points_inside(values[0], inside) or _close_inside(values, modules)):
                vars(child)[name] = blend(values, f"{where}.{path}.{name}".replace("..", "."))
    return made


def _blend_hooks(
    made: dict[int, Any], values: Sequence[Mapping[int, Any]], where: str, inside: Set[int]
) -> None:
    """Give the copy's hooks what they all have between them.

    Raises:
        Declined: one closes over its own model, of which the copy has another.
    """
    for key, hooks in zip(made, zip(*(v.values() for v in values), strict=True), strict=True):
        if all(hook is hooks[0] for hook in hooks) or _points_inside(hooks[0], inside):
            continue
        closed = contents_of(getattr(hooks[0], "__closure__", None))
        if any(isinstance(item, nn.Module) for item in closed):
            raise Declined(
                f"a hook of {where} closes over a module, which would be one trial's for all. A "
                "method of the module, or the module that a hook is called with, is each trial's."
            )
        made[key] = blend(hooks, f"a hook of {where}")


def _close_inside(values: Sequence[Any], modules: Sequence[nn.Module]) -> bool:
    """Whether settings are one function, each closed over the same parts of its own model alone.

    That of the copy closes over the copy's (``modelcopy``).
    """
    if not all(isinstance(value, types.FunctionType) and value.__closure__ for value in values):
        return False
    parts = []
    for value, module in zip(values, modules, strict=True):
        names = {id(part): name for name, part in module.named_modules()}
        closed = [names.get(id(part)) for part in closed_over(value).values()]
        parts.append((value.__code__, closed, len(value.__closure__)))
    _, closed, count = parts[0]
    alike = all(part == parts[0] for part in parts) and same([v.__defaults__ for v in values])
    return alike and None not in closed and len(closed) == count


def _decline_trained(value: Any, where: str, depth: int = 4) -> None:
    """Decline a tensor that backwards give gradients to, which no pass for all slots would."""
    kind = type(value)
    if kind in (list, dict) or isinstance(value, tuple):
        for item in (value.values() if kind is dict else value) if depth else ():  # may be endless
            _decline_trained(item, where, depth - 1)
    elif isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
        raise Declined(
            f"{where} is or has a tensor with requires_grad=True that is no parameter of the "
            "model, and would be one trial's for all. Make it one: an nn.Parameter that is an "
            "attribute, or in an nn.ParameterList."
        )


def _points_inside(value: Any, inside: Set[int]) -> bool:
    """Whether a setting is a part of its own model, which the copy has one of too."""
    if isinstance(value, nn.Module):
        return id(value) in inside
    if isinstance(value, types.MethodType):
        return _points_inside(value.__self__, inside)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return bool(value) and all(_points_inside(item, inside) for item in value)
    return False
