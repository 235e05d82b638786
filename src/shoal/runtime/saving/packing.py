"""Containers as JSON with their tensors beside it: what of a trial is no flat tensor.

Types survive the round trip: Python's own containers with any packable members, its numbers and
NumPy's (a product of np.float32 is rounded otherwise than Python's) and arrays of these, tensors
under a number, whole random states, and members and named tuples of classes that modules have.
Nothing that is read can become anything but one of these.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import StorageError, TrialError
from shoal.rng import RngState

PREFIX = "packed|"
_KINDS = frozenset("biufcmM")  # of NumPy's types: those whose bytes are all there is to a value
_SEQUENCES = {"size": torch.Size, "list": list, "tuple": tuple}
_MAPPINGS = {"counter": Counter, "ordered": OrderedDict, "dict": dict}
_UNREADABLE = (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RecursionError)
_FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict)}


class Packer:
    """Packs values; their tensors are added to ``tensors`` under names with ``prefix``."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str = PREFIX) -> None:
        self._tensors, self._prefix = tensors, prefix

    def pack(self, value: Any) -> Any:
        """``value`` as JSON-ready containers.

        Raises:
            TrialError: a type that has no rule.
        """
        if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
            return {"numpy": [value.dtype.str, value.tobytes().hex()]}
        if isinstance(value, Enum):
            return {"enum": [*_place_of(value), self._member(value)]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            if getattr(value, "__dict__", None):
                raise _no_rule(value, ", which has attributes of its own,")
            return {"named": [*_place_of(value), self._packed(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            kept = {"tensor": self._keep(value)}
            stride = torch.empty_like(value, device="meta").stride()  # as a copy of it lies
            is_usual = self._tensors[kept["tensor"]].stride() == stride
            return kept if is_usual else {"strided": [list(stride), kept]}
        if type(value) is np.ndarray and value.dtype.kind in _KINDS:
            return {"ndarray": self._array(value)}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, RngState):
            return {"rng": self._rng(value)}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, deque):
            return {"deque": [value.maxlen, self._packed(value)]}
        for kind, of in _SEQUENCES.items():
            if isinstance(value, of):
                return {kind: self._packed(value)}
        if isinstance(value, Mapping):
            return self._mapping(value)
        raise _no_rule(value)

    def _member(self, member: Enum) -> Any:
        """Its name; of flags that have none together, their value."""
        name = member.name
        return {"value": self.pack(member.value)} if name not in type(member).__members__ else name

    def _packed(self, items: Iterable[Any]) -> list[Any]:
        return [self.pack(item) for item in items]

    def _mapping(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        pairs = [[self.pack(k), self.pack(v)] for k, v in value.items()]
        if isinstance(value, defaultdict):
            factory = value.default_factory
            if factory is not None and not any(factory is known for known in _FACTORIES.values()):
                made = getattr(factory, "__name__", type(factory).__name__)
                raise _no_rule(value, f" whose default is made by {made}")
            return {"defaultdict": [factory and factory.__name__, pairs]}
        kind = next((kind for kind, of in _MAPPINGS.items() if isinstance(value, of)), "dict")
        return {kind: pairs}

    def _keep(self, tensor: Tensor) -> str:
        key = f"{self._prefix}{len(self._tensors)}"
        self._tensors[key] = tensor.detach().cpu().contiguous().clone()
        return key

    def _array(self, array: np.ndarray) -> list[Any]:
        order: Literal["C", "F"] = "F" if array.flags.fnc else "C"  # sums follow it
        data = np.frombuffer(array.tobytes(order), np.uint8).copy()
        return [array.dtype.str, order, array.shape, self._keep(torch.from_numpy(data))]

    def _rng(self, state: RngState) -> dict[str, Any]:
        algorithm, keys, *rest = state.numpy
        version, internal, gauss = state.python
        return {
            "torch": self._keep(state.torch),
            "cuda": None if state.cuda is None else self._keep(state.cuda),
            "python": [version, self._keep(torch.tensor(internal)), gauss],
            "numpy": [algorithm, self._keep(torch.from_numpy(keys.astype(np.int64))), *rest],
        }


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``Packer.pack``.

    Raises:
        StorageError: it is nothing that was packed.
    """
    try:
        return _unpack(value, tensors)
    except _UNREADABLE as error:
        raise StorageError(
            f"the record of a checkpoint cannot be read: {type(error).__name__}: {error}. It was "
            "not written by shoal, or by another version. Use the generation before it."
        ) from error


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_unpacked(content, tensors))
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](_pairs(content, tensors))
    rule = _RULES.get(kind)
    if rule is None:
        raise ValueError(f"unknown kind {kind!r}")
    return rule(content, tensors)


def _unpacked(items: Iterable[Any], tensors: Mapping[str, Tensor]) -> list[Any]:
    return [_unpack(item, tensors) for item in items]


def _pairs(items: Iterable[Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {_unpack(k, tensors): _unpack(v, tensors) for k, v in items}


def _unpack_deque(record: Any, tensors: Mapping[str, Tensor]) -> deque[Any]:
    size, items = record
    return deque(_unpacked(items, tensors), size)


def _unpack_defaultdict(record: Any, tensors: Mapping[str, Tensor]) -> defaultdict[Any, Any]:
    factory, items = record
    return defaultdict(None if factory is None else _FACTORIES[factory], _pairs(items, tensors))


def _unpack_enum(record: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A member; where its class is not there, its name, or its flags' value."""
    module, name, member = record
    kind: Any = _class_at(module, name)
    is_there = kind is not None and issubclass(kind, Enum)
    if isinstance(member, str):
        return kind[member] if is_there else member
    value = _unpack(member["value"], tensors)
    return kind(value) if is_there else value


def _unpack_named(record: Any, tensors: Mapping[str, Tensor]) -> Any:
    module, name, packed = record
    kind: Any = _class_at(module, name)
    items = tuple(_unpacked(packed, tensors))
    if kind is None or not issubclass(kind, tuple) or not hasattr(kind, "_fields"):
        return items
    return kind._make(items)


def _place_of(value: object) -> tuple[str, str]:
    """Where a class is found again, in a process that has the recipe's modules.

    Raises:
        TrialError: it would come back as the number, the text or the tuple that it is, which is
            another answer to ``is``.
    """
    kind = type(value)
    if _class_at(kind.__module__, kind.__qualname__) is not kind:
        raise _no_rule(value, ", which is in no module that workers import,")
    return kind.__module__, kind.__qualname__


def _class_at(module: str, name: str) -> type | None:
    """Of a module that is there; none is imported for what a file says."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _unpack_number(record: Any, tensors: Mapping[str, Tensor]) -> Any:
    name, data = record
    (number,) = np.frombuffer(bytes.fromhex(data), _plain(name))
    return number


def _unpack_array(record: Any, tensors: Mapping[str, Tensor]) -> np.ndarray:
    name, order, shape, key = record
    data = np.frombuffer(tensors[key].numpy().tobytes(), _plain(name))
    return data.reshape(shape, order=order).copy(order)


def _plain(name: str) -> np.dtype[Any]:
    dtype = np.dtype(str(name))
    if dtype.kind not in _KINDS:
        raise ValueError(f"no values of NumPy's that are saved: {name!r}")
    return dtype


def _unpack_dtype(name: str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype of torch's: {name!r}")
    return dtype


def _unpack_rng(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RngState:
    algorithm, keys, *rest = record["numpy"]
    version, internal, gauss = record["python"]
    return RngState(
        torch=tensors[record["torch"]],
        python=(version, tuple(tensors[internal].tolist()), gauss),
        numpy=(algorithm, tensors[keys].numpy().astype(np.uint32), *rest),
        cuda=None if record["cuda"] is None else tensors[record["cuda"]],
    )


def _unpack_strided(parts: Sequence[Any], tensors: Mapping[str, Tensor]) -> Tensor:
    stride, packed = parts
    tensor = _unpack(packed, tensors)
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


_RULES: Mapping[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "complex": lambda parts, tensors: complex(*parts),
    "bytes": lambda text, tensors: bytes.fromhex(text),
    "defaultdict": _unpack_defaultdict,
    "deque": _unpack_deque,
    "dtype": _unpack_dtype,
    "enum": _unpack_enum,
    "named": _unpack_named,
    "ndarray": _unpack_array,
    "numpy": _unpack_number,
    "rng": _unpack_rng,
    "strided": _unpack_strided,
}


def _no_rule(value: object, more: str = "") -> TrialError:
    return TrialError(
        f"a checkpoint has no rule for {type(value).__name__}{more} in the state of the "
        "optimizer, schedule or data. Use numbers, strings, tensors and containers of them."
    )
