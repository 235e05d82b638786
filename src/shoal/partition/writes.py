"""Which parameters a forward writes to, and whose they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernels.dispatched import run_operation
from shoal.partition.wires import storage_key, tensors_in


class WriteWatch(TorchDispatchMode):
    """Notes every operator that writes into a parameter's memory, also through ``.data``.

    ``names`` are the parameters that whoever holds them wrote to. ``foreign`` are those that a
    block wrote to that does not hold them, or, of a block's, what is outside of it.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._names = {storage_key(p): name for name, p in model.named_parameters()}
        self._holders: dict[int, set[nn.Module]] = {}
        for block in blocks:
            for parameter in block.parameters():
                self._holders.setdefault(storage_key(parameter), set()).add(block)
        self._inside: nn.Module | None = None
        self.names: set[str] = set()
        self.foreign: set[str] = set()

    @contextmanager
    def inside(self, block: nn.Module) -> Iterator[None]:
        """What is written now is written by ``block``."""
        self._inside = block
        try:
            yield
        finally:
            self._inside = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._note(written_by(func, args, kwargs))
        return run_operation(func, args, kwargs)

    def _note(self, written: Iterable[Tensor]) -> None:
        for key in map(storage_key, written):
            name = self._names.get(key)
            if name is None:
                continue
            holders = self._holders.get(key, set())
            own = self._inside in holders if self._inside is not None else not holders
            (self.names if own else self.foreign).add(name)


def written_by(func: Any, args: tuple[Any, ...], kwargs: Any) -> list[Tensor]:
    """What an operator writes to, of what it is given; not what it only reads."""
    if not func._schema.is_mutable:
        return []
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
    given |= kwargs or {}
    return [
        tensor
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(given.get(argument.name))
    ]
