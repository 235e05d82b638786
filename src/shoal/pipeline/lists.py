"""The lists of actions that a device made of late, kept for steps that are alike. Pure."""

from __future__ import annotations

from shoal.pipeline.schedule import Pipeline
from shoal.program.ir import Action

MOST_ACTIONS = 20_000
"""Some 4 MiB. A synchronous schedule has a list a step, of one or two kinds; one of "2bw" is of
all steps up to a stop, and seldom comes again."""


class Lists:
    """Makes each device's list of a pipeline's program, or finds it.

    Args:
        most: Actions that are kept, of the lists that were asked for last; the newest list stays.
    """

    def __init__(self, most: int = MOST_ACTIONS) -> None:
        self._most = most
        self._kept: dict[tuple[Pipeline, int], tuple[Action, ...]] = {}

    def of(self, pipeline: Pipeline, device: int) -> tuple[Action, ...]:
        """What a device runs of a pipeline's program."""
        key = (pipeline, device)
        found = self._kept.pop(key, None) or pipeline.actions(device)
        self._kept[key] = found
        while self.num_actions > self._most and len(self._kept) > 1:
            del self._kept[next(iter(self._kept))]
        return found

    @property
    def num_actions(self) -> int:
        """Actions of all lists that are kept."""
        return sum(map(len, self._kept.values()))
