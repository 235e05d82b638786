"""What a study is after: which metric, and whether less or more of it is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Aim(NamedTuple):
    """A metric, and ``"min"`` or ``"max"``."""

    metric: str
    mode: str

    def rank(self, metrics: Mapping[str, float]) -> float:
        """A sort key of what an evaluation found: ``metric_rank`` of the metric in it."""
        return metric_rank(metrics.get(self.metric), self.mode)


def metric_rank(value: float | None, mode: str) -> float:
    """A sort key for a metric: smaller is better, what is no finite number comes last."""
    if value is None or not math.isfinite(value):
        return math.inf
    return value if mode == "min" else -value
