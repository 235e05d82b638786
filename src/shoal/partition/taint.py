"""Follows the values of stand-ins through a forward: who computes from them, who reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.partition.callsheet import Wire, argument_name, flatten, storage_key, tensors_in
from shoal.partition.discover import NotCuttable

if TYPE_CHECKING:
    from shoal.partition.glue import Block

_READS = ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero")
_NOTHING: frozenset[Wire] = frozenset()


class Taint(TorchDispatchMode):
    """Marks storages with the wires they were computed from.

    ``read`` are the wires whose values reached Python, or any operator while ``noting``. The
    tensors are kept alive, so that a storage's address means one storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.read: set[Wire] = set()
        self.noting = False
        self._sources: dict[int, frozenset[Wire]] = {}
        self._stand_ins: set[int] = set()
        self._changed: set[int] = set()
        self._alive: list[Tensor] = []

    def mark(self, tensor: Tensor, wire: Wire) -> None:
        """``tensor`` stands in for ``wire``."""
        self._spread(tensor, frozenset({wire}))
        self._stand_ins.add(id(tensor))

    def sources_of(self, tensors: Iterable[Tensor]) -> frozenset[Wire]:
        """The wires that any of ``tensors`` was computed from."""
        found = (self._sources.get(storage_key(tensor), _NOTHING) for tensor in tensors)
        return _NOTHING.union(*found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = tensors_in((args, kwargs))
        sources = self.sources_of(inputs)
        if sources and (self.noting or func.name() in _READS):
            self.read |= sources
        output = func(*args, **(kwargs or {}))
        if sources:
            for tensor in tensors_in(output):
                self._spread(tensor, sources)
            if func._schema.is_mutable:
                self._changed.update(storage_key(t) for t in tensors_in(output))
        return output

    def check_arguments(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        blocks: Sequence[Block],
        position: int,
    ) -> None:
        """Refuse an argument that was computed from a block's output outside of any block.

        Raises:
            NotCuttable: names the argument and the two blocks.
        """
        for index, leaf in enumerate(flatten((args, kwargs))[0]):
            sources = self.sources_of([leaf]) if isinstance(leaf, Tensor) else _NOTHING
            untouched = id(leaf) in self._stand_ins and storage_key(leaf) not in self._changed
            if sources and not untouched:
                source = max(wire.layer for wire in sources)
                name = argument_name(module, args, kwargs, index)
                raise NotCuttable(
                    f"the forward computes argument {name!r} of block {blocks[position].name!r} "
                    f"from the output of block {blocks[source - 1].name!r}, outside of both"
                )

    def _spread(self, tensor: Tensor, sources: frozenset[Wire]) -> None:
        key = storage_key(tensor)
        self._sources[key] = self._sources.get(key, _NOTHING) | sources
        self._alive.append(tensor)
