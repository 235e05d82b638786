"""New seats for trials of arrays that go on where others were pruned.

[Note: why at rungs]
A trial that waits at a rung has left its array, and the rung is decided for all of its generation
at once. So its new seat follows from what is decided, like everything of a search, and not from
who was quicker. It is on record before the trial takes its next step, as another epoch of its
numerics key. What is on record stays: a trial that falls back to before it is in its old seat
again, stops at the rung once more, and has the seat that it had.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core.plan import ArrayPlace, Job, seated
from shoal.core.seats import ALONE, OTHERS_PRUNED, Epoch, epochs_of, with_epoch
from shoal.core.spec import Scalar
from shoal.execution.floor import Floor
from shoal.execution.trial import TrialRun
from shoal.search import Rank, Ranks, Search


class Seating:
    """Gives seats; one thread's.

    Args:
        keys: The numerics keys of trials that were planned in earlier runs.
    """

    def __init__(
        self, search: Search, floor: Floor, keys: Mapping[int, Mapping[str, Scalar]]
    ) -> None:
        self._search, self._floor, self._keys = search, floor, keys
        self._ranks = Ranks(search, self._company)

    def _company(self, trial: int) -> str:
        """Whom it shared arrays with when it began."""
        state = self._floor.states.get(trial)
        key = state.job.numerics if state is not None else self._keys.get(trial, {})
        return str(key.get("array_company", ""))

    def next_rung(self, state: TrialRun, every: int, following: int | None) -> int | None:
        """Where a trial stops that has seats to come: at the next rung, decided or not."""
        trial = state.job.trial
        if _first(state.job) is None or self._search.pruned_at(trial) is not None:
            return following
        for rung in self._search.rungs_of(trial):
            if rung * every > state.step:
                return rung if following is None else min(rung, following)
            if following == rung:
                return rung  # it stands there, and it is not decided yet
        return following

    def take(self, state: TrialRun, every: int) -> None:
        """Put a trial that stands at a rung where its rank has it; it is on no device."""
        first, (rung, rest) = _first(state.job), divmod(state.step, every)
        if first is None or rest or not rung:
            return
        before = epochs_of(state.job.numerics)
        epochs = (
            with_epoch(before, epoch) if (epoch := self._epoch(state, first, rung)) else before
        )
        if epochs == before:
            return
        state.job = seated(state.job, epochs)
        if epochs[-1] not in state.seats:
            state.seats = epochs
            why = f"{OTHERS_PRUNED}: {state.seats[-1]}"
            self._floor.tell_replanned(state.job, state.step, why)

    def _epoch(self, state: TrialRun, first: ArrayPlace, rung: int) -> Epoch | None:
        """The seat after a rung, as is on record, or by its rank; None where it keeps the one."""
        known = {epoch.step: epoch for epoch in state.seats}
        if state.step in known:
            return known[state.step]
        if self._search.went_on(state.job.trial, rung) or max(known, default=0) > state.step:
            return None  # it trained on after the rung, in the seat that it had
        rank = self._ranks.after(state.job.trial, rung)
        return _seat(first, rank, state.step, state.job) if rank is not None else None


def _seat(first: ArrayPlace, rank: Rank, step: int, job: Job) -> Epoch | None:
    """In the narrowest array that is for so many, or by itself.

    Within a width only where slots were shared: else all have one each, and who goes on may stay.
    """
    if rank.trials <= first.alone_most:
        return Epoch(step, 0, ALONE)
    width = min(r.width for r in first.rooms if r.most is None or rank.trials <= r.most)
    if job.array is not None and job.array.width == width and rank.had < 2 * width:
        return None
    return Epoch(step, rank.place % width, width)


def _first(job: Job) -> ArrayPlace | None:
    """The array in which it began, of a trial that may get other seats."""
    first = job.began or job.array
    may_move = first is not None and bool(first.rooms) and "array_widths" in job.numerics
    has_left = any(epoch.for_good for epoch in epochs_of(job.numerics))
    return first if may_move and not has_left else None
