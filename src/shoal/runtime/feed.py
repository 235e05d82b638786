"""A trial's training batches: fetched in the plain loop's order, from a position.

The caller has the trial's random streams in place whenever it calls: making an iterator
and fetching a batch may draw from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.core.errors import SpecError, TrialError
from shoal.recipe import Batch
from shoal.rng import RngState, capture_rng, restore_rng, same_rng


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the data a trial is, and the random states that lead there again.

    ``draws`` holds the state before each fetch that drew random numbers, so that a replay
    hands the source the numbers it saw.
    """

    epoch: int = 0
    batch: int = 0
    epoch_rng: RngState | None = None
    draws: dict[int, RngState] = field(default_factory=dict)


class Feed:
    """One source of batches, epoch after epoch. Owns the source's iterator.

    ``num_batches`` is the length of an epoch where the source states it reliably.
    """

    def __init__(self, source: Iterable[Batch], device: torch.device) -> None:
        self.num_batches = _length(source)
        self.position = Position()
        self._source = source
        self._device = device
        self._iterator: Iterator[Batch] | None = None
        self._may_follow_draws = not _order_is_fixed_at_start(source)

    @property
    def at_end(self) -> bool:
        """Whether all batches of this epoch are known to be fetched."""
        return self.num_batches is not None and self.position.batch >= self.num_batches

    def next(self) -> Batch | None:
        """The next batch of this epoch; None at its end, after which a new epoch begins."""
        if self._iterator is None:
            self._begin_epoch(capture_rng(self._device))
        before = capture_rng(self._device) if self._may_follow_draws else None
        assert self._iterator is not None
        batch = next(self._iterator, None)
        if batch is None:
            self._end_epoch()
            return None
        draws = self.position.draws
        if before is not None and not same_rng(before, capture_rng(self._device)):
            draws = {**draws, self.position.batch: before}
        self.position = dataclasses.replace(
            self.position, batch=self.position.batch + 1, draws=draws
        )
        return batch

    def is_at(self, position: Position) -> bool:
        """Whether the next batch is the one after ``position``."""
        here = self.position
        if position.epoch_rng is None:
            return self._iterator is None and here.epoch == position.epoch and here.batch == 0
        same = (here.epoch, here.batch) == (position.epoch, position.batch)
        return same and self._iterator is not None

    def close(self) -> None:
        """End the iterator, and with it the loader processes it may have."""
        self._iterator = None

    def seek(self, position: Position) -> None:
        """Go to ``position`` by fetching and dropping; leaves the random streams anywhere."""
        self.position = dataclasses.replace(position, batch=0)
        self._iterator = None
        if position.epoch_rng is None:
            return
        restore_rng(position.epoch_rng, self._device)
        self._iterator = iter(self._source)
        for index in range(position.batch):
            if index in position.draws:
                restore_rng(position.draws[index], self._device)
            if next(self._iterator, None) is None:
                raise TrialError(
                    f"the data source ended after {index} batches of epoch {position.epoch}, but "
                    f"the trial had read {position.batch}. A source must yield the same batches "
                    "each time it is read with the same random state."
                )
        self.position = position

    def _begin_epoch(self, rng: RngState) -> None:
        self._iterator = iter(self._source)
        self.position = Position(self.position.epoch, 0, rng)

    def _end_epoch(self) -> None:
        if self.position.batch == 0:
            raise SpecError(
                "the training data yielded no batch. Recipe(data=...) must return a source that "
                "yields at least one batch each time it is read."
            )
        if self.num_batches is not None and self.position.batch != self.num_batches:
            raise TrialError(
                f"the training data says len() = {self.num_batches} batches but yielded "
                f"{self.position.batch}. Correct its __len__, or leave it out."
            )
        self._iterator = None
        self.position = Position(self.position.epoch + 1)


def _order_is_fixed_at_start(source: Iterable[Batch]) -> bool:
    """Whether what an epoch yields, draws during it aside, is settled when it begins.

    True for plain sequences and for DataLoaders over torch's own samplers, which draw one
    seed at the start; then a replay needs no random state of its own for each fetch.
    """
    if type(source) in (list, tuple):
        return True
    return type(source) is DataLoader and type(source.sampler) in (
        SequentialSampler,
        RandomSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )


def _length(source: Iterable[Batch]) -> int | None:
    """Batches per epoch, or None where the source does not know or only guesses."""
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        return None
    try:
        return len(source)  # type: ignore[arg-type]  # a TypeError is an answer
    except (TypeError, NotImplementedError):
        return None
