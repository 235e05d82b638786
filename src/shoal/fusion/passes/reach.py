"""Which passes of all slots the tensors of one slot come from.

A pass leaves every slot its row, and autograd's graph of all behind it. So from one slot's row the
graph leads to everybody's parameters, also where alone there would be no gradient: with zeros, or
with NaN where a neighbour's numbers are not finite. Slots whose tensors come from other passes are
therefore another backward. Within a pass all slots read the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shoal.fusion.passes.meeting import Run
from shoal.fusion.passes.outputs import by_slot, taken_apart
from shoal.fusion.rows.level import Level

PASS = "shoal: the inputs of the pass"
"""Where autograd's step from all slots' outputs to each one's keeps those to its inputs."""


def rows_of(level: Level, output: Any, inputs: Sequence[Any]) -> list[Any]:
    """Each slot's output; its tensors are rows, in one step of autograd."""
    tensors, form = taken_apart(output)
    rows = [level.stacked(x).unbind(0) for x in tensors]
    for some in rows:
        node: Any = some[0].grad_fn
        if node is not None:
            node.metadata[PASS] = inputs
    return by_slot(form, rows, level.width)


def by_passes(group: Sequence[Run]) -> list[list[Run]]:
    """The runs whose tensors come from the same passes, together."""
    if len(group) == 1:
        return [list(group)]
    found: dict[frozenset[int], list[Run]] = {}
    for run in group:
        found.setdefault(_passes_behind(run.asked.tensors, run.slot), []).append(run)
    return list(found.values())


def _passes_behind(tensors: Sequence[Tensor], slot: int) -> frozenset[int]:
    """Which passes a slot's tensors come from, by the identity of what is kept of their inputs."""
    found: set[int] = set()
    seen: set[Any] = set()
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        inputs = node.metadata.get(PASS) if node.name() == "UnbindBackward0" else None
        if inputs is None:
            todo += [before for before, _ in node.next_functions]
        else:
            found.add(id(inputs))
            todo += [each.next_functions[slot][0] for each in inputs]
    return frozenset(found)
