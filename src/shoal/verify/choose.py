"""Which trials of a study are verified, and which cannot be."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from shoal.core.aim import metric_rank
from shoal.core.errors import SpecError
from shoal.core.event import TrialPlanned
from shoal.observe.reader import read_outline
from shoal.observe.rows import TrialRow, TrialState
from shoal.observe.snapshot import Snapshot
from shoal.resume.since import two_recipes

TRIALS = 2  # that are verified when nobody says how many
ENDED_EARLY = TrialState.PRUNED, TrialState.STOPPED


def without_state(place: Path, snapshot: Snapshot) -> frozenset[int]:
    """Trials that are done and have no checkpoint: ``Study(keep_finished='best:N')``."""
    done = (row for row in snapshot.trials if row.state in (TrialState.FINISHED, *ENDED_EARLY))
    return frozenset(
        r.number for r in done if not r.checkpoint or not (place / r.checkpoint).is_dir()
    )


def choose_trials(
    snapshot: Snapshot, count: int, *, leave_out: Collection[int] = ()
) -> list[TrialRow]:
    """The best finished trial, one that was interrupted, and others drawn at random.

    They are the same each time. What goes wrong where a trial goes on shows in such a one. Where
    fewer finished, also those that were pruned or stopped and have a checkpoint.

    Raises:
        SpecError: no trial got so far, or ``count`` is less than one.
    """
    if count < 1:
        raise SpecError(f"verify at least one trial, got {count}.")
    finished = [row for row in snapshot.trials if row.state is TrialState.FINISHED]
    early = [r for r in snapshot.trials if r.state in ENDED_EARLY and r.number not in leave_out]
    if not finished and not early:
        raise SpecError(
            f"study {snapshot.study} has no finished trial to verify: "
            f"{snapshot.count(TrialState.FAILED)} failed, "
            f"{snapshot.count(TrialState.PENDING) + snapshot.count(TrialState.RUNNING)} not done."
        )

    def rank(row: TrialRow) -> tuple[bool, float, int]:
        value = metric_rank(row.metrics.get(snapshot.metric), snapshot.mode)
        return row.number in leave_out, value, row.number

    best = sorted(finished, key=rank)[:1]
    others = sorted(finished, key=rank)[1:]
    others = [row for row in others if row.number not in leave_out]
    draw = random.Random(0)
    resumed = [row for row in others if row.restarts and not any(b.restarts for b in best)]
    chosen = [*best, *draw.sample(resumed, min(count - len(best), len(resumed), 1))]
    others = [row for row in others if row not in chosen]
    chosen += draw.sample(others, min(count - len(chosen), len(others)))
    return [*chosen, *draw.sample(early, min(count - len(chosen), len(early)))]


def rows_to_verify(
    place: Path, snapshot: Snapshot, count: int | None, numbers: Sequence[int]
) -> list[TrialRow]:
    """The trials of these ``numbers``, and ``count`` more that are chosen; by default TRIALS.

    Raises:
        SpecError: there is no such trial, or none to choose.
    """
    named = named_trials(snapshot, numbers)
    if count is None:
        count = 0 if named else TRIALS
    elif count < 1:
        raise SpecError(f"verify at least one trial, got {count}.")
    if not count:
        return named
    taken = {row.number for row in named}
    leave_out = warm_clones(place) | without_state(place, snapshot)
    leave_out |= with_two_recipes(place, snapshot).keys()
    chosen = choose_trials(snapshot, count + len(named), leave_out=leave_out)
    return [*named, *[row for row in chosen if row.number not in taken][:count]]


def named_trials(snapshot: Snapshot, numbers: Sequence[int]) -> list[TrialRow]:
    """The trials of these numbers, each once, whatever became of them.

    Raises:
        SpecError: the study has no such trial.
    """
    rows = {row.number: row for row in snapshot.trials}
    for number in numbers:
        if number not in rows:
            raise SpecError(
                f"study {snapshot.study} has no trial {number} to verify; it has "
                f"{len(rows)}, numbered from 0."
            )
    return [rows[number] for number in dict.fromkeys(numbers)]


def warm_clones(place: Path) -> frozenset[int]:
    """The trials that began from another one's state, and not from their seed."""
    planned = (event for event in read_outline(place) if isinstance(event, TrialPlanned))
    return frozenset(event.trial for event in planned if event.warm)


def with_two_recipes(place: Path, snapshot: Snapshot) -> dict[int, str]:
    """The trials that no one recipe trains again, each with what to say of it."""
    numbers = {one.recipe for row in snapshot.trials for one in row.recipes}
    if len(numbers) < 2:
        return {}
    found = {row.number: two_recipes(place, row.recipes) for row in snapshot.trials}
    for row in snapshot.trials:
        if row.inherited and not found[row.number]:
            found[row.number] = "its population trained with more than one recipe"
    return {number: words for number, words in found.items() if words}


def skip_reason(
    row: TrialRow,
    warm: Collection[int],
    gone: Collection[int],
    mixed: Mapping[int, str],
) -> str:
    """Why a trial cannot be compared with training alone; empty if it can.

    ``warm`` are clones, ``gone`` those whose checkpoints were not kept, ``mixed`` those of two
    recipes, with what to say of them.
    """
    if row.number in gone:
        return "its checkpoints were not kept (keep_finished='best:N', or removed by hand)"
    if row.number in warm:
        return (
            f"it began from the state of trial {row.parent}, which the plain loop does not have; "
            f"verify trial {row.parent}"
        )
    if row.state is TrialState.FAILED:
        return f"it failed at step {row.step}: {row.error_line}"
    if not row.is_done:
        return f"it has not finished; it is at step {row.step}"
    if row.number in mixed:
        return f"{mixed[row.number]}; with one recipe it cannot be trained again alone"
    return ""
