"""What each block is called with: tensors named as wires, everything else as constants.

[Note: wires]
A wire is a tensor that leaves one layer for later ones. A block's output leaves are wires
of that block; a tensor that a head (see ``sections``) made and hands to a block (a mask,
rotary angles, the first hidden state) is a wire of that head. A call sheet is written by
running the user's own forward with stand-ins for the blocks (see ``glue``), so it follows
what the forward does for this very batch: a mask that is None for one batch and a tensor
for the next is one wire more.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.partition.discover import NotCuttable
from shoal.partition.sections import Sections
from shoal.partition.template import Constant, Shape, Template, flatten, is_constant, leaf_paths
from shoal.partition.wires import Names, OwnCall, Wire, Wires
from shoal.rng import RngState


@dataclass(frozen=True, slots=True)
class EmptyCache:
    """A key-value cache that the forward hands to its blocks, not yet filled.

    Every run of a block gets a copy of its own: in training the forward starts with an
    empty cache and a block reads back only what it has just put there itself.
    """

    value: Any

    def copy(self) -> Any:
        return copy.deepcopy(self.value)


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


class Returned(NamedTuple):
    """What one call of a module between the blocks returned: its form, and its leaves' names."""

    template: Template
    names: tuple[Wire, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one section's head wrote down; one entry a block, the first block first.

    ``outputs`` have the sizes they have for this micro-batch. ``returned`` are the calls of
    each module between the blocks, ``rng`` the random state in which the head began, where the
    forward draws by itself.
    """

    calls: tuple[Call, ...]
    outputs: tuple[Template, ...]
    returned: Mapping[str, tuple[Returned, ...]]
    rng: RngState | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What the sections read of what earlier ones made, a set for each; the pilot's.

    ``by_head`` is what a head itself reads, ``by_section`` also what its blocks do.
    """

    by_head: tuple[frozenset[Wire], ...]
    by_section: tuple[frozenset[Wire], ...]

    @property
    def anywhere(self) -> frozenset[Wire]:
        return frozenset[Wire]().union(*self.by_section)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSheet:
    """The calls of one micro-batch, as far as its sections have begun.

    ``last_reader`` is the last layer that reads a wire, to the best of what is known: of a
    section that has not begun, what it read in the pilot is taken to be read by its head.
    """

    sections: Sections
    reads: Reads
    parts: tuple[Part, ...] = ()
    last_reader: Mapping[Wire, int] = field(init=False)

    def __post_init__(self) -> None:
        last: dict[Wire, int] = {}
        for section, part in enumerate(self.parts):
            last.update(dict.fromkeys(self.reads.by_head[section], self.sections.head(section)))
            for position, call in zip(self.sections.blocks_of(section), part.calls, strict=True):
                last.update(dict.fromkeys(call.wires, self.sections.layer_of(position)))
        for section in range(len(self.parts), self.sections.epilogue + 1):
            last.update(dict.fromkeys(self.reads.by_section[section], self.sections.head(section)))
        object.__setattr__(self, "last_reader", last)

    def live(self, boundary: int) -> tuple[Wire, ...]:
        """Wires made before layer ``boundary`` and read in it or later."""
        return tuple(
            sorted(w for w, last in self.last_reader.items() if w.layer < boundary <= last)
        )

    def call(self, position: int) -> Call:
        """What the block at ``position`` is called with."""
        section = self.sections.of_block(position)
        return self.parts[section].calls[position - self.sections.blocks_of(section).start]

    def output(self, position: int) -> Template:
        """What the block at ``position`` returns."""
        section = self.sections.of_block(position)
        return self.parts[section].outputs[position - self.sections.blocks_of(section).start]

    def with_part(self, section: int, part: Part) -> CallSheet:
        """This sheet when a section's head has run, perhaps not for the first time."""
        parts = (*self.parts[:section], part, *self.parts[section + 1 :])
        return replace(self, parts=parts)

    def with_output(self, position: int, output: Template) -> CallSheet:
        """This sheet when a block's output turned out to have other sizes."""
        section = self.sections.of_block(position)
        index = position - self.sections.blocks_of(section).start
        part = self.parts[section]
        outputs = (*part.outputs[:index], output, *part.outputs[index + 1 :])
        return self.with_part(section, replace(part, outputs=outputs))


def output_wires(layer: int, output: Template, first: int | None) -> tuple[Wire, ...]:
    """The wires a block's output consists of, all or those of the ``first`` leaves."""
    pairs = zip(leaf_wires(layer, output)[:first], output.leaves[:first], strict=True)
    return tuple(name for name, leaf in pairs if isinstance(leaf, Shape))


def leaf_wires(layer: int, output: Template) -> tuple[Wire, ...]:
    """The names of all leaves of a block's output; a tensor that it returns twice has one."""
    return _leaf_wires(layer, output.firsts)


@functools.cache
def _leaf_wires(layer: int, firsts: tuple[int, ...]) -> tuple[Wire, ...]:
    return tuple(Wire(layer, f"out.{index}") for index in firsts)


def module_wire(head: int, module: str, call: int, leaf: int) -> Wire:
    """The name of a leaf of what a module that ran in a section's head returned."""
    return Wire(head, f"{module}#{call}.{leaf}")


def argument_wire(head: int, module: str, call: int, leaf: int) -> Wire:
    """The name of a leaf of what a module that ran in a section's head was called with."""
    return Wire(head, f"{module}#{call}<{leaf}")


def own_wire(head: int, call: OwnCall) -> Wire:
    """The name of what a section's head computed by itself."""
    return module_wire(head, f"{call.function}()", call.number, 0)


def own_among(wires: Iterable[Wire]) -> dict[OwnCall, Wire]:
    """Those that a head computed by itself, by their calls."""
    named = (wire for wire in wires if "()#" in wire.slot and not wire.is_argument)
    return {_own_call(wire): wire for wire in named}


def _own_call(wire: Wire) -> OwnCall:
    function, _, place = wire.slot.partition("()#")
    return OwnCall(function, int(place.partition(".")[0]))


def is_cache(value: Any) -> bool:
    """Is this a key-value cache in the way of Hugging Face's transformers?"""
    methods = ("get_seq_length", "update", "reset")
    return all(callable(getattr(value, method, None)) for method in methods)


def argument_name(module: nn.Module, args: tuple[Any, ...], kwargs: Any, index: int) -> str:
    """What the leaf number ``index`` of a call is called in the module's forward."""
    side, key, *rest = leaf_paths((args, kwargs))[index]
    name = getattr(key, "key", None)
    if isinstance(side, pytree.SequenceKey) and side.idx == 0:
        try:
            name = list(inspect.signature(module.forward).parameters)[key.idx]
        except (ValueError, IndexError):
            name = f"argument {key.idx}"
    return f"{name}{pytree.keystr(tuple(rest))}"


class CallWriter:
    """Writes the calls of a section's blocks while a forward runs.

    ``made`` are the tensors that its head made and hands to them. An argument by whose name a
    later section reads it, as told by ``kept``, has that name, whatever it was called before.
    """

    def __init__(
        self, names: Names, head: int, first: int, kept: Collection[Wire] = frozenset()
    ) -> None:
        self.calls: list[Call] = []
        self.made: Wires = {}
        self._names, self._head, self._first, self._kept = names, head, first, kept

    def write(
        self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Name the arguments of the next block; returns them as leaves.

        Raises:
            NotCuttable: an argument that a block may change.
        """
        values, spec = flatten((args, kwargs))
        number = self._first + len(self.calls) + 1
        leaves: list[Wire | Constant | EmptyCache] = []
        for index, value in enumerate(values):
            if isinstance(value, nn.Parameter):  # stays where it is: its block borrows it
                leaves.append(Constant(value))
            elif isinstance(value, Tensor):
                leaves.append(self._wire_of(value, Wire(self._head, f"{number}.{index}")))
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

    def _wire_of(self, tensor: Tensor, fresh: Wire) -> Wire:
        wire = self._names.of(tensor)
        if wire is None or fresh in self._kept:
            self._names.give(tensor, wire := fresh)
        if wire.layer == self._head:
            self.made[wire] = tensor
        return wire
