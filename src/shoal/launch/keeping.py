"""Which checkpoints stay of trials that have ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.core.event import Event, TrialFailed, TrialFinished, TrialPruned
from shoal.observe.rows import metric_rank
from shoal.runtime import checkpoint
from shoal.storage.generations import Generation, Generations


class Keeper:
    """Removes what is not to be kept of trials that end.

    Args:
        keep: Generations that stay of each.
        only_weights: The last generation is all that stays of each.
        best: How many trials keep theirs; None for all.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        only_weights: bool,
        best: int | None,
        metric: str,
        mode: str,
    ) -> None:
        self._keep = keep
        self._directory, self._only_weights, self._best = directory, only_weights, best
        self._metric, self._mode = metric, mode
        self._values: dict[int, float | None] = {}

    def see(self, event: Event) -> None:
        """Note the trials that end; that they did is on record."""
        if isinstance(event, TrialFinished):
            self.finished(event.trial, event.metrics)
        elif isinstance(event, TrialPruned):
            self.pruned(event.trial)
        elif isinstance(event, TrialFailed):
            self.failed(event.trial)

    def finished(self, number: int, metrics: Mapping[str, float]) -> None:
        """A trial has finished, and that is on record."""
        self._values[number] = metrics.get(self._metric)
        place = checkpoint.generations(self._directory, number, self._keep)
        if self._only_weights:
            self._remove(place.all()[:-1])
        else:
            place.collect()
        ranked = sorted(self._values, key=lambda n: (self._rank(n), n))
        for worse in ranked[self._best :] if self._best is not None else ():
            self._remove(checkpoint.generations(self._directory, worse).all())

    def pruned(self, number: int) -> None:
        """Where only the best stay, it is none of them; of its state the last generation stays."""
        place = checkpoint.generations(self._directory, number, self._keep)
        if self._best is not None:
            self._remove(place.all())
        elif self._only_weights:
            self._remove(place.all()[:-1])
        else:
            place.collect()

    def failed(self, number: int) -> None:
        """Of its state as many generations stay as of one that trains."""
        checkpoint.generations(self._directory, number, self._keep).collect()

    def _rank(self, number: int) -> float:
        return metric_rank(self._values[number], self._mode)

    def _remove(self, generations: Iterable[Generation]) -> None:
        for generation in generations:
            Generations(generation.path.parent).remove(generation)
