"""One Python value: what it holds now, whether that is another than before, and back again.

``look_at`` makes a ``Note``, which refers to the objects and has copies of what is in them.
``put_back`` has the same objects hold it again.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
import random
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.pystate.iterators import count_at, is_iterator, mark_of
from shoal.pystate.parts import parts_of

PLAIN = (bool, int, float, str)
EXACTLY = frozenset((*PLAIN, type(None)))
DEEPEST = 6  # objects within objects that are looked into
FILLERS: dict[type, Callable[[Any, list[Any]], None]] = {
    list: lambda held, items: held.__setitem__(slice(None), items),
    deque: lambda held, items: (held.clear(), held.extend(items))[0],
    set: lambda held, items: (held.clear(), held.update(items))[0],
}
"""By type how one of them comes to have other items."""
STREAMS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_OF_PROCESS = ((random, "_inst"), (np.random.mtrand, "_rand"), (torch, "default_generator"))
SYMBOLS = (complex, bytes, torch.dtype, torch.device)
"""Values that never change, and are no numbers or texts."""
SHARED = frozenset(("tensor", "array", "stream", "flat", "items", "dict", "parts"))
"""Kinds of notes of what may be known by several names."""
HUGE = 200_000
"""Items of a container of which are noted only how many there are, and the ends."""


def place_of_own_stream(value: Any) -> tuple[ModuleType, str] | None:
    """Where the process's own generator is, if it is one: seeded for each trial.

    ``from random import choice`` gives a method of it.
    """
    if not isinstance(value, STREAMS):
        return None
    return next((place for place in _OF_PROCESS if getattr(*place) is value), None)


class Note(NamedTuple):
    """A value at one moment.

    ``held`` is the object, where it may change in place; ``inside`` what was in it: for
    containers and objects the notes of their parts, by name or key where they have any.
    """

    kind: str
    held: Any = None
    inside: Any = None


NOTHING = Note("nothing")
"""Of what was not there yet."""


@dataclass
class Look:
    """How values are looked at.

    Attributes:
        fixed: Objects that somebody else looks after, as a model's parameters: names by identity.
        longest: Items of a container that are looked into; of a longer one is noted which it has.
        largest: Bytes of a tensor that is copied; of others is noted how often they were written.
        values: So many may still be looked into.
        room: Bytes that may still be copied.
    """

    fixed: Mapping[int, str] = field(default_factory=dict)
    longest: int = 10_000
    largest: int = 2**20
    values: int = 100_000
    room: int = 2**26

    def may_copy(self, num_bytes: int) -> bool:
        """Whether so much is copied; if so, it counts."""
        if num_bytes > min(self.largest, self.room):
            return False
        self.room -= num_bytes
        return True


def look_at(value: Any, look: Look, depth: int = 0) -> Note:
    """What a value holds now."""
    if isinstance(value, enum.Enum):
        return Note("member", value)
    if value is None or isinstance(value, PLAIN):
        return Note("plain", None, value)
    if (name := look.fixed.get(id(value))) is not None:
        return Note("fixed", value, name)
    look.values -= 1
    if depth > DEEPEST or look.values < 0:
        return Note("other", value)
    try:
        return _look(value, look, lambda one: look_at(one, look, depth + 1))
    except Exception:  # a sparse tensor, a lazy one, an object that lets nobody look
        return Note("other", value)


def _look(value: Any, look: Look, inner: Callable[[Any], Note]) -> Note:
    if isinstance(value, Tensor):
        return _look_at_tensor(value, look)
    if isinstance(value, np.ndarray):
        copied = value.dtype != object and look.may_copy(value.nbytes)
        return Note("array", value, value.copy() if copied else None)
    if isinstance(value, np.generic):
        return Note("scalar", None, value)
    if isinstance(value, SYMBOLS):
        return Note("symbol", value)
    if isinstance(value, STREAMS):
        return Note("stream", value, state_of(value))
    if isinstance(value, list | tuple | deque | set | frozenset | dict):
        return _look_at_container(value, look, inner)
    if isinstance(value, itertools.count):
        return Note("count", value, count_at(value))
    if (parts := parts_of(value)) is not None:
        return Note("parts", value, {name: inner(one) for name, one in parts.items()})
    if is_iterator(value):
        return Note("iterator", value, mark_of(value))
    return Note("other", value)


def _look_at_container(value: Any, look: Look, inner: Callable[[Any], Note]) -> Note:
    if len(value) > HUGE:
        ends = [] if isinstance(value, set | frozenset | dict) else [id(value[0]), id(value[-1])]
        return Note("huge", value, [len(value), *ends])
    if len(value) > look.longest:
        look.values -= len(value) // 10
        return Note("bulk", value, _listed(value))
    if isinstance(value, dict):
        return Note("dict", value, {key: inner(one) for key, one in value.items()})
    items = list(value)
    if EXACTLY.issuperset(map(type, items)):
        look.values -= len(items) // 10
        return Note("flat", value, items)
    return Note("items", value, list(map(inner, items)))


def _listed(value: Any) -> list[Any]:
    """What is in a container; of a dict its keys and then its values."""
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _look_at_tensor(value: Tensor, look: Look) -> Note:
    if value._base is not None and (name := look.fixed.get(id(value._base))) is not None:
        return Note("fixed", value, f"a view of {name}")
    if value.layout is not torch.strided:
        return Note("other", value)
    written = 0 if value.is_inference() else value._version
    copied = value.device.type != "meta" and look.may_copy(value.nbytes)
    return Note("tensor", value, (written, value.detach().clone() if copied else None))


def state_of(stream: Any) -> Any:
    """Where a random generator stands."""
    if isinstance(stream, torch.Generator):
        return stream.get_state().numpy()
    if isinstance(stream, random.Random):
        return stream.getstate()
    if isinstance(stream, np.random.RandomState):
        return stream.get_state(legacy=False)
    return stream.bit_generator.state


def move(stream: Any, state: Any) -> None:
    """Have a random generator stand there."""
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
            return bool(one.inside == other.inside)
        case "plain":
            return _same_plain(one.inside, other.inside)
        case "scalar":
            return one.inside.dtype == other.inside.dtype and _same_plain(
                one.inside.item(), other.inside.item()
            )
        case "tensor":
            return _same_tensors(one, other)
        case "array":
            if one.inside is None or other.inside is None:
                return one.held is other.held
            return _same_arrays(one.inside, other.inside)
        case "stream":
            return _same_states(one.inside, other.inside)
        case "flat":
            if isinstance(one.held, set | frozenset):
                return set(one.inside) == set(other.inside)
            kinds = map(type, one.inside), map(type, other.inside)
            return bool(one.inside == other.inside) and all(map(operator.is_, *kinds))
        case "bulk":
            return _are(one.inside, other.inside)
        case "items":
            return len(one.inside) == len(other.inside) and all(
                map(same, one.inside, other.inside)
            )
        case "huge":
            return one.held is other.held and bool(one.inside == other.inside)
        case "count":
            return bool(one.inside == other.inside)
        case "iterator":
            return one.held is other.held and bool(one.inside == other.inside)
        case "symbol":
            return bool(one.held == other.held)
        case "other" | "member":
            return one.held is other.held
    keys = list(one.inside), list(other.inside)
    alike = len(keys[0]) == len(keys[1]) and all(map(_same_keys, *keys))
    return alike and all(map(same, one.inside.values(), other.inside.values()))


def _same_keys(one: Any, other: Any) -> bool:
    """Whether two keys are one; tensors say whether each number is."""
    return one is other or (not isinstance(one, Tensor) and bool(one == other))


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


def _same_arrays(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    nan = one.dtype.kind in "fcmM"
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=nan)


def _same_tensors(one: Note, other: Note) -> bool:
    (written, copy), (written_now, copy_now) = one.inside, other.inside
    if one.held is other.held and (copy is None or copy_now is None):
        return bool(written == written_now)
    before = one.held if copy is None else copy
    now = other.held if copy_now is None else copy_now
    alike = before.shape == now.shape and before.dtype == now.dtype
    if not alike or before.device != now.device:
        return False
    if torch.equal(before, now):
        return True
    if not before.is_floating_point():
        return False
    nan = before.isnan()
    return bool(torch.equal(nan, now.isnan()) and torch.equal(before[~nan], now[~nan]))


def put_back(note: Note) -> Any:
    """The value as it was; the same object where it was one.

    What has come into containers since then is taken out.
    """
    held, inside = note.held, note.inside
    match note.kind:
        case "plain" | "scalar":
            return inside
        case "tensor":
            written, copy = inside
            if copy is not None and (held.is_inference() or held._version != written):
                held.detach().copy_(copy)
        case "array" if inside is not None:
            if held.flags.writeable and not _same_arrays(held, inside):
                held[...] = inside
        case "stream":
            move(held, inside)
        case "count":
            return held if count_at(held) == inside else itertools.count(*inside)
        case "flat" | "items" | "bulk":
            if note.kind == "items":
                inside = [put_back(one) for one in inside]
            _fill_again(held, inside)
        case "dict":
            refill_values(held, inside)
            if not _are(list(held), list(inside)):
                refill(held, {key: held[key] for key in inside})
        case "parts":
            parts = parts_of(held)
            assert parts is not None
            refill_values(parts, inside)
    return held


def _fill_again(held: Any, inside: list[Any]) -> None:
    """Have a container hold these, if it holds others: a set that is filled anew has its order."""
    if _are(_listed(held), inside) or (isinstance(held, set) and held == set(inside)):
        return
    if isinstance(held, dict):
        half = len(inside) // 2
        held.clear()
        held.update(zip(inside[:half], inside[half:], strict=True))
    elif (filler := filler_of(held)) is not None:
        filler(held, list(inside))


def _are(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def refill_values(held: MutableMapping[Any, Any], notes: Mapping[Any, Note]) -> None:
    """Have a mapping hold what was noted, as ``put_back`` does."""
    for key in [key for key in held if key not in notes]:
        del held[key]
    put_in(held, notes)


def put_in(held: MutableMapping[Any, Any], notes: Mapping[Any, Note]) -> None:
    """The same, and leave what else is there."""
    for key, note in notes.items():
        put_one(held, key, note)


def put_one(held: MutableMapping[Any, Any], key: Any, note: Note) -> None:
    """The same of one key."""
    value = put_back(note)
    if value is not held.get(key, NOTHING):
        held[key] = value


def filler_of(value: Any) -> Callable[[Any, list[Any]], None] | None:
    """How a container comes to have other items; None of a tuple."""
    return next((fill for kind, fill in FILLERS.items() if isinstance(value, kind)), None)


def refill(held: dict[Any, Any], values: dict[Any, Any]) -> None:
    """Have a dict hold these, in their order."""
    if list(held) != list(values):
        held.clear()
    held.update(values)
