"""Each slot's own optimizer, stepped over rows.

An optimizer of any class steps as it does alone. ``Adam`` and ``AdamW`` with ``fused=True``
are stepped by the very kernel that they would call, past the Python around it, which costs a
narrow model more than the kernel does. Settings are read from the optimizer's groups at every
step, so schedules work, and the state is the optimizer's own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.fusion.crew import Crew, Parts, Steps
from shoal.fusion.member import Member
from shoal.kernels.kernelstep import is_one_kernel, is_plain_sgd, run_kernel, step_whole

ONE = torch.ones(())  # adding a tensor is quicker than a number, which torch makes one of


NUMBERS = ("lr", "weight_decay", "eps", "decoupled_weight_decay")
OF_SGD = ("momentum", "dampening", "nesterov", "maximize", "foreach", "fused")
"""Settings of a param group that a step reads, beside ``betas``; others are somebody else's."""


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
    held: list[Tensor]  # all that a step reads and writes, but for the gradients


class FusedSteps:
    """Steps of the slots whose optimizers are calls of one kernel; lists are kept between steps.

    While a slot is here its state's ``step`` tensors are views of one, until ``let_go``. Where
    there are ``steps`` they launch all calls of a step, of which nothing but addresses and numbers
    is looked at where those are the same as before.
    """

    def __init__(self, steps: Steps | None) -> None:
        self._steps = steps
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

    def step(self, crew: Crew, slots: Sequence[int], theirs: Sequence[int] = ()) -> frozenset[int]:
        """Step the optimizers of ``slots`` with the rows of the stacked gradients.

        ``theirs``: slots whose parameters have gradients of their own; they step too, also if they
        have torch's SGD, where there is somebody who launches steps and they can be captured.

        Returns:
            Who has been stepped.
        """
        blocks = {k: b.grad for k, b in crew.stacked.parameters.items() if b.grad is not None}
        names, stacked = tuple(blocks), list(blocks.values())
        rows = [(slot, self._of(crew.members[slot], names)) for slot in (slots if names else ())]
        others = self._that_join(crew, theirs)

        def parts() -> Parts:
            columns = list(zip(*(gradient.unbind(0) for gradient in stacked), strict=True))
            found = [partial(_call_all, groups, columns[slot]) for slot, groups in rows]
            return found + [partial(step_whole, crew.members[slot].optimizer) for slot in others]

        if not rows and not others:
            return frozenset()
        with torch.no_grad():
            if self._steps is None:
                for part in parts():
                    part()
            else:
                where = [(gradient.data_ptr(), gradient.stride()) for gradient in stacked]
                every = [lists for _, groups in rows for lists in groups]
                held = (tensor for lists in every for tensor in lists.held)
                told = [_numbers(lists.settings) for lists in every]
                what = names, tuple(slots), where, list(map(Tensor.data_ptr, held)), told, others
                self._steps(what, parts)
        stepped = frozenset((*slots, *others))
        for slot in stepped:
            crew.members[slot].optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedules
        return stepped

    def _that_join(self, crew: Crew, slots: Sequence[int]) -> dict[int, Hashable]:
        """What their steps are."""
        if self._steps is None:
            return {}
        found: dict[int, Hashable] = {}
        for slot in slots:
            optimizer = crew.members[slot].optimizer
            known = is_plain_sgd(optimizer) or self.takes(optimizer)
            if known and (what := _what(optimizer)) is not None:
                found[slot] = what
        return found

    def _of(self, member: Member, names: tuple[str, ...]) -> list[GroupLists]:
        optimizer = member.optimizer
        found = self._lists.get(id(optimizer))
        if found is None or found[0] != names or not _is_current(found[1], optimizer):
            parameters = dict(member.module.named_parameters())
            column = {parameters[name]: at for at, name in enumerate(names)}
            found = (names, [_lists_of(optimizer, g, column) for g in optimizer.param_groups])
            self._lists[id(optimizer)] = found
        return found[1]

    def let_go(self, optimizer: torch.optim.Optimizer, *, whole: bool = True) -> None:
        """Its state stands on its own again, with the same bits, if it is wanted ``whole``."""
        if self._lists.pop(id(optimizer), None) is not None and whole:
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
    averages = [entry["exp_avg"] for entry in entries]
    squares = [entry["exp_avg_sq"] for entry in entries]
    return GroupLists(
        group,
        parameters,
        averages,
        squares,
        [entry["step"] for entry in entries],
        [column[parameter] for parameter in parameters],
        [column[parameter] for parameter in parameters] == list(range(len(column))),
        counts,
        [counts, *parameters, *averages, *squares],
    )


def _numbers(settings: Mapping[str, Any]) -> Hashable:
    """Those that the kernel is given."""
    return tuple(settings["betas"]), *(settings.get(name) for name in NUMBERS)


def _what(optimizer: torch.optim.Optimizer) -> Hashable | None:
    """What a step is of parameters that have their own gradients: addresses, and numbers.

    None: it has no state yet, or gradients of a kind that its kernels do not take.
    """
    found: list[Any] = []
    for group in optimizer.param_groups:
        found += [group.get(name) for name in (*NUMBERS, *OF_SGD)]
        found.append(tuple(group.get("betas", ())))
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        if group.get("momentum", True):  # of SGD without there is none
            if not all(states):
                return None
            gradients += [value for state in states for value in state.values()]
        usual = (t is not None and t.layout is torch.strided for t in gradients)
        if not all(usual) or any(map(torch.is_complex, gradients)):
            return None
        found += map(Tensor.data_ptr, [*parameters, *gradients])
    return tuple(found)


def _call_all(groups: Sequence[GroupLists], row: Sequence[Tensor]) -> None:
    for lists in groups:
        _call(lists, row)


def _call(lists: GroupLists, row: Sequence[Tensor]) -> None:
    if not lists.parameters:
        return
    lists.counts.add_(ONE)
    gradients = list(row) if lists.all_columns else [row[at] for at in lists.at]
    run_kernel(
        lists.settings, lists.parameters, gradients, lists.averages, lists.squares, lists.steps
    )
