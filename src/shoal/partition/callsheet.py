"""What each block is called with: tensors named as wires, everything else as constants.

[Note: wires]
A wire is a tensor that leaves one layer for later ones. A block's output leaves are wires
of that block; a tensor that the prologue made and hands to a block (a mask, rotary
angles, the first hidden state) is a wire of layer 0, named after the place where it is
first read. A call sheet is written by running the user's own forward with stand-ins for
the blocks (see ``glue``), so it follows what the forward does for this very batch: a
mask that is None for one batch and a tensor for the next is one wire more.
"""

from __future__ import annotations

import copy
import enum
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.partition.discover import NotCuttable

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range, np.generic,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Wire:
    """A tensor between layers: the layer that makes it, and its place there.

    ``slot`` is ``out.<leaf>`` for a block's output, ``<block>.<leaf>`` for a tensor of the
    prologue, after the argument leaf of the block that reads it first; one that the epilogue
    reads as well is named after the module that made it, ``<module>#<call>.<leaf>``.
    """

    layer: int
    slot: str

    def __str__(self) -> str:
        return f"{self.layer}:{self.slot}"


Wires = dict[Wire, Tensor]


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument that is no tensor and that a call cannot change."""

    value: Any


@dataclass(frozen=True, slots=True)
class EmptyCache:
    """A key-value cache that the forward hands to its blocks, not yet filled.

    Every run of a block gets a copy of its own: in training the forward starts with an
    empty cache and a block reads back only what it has just put there itself.
    """

    value: Any

    def copy(self) -> Any:
        return copy.deepcopy(self.value)


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

    def fill(
        self, names: Sequence[Wire], real: Mapping[Wire, Tensor], stand_in: Callable[[Shape], Any]
    ) -> Any:
        """The output with real tensors where ``real`` has them, and stand-ins elsewhere.

        ``names`` are the wires of the leaves.
        """
        values: list[Any] = []
        for name, leaf in zip(names, self.leaves, strict=True):
            if isinstance(leaf, Constant):
                values.append(leaf.value)
            else:
                values.append(real[name] if name in real else stand_in(leaf))
        return pytree.tree_unflatten(values, self.spec)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one block: what stands at every leaf of (args, kwargs)."""

    spec: pytree.TreeSpec
    leaves: tuple[Wire | Constant | EmptyCache, ...]

    @property
    def wires(self) -> tuple[Wire, ...]:
        return tuple(dict.fromkeys(leaf for leaf in self.leaves if isinstance(leaf, Wire)))

    def has_form_of(self, other: Call) -> bool:
        """Same structure and same wires; constants may have other values."""
        mine, others = self._form(), other._form()
        return self.spec == other.spec and mine == others

    def _form(self) -> list[Wire | None]:
        return [leaf if isinstance(leaf, Wire) else None for leaf in self.leaves]

    def arguments(self, wires: Mapping[Wire, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` of the call, with the tensors of ``wires``."""
        values = []
        for leaf in self.leaves:
            if isinstance(leaf, Wire):
                values.append(wires[leaf])
            else:
                values.append(leaf.copy() if isinstance(leaf, EmptyCache) else leaf.value)
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return tuple(args), kwargs


@dataclass(frozen=True, slots=True)
class CallSheet:
    """All calls of one micro-batch, block 1 first, and what the epilogue needs to skip them.

    ``outputs`` are the blocks' outputs as templates; ``prologue`` what each stubbed module
    of the prologue returned, call by call. ``kept`` are wires from before the last block
    that the epilogue reads besides that block's output.
    """

    calls: tuple[Call, ...]
    outputs: tuple[Template, ...]
    prologue: Mapping[str, tuple[Template, ...]]
    kept: frozenset[Wire] = frozenset()
    last_reader: Mapping[Wire, int] = field(init=False)

    def __post_init__(self) -> None:
        last: dict[Wire, int] = {}
        for block, call in enumerate(self.calls, start=1):
            last.update((wire, block) for wire in call.wires)
        epilogue = len(self.calls) + 1
        last.update((wire, epilogue) for wire in output_wires(epilogue - 1, self.outputs[-1]))
        last.update((wire, epilogue) for wire in self.kept)
        object.__setattr__(self, "last_reader", last)

    def live(self, boundary: int) -> tuple[Wire, ...]:
        """Wires made before layer ``boundary`` and read in it or later."""
        return tuple(
            sorted(w for w, last in self.last_reader.items() if w.layer < boundary <= last)
        )


def output_wires(layer: int, output: Template) -> tuple[Wire, ...]:
    """The wires a block's output consists of."""
    names = leaf_wires(layer, output)
    pairs = zip(names, output.leaves, strict=True)
    return tuple(name for name, leaf in pairs if isinstance(leaf, Shape))


def leaf_wires(layer: int, output: Template) -> tuple[Wire, ...]:
    """The names of all leaves of a block's output."""
    return tuple(Wire(layer, f"out.{index}") for index in range(len(output.leaves)))


def module_wires(module: str, call: int, output: Template) -> tuple[Wire, ...]:
    """The names of all leaves of what a module of the prologue returned."""
    return tuple(Wire(0, f"{module}#{call}.{index}") for index in range(len(output.leaves)))


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure; only containers that a call could not change unseen are opened."""
    return pytree.tree_flatten(tree, is_leaf=_is_leaf)


def _is_leaf(node: Any) -> bool:
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


def is_cache(value: Any) -> bool:
    """Is this a key-value cache in the way of Hugging Face's transformers?"""
    methods = ("get_seq_length", "update", "reset")
    return all(callable(getattr(value, method, None)) for method in methods)


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


def argument_name(module: nn.Module, args: tuple[Any, ...], kwargs: Any, index: int) -> str:
    """What the leaf number ``index`` of a call is called in the module's forward."""
    paths = pytree.tree_flatten_with_path((args, kwargs), is_leaf=_is_leaf)[0]
    side, key, *rest = paths[index][0]
    name = getattr(key, "key", None)
    if isinstance(side, pytree.SequenceKey) and side.idx == 0:
        try:
            name = list(inspect.signature(module.forward).parameters)[key.idx]  # type: ignore[attr-defined]
        except (ValueError, IndexError):
            name = f"argument {key.idx}"  # type: ignore[attr-defined]
    return f"{name}{pytree.keystr(tuple(rest))}"


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of a structure, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_key(tensor: Tensor) -> int:
    """Equal for two living tensors when they share memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


class CallWriter:
    """Writes a call sheet while a forward runs: knows each tensor by identity.

    ``made`` are the prologue's tensors, ``tensors`` all that were named; they are kept
    alive, so that an identity means one tensor.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.outputs: list[Template] = []
        self.made: Wires = {}
        self.tensors: Wires = {}
        self._names: dict[int, Wire] = {}

    def write_call(
        self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Name the arguments of the next block; returns them as leaves.

        Raises:
            NotCuttable: an argument that a block may change.
        """
        values, spec = flatten((args, kwargs))
        block = len(self.calls) + 1
        leaves: list[Wire | Constant | EmptyCache] = []
        for index, value in enumerate(values):
            if isinstance(value, nn.Parameter):  # stays where it is: its block borrows it
                leaves.append(Constant(value))
            elif isinstance(value, Tensor):
                leaves.append(self._wire_of(value, Wire(0, f"{block}.{index}")))
            elif is_constant(value):
                leaves.append(Constant(value))
            elif is_cache(value):
                leaves.append(EmptyCache(value))
            else:
                raise NotCuttable(
                    f"argument {argument_name(module, args, kwargs, index)!r} of block {name!r} "
                    f"is a {type(value).__name__}, which a block may change"
                )
        self.calls.append(Call(spec, tuple(leaves)))
        return values

    def write_output(self, template: Template, output: Any) -> None:
        """Name the tensors that the block just called returned, or their stand-ins."""
        block = len(self.calls)
        self.outputs.append(template)
        for index, leaf in enumerate(flatten(output)[0]):
            if isinstance(leaf, Tensor):
                self._remember(leaf, Wire(block, f"out.{index}"))

    def write_module_output(
        self, names: Sequence[Wire], output: Any, kept: frozenset[Wire]
    ) -> None:
        """Name what a module of the prologue returned, as far as the epilogue reads it."""
        for name, leaf in zip(names, flatten(output)[0], strict=True):
            if name in kept and isinstance(leaf, Tensor):
                self.made[name] = leaf
                self._remember(leaf, name)

    def _wire_of(self, tensor: Tensor, fresh: Wire) -> Wire:
        known = self._names.get(id(tensor))
        if known is not None:
            return known
        self.made[fresh] = tensor
        self._remember(tensor, fresh)
        return fresh

    def _remember(self, tensor: Tensor, wire: Wire) -> None:
        self._names[id(tensor)] = wire
        self.tensors[wire] = tensor

    def sheet(
        self, prologue: Mapping[str, Iterable[Template]], kept: frozenset[Wire]
    ) -> CallSheet:
        returned = {name: tuple(templates) for name, templates in prologue.items()}
        return CallSheet(tuple(self.calls), tuple(self.outputs), returned, kept)
