"""A value as plain containers and tensors, and one that was built anew made to hold them.

``pack`` makes a note what a checkpoint can hold, next to the note of when its value was built:
what did not change is built anew. ``Giving`` is the inverse. Nothing in it runs code.
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.pystate.parts import is_code, parts_of
from shoal.pystate.values import (
    EXACTLY,
    FILLERS,
    NOTHING,
    PLAIN,
    SHARED,
    STREAMS,
    Note,
    filler_of,
    move,
    refill,
    same,
)

IMMUTABLE = (tuple, frozenset, torch.Size)


class Unkept(Exception):
    """A value changed that cannot be made anew from plain containers and tensors."""


Path = tuple[Any, ...]
"""Where a value is: the name of what has it, and the names and keys within."""


class Known:
    """Which objects have several names: those that were there when all was built, and new ones.

    Args:
        before, now: Notes by name, when it was built and now. Two objects of a name are one where
            nobody assigned another.
    """

    def __init__(self, before: Mapping[str, Note], now: Mapping[str, Note]) -> None:
        self._built: dict[int, Path] = {}
        self._new: dict[int, Path] = {}
        for name, note in now.items():
            self._add(before.get(name, NOTHING), note, (name,))

    def _add(self, before: Note, note: Note, path: Path) -> None:
        if note.kind not in SHARED or before.held is not note.held:
            return
        self._built.setdefault(id(note.held), path)
        for key, one, inner in inside_both(before, note):
            self._add(one, inner, (*path, key))

    def elsewhere(self, before: Note, note: Note) -> Path | None:
        """Where an object is that was there, if it has another name now than then."""
        return None if before.held is note.held else self._built.get(id(note.held))

    def again(self, note: Note, path: Path) -> Path | None:
        """Where a new object was met before; else it is from now on."""
        first = self._new.setdefault(id(note.held), path)
        return None if first == path else first

    def forget(self, name: str) -> None:
        """What is of this name is not packed after all."""
        self._new = {key: path for key, path in self._new.items() if path[0] != name}


def inside_both(before: Note, note: Note) -> list[tuple[Any, Note, Note]]:
    """By key what is in two notes of one object."""
    if before.kind != note.kind or note.kind not in ("items", "dict", "parts"):
        return []
    if note.kind == "items":
        if isinstance(note.held, set | frozenset):
            return []
        return list(zip(range(len(note.inside)), before.inside, note.inside, strict=False))
    return [(k, before.inside[k], one) for k, one in note.inside.items() if k in before.inside]


def pack(note: Note, before: Note, known: Known | None = None, path: Path = ()) -> Any:
    """A note as plain containers and tensors on the CPU, next to the one when it was built.

    ``known`` with ``path``: then objects with several names stay one.

    Raises:
        Unkept: something else is in it now that cannot be made anew.
    """
    shared = note.kind in SHARED and known is not None
    if shared and known is not None and (home := known.elsewhere(before, note)) is not None:
        return {"built": _path(home)}
    if same(before, note):
        return None  # it is built like that
    is_new = note.held is not before.held
    if shared and is_new and known is not None and (first := known.again(note, path)) is not None:
        return {"again": _path(first)}
    return _packed(note, before, known, path)


LOST: Any = object()


def pack_one(note: Note, before: Note, named: Collection[int]) -> Any:
    """As ``pack`` of a value alone; LOST where that raises.

    ``named``: Objects with names of their own, by identity. What changes in such a member of a set
    is kept by its name, and the set is what it was.
    """
    if _has_those_it_had(note, before, named):
        return None
    try:
        return pack(note, before)
    except Unkept:
        return LOST


def _has_those_it_had(note: Note, before: Note, named: Collection[int]) -> bool:
    if before.kind != note.kind or note.kind != "items":
        return False
    if note.held is not before.held or not isinstance(note.held, set | frozenset):
        return False
    was, now = (
        {id(one.held) if one.held is not None else (one.inside,): one for one in of.inside}
        for of in (before, note)
    )
    is_same = was.keys() == now.keys()
    return is_same and all(same(was[key], one) or key in named for key, one in now.items())


def _packed(note: Note, before: Note, known: Known | None, path: Path) -> Any:
    held, inside = note.held, note.inside
    in_place = held is before.held

    def inner(key: Any, one: Note, was: Note) -> Any:
        return pack(one, was, known, (*path, key))

    match note.kind:
        case "plain":
            return {"plain": inside}
        case "symbol":
            return {"symbol": _symbol(held)}
        case "count":
            return {"count": list(inside)}
        case "fixed" if not inside.startswith("a view of"):
            return {"fixed": inside}
        case "scalar" if inside.dtype.kind in "iufb":
            return {"scalar": [inside.dtype.name, inside.item()]}
        case "tensor":
            copied = inside[1]
            learns = held.requires_grad and held.is_leaf
            kept = _keepable(held if copied is None else copied)
            return {"tensor": [kept, in_place, held.device.type != "cpu", learns]}
        case "array" if held.dtype != object:
            return {"array": [_numbers(held if inside is None else inside), in_place]}
        case "flat":
            return {"flat": [*_kind_of(note, before), in_place, inside]}
        case "items":
            ordered = before.kind == "items" and not isinstance(held, set | frozenset)
            was = [*(before.inside if ordered else []), *[NOTHING] * len(inside)]
            items = [inner(n, one, was[n]) for n, one in enumerate(inside)]
            return {"items": [*_kind_of(note, before), in_place, items]}
        case "bulk":
            return _packed_bulk(note, before)
        case "dict":
            if type(held) is not dict and type(before.held) is not type(held):
                raise Unkept
            was_in = before.inside if before.kind == "dict" else {}
            pairs = [[_key(k), inner(k, n, was_in.get(k, NOTHING))] for k, n in inside.items()]
            return {"dict": [pairs, in_place]}
    if before.kind != note.kind or type(before.held) is not type(held):
        raise Unkept
    match note.kind:
        case "member":
            return {"member": held.name}
        case "stream":
            return {"stream": _plain_state(inside)}
        case "parts" if in_place or not is_code(held) or _is_one_function(held, before.held):
            was_in = before.inside
            parts = {n: inner(n, one, was_in.get(n, NOTHING)) for n, one in inside.items()}
            return {"parts": [parts, in_place or is_code(held)]}
    raise Unkept


def _packed_bulk(note: Note, before: Note) -> Any:
    """Of a container with so many items that nobody looked into them."""
    held, items, in_place = note.held, note.inside, note.held is before.held
    keys = items[: len(held)] if isinstance(held, dict) else []
    values = items[len(keys) :]
    if not EXACTLY.issuperset(map(type, values)):
        raise Unkept
    if not isinstance(held, dict):
        return {"flat": [*_kind_of(note, before), in_place, values]}
    if type(held) is not dict and type(before.held) is not type(held):
        raise Unkept
    pairs = [[_key(key), {"plain": one}] for key, one in zip(keys, values, strict=True)]
    return {"dict": [pairs, in_place]}


def _symbol(value: Any) -> list[Any]:
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, bytes):
        return ["bytes", list(value)]
    name = "dtype" if isinstance(value, torch.dtype) else "device"
    return [name, str(value).removeprefix("torch.")]


def _of_symbol(name: str, content: Any) -> Any:
    match name:
        case "complex":
            return complex(*content)
        case "bytes":
            return bytes(content)
        case "device":
            return torch.device(content)
    return getattr(torch, content)


def _kind_of(note: Note, before: Note) -> tuple[str, int | None]:
    """The name of a container's type, which can be made anew, and how long it may become."""
    kind = type(note.held)
    if kind not in (*IMMUTABLE, *FILLERS) and type(before.held) is not kind:
        raise Unkept
    if isinstance(note.held, tuple) and kind not in IMMUTABLE and not hasattr(kind, "_make"):
        raise Unkept
    return kind.__name__, note.held.maxlen if isinstance(note.held, deque) else None


def _is_one_function(one: Any, other: Any) -> bool:
    """Whether two functions differ in what they close over alone."""
    return (
        isinstance(one, FunctionType)
        and isinstance(other, FunctionType)
        and one.__code__ is other.__code__
    )


def _path(path: Path) -> list[Any]:
    return [_key(key) for key in path]


def _key(key: Any) -> Any:
    if key is None or type(key) in PLAIN:
        return key
    if isinstance(key, tuple):
        return tuple(map(_key, key))
    raise Unkept


NO_FILE_HAS = (torch.complex128, torch.complex32)


def _keepable(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, of a kind that a file can hold."""
    is_odd = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested
    if is_odd or tensor.dtype in NO_FILE_HAS or tensor.device.type == "meta":
        raise Unkept
    return tensor.detach().cpu()


def _numbers(array: np.ndarray[Any, Any]) -> Tensor:
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(array).copy())
    except TypeError as error:  # of strings, dates
        raise Unkept from error
    return _keepable(tensor.reshape(array.shape))


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


class Giving:
    """What is packed is given back to values that were built anew.

    Args:
        device: Of tensors that were on one.
        built: Notes by name, of when all was built.
        fixed: What somebody else looks after, by the names that ``Look`` had.
    """

    def __init__(
        self,
        device: torch.device,
        built: Mapping[str, Note] | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        self._device, self._built, self._fixed = device, built or {}, fixed or {}
        self._made: dict[Path, Any] = {}

    def give(self, packed: Any, value: Any, path: Path = ()) -> Any:
        """A value, with what was packed in it; the same object where it was one.

        Raises:
            Unkept: it is of another kind than the one that was packed.
        """
        if packed is None:
            return value
        ((kind, content),) = packed.items()
        made = self._give(kind, content, value, path)
        self._made[path] = made
        return made

    def _give(self, kind: str, content: Any, value: Any, path: Path) -> Any:
        match kind:
            case "plain":
                return content
            case "symbol":
                return _of_symbol(*content)
            case "count":
                return itertools.count(*content)
            case "scalar":
                return np.dtype(content[0]).type(content[1])
            case "fixed" if content in self._fixed:
                return self._fixed[content]
            case "built":
                return self._find(content)
            case "again" if tuple(content) in self._made:
                return self._made[tuple(content)]
            case "member" if isinstance(value, enum.Enum):
                return type(value)[content]
            case "tensor":
                return self._give_tensor(content, value)
            case "array":
                return _give_array(content, value)
            case "stream" if isinstance(value, STREAMS):
                move(value, _given_state(content))
                return value
            case "flat":
                return _filled(content[:3], content[3], value)
            case "items":
                return self._give_items(content, value, path)
            case "dict":
                return self._give_dict(content, value, path)
            case "parts":
                return self._give_parts(content, value, path)
        raise Unkept

    def _find(self, path: list[Any]) -> Any:
        """An object that was there when all was built."""
        name, *keys = path
        note = self._built.get(name, NOTHING)
        for key in keys:
            known = note.inside
            if note.kind == "items" and not key < len(known):
                raise Unkept
            if note.kind not in ("items", "dict", "parts"):
                raise Unkept
            note = known[key] if note.kind == "items" else known.get(key, NOTHING)
        if note.held is None:
            raise Unkept
        return note.held

    def _give_tensor(self, content: Any, value: Any) -> Tensor:
        kept, in_place, on_device, learns = content
        if in_place and isinstance(value, Tensor) and value.shape == kept.shape:
            value.detach().copy_(kept)
            return value
        made: Tensor = kept.to(self._device) if on_device else kept.clone()
        return made.requires_grad_(learns)

    def _give_items(self, content: Any, value: Any, path: Path) -> Any:
        *kind, items = content
        known = list(value) if isinstance(value, tuple | list | deque | set | frozenset) else []
        known += [None] * (len(items) - len(known))
        pairs = enumerate(zip(items, known, strict=False))
        made = [self.give(one, there, (*path, n)) for n, (one, there) in pairs]
        return _filled(kind, made, value)

    def _give_dict(self, content: Any, value: Any, path: Path) -> Any:
        pairs, in_place = content
        is_known = isinstance(value, dict)
        made: Any = value if is_known and in_place else copy.copy(value) if is_known else {}
        known = dict(made)
        refill(made, {key: self.give(one, known.get(key), (*path, key)) for key, one in pairs})
        return made

    def _give_parts(self, content: Any, value: Any, path: Path) -> Any:
        """Into an object, a function, or what has parts that are no attributes."""
        named, in_place = content
        value = value if in_place else copy.copy(value)
        if (parts := parts_of(value)) is None:
            raise Unkept
        for name in [name for name in parts if name not in named]:
            del parts[name]
        for name, packed in named.items():
            there = parts.get(name)
            made = self.give(packed, there, (*path, name))
            if made is not there or name not in parts:
                parts[name] = made
        return value


def _give_array(content: Any, value: Any) -> np.ndarray[Any, Any]:
    kept, in_place = content
    found: np.ndarray[Any, Any] = kept.numpy()
    if not (in_place and isinstance(value, np.ndarray) and value.flags.writeable):
        return found.copy()
    if value.shape != found.shape or value.dtype != found.dtype:
        return found.copy()
    value[...] = found
    return value


def _filled(kind: Sequence[Any], items: list[Any], value: Any) -> Any:
    """A container of these: the one that is there, where it is that one, else a new one."""
    name, size, in_place = kind
    is_alike = type(value).__name__ == name
    filler = filler_of(value) if is_alike else None
    if filler is not None and (in_place or type(value) not in FILLERS):
        filler(value, items)
        return value
    if (made := next((one for one in IMMUTABLE if one.__name__ == name), None)) is not None:
        return made(items)
    if is_alike and hasattr(value, "_make"):
        return value._make(items)
    if name == "deque":
        return deque(items, maxlen=size)
    if name not in ("list", "set"):
        raise Unkept
    return set(items) if name == "set" else list(items)
