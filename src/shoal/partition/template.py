"""How a module's output looks, without its values: to give stand-ins in its place."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.partition.discover import NotCuttable
from shoal.partition.wires import Wire

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range, np.generic,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument that is no tensor and that a call cannot change."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a tensor looks, without its values.

    ``like`` is the index of the argument tensor whose shape it follows from batch to
    batch, ``like_size`` the shape that argument had when this one was recorded.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    like: int | None = None
    like_size: tuple[int, ...] = ()

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
    """The structure of an output, with a Shape or a Constant at every leaf."""

    spec: pytree.TreeSpec
    leaves: tuple[Shape | Constant, ...]

    def resolved(self, arguments: Sequence[Tensor]) -> Template:
        """This template with the sizes it has for these arguments."""
        leaves = tuple(
            replace(leaf, size=leaf.resolve(arguments)) if isinstance(leaf, Shape) else leaf
            for leaf in self.leaves
        )
        return Template(self.spec, leaves)

    def values(
        self, names: Sequence[Wire], real: Mapping[Wire, Tensor], stand_in: Callable[[Shape], Any]
    ) -> list[Any]:
        """The output's leaves: real tensors where ``real`` has them, and stand-ins elsewhere.

        ``names`` are the wires of the leaves.
        """
        return [
            leaf.value
            if isinstance(leaf, Constant)
            else (real[name] if name in real else stand_in(leaf))
            for name, leaf in zip(names, self.leaves, strict=True)
        ]


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure; only containers that a call could not change unseen are opened."""
    return pytree.tree_flatten(tree, is_leaf=is_leaf)


def is_leaf(node: Any) -> bool:
    """Is this node of an argument or output kept whole?"""
    kind = type(node)
    if kind in (tuple, list, dict, OrderedDict):
        return False
    is_named_tuple = isinstance(node, tuple) and hasattr(node, "_fields")
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
                "return tensors, tuples, lists or dicts of them"
            )
    return Template(spec, tuple(made))
