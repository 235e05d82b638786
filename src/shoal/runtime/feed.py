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
    BatchSampler,
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

KNOWN_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


@dataclass(frozen=True, slots=True)
class Epoch:
    """How one epoch was read: enough to have the source go through it again.

    ``rng`` is the random state in which its iterator was made, None before that; ``draws``
    the state before each fetch that drew random numbers, so that a replay hands the
    source the numbers it saw.
    """

    batches: int = 0
    rng: RngState | None = None
    draws: dict[int, RngState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the data a trial is, and what leads there again.

    A source that shoal knows (a sequence, a DataLoader over torch's samplers) is put at the
    beginning of the epoch: ``generators`` are the states of its own generators there. Any
    other may keep what it likes from epoch to epoch, so it is led through all of ``past``.
    """

    epoch: int = 0
    now: Epoch = field(default_factory=Epoch)
    generators: tuple[torch.Tensor, ...] = ()
    past: tuple[Epoch, ...] = ()

    @property
    def batch(self) -> int:
        """Batches of this epoch that were fetched."""
        return self.now.batches


class Feed:
    """One source of batches, epoch after epoch. Owns the source's iterator.

    ``num_batches`` is the length of an epoch where the source states it reliably.
    """

    def __init__(self, source: Iterable[Batch], device: torch.device) -> None:
        self.num_batches = epoch_length(source)
        self._source = source
        self._generators = _own_generators(source)
        self.position = Position(generators=self._states())
        self._device = device
        self._iterator: Iterator[Batch] | None = None
        self._is_known = _order_is_fixed_at_start(source)

    @property
    def at_end(self) -> bool:
        """Whether all batches of this epoch are known to be fetched."""
        return self.num_batches is not None and self.position.batch >= self.num_batches

    def next(self) -> Batch | None:
        """The next batch of this epoch; None at its end, after which a new epoch begins."""
        if self._iterator is None:
            self._begin_epoch(capture_rng(self._device))
        before = None if self._is_known else capture_rng(self._device)
        assert self._iterator is not None
        batch = next(self._iterator, None)
        if batch is None:
            self._end_epoch()
            return None
        now = self.position.now
        if before is not None and not same_rng(before, capture_rng(self._device)):
            now.draws[now.batches] = before
        now = dataclasses.replace(now, batches=now.batches + 1)
        self.position = dataclasses.replace(self.position, now=now)
        return batch

    def is_at(self, position: Position) -> bool:
        """Whether the next batch is the one after ``position``."""
        here = self.position
        if position.now.rng is None:
            return self._iterator is None and here.epoch == position.epoch and here.batch == 0
        same = (here.epoch, here.batch) == (position.epoch, position.batch)
        return same and self._iterator is not None

    def close(self) -> None:
        """End the iterator, and with it the loader processes it may have."""
        self._iterator = None

    def seek(self, position: Position) -> None:
        """Go to ``position`` by fetching and dropping; leaves the random streams anywhere."""
        self._iterator = None
        for generator, state in zip(self._generators, position.generators, strict=True):
            generator.set_state(state)
        for past in position.past:
            self._replay(past, to_its_end=True)
        if position.now.rng is not None:
            self._replay(position.now, to_its_end=False)
        self.position = position

    def _replay(self, epoch: Epoch, *, to_its_end: bool) -> None:
        """Read an epoch again, with the random numbers it was read with."""
        assert epoch.rng is not None
        restore_rng(epoch.rng, self._device)
        iterator = iter(self._source)
        for index in range(epoch.batches):
            if index in epoch.draws:
                restore_rng(epoch.draws[index], self._device)
            if next(iterator, None) is None:
                raise TrialError(
                    f"the data source ended after {index} batches of an epoch of which the trial "
                    f"had read {epoch.batches}. A source must yield the same batches each time "
                    "it is read with the same random state."
                )
        if to_its_end:
            next(iterator, None)
        self._iterator = None if to_its_end else iterator

    def _begin_epoch(self, rng: RngState) -> None:
        states = self._states()
        self._iterator = iter(self._source)
        self.position = dataclasses.replace(
            self.position,
            now=Epoch(rng=rng),
            generators=states if self._is_known else self.position.generators,
        )

    def _states(self) -> tuple[torch.Tensor, ...]:
        return tuple(generator.get_state() for generator in self._generators)

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
        here = self.position
        self.position = Position(
            epoch=here.epoch + 1,
            generators=self._states() if self._is_known else here.generators,
            past=() if self._is_known else (*here.past, here.now),
        )


def _own_generators(source: Iterable[Batch]) -> tuple[torch.Generator, ...]:
    """The generators that a DataLoader was given, each once."""
    if not isinstance(source, DataLoader):
        return ()
    holders = (source, source.sampler, source.batch_sampler)
    found = {
        id(g): g
        for h in holders
        if isinstance(g := getattr(h, "generator", None), torch.Generator)
    }
    return tuple(found.values())


def _order_is_fixed_at_start(source: Iterable[Batch]) -> bool:
    """Whether what an epoch yields, draws during it aside, is settled when it begins.

    True for plain sequences and for DataLoaders over torch's own samplers, which draw one
    seed at the start; then a replay needs no random state of its own for each fetch.
    """
    if type(source) in (list, tuple):
        return True
    return (
        type(source) is DataLoader
        and not source.persistent_workers  # their second epoch begins in another way
        and type(source.batch_sampler) is BatchSampler
        and type(source.sampler) in KNOWN_SAMPLERS
    )


def epoch_length(source: Iterable[Batch]) -> int | None:
    """Batches per epoch, or None where the source does not know or only guesses."""
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        return None
    try:
        return len(source)  # type: ignore[arg-type]  # a TypeError is an answer
    except (TypeError, NotImplementedError):
        return None
