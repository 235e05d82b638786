"""The parameters and buffers of N modules as N rows of shared tensors.

``Stacked`` copies each module's tensors into rows and lets the module's own parameters live
there; ``let_go`` gives a module tensors of its own again. Neither changes a bit, and the
parameter objects stay the same, so that optimizers and schedules never notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.core import arraykeys
from shoal.fusion.declined import Declined
from shoal.fusion.likeness import same_bits
from shoal.fusion.rows.installed import swap_buffers
from shoal.fusion.rows.level import like_alone


def is_of_base(parameter: nn.Parameter) -> bool:
    """Whether an array with one base has this once: it is frozen, and not small."""
    return not parameter.requires_grad and parameter.nbytes >= arraykeys.LEAST_BASE_BYTES


def base_in(named: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Which of a module's parameters that are."""
    return frozenset(name for name, parameter in named.items() if is_of_base(parameter))


def other_base(name: str) -> str:
    """Why a trial is not taken in, in words."""
    return (
        f"{name!r}, which is frozen, has other bits than in the trials of its array, which have "
        "it in memory once"
    )


class Stacked:
    """``parameters`` and ``buffers`` by their first name, each [N, ...].

    A row lies in memory as its tensor did alone. Parameters are leaves of autograd: their
    gradients are stacked too. They are on ``device``, or where the modules are.

    With ``one_base`` the weights of ``is_of_base`` are there once: all rows of such a block are
    the same memory, and in a pass it is a tensor that no slot has for itself (``given``). So a
    product with it is one of all slots' rows. Who has other bits there cannot be taken.
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
        self.parameters = {n: self._block(n, width, p.detach(), device) for n, p in named.items()}
        self.buffers = {name: like_alone(width, b, device) for name, b in first.named_buffers()}
        for slot, module in enumerate(modules):
            self.take(slot, module)
        for name, parameter in named.items():
            self.parameters[name].requires_grad_(parameter.requires_grad)

    def _block(self, name: str, width: int, one: Tensor, device: torch.device | None) -> Tensor:
        """Rows for a parameter like ``one``; of the base they are one memory, with its bits."""
        if name not in self.base:
            return like_alone(width, one, device)
        own = like_alone(1, one, device)
        own[0].copy_(one)
        return own[0].expand(width, *one.shape)

    @property
    def given(self) -> dict[str, Tensor]:
        """What a pass runs on by name: blocks [N, ...], and of the base a tensor for all slots."""
        return {n: block[0] if n in self.base else block for n, block in self.parameters.items()}

    def part(self, parameters: Mapping[str, str], buffers: Mapping[str, str]) -> Stacked:
        """Some of the tensors, under other names: theirs there -> theirs here."""
        found: Stacked = object.__new__(Stacked)
        found.parameters = {name: self.parameters[here] for name, here in parameters.items()}
        found.buffers = {name: self.buffers[here] for name, here in buffers.items()}
        found.base = frozenset(name for name, here in parameters.items() if here in self.base)
        return found

    def rows(self, slot: int) -> dict[str, Tensor]:
        """A slot's parameters and buffers by name."""
        found = {name: block.detach()[slot] for name, block in self.parameters.items()}
        return found | {name: block.detach()[slot] for name, block in self.buffers.items()}

    def take(self, slot: int, module: nn.Module) -> None:
        """Copy a module's tensors into a row, where they live from now on.

        Raises:
            Declined: what is there once for all is another one there; nothing has changed.
        """
        with torch.no_grad():
            self._require_base(module)
            for name, parameter in module.named_parameters():
                row = self.parameters[name].detach()[slot]
                if name not in self.base:
                    row.copy_(parameter)
                parameter.data = row
            self.put_buffers(slot, module)

    def _require_base(self, module: nn.Module) -> None:
        for name in self.base:
            parameter, mine = module.get_parameter(name), self.parameters[name][0]
            is_here = parameter.data_ptr() == mine.data_ptr()
            if not (is_here or same_bits(parameter, mine)):
                raise Declined(other_base(name))

    def settle(self, slot: int, module: nn.Module) -> None:
        """Have tensors that a module's code replaced by others live in their row again.

        Raises:
            Declined: what is there once for all was given other bits.
        """
        with torch.no_grad():
            self._require_base(module)
            for name, parameter in module.named_parameters():
                row = self.parameters[name].data[slot]
                if parameter.data_ptr() != row.data_ptr():
                    if name not in self.base:
                        row.copy_(parameter)
                    parameter.data = row
        self.put_buffers(slot, module)

    def put_buffers(self, slot: int, module: nn.Module) -> None:
        """Copy a module's buffers into their row, also ones that its forward made anew.

        The rows have no gradient, though code may ask that a buffer keep one (``zero`` of a
        module that sums losses): autograd refuses a view that was made without gradients.
        """
        rows = {}
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                row = self.buffers[name].detach()[slot]
                if buffer.data_ptr() != row.data_ptr() or buffer.shape != row.shape:
                    row.copy_(buffer)
                rows[id(buffer)] = row
        swap_buffers(module, rows)

    def let_go(self, module: nn.Module) -> None:
        """Give a module tensors of its own again, with the same bits; but the base, as it was."""
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name not in self.base:
                    parameter.data = parameter.detach().clone()
                parameter.grad = None
        self._let_go_of_buffers(module)

    def drop(self, module: nn.Module) -> None:
        """Have a module that nobody goes on with hold no memory here; nothing is copied."""
        for parameter in module.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)
        self._drop_buffers(module)

    def _drop_buffers(self, module: nn.Module) -> None:
        swap_buffers(module, {id(b): b.new_empty(0) for b in module.buffers()})

    def _let_go_of_buffers(self, module: nn.Module) -> None:
        swap_buffers(module, {id(b): b.detach().clone() for b in module.buffers()})


def owners(module: nn.Module) -> Mapping[str, str]:
    """Every name of a parameter or buffer, and the first name of the same tensor."""
    first: dict[int, str] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}
