"""Rows that have no memory of their own: of an array that is on its device shard by shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from shoal.fusion.rows.stacked import Stacked
from shoal.kernels.poison import Poison


class Unplaced(Stacked):
    """Stacked tensors whose parameters are wherever somebody puts them.

    Until then they are NaN, or 0, without memory; so that touching what is not there is seen.
    Buffers are rows as ever, on ``device`` or where the modules are. The members' own parameters
    are not touched.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device | None = None,
        *,
        one_base: bool = False,
    ) -> None:
        self._nowhere: dict[str, Tensor] = {}
        self._poison = Poison()
        super().__init__(modules, device, one_base=one_base)

    def _block(self, name: str, width: int, one: Tensor, device: torch.device | None) -> Tensor:
        nowhere = self._poison.like(one, device).expand(width, *one.shape)
        self._nowhere[name] = nowhere
        return nowhere.detach()

    def take(self, slot: int, module: nn.Module) -> None:
        """Copy a module's buffers into a row, where they live from now on."""
        self.put_buffers(slot, module)

    def let_go(self, module: nn.Module) -> None:
        """Give a module buffers of its own again, with the same bits."""
        self._let_go_of_buffers(module)

    def drop(self, module: nn.Module) -> None:
        """Have a module that nobody goes on with hold no buffers; nothing is copied."""
        self._drop_buffers(module)

    def place(self, name: str, tensor: Tensor) -> None:
        """Have the rows of a parameter be ``tensor`` [N, ...], which is somebody else's.

        Of the base all rows are the same memory there too.
        """
        self.parameters[name].data = tensor

    def evict(self, names: Iterable[str]) -> None:
        """Have these parameters be nowhere again."""
        for name in names:
            self.parameters[name].data = self._nowhere[name]
