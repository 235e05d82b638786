"""A trial over several devices, as its leader reads its data and counts its steps.

Every member of a gang, a stage of a pipeline or a replica, has a session of the trial, built from
the same seed. The first one's leads: it has the data, the random streams, and how far the trial
is. The others' read nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.core.errors import TrialError
from shoal.program.ir import Program
from shoal.recipes.recipe import to_device
from shoal.rng import capture_rng, restore_rng, same_rng
from shoal.runtime.session import Session
from shoal.runtime.task import Task

Scalars = Mapping[str, Mapping[str, Any]]
Stored = Mapping[str, Sequence[str]]


class GangSession(Session, ABC):
    """A trial admitted to several devices, at one of them.

    Attributes:
        save_is_due: Asked between two steps, of the leader.
        draws: Whether the model draws random numbers while it trains; None: not known yet.
        drew_ahead: Whether reading a step's batches ahead drew random numbers.
        has_ended: What another member was told of the trial's end.
    """

    save_is_due: Callable[[], bool] = staticmethod(lambda: False)
    draws: bool | None = None
    drew_ahead = False
    has_ended = False

    @property
    def members(self) -> int:
        """How many there are."""
        return self.job.gang

    def learn(self, scalars: Scalars, stored: Stored) -> None:
        """Know of another member's parameters what it knows, beside their tensors."""
        self.binding.take_over(scalars, stored, self._step_places())

    def learn_options(
        self, options: Mapping[int, Mapping[str, Any]], *, but: Sequence[int]
    ) -> None:
        """Know what steps elsewhere left in groups, ``but`` in those that these shards step."""
        own = self.binding.options_of(*but)
        for index, values in options.items():
            if index not in own:
                self.binding.optimizer.param_groups[index].update(values)

    def known_of(self, *shards: int) -> tuple[Scalars, Stored]:
        """What ``learn`` takes, of shards that are here."""
        names = {name for shard in shards for name in self.owned[shard]}
        scalars = {n: v for n, v in self.binding.scalars().items() if n in names}
        return scalars, {n: k for n, k in self.binding.stored_keys().items() if n in names}

    # -- steps --------------------------------------------------------------------------

    @abstractmethod
    def keep_ahead(self, batch: Any) -> None:
        """Keep a batch that was read before it is used."""

    def _read_group(self) -> int:
        """Read a step's batches ahead, where nobody knows how many there are; their number."""
        count, before = 1, capture_rng(self.device)
        while count < self.recipe.accumulate:
            batch = self.feed.next()
            if batch is None:
                break
            self.keep_ahead(batch)
            count += 1
        self.drew_ahead = not same_rng(before, capture_rng(self.device))
        return count

    def refuse_mixed_draws(self) -> None:
        """What was read ahead drew in the plain loop's order only if the model draws nothing.

        Raises:
            TrialError: both draw.
        """
        if self.drew_ahead and self.draws:
            raise TrialError(
                "the training data does not say how many batches it has, so a step's batches are "
                "read ahead; and both they and the model draw random numbers, which would come in "
                "another order than on one device. Give the data a __len__, or train with "
                "technique='spilled'."
            )

    def count_step(self, loss: float) -> None:
        """A step's loss is here."""
        self.step += 1
        self.on_step(loss)

    def _boundary(self) -> Iterator[Task]:
        if self.save_is_due():
            yield Task(Program(()), "save")

    # -- evaluation ---------------------------------------------------------------------

    def _evaluate(self) -> Iterator[Task]:
        """A validation pass, several batches at a time under way; whatever it draws is undone."""
        self.evaluated_at = self.step
        if self.valid_feed is None:
            self._evaluated([])
            return
        saved = capture_rng(self.device)
        tasks = []
        for batch in self.validating.batches(self.valid_feed):
            moved = to_device(batch, self.device)
            tasks.append(Task(Program(()), "evaluation", batches={0: moved}))
            yield tasks[-1]
        yield Task(Program(()), "metrics")
        restore_rng(saved, self.device)
        self._evaluated([task.metrics for task in tasks])
