"""A trial's batches: fetched in the plain loop's order, from a position.

The caller has the trial's random streams in place whenever it calls ``next``: making an
iterator and fetching a batch may draw from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from shoal.core.errors import SpecError, TrialError
from shoal.data.keeper import Keeper
from shoal.data.keepers import first_keeper, keeper_of
from shoal.data.loaders import TIMEOUT_S, LoaderLost, LoaderReader, reader_of
from shoal.data.position import Position
from shoal.data.reading import END
from shoal.data.sources import (
    Rule,
    draws_at_start_only,
    name_of,
    replay_rule,
    rule_of,
    starts_as_new,
)
from shoal.recipes.recipe import Batch, epoch_length

RESTARTS = 3


class Feed:
    """One source of batches, epoch after epoch. Owns its iterator and its loader processes.

    For one thread. A loader whose process dies is started again from where it was, to the
    bit, ``RESTARTS`` times.

    Args:
        source: As ``Recipe.data`` built it; nobody has read it.
        device: The trial's, whose random streams are kept too.
        timeout_s: How long loader processes may take for a batch.
        on_restart: Called with the reason, after a loader was started again.
        renew: Builds the source anew, in the random state in which it was built; for a source
            that may keep anything and has to be read again.
        what: What the data is called in messages.

    Attributes:
        num_batches: The length of an epoch where the source states it reliably.
        epoch: Epochs read to their end.
        batch: Batches of this epoch that were fetched.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        device: torch.device,
        *,
        timeout_s: float = TIMEOUT_S,
        on_restart: Callable[[str], None] = lambda reason: None,
        renew: Callable[[], Iterable[Batch]] | None = None,
        what: str = "training",
    ) -> None:
        self._device, self._timeout_s, self._what = device, timeout_s, what
        self._on_restart, self._renew = on_restart, renew
        self.num_batches = epoch_length(source)
        self.epoch = self.batch = self._restarts = 0
        self._iterator: Iterator[Batch] | None = None
        self._take: Callable[[Iterator[Batch], int], Any]
        self._keeper: Keeper
        self._adopt(source)
        self._use_first(self._found_rule)

    @property
    def at_end(self) -> bool:
        """Whether all batches of this epoch are known to be fetched."""
        return self.num_batches is not None and self.batch >= self.num_batches

    @property
    def draws_nothing(self) -> bool:
        """Whether ``next`` gives one more batch of this epoch, and surely without a draw."""
        inside = self.num_batches is not None and 0 < self.batch < self.num_batches
        return inside and self._is_quiet and self._keeper.rule.way in ("index", "sampler", "epoch")

    def next(self) -> Batch | None:
        """The next batch of this epoch; None at its end, after which a new epoch begins.

        Raises:
            SpecError: the source has no batch, or one that is None.
            TrialError: it has another number of them than it says, its loader is lost, or its
                code has no memory, which is nothing that smaller shards would help.
        """
        try:
            iterator = self._iterator
            if iterator is None:
                iterator = self._begin_epoch()
            batch = self._take(iterator, self.batch)
        except MemoryError as error:
            raise TrialError(
                f"reading the {self._what} data took more host memory than there is: "
                f"{type(error).__name__}: {error}".removesuffix(": ")
            ) from error
        if batch is END:
            self._end_epoch()
            return None
        if batch is None:
            raise SpecError(f"the {self._what} data yielded None; a batch is a value.")
        self.batch += 1
        return batch

    def position(self) -> Position:
        """Where the next batch comes from, to be kept. Not for every step: see ``rule``."""
        begun = self._iterator is not None
        fields = self._keeper.fields(batch=self.batch, begun=begun)
        way = self._keeper.rule.way
        return Position(way=way, epoch=self.epoch, batch=self.batch, begun=begun, **fields)

    def is_at(self, position: Position) -> bool:
        """Whether the next batch is the one after ``position``."""
        here = (self.epoch, self.batch, self._iterator is not None)
        return here == (position.epoch, position.batch, position.begun)

    def seek(self, position: Position) -> None:
        """Go to ``position``; leaves the random streams anywhere.

        Raises:
            TrialError: the source is not the one that the position is of.
        """
        while True:
            try:
                return self._lead(position)
            except LoaderLost as lost:
                self._count(lost)

    def close(self) -> None:
        """End the iterator and the loader's processes; none is left."""
        self._iterator = None
        self._reader.close()

    # -- epochs -------------------------------------------------------------------------

    def _begin_epoch(self) -> Iterator[Batch]:
        while self._iterator is None:
            self._is_new = False
            try:
                self._iterator = self._keeper.open()
            except LoaderLost as lost:
                self._restart(lost, opening=True)
        return self._iterator

    def _end_epoch(self) -> None:
        if self.batch == 0:
            raise SpecError(
                f"the {self._what} data yielded no batch. Recipe(data=...) must return a source "
                "that yields at least one batch each time it is read, or None for validation."
            )
        if self.num_batches is not None and self.batch != self.num_batches:
            if self.epoch:
                raise TrialError(
                    f"the {self._what} data said len() = {self.num_batches} batches before its "
                    f"first epoch and yielded {self.batch} in epoch {self.epoch + 1}. Where "
                    "epochs differ in length (a curriculum), leave __len__ out, a sampler's too."
                )
            raise TrialError(
                f"the {self._what} data says len() = {self.num_batches} batches but yielded "
                f"{self.batch}. Correct its __len__, or leave it out."
            )
        self._keeper.end_epoch(self.batch)
        self._iterator = None
        self.epoch, self.batch = self.epoch + 1, 0

    def _take_first(self, iterator: Iterator[Batch], index: int) -> Any:
        """The first batch of all, which shows whether the rule holds."""
        batch = self._take_patiently(iterator, index)
        if batch is not END:
            self._use(self._keeper.settle())
        return batch

    def _take_patiently(self, iterator: Iterator[Batch], index: int) -> Any:
        """A batch of a loader whose processes may die."""
        while True:
            try:
                return self._keeper.take(iterator, index)
            except LoaderLost as lost:
                self._restart(lost, opening=False)
                assert self._iterator is not None
                iterator = self._iterator

    # -- positions ----------------------------------------------------------------------

    def _adopt(self, source: Iterable[Batch]) -> None:
        self._source = source
        self._reader = reader_of(source, self._timeout_s)
        self._found_rule = rule_of(source)
        self._is_quiet = draws_at_start_only(source)
        self._is_new = True

    def _use(self, keeper: Keeper) -> None:
        self._keeper = keeper
        patient = isinstance(self._reader, LoaderReader)
        self._take = self._take_patiently if patient else keeper.take

    def _use_first(self, rule: Rule) -> None:
        self._keeper = first_keeper(rule, self._source, self._reader, self._device)
        self._take = self._take_first

    def _lead(self, position: Position) -> None:
        self.close()
        rule = self._rule_for(position)
        if position.needs_new_source and not self._is_new:
            self._make_new()
        if position.is_start:
            self._use_first(rule)
        else:
            self._use(keeper_of(rule, self._source, self._reader, self._device))
            self._is_new = False
        self._iterator = self._keeper.lead(position)
        self.epoch, self.batch = position.epoch, position.batch

    def _rule_for(self, position: Position) -> Rule:
        found = self._found_rule
        if position.way == found.way:
            return found
        if position.way == "replay":
            return replay_rule("the dataset")
        raise TrialError(
            f"the trial's data was found by its {position.way} and is now {name_of(self._source)} "
            f"({found}). Resume with the data that it began with."
        )

    def _make_new(self) -> None:
        """Have the source as it was built, for a replay from its first batch."""
        if starts_as_new(self._source):
            return
        if self._renew is None:
            raise TrialError(
                f"{name_of(self._source)} has to be read again from its first batch, and may "
                "keep something from the reading before. Resume the trial from its checkpoint."
            )
        self._adopt(self._renew())

    # -- restarts -----------------------------------------------------------------------

    def _restart(self, lost: LoaderLost, *, opening: bool) -> None:
        """Start the loader again, where it was, with the random streams as they were."""
        undo = self._keeper.undo(opening=opening)
        position = self.position()
        self._count(lost)
        self.seek(position)
        undo()
        where = f"epoch {self.epoch + 1}, batch {self.batch + 1}"
        self._on_restart(f"{lost}. Restart {self._restarts} of {RESTARTS}, at {where}")

    def _count(self, lost: LoaderLost) -> None:
        """One restart more, or the end.

        Raises:
            TrialError: it would be one too many.
        """
        self._restarts += 1
        if self._restarts > RESTARTS:
            self.close()
            raise TrialError(
                f"the {self._what} data's loader was started again {RESTARTS} times and lost "
                f"again: {lost}. Look for the kernel's out-of-memory killer in dmesg, or read the "
                "data with num_workers=0 to see the error."
            ) from lost
