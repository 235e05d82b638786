"""Follows, through one real forward, what the computation between the blocks is made from."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.frames import line_now
from shoal.kernels.dispatched import run_operation
from shoal.partition.wires import OwnCall, Wire, has_storage, storage_key, tensors_in

_BY_GRADIENTS = ("aten::_linalg_eigh", "aten::_linalg_svd")
"""Of values alone they are another kernel where no gradient is asked for, and no mode is on."""
_READS = ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero")


class Chance:
    """The source of a random number."""


@dataclass(frozen=True, slots=True)  # and no tuples, which would be equal across kinds
class BlockOutput:
    """A block's output, through whatever was computed from it since."""

    position: int


@dataclass(frozen=True, slots=True)
class Derived:
    """What operators between the blocks computed before the block at ``position``."""

    position: int


@dataclass(frozen=True, slots=True)
class Computed:
    """What the forward computed itself with a gradient, through what was computed from it."""

    call: OwnCall


CHANCE: Final = Chance()
Source = Wire | str | BlockOutput | Chance | Derived | Computed
Sources = frozenset[Source]
_NOTHING: Sources = frozenset()


class _Known(NamedTuple):
    """A tensor's sources, as it was then."""

    tensor: weakref.ref[Tensor]
    version: int
    sources: Sources


class Taint(TorchDispatchMode):
    """Knows of every tensor from which wires, parameters, blocks and chance it was computed.

    A parameter's source is its name. A tensor that is given a wire's name has that wire for
    its source from then on, and the blocks it goes back to. ``read`` and ``looked_at`` are
    the sources of what the operators read and of what reached Python, since they were last
    taken, ``line`` where a block's output first did so; nothing is noted while ``paused``, as
    inside blocks. ``position`` is the next block's. ``by_gradients``: an operator ran, in blocks
    or elsewhere, whose bits without gradients no mode sees. Nothing is kept alive.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.paused = False
        self.position = 0
        self.read: set[Source] = set()
        self.looked_at: set[Source] = set()
        self.line = ""
        self.by_gradients = False
        self._exactly: dict[int, _Known] = {}
        self._by_storage: dict[int, Sources] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for name, parameter in parameters.items():
            self._spread(parameter, frozenset({name}))

    def of(self, tensor: Tensor) -> Sources:
        """The sources of one tensor."""
        known = self._exactly.get(id(tensor))
        if known and known.tensor() is tensor and known.version == tensor._version:
            return known.sources
        return self._by_storage.get(storage_key(tensor), _NOTHING)

    def of_all(self, tensors: Iterable[Tensor]) -> Sources:
        """The sources of several."""
        return _NOTHING.union(*map(self.of, tensors))

    def name(self, tensor: Tensor, wire: Wire, *, position: int | None = None) -> None:
        """``tensor`` is ``wire``; and if ``position`` is given, the output of that block."""
        origin: set[Source] = {s for s in self.of(tensor) if isinstance(s, BlockOutput | Chance)}
        if position is not None:
            origin = {BlockOutput(position)}
        self._know(tensor, frozenset({wire, *origin}))

    def add(self, tensor: Tensor, source: Source) -> None:
        """``tensor`` has one more source."""
        self._know(tensor, self.of(tensor) | {source})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.by_gradients = self.by_gradients or func.name() in _BY_GRADIENTS
        if self.paused:
            return run_operation(func, args, kwargs)
        sources = self.of_all(tensors_in((args, kwargs)))
        self.read |= sources
        if func.name() in _READS:
            self.looked_at |= sources
            if not self.line and any(isinstance(s, BlockOutput) for s in sources):
                self.line = line_now()
        output = run_operation(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            sources |= {CHANCE}
        if sources:
            sources |= {Derived(self.position)}
            for tensor in tensors_in(output):
                before = self.of(tensor) if func._schema.is_mutable else _NOTHING
                self._know(tensor, sources | before)
        return output

    def _know(self, tensor: Tensor, sources: Sources) -> None:
        self._exactly[id(tensor)] = _Known(weakref.ref(tensor), tensor._version, sources)
        self._spread(tensor, sources)

    def _spread(self, tensor: Tensor, sources: Sources) -> None:
        """Also for other views of the memory, which only it tells apart from another's."""
        if not has_storage(tensor):
            return
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key not in self._storages:
            forget = self._forget
            self._storages[key] = weakref.ref(storage, lambda _: forget(key))
        self._by_storage[key] = self._by_storage.get(key, _NOTHING) | sources

    def _forget(self, key: int) -> None:
        self._storages.pop(key, None)
        self._by_storage.pop(key, None)
