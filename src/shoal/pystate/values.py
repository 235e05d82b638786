"""One Python value: what it holds now, whether that is another than before, and back again.

``look_at`` makes a ``Note``, which refers to the objects and has copies of what is in them.
``put_back`` has the same objects hold it again. ``pack`` makes a note plain containers and
tensors, which a checkpoint can hold, and ``give`` has a value that was built anew hold that.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.spelled import is_library

PLAIN = (bool, int, float, str)
DEEPEST = 6  # objects within objects that are looked into
SPACES = (types.SimpleNamespace, argparse.Namespace)
SEQUENCES: dict[type, Callable[[Any, list[Any]], None]] = {
    list: lambda held, items: held.__setitem__(slice(None), items),
    deque: lambda held, items: (held.clear(), held.extend(items))[0],
    set: lambda held, items: (held.clear(), held.update(items))[0],
}
"""By type how one of them comes to have other items."""
CODE = ("function", "parts")
"""Kinds of notes of which what is inside is put back, and not they themselves."""
STREAMS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Unkept(Exception):
    """A value changed that cannot be made anew from plain containers and tensors."""


class Note(NamedTuple):
    """A value at one moment.

    ``held`` is the object, where it may change in place; ``inside`` what was in it: for
    containers and objects the notes of their parts, by name or key where they have any.
    """

    kind: str
    held: Any = None
    inside: Any = None


FIXED = Note("fixed")
"""What somebody else looks after."""

NOTHING = Note("nothing")
"""Of what was not there yet."""


@dataclass
class Look:
    """How values are looked at.

    Attributes:
        fixed: Identities of objects that somebody else looks after, as a model's parameters.
        longest: Items of a container that are looked into.
        largest: Bytes of a tensor that is copied; of others is noted how often they were written.
        values: So many may still be looked into.
    """

    fixed: Set[int] = frozenset()
    longest: int = 10_000
    largest: int = 2**20
    values: int = 100_000


def look_at(value: Any, look: Look, depth: int = 0) -> Note:
    """What a value holds now."""
    if value is None or isinstance(value, PLAIN):
        return Note("plain", None, value)
    if id(value) in look.fixed:
        return FIXED
    if isinstance(value, Tensor):
        return _look_at_tensor(value, look)
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= look.largest and value.dtype != object
        return Note("array", value, value.copy() if is_small else None)
    if isinstance(value, STREAMS):
        return Note("stream", value, _state_of(value))
    look.values -= 1
    if depth > DEEPEST or look.values < 0:
        return Note("other", value)
    return _look_inside(value, look, lambda one: look_at(one, look, depth + 1))


def _look_at_tensor(value: Tensor, look: Look) -> Note:
    if value._base is not None and id(value._base) in look.fixed:
        return FIXED
    written = 0 if value.is_inference() else value._version
    is_small = value.nbytes <= look.largest and value.device.type != "meta"
    return Note("tensor", value, (written, value.detach().clone() if is_small else None))


def _look_inside(value: Any, look: Look, inner: Callable[[Any], Note]) -> Note:
    kind = type(value)
    if kind in SEQUENCES or isinstance(value, tuple):
        if len(value) > look.longest:
            return Note("other", value)
        return Note("items", value, [inner(one) for one in value])
    if isinstance(value, dict):
        if len(value) > look.longest:
            return Note("other", value)
        return Note("dict", value, {key: inner(one) for key, one in value.items()})
    if isinstance(value, nn.Module):
        tensors = [*value.named_parameters(), *value.named_buffers()]
        return Note("parts", value, {name: inner(one) for name, one in tensors})
    if (parts := _wrapped(value)) is not None:
        return Note("parts", value, {name: inner(one) for name, one in parts.items()})
    if isinstance(value, types.FunctionType) and not is_library(value):
        return Note("function", value, {name: inner(one) for name, one in _cells(value).items()})
    is_code = isinstance(value, type | types.ModuleType | types.FunctionType)
    if not is_code and hasattr(value, "__dict__") and _is_users(kind):
        return Note("object", value, {name: inner(one) for name, one in vars(value).items()})
    return Note("other", value)


def _wrapped(value: Any) -> dict[str, Any] | None:
    """What a callable calls that somebody else wrapped; None of what is no such one."""
    if isinstance(value, types.MethodType):
        return {"self": value.__self__}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, types.FunctionType) and is_library(value):
        return {"wrapped": value.__wrapped__} if hasattr(value, "__wrapped__") else None
    return None


def _is_users(kind: type) -> bool:
    return issubclass(kind, SPACES) or not is_library(kind)


def _cells(function: types.FunctionType) -> dict[str, Any]:
    """What a function closes over, and what it keeps as attributes, by name."""
    found = {}
    for name, cell in _named_cells(function):
        try:
            found[f"{name} "] = cell.cell_contents  # no attribute has such a name
        except ValueError:  # not assigned yet
            continue
    return found | vars(function)


def _state_of(stream: Any) -> Any:
    """Where a random generator stands."""
    if isinstance(stream, torch.Generator):
        return stream.get_state().numpy()
    if isinstance(stream, random.Random):
        return stream.getstate()
    if isinstance(stream, np.random.RandomState):
        return stream.get_state(legacy=False)
    return stream.bit_generator.state


def _move(stream: Any, state: Any) -> None:
    if isinstance(stream, torch.Generator):
        stream.set_state(torch.from_numpy(state))
    elif isinstance(stream, random.Random):
        stream.setstate(state)
    elif isinstance(stream, np.random.RandomState):
        stream.set_state(state)
    else:
        stream.bit_generator.state = state


# -- the same process ---------------------------------------------------------------------------


def same(one: Note, other: Note) -> bool:
    """Whether nothing has changed between two notes, as far as can be seen."""
    if one.kind != other.kind:
        return False
    match one.kind:
        case "fixed":
            return True
        case "plain":
            return _same_plain(one.inside, other.inside)
        case "tensor":
            return _same_tensors(one, other)
        case "array":
            if one.inside is None or other.inside is None:
                return one.held is other.held
            return bool(np.array_equal(one.inside, other.inside))
        case "stream":
            return _same_states(one.inside, other.inside)
        case "items":
            return len(one.inside) == len(other.inside) and all(
                map(same, one.inside, other.inside)
            )
        case "other":
            return one.held is other.held
    return list(one.inside) == list(other.inside) and all(
        same(note, other.inside[name]) for name, note in one.inside.items()
    )


def _same_plain(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and one == other


def _same_states(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, dict):
        return all(_same_states(state, other.get(key)) for key, state in one.items())
    return bool(one == other)


def _same_tensors(one: Note, other: Note) -> bool:
    (written, copy), (written_now, copy_now) = one.inside, other.inside
    if one.held is other.held and (copy is None or copy_now is None):
        return bool(written == written_now)
    before = one.held if copy is None else copy
    now = other.held if copy_now is None else copy_now
    alike = before.shape == now.shape and before.dtype == now.dtype
    return alike and before.device == now.device and torch.equal(before, now)


def put_back(note: Note, *, soft: bool = False) -> Any:
    """The value as it was; the same object where it was one.

    Of what has come into containers since then plain values are taken out. ``soft``: and nothing
    is put over what is no plain value, such as what was read from a disk and is kept for all.
    """
    held, inside = note.held, note.inside
    again = functools.partial(put_back, soft=soft)
    match note.kind:
        case "plain":
            return inside
        case "tensor":
            written, copy = inside
            if copy is not None and (held.is_inference() or held._version != written):
                held.detach().copy_(copy)
        case "array" if inside is not None:
            held[...] = inside
        case "stream":
            _move(held, inside)
        case "items":
            items, refill = list(map(again, inside)), SEQUENCES.get(type(held))
            if refill is not None and not any(one.kind == "other" for one in inside):
                refill(held, items)
        case "dict":
            refill_values(held, inside, soft=soft)
            if list(held) != list(inside):
                _refill(held, {k: held[k] for k in dict.fromkeys([*inside, *held]) if k in held})
        case "object":
            refill_values(vars(held), inside, soft=soft)
        case "function":
            cells = {n.removesuffix(" "): one for n, one in inside.items() if n.endswith(" ")}
            for name, cell in _named_cells(held):
                if name in cells and not (soft and covers(cells[name], cell.cell_contents)):
                    cell.cell_contents = again(cells[name])
            rest = {name: one for name, one in inside.items() if not name.endswith(" ")}
            refill_values(vars(held), rest, soft=soft)
        case "parts":
            for one in inside.values():
                again(one)
    return held


def refill_values(
    held: MutableMapping[Any, Any], notes: Mapping[Any, Note], *, soft: bool
) -> None:
    """Have a mapping hold what was noted, as ``put_back`` does."""
    for key in [key for key in held if key not in notes and is_plain(held[key])]:
        del held[key]
    for key, note in notes.items():
        if soft and key in held and covers(note, held[key]):
            continue
        value = put_back(note, soft=soft)
        if note.kind not in CODE:  # torch wraps an optimizer's step on its class
            held[key] = value


def is_plain(value: Any) -> bool:
    """Whether it is a number, a string or None."""
    return value is None or isinstance(value, PLAIN)


def covers(note: Note, value: Any) -> bool:
    """Whether there is something now that is worth more than what was noted."""
    return note.kind == "other" or is_plain(value) != (note.kind == "plain")


def _named_cells(function: types.FunctionType) -> Iterator[tuple[str, types.CellType]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _refill_function(function: types.FunctionType, values: dict[str, Any]) -> None:
    for name, cell in _named_cells(function):
        if f"{name} " in values:
            cell.cell_contents = values.pop(f"{name} ")
    _refill(vars(function), values)


def _refill(held: dict[Any, Any], values: dict[Any, Any]) -> None:
    """Have a dict hold these, in their order."""
    if list(held) != list(values):
        held.clear()
    held.update(values)


# -- another process ------------------------------------------------------------------------------


def pack(note: Note, before: Note) -> Any:
    """A note as plain containers and tensors on the CPU, next to the one when it was built.

    Raises:
        Unkept: something else is in it now that cannot be made anew.
    """
    if same(before, note):
        return None  # it is built like that
    held, inside = note.held, note.inside
    match note.kind:
        case "plain":
            return {"plain": inside}
        case "tensor":
            in_place = before.kind == "tensor" and before.held is held
            copy, learns = inside[1], held.requires_grad and held.is_leaf
            kept = (held if copy is None else copy).detach().cpu()
            return {"tensor": [kept, in_place, held.device.type != "cpu", learns]}
        case "array" if held.dtype != object:
            return {"array": _numbers(held if inside is None else inside)}
        case "items":
            has_order = before.kind == "items" and not isinstance(held, set)
            known = before.inside[: len(inside)] if has_order else []
            known = [*known, *[NOTHING] * (len(inside) - len(known))]
            name = type(held).__name__
            if isinstance(held, tuple) and type(held) is not tuple:
                raise Unkept
            size = held.maxlen if isinstance(held, deque) else None
            return {"items": [name, list(map(pack, inside, known)), size]}
        case "dict" if type(held).__name__ in ("dict", "OrderedDict", "defaultdict", "Counter"):
            known = before.inside if before.kind == "dict" else {}
            if type(held) is not dict and before.kind != "dict":
                raise Unkept
            pairs = [[_key(k), pack(n, known.get(k, NOTHING))] for k, n in inside.items()]
            return {"dict": pairs}
    if before.kind != note.kind or type(before.held) is not type(held):
        raise Unkept
    if note.kind == "stream":
        return {"stream": _plain_state(inside)}
    if note.kind in ("object", "function", "parts"):
        if note.kind == "parts" and list(before.inside) != list(inside):
            raise Unkept
        return {
            "parts": {n: pack(one, before.inside.get(n, NOTHING)) for n, one in inside.items()}
        }
    raise Unkept


def _key(key: Any) -> Any:
    if key is None or isinstance(key, PLAIN):
        return key
    if isinstance(key, tuple):
        return tuple(map(_key, key))
    raise Unkept


def _numbers(array: np.ndarray[Any, Any]) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).copy())
    except TypeError as error:  # of strings, dates
        raise Unkept from error


def _plain_state(state: Any) -> Any:
    """A random generator's state in lists, mappings and tensors."""
    if isinstance(state, np.ndarray):
        return {"array": torch.from_numpy(state.astype(np.int64)), "dtype": state.dtype.name}
    if isinstance(state, dict):
        return {key: _plain_state(one) for key, one in state.items()}
    return state


def _given_state(state: Any) -> Any:
    if isinstance(state, dict) and set(state) == {"array", "dtype"}:
        return state["array"].numpy().astype(state["dtype"])
    if isinstance(state, dict):
        return {key: _given_state(one) for key, one in state.items()}
    return state


def give(packed: Any, value: Any, device: torch.device) -> Any:
    """A value that was built anew, with what was packed in it; the same object where it can be.

    Raises:
        Unkept: it is of another kind than the one that was packed.
    """
    if packed is None:
        return value
    ((kind, content),) = packed.items()
    match kind:
        case "plain":
            return content
        case "tensor":
            return _give_tensor(content, value, device)
        case "array":
            found = content.numpy()
            if isinstance(value, np.ndarray) and value.shape == found.shape:
                value[...] = found
                return value
            return found.copy()
        case "stream":
            if not isinstance(value, STREAMS):
                raise Unkept
            _move(value, _given_state(content))
            return value
        case "items":
            return _give_items(content, value, device)
        case "dict":
            made: dict[Any, Any] = value if isinstance(value, dict) else {}
            _refill(made, {key: give(one, made.get(key), device) for key, one in content})
            return made
    return _give_parts(content, value, device)


def _give_tensor(content: Any, value: Any, device: torch.device) -> Tensor:
    kept, in_place, on_device, learns = content
    if in_place and isinstance(value, Tensor) and value.shape == kept.shape:
        value.detach().copy_(kept)
        return value
    made: Tensor = kept.to(device) if on_device else kept.clone()
    return made.requires_grad_(learns)


def _give_items(content: Any, value: Any, device: torch.device) -> Any:
    name, items, size = content
    known = list(value) if isinstance(value, tuple | list | deque | set) else []
    known += [None] * (len(items) - len(known))
    made = [give(one, there, device) for one, there in zip(items, known, strict=False)]
    if name == "tuple":
        return tuple(made)
    if type(value).__name__ == name:
        SEQUENCES[type(value)](value, made)
        return value
    if name == "deque":
        return deque(made, maxlen=size)
    return set(made) if name == "set" else made


def _give_parts(content: dict[str, Any], value: Any, device: torch.device) -> Any:
    """Into an object, a function, or what has parts that are no attributes."""
    if isinstance(value, nn.Module):
        known = dict(value.named_parameters()) | dict(value.named_buffers())
    elif (parts := _wrapped(value)) is not None:
        known = parts
    elif isinstance(value, types.FunctionType):
        known = _cells(value)
        _refill_function(value, {n: give(p, known.get(n), device) for n, p in content.items()})
        return value
    elif hasattr(value, "__dict__"):
        known = vars(value)
        _refill(known, {n: give(p, known.get(n), device) for n, p in content.items()})
        return value
    else:
        raise Unkept
    for name, packed in content.items():
        give(packed, known.get(name), device)
    return value
