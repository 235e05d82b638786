"""Finds computation between blocks: tensors made from a block's output outside of any block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.partition.callsheet import argument_name, flatten, storage_key, tensors_in
from shoal.partition.discover import NotCuttable

if TYPE_CHECKING:
    from shoal.partition.glue import Block

_READS = ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero")


class Taint(TorchDispatchMode):
    """Follows the stand-ins of block outputs through the operators of a prologue run.

    A storage is tainted with the position of the block it stems from. The tensors are kept
    alive, so that a storage's address means one storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._source: dict[int, int] = {}
        self._stand_ins: set[int] = set()
        self._mutated: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def mark(self, tensors: Sequence[Tensor], position: int) -> None:
        """``tensors`` are the stand-ins of the output of the block at ``position``."""
        for tensor in tensors:
            self._taint(tensor, position)
            self._stand_ins.add(id(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = tensors_in((args, kwargs))
        sources = [self._source[key] for key in map(storage_key, inputs) if key in self._source]
        if sources and func.name() in _READS:
            raise NotCuttable(
                f"the forward reads a value of the output of block number {max(sources) + 1} "
                "between blocks"
            )
        output = func(*args, **(kwargs or {}))
        if sources:
            for tensor in tensors_in(output):
                self._taint(tensor, max(sources))
            if func._schema.is_mutable and inputs and storage_key(inputs[0]) in self._source:
                self._mutated[storage_key(inputs[0])] = max(sources)
        return output

    def check_arguments(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        blocks: Sequence[Block],
        position: int,
    ) -> None:
        """Refuse an argument that was computed from a block's output outside of the block.

        Raises:
            NotCuttable: names the argument and the two blocks.
        """
        for index, leaf in enumerate(flatten((args, kwargs))[0]):
            if not isinstance(leaf, Tensor):
                continue
            key = storage_key(leaf)
            changed = key in self._mutated
            if changed or (key in self._source and id(leaf) not in self._stand_ins):
                source = self._mutated.get(key, self._source.get(key, 0))
                name = argument_name(module, args, kwargs, index)
                raise NotCuttable(
                    f"the forward computes argument {name!r} of block {blocks[position].name!r} "
                    f"from the output of block {blocks[source].name!r}, outside of both"
                )

    def _taint(self, tensor: Tensor, position: int) -> None:
        key = storage_key(tensor)
        self._source[key] = max(position, self._source.get(key, position))
        self._alive.append(tensor)
