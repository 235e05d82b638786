"""The micro-batches of a pipeline, in the order and with the random draws of the plain loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

from shoal.core.errors import SpecError, TrialError
from shoal.recipes.recipe import Batch, epoch_length


def group_sizes(train: Iterable[Any], accumulate: int, steps: int) -> tuple[int, ...]:
    """How many micro-batches each step takes: the last group of an epoch may be short.

    Data without a length is taken to have whole groups.

    Raises:
        SpecError: there is no batch.
    """
    length = epoch_length(train)
    count = accumulate if length is None else length
    if count == 0:
        raise SpecError("train data has no batches in epoch 1; it needs one or more.")
    whole, rest = divmod(count, accumulate)
    epoch = chain([accumulate] * whole, [rest] if rest else [])
    return tuple(islice(cycle(list(epoch)), steps))


class Feed:
    """Batches one after another, epoch after epoch.

    ``first`` may be looked at before training; it is fetched once.
    """

    def __init__(self, train: Iterable[Batch]) -> None:
        self._train = train
        self._epoch: Iterator[Batch] = iter(train)
        self._group = -1
        self.first = self._next(0)
        self._is_first = True

    def fetch(self, group: int) -> Batch:
        """The next micro-batch, which is of this group.

        Raises:
            TrialError: the epoch ended within a group.
        """
        if self._is_first:
            self._is_first, self._group = False, group
            return self.first
        return self._next(group)

    def _next(self, group: int) -> Batch:
        begins, self._group = group != self._group, group
        for batch in self._epoch:
            return batch
        if not begins:
            raise TrialError(
                f"an epoch of train data ended within step {group + 1}, which a pipeline has to "
                "know before it starts. Give data whose len() is its number of batches, or a "
                "multiple of accumulate= of them."
            )
        self._epoch = iter(self._train)
        for batch in self._epoch:
            return batch
        raise TrialError("train data has no batches in a later epoch; it needs one or more.")
