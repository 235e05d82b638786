"""Each slot's own optimizer, stepped over rows.

An optimizer of any class steps as it does alone. ``Adam`` and ``AdamW`` with ``fused=True``
are stepped by the very kernel that they would call, past the Python around it, which costs a
narrow model more than the kernel does. Settings are read from the optimizer's groups at every
step, so schedules work, and the state is the optimizer's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.fusion.crew import Crew
from shoal.fusion.member import Member
from shoal.kernelstep import is_one_kernel, run_kernel

ONE = torch.ones(())  # adding a tensor is quicker than a number, which torch makes one of


class GroupLists(NamedTuple):
    """What the kernel takes of one param group but the gradients, whose columns are ``at``."""

    settings: dict[str, Any]
    parameters: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]
    at: list[int]
    all_columns: bool
    counts: Tensor  # all of ``steps`` in one tensor


class FusedSteps:
    """Steps of the slots whose optimizers are calls of one kernel; lists are kept between steps.

    While a slot is here its state's ``step`` tensors are views of one, until ``let_go``.
    """

    def __init__(self) -> None:
        self._lists: dict[int, tuple[tuple[str, ...], list[GroupLists]]] = {}

    def takes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step is the kernel and nothing else; torch makes the first, and the state."""
        if not is_one_kernel(optimizer):
            return False
        return id(optimizer) in self._lists or all(
            parameter in optimizer.state
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def step(self, crew: Crew, slots: Sequence[int]) -> None:
        """Step the optimizers of ``slots`` with the rows of the stacked gradients."""
        blocks = {k: b.grad for k, b in crew.stacked.parameters.items() if b.grad is not None}
        names = tuple(blocks)
        columns = list(zip(*(gradient.unbind(0) for gradient in blocks.values()), strict=True))
        with torch.no_grad():
            for slot in slots if names else ():
                member = crew.members[slot]
                for lists in self._of(member, names):
                    _call(lists, columns[slot])
                member.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedules

    def _of(self, member: Member, names: tuple[str, ...]) -> list[GroupLists]:
        optimizer = member.optimizer
        found = self._lists.get(id(optimizer))
        if found is None or found[0] != names or not _is_current(found[1], optimizer):
            parameters = dict(member.module.named_parameters())
            column = {parameters[name]: at for at, name in enumerate(names)}
            found = (names, [_lists_of(optimizer, g, column) for g in optimizer.param_groups])
            self._lists[id(optimizer)] = found
        return found[1]

    def let_go(self, optimizer: torch.optim.Optimizer) -> None:
        """Its state stands on its own again, with the same bits."""
        if self._lists.pop(id(optimizer), None) is not None:
            for entry in optimizer.state.values():
                entry["step"] = entry["step"].clone()


def _is_current(kept: list[GroupLists], optimizer: torch.optim.Optimizer) -> bool:
    """Whether the lists are of the optimizer's groups and state, and not of ones before a load."""
    if len(kept) != len(optimizer.param_groups):
        return False
    return all(
        lists.settings is group
        and (
            not lists.parameters or optimizer.state[lists.parameters[0]]["step"] is lists.steps[0]
        )
        for lists, group in zip(kept, optimizer.param_groups, strict=True)
    )


def _lists_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], column: Mapping[Any, int]
) -> GroupLists:
    parameters = [parameter for parameter in group["params"] if parameter in column]
    entries = [optimizer.state[parameter] for parameter in parameters]
    counts = torch.empty(0)
    if entries:
        counts = torch.stack([entry["step"] for entry in entries])
        for entry, count in zip(entries, counts.unbind(0), strict=True):
            entry["step"] = count
    return GroupLists(
        group,
        parameters,
        [entry["exp_avg"] for entry in entries],
        [entry["exp_avg_sq"] for entry in entries],
        [entry["step"] for entry in entries],
        [column[parameter] for parameter in parameters],
        [column[parameter] for parameter in parameters] == list(range(len(column))),
        counts,
    )


def _call(lists: GroupLists, row: Sequence[Tensor]) -> None:
    if not lists.parameters:
        return
    lists.counts.add_(ONE)
    gradients = list(row) if lists.all_columns else [row[at] for at in lists.at]
    run_kernel(
        lists.settings, lists.parameters, gradients, lists.averages, lists.squares, lists.steps
    )
