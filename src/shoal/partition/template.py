"""How a module's output looks, without its values: to give stand-ins in its place."""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from shoal.partition.discover import NotCuttable
from shoal.partition.wires import Wire

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range, np.generic,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument that is no tensor and that a call cannot change; or what a module returns so.

    ``argument`` is the index of the leaf of its call that a block hands on.
    """

    value: Any
    argument: int | None = None

    def resolved(self, values: Sequence[Any]) -> Constant:
        """As it is for a call with these leaves."""
        if self.argument is None or self.argument >= len(values):
            return self
        value = values[self.argument]
        return self if isinstance(value, Tensor) else replace(self, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a tensor looks, without its values.

    ``like`` is the index of the argument tensor whose shape it follows from batch to
    batch, ``like_size`` the shape that argument had when this one was recorded. ``argument`` is
    the index of the leaf of its call that a block hands on as it is, with its values.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    like: int | None = None
    like_size: tuple[int, ...] = ()
    argument: int | None = None

    @classmethod
    def of(cls, tensor: Tensor, arguments: Sequence[Tensor] = ()) -> Shape:
        """The shape of ``tensor``, tied to the argument it resembles most."""
        size = tuple(tensor.shape)
        same = [i for i, other in enumerate(arguments) if tuple(other.shape) == size]
        like = same[0] if same else (0 if arguments else None)
        return cls(
            size=size,
            stride=tensor.stride(),
            dtype=tensor.dtype,
            like=like,
            like_size=() if like is None else tuple(arguments[like].shape),
        )

    def resolve(self, arguments: Sequence[Tensor]) -> tuple[int, ...]:
        """The size for these arguments: dimensions equal to the argument's follow it."""
        if self.like is None or self.like >= len(arguments):
            return self.size
        now = tuple(arguments[self.like].shape)
        if len(now) != len(self.like_size):
            return self.size
        if self.size == self.like_size:
            return now
        followed = list(self.size)
        for axis, (mine, recorded) in enumerate(zip(self.size, self.like_size, strict=False)):
            if mine == recorded:
                followed[axis] = now[axis]
        return tuple(followed)

    def stand_in(self, device: torch.device, *, dense: bool = False) -> Tensor:
        """A tensor of this shape over one element: NaN, so that a use of it is loud.

        Integers and booleans are zero. ``dense`` gives every element memory of its own, for
        a forward that changes it in place.
        """
        floating = self.dtype.is_floating_point or self.dtype.is_complex
        fill: float | bool = float("nan") if floating else False
        if dense:
            return torch.full(self.size, fill, dtype=self.dtype, device=device)
        return torch.full((), fill, dtype=self.dtype, device=device).expand(self.size)


@dataclass(frozen=True, slots=True)
class Template:
    """The structure of an output, with a Shape or a Constant at every leaf.

    ``firsts``: for each leaf the first that is the same tensor, or itself.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Shape | Constant, ...]
    firsts: tuple[int, ...]

    def resolved(self, values: Sequence[Any]) -> Template:
        """This template with the sizes and constants it has for a call with these leaves."""
        arguments = [value for value in values if isinstance(value, Tensor)]
        leaves = tuple(
            replace(leaf, size=leaf.resolve(arguments))
            if isinstance(leaf, Shape)
            else leaf.resolved(values)
            for leaf in self.leaves
        )
        return replace(self, leaves=leaves)

    def handing_on(self, handed: Mapping[int, int]) -> Template:
        """This template, of whose leaves these are arguments."""
        leaves = tuple(
            replace(leaf, argument=handed[index])
            if index in handed and isinstance(leaf, Shape)
            else leaf
            for index, leaf in enumerate(self.leaves)
        )
        return replace(self, leaves=leaves)

    def values(
        self, names: Sequence[Wire], real: Mapping[Wire, Tensor], stand_in: Callable[[Shape], Any]
    ) -> list[Any]:
        """The output's leaves: real tensors where ``real`` has them, and stand-ins elsewhere.

        ``names`` are the wires of the leaves; those of one name are one tensor.
        """
        tensors = {
            name: real[name] if name in real else stand_in(leaf)
            for name, leaf in zip(names, self.leaves, strict=True)
            if isinstance(leaf, Shape)
        }
        return [
            leaf.value if isinstance(leaf, Constant) else tensors[name]
            for name, leaf in zip(names, self.leaves, strict=True)
        ]


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure; only containers that a call could not change unseen are opened.

    Dataclasses that hold tensors are among them; ``tree_unflatten`` makes them anew.
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=is_leaf)
    if any(map(_is_record, leaves)):
        return pytree.tree_flatten(_opened(tree), is_leaf=is_leaf)
    return leaves, spec


def leaf_paths(tree: Any) -> list[tuple[Any, ...]]:
    """Where in ``tree`` each leaf stands."""
    return [path for path, _ in pytree.tree_flatten_with_path(_opened(tree), is_leaf=is_leaf)[0]]


@dataclass(frozen=True, slots=True)
class _Record:
    """A dataclass in the form in which it is opened: what pytree may do with it is ours."""

    kind: type
    values: tuple[Any, ...]

    def named(self) -> tuple[list[tuple[Any, Any]], type]:
        """Its values with where they stand, and what ``closed`` needs to know."""
        keys = [pytree.GetAttrKey(part.name) for part in fields(self.kind)]
        return list(zip(keys, self.values, strict=True)), self.kind

    @staticmethod
    def closed(values: Iterable[Any], kind: Any) -> Any:
        """The dataclass again, whatever its ``__init__`` does."""
        made = object.__new__(kind)
        for part, value in zip(fields(kind), values, strict=True):
            object.__setattr__(made, part.name, value)
        return made


pytree.register_pytree_node(
    _Record,
    lambda record: (list(record.values), record.kind),
    _Record.closed,
    flatten_with_keys_fn=_Record.named,
    serialized_type_name=f"{__name__}._Record",
)


def _opened(tree: Any, around: tuple[Any, ...] = ()) -> Any:
    """``tree`` with a record for each dataclass in it but those ``around`` it."""

    def record_of(leaf: Any) -> Any:
        if not _is_record(leaf) or any(leaf is one for one in around):
            return leaf
        values = (_opened(getattr(leaf, part.name), (*around, leaf)) for part in fields(leaf))
        return _Record(type(leaf), tuple(values))

    return pytree.tree_map(record_of, tree, is_leaf=is_leaf)


def _is_record(leaf: Any) -> bool:
    """A dataclass that may change or holds what may, and has nothing but its fields."""
    if not is_dataclass(leaf) or isinstance(leaf, (type, nn.Module)) or is_constant(leaf):
        return False
    if type(leaf).__new__ is not object.__new__:
        return False  # a dictionary, say, with more in it
    names = {part.name for part in fields(leaf)}
    if hasattr(leaf, "__dict__"):
        return vars(leaf).keys() == names
    return all(hasattr(leaf, name) for name in names)


def is_leaf(node: Any) -> bool:
    """Is this node of an argument or output kept whole?"""
    kind = type(node)
    if kind in (tuple, list, dict, OrderedDict):
        return False
    if kind is _Record:
        return False
    is_named_tuple = isinstance(node, tuple) and hasattr(node, "_fields")
    is_named_tuple |= kind.__module__ == "torch.return_types"  # of torch.max(x, 1), say
    is_model_output = isinstance(node, OrderedDict) and kind in pytree.SUPPORTED_NODES
    return not (is_named_tuple or is_model_output)


def is_constant(value: Any) -> bool:
    """May this argument be kept and given again? Not if a call could change it."""
    if isinstance(value, _CONSTANTS) or callable(value):
        return True
    params = getattr(type(value), "__dataclass_params__", None)
    if params is None or not params.frozen:
        return False
    return all(is_constant(getattr(value, part.name)) for part in fields(value))


def may_vary(value: Any) -> bool:
    """May it be another one for another batch: a number, or a function that holds something?"""
    if isinstance(value, (int, float, complex, np.generic, torch.Size, slice, range)):
        return True
    if is_dataclass(value) and not isinstance(value, type):
        return any(may_vary(getattr(value, part.name)) for part in fields(value))
    return callable(value) and _holds_something(value)


def is_handed_on(value: Any, argument: Any) -> bool:
    """May a number that a block returns be an argument of its? A function or a record is none."""
    plain = not (callable(value) or is_dataclass(value) or isinstance(argument, Tensor))
    return plain and is_same_constant(value, argument)


def packing_handed_on(output: Any, values: Sequence[Any]) -> dict[int, int]:
    """Which leaves of an output are which of a call's, of what says how sequences are packed.

    An LSTM hands that on, and code between two of them goes by its numbers.
    """
    parts = pytree.tree_leaves(output, is_leaf=lambda part: isinstance(part, PackedSequence))
    packing = {id(t) for one in parts if isinstance(one, PackedSequence) for t in one[1:]}
    places = {id(v): i for i, v in enumerate(values) if isinstance(v, Tensor)}
    leaves = enumerate(flatten(output)[0])
    return {i: places[id(t)] for i, t in leaves if id(t) in packing and id(t) in places}


def _holds_something(function: Any) -> bool:
    """A closure does, a method, or an object that can be called; what modules hold is theirs."""
    if isinstance(function, types.FunctionType):
        return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__)
    if isinstance(function, types.MethodType | types.BuiltinFunctionType):
        return not isinstance(function.__self__, type | types.ModuleType | nn.Module | None)
    return not isinstance(function, type | nn.Module)


def is_same_constant(one: Any, other: Any) -> bool:
    """Are they equal and of one type? Functions are that come from the same code."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, types.FunctionType):
        return one.__code__ is other.__code__
    if is_dataclass(one):
        names = [part.name for part in fields(one)]
        return all(is_same_constant(getattr(one, n), getattr(other, n)) for n in names)
    return bool(one == other or (one != one and other != other))


def _firsts_among(leaves: Sequence[Any]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), index) if isinstance(leaf, Tensor) else index
        for index, leaf in enumerate(leaves)
    )


def output_template(output: Any, arguments: Sequence[Tensor], *, owner: str) -> Template:
    """The template of what a module returned.

    Raises:
        NotCuttable: a leaf that is neither a tensor nor a constant; names its type.
    """
    leaves, spec = flatten(output)
    made: list[Shape | Constant] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            made.append(Shape.of(leaf, arguments))
        elif is_constant(leaf):
            made.append(Constant(leaf))
        else:
            raise NotCuttable(
                f"{owner} returns a {type(leaf).__name__}, which cannot be kept between shards; "
                "return tensors, tuples, lists, dicts or dataclasses of them"
            )
    return Template(spec, tuple(made), _firsts_among(leaves))
