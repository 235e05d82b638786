"""Rows that have no memory of their own: of an array that is on its device shard by shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from shoal.fusion.level import like_alone
from shoal.fusion.stacked import Stacked, base_in


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
        first, width = modules[0], len(modules)
        named = dict(first.named_parameters())
        self.base = base_in(named) if one_base else frozenset()
        self._nowhere = {name: _nowhere(width, p.detach(), device) for name, p in named.items()}
        self.parameters = {name: one.detach() for name, one in self._nowhere.items()}
        self.buffers = {name: like_alone(width, b, device) for name, b in first.named_buffers()}
        for slot, module in enumerate(modules):
            self.take(slot, module)
        for name, parameter in first.named_parameters():
            self.parameters[name].requires_grad_(parameter.requires_grad)

    def take(self, slot: int, module: nn.Module) -> None:
        """Copy a module's buffers into a row, where they live from now on."""
        self.put_buffers(slot, module)

    def let_go(self, module: nn.Module) -> None:
        """Give a module buffers of its own again, with the same bits."""
        with torch.no_grad():
            own = {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
        for child in module.modules():
            for key, held in child._buffers.items():
                if held is not None:
                    child._buffers[key] = own[id(held)]

    def place(self, name: str, tensor: Tensor) -> None:
        """Have the rows of a parameter be ``tensor`` [N, ...], which is somebody else's.

        Of the base all rows are the same memory there too.
        """
        self.parameters[name].data = tensor

    def evict(self, names: Iterable[str]) -> None:
        """Have these parameters be nowhere again."""
        for name in names:
            self.parameters[name].data = self._nowhere[name]


def _nowhere(width: int, one: Tensor, device: torch.device | None) -> Tensor:
    fill = float("nan") if one.is_floating_point() or one.is_complex() else 0
    return one.new_full((), fill, device=device).expand(width, *one.shape)
