"""Where to cut a chain: the smallest largest shard, then the fewest boundary bytes.

Pure data: layers as they were measured in, half-open ranges of layers out. ``cost`` is
what a shard needs on the device; any function of a range will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import PlanError
from shoal.core.spec import LayerMeasure
from shoal.core.units import Bytes, format_bytes

Cost = Callable[[int, int], int]
Ranges = tuple[tuple[int, int], ...]
_Table = NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max // 4  # two of them still add up


class CutError(PlanError):
    """No cut of the chain satisfies what was asked; says which layers stand against it."""


def shard_cost(layers: Sequence[LayerMeasure], *, with_state: bool = False) -> Cost:
    """The usual cost: what a backward of the range holds on the device at its worst moment.

    Parameters, their gradients, all activations the range saves, the largest working
    memory of one layer on top of its saved bytes, and the boundary at its entry. A tied
    parameter inside the range is counted as borrowed too: an upper bound.
    """
    fixed = _sums([layer.parameter_bytes + layer.borrowed_bytes for layer in layers])
    saved = _sums([layer.saved_bytes for layer in layers])
    state = _sums([layer.state_bytes if with_state else 0 for layer in layers])
    working = [layer.backward_peak_bytes - layer.saved_bytes for layer in layers]

    def cost(start: int, stop: int) -> int:
        held = fixed[stop] - fixed[start] + saved[stop] - saved[start]
        boundary = layers[start - 1].boundary_bytes if start else 0
        gradients = fixed[stop] - fixed[start] - (fixed[start + 1] - fixed[start])
        most = max(working[start:stop])
        return held + state[stop] - state[start] + boundary + max(gradients, 0) + max(most, 0)

    return cost
