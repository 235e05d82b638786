"""Which checkpoints stay of trials that have ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.core.aim import Aim
from shoal.core.event import Event, TrialFailed, TrialFinished, TrialPruned
from shoal.observe.reader import read_trial
from shoal.observe.snapshot import Snapshot
from shoal.runtime.saving import checkpoint
from shoal.storage.generations import Generation, Generations


class Keeper:
    """Removes what is not to be kept of trials that end.

    Args:
        keep: Generations that stay of each.
        only_weights: The last generation is all that stays of each.
        best: How many trials keep theirs; None for all.
        aim: The study's, by which they are ranked.
        keep_best: Whether of each its best evaluation's stays too.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        only_weights: bool,
        best: int | None,
        aim: Aim,
        keep_best: bool = False,
    ) -> None:
        self._keep, self._kept_best = keep, aim if keep_best else None
        self._directory, self._only_weights, self._best = directory, only_weights, best
        self._aim = aim
        self._ranks: dict[int, float] = {}  # of the best

    def see(self, event: Event) -> None:
        """Note the trials that end; that they did is on record."""
        if isinstance(event, TrialFinished):
            self.finished(event.trial, self._metrics(event))
        elif isinstance(event, TrialPruned):
            self.pruned(event.trial)
        elif isinstance(event, TrialFailed):
            self.failed(event.trial)

    def _metrics(self, event: TrialFinished) -> Mapping[str, float]:
        """What it ended with; the mean of the last steps' losses is on record alone."""
        if self._best is None or self._aim.metric in event.metrics:
            return event.metrics
        return Snapshot.of(read_trial(self._directory, event.trial)).trial(event.trial).metrics

    def finished(self, number: int, metrics: Mapping[str, float]) -> None:
        """A trial has finished, and that is on record."""
        self._ranks[number] = self._aim.rank(metrics)
        self._let_go(number)
        if self._best is None:
            return
        ranked = sorted(self._ranks, key=lambda n: (self._ranks[n], n))
        for worse in ranked[self._best :]:
            del self._ranks[worse]  # whoever comes, it is none of the best again
            self._remove(self._place(worse).all())

    def pruned(self, number: int) -> None:
        """Where only the best stay, it is none of them; of its state the last generation stays."""
        if self._best is not None:
            self._remove(self._place(number).all())
        else:
            self._let_go(number)

    def failed(self, number: int) -> None:
        """Of its state as many generations stay as of one that trains."""
        self._place(number).collect()

    def _let_go(self, number: int) -> None:
        """Of what was saved on the way."""
        place = self._place(number)
        if self._only_weights:
            best = place.best()
            self._remove(found for found in place.all()[:-1] if found != best)
        else:
            place.collect()

    def _place(self, number: int) -> Generations:
        return checkpoint.generations(self._directory, number, self._keep, self._kept_best)

    def _remove(self, generations: Iterable[Generation]) -> None:
        for generation in generations:
            Generations(generation.path.parent).remove(generation)
