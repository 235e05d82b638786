"""Where to cut a chain: the smallest largest shard, then the fewest boundary bytes.

Pure data: layers as they were measured in, places to cut out. ``cost`` is
what a shard needs on the device; any function of a range will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import PlanError
from shoal.core.spec import LayerMeasure

Cost = Callable[[int, int], int]
_Ranges = tuple[tuple[int, int], ...]
_Table = NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max // 4  # two of them still add up


class CutError(PlanError):
    """No cut of the chain satisfies what was asked; says which layers stand against it."""


def shard_cost(layers: Sequence[LayerMeasure], *, with_state: bool = False) -> Cost:
    """What a range of layers holds on the device at the worst moment of its backward.

    Parameters (and with ``with_state`` their optimizer state), the boundary at the entry, and
    the largest over its layers of

        saved by the layers before + the layer's own peak + gradients of the layers after.

    Every parameter counts as trained, and a tied one in each layer that uses it: an
    estimate from above. What a shard really needs is measured (``measure``).
    """
    held = np.cumsum([0, *(layer.parameter_bytes + layer.borrowed_bytes for layer in layers)])
    state = np.cumsum([0, *(layer.state_bytes if with_state else 0 for layer in layers)])
    num_layers = len(layers)
    table: _Table = np.zeros((num_layers + 1, num_layers + 1), np.int64)
    peak: _Table = np.full(num_layers + 1, -_NEVER, np.int64)  # of [start, stop), by stop
    for start in reversed(range(num_layers)):
        layer = layers[start]
        peak = np.maximum(
            layer.backward_peak_bytes + held - held[start + 1], layer.saved_bytes + peak
        )
        peak[: start + 1] = -_NEVER
        boundary = layers[start - 1].boundary_bytes if start else 0
        table[start] = peak + held - held[start] + state - state[start] + boundary
    rows: list[list[int]] = table.tolist()
    return lambda start, stop: rows[start][stop]


def cut(
    layers: Sequence[LayerMeasure], num_shards: int, cost: Cost | None = None
) -> tuple[int, ...]:
    """The layers at which the second and later of ``num_shards`` shards start.

    The largest cost is the smallest possible, and among such cuts the bytes that leave
    the layers before the cuts are the fewest. ``cut_after=False`` is honoured.

    Raises:
        CutError: there are fewer places to cut than that many shards need.
    """
    groups = _groups(layers)
    if not 1 <= num_shards <= len(groups):
        raise CutError(
            f"cannot cut {len(layers)} layers into {num_shards} shards: there are {len(groups)} "
            f"pieces that may stand alone. Ask for 1 to {len(groups)} shards."
        )
    costs = _costs(cost or shard_cost(layers), groups)
    largest = _smallest_largest(costs, num_shards)
    leaving = np.array([0, *(layers[stop - 1].boundary_bytes for _, stop in groups)], np.int64)
    return _fewest_bytes(costs, leaving, num_shards, largest, groups)


def _groups(layers: Sequence[LayerMeasure]) -> _Ranges:
    """The ranges between places where a cut is allowed."""
    stops = [i + 1 for i, layer in enumerate(layers) if layer.cut_after or i + 1 == len(layers)]
    return tuple(zip([0, *stops], stops, strict=False))


def _costs(cost: Cost, groups: _Ranges) -> _Table:
    """Cost of the groups [i, j) at row i, column j; elsewhere never."""
    edges = [0, *(stop for _, stop in groups)]
    table: _Table = np.full((len(edges), len(edges)), _NEVER, np.int64)
    for row, start in enumerate(edges):
        table[row, row + 1 :] = [cost(start, stop) for stop in edges[row + 1 :]]
    return table


def _smallest_largest(costs: _Table, num_shards: int) -> int:
    """Dynamic programming over the number of shards; best[j] covers the groups before j."""
    best: _Table = costs[0]
    for _ in range(num_shards - 1):
        best = np.minimum.reduce(np.maximum(best[:, None], costs), axis=0)
    return int(best[-1])


def _fewest_bytes(
    costs: _Table, leaving: _Table, num_shards: int, largest: int, groups: _Ranges
) -> tuple[int, ...]:
    """Among the cuts whose shards cost at most ``largest``, one with the fewest bytes."""
    allowed = costs <= largest
    best: _Table = np.where(allowed[0], 0, _NEVER)
    choices: list[NDArray[np.intp]] = []
    for _ in range(num_shards - 1):
        totals = np.where(allowed, (best + leaving)[:, None], _NEVER)
        choices.append(np.argmin(totals, axis=0))
        best = np.minimum.reduce(totals, axis=0)
    edge = len(groups)
    cuts = []
    for choice in reversed(choices):
        edge = int(choice[edge])
        cuts.append(groups[edge - 1][1])
    return tuple(reversed(cuts))
