"""What ran against what is asked for now: what goes on, what is new, what is refused.

    recorded   study.json: what the trials that are there were asked for
    progress   how far each of them came
    asked      the study as its file says now

More is welcome (trials, epochs, a wider space), and what changes no trained bit (metric,
mode, how often to evaluate and to save). Refused is what would make trials of one study
differ in more than their hyperparameters, or throw training away (see refuse.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shoal.core.spec import TrialSpec
from shoal.core.units import counted, list_some
from shoal.observe.rows import TrialState
from shoal.resume import refuse
from shoal.resume.recipe import RecipeRecord
from shoal.resume.record import StudyRecord, TrialRecord
from shoal.resume.trials import Pairing, number_on, pair


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProgress:
    """How far a trial came.

    ``step`` is its last one, ``epoch`` that step's, counted from 1; both 0 before the
    first. ``target`` is how many epochs or steps it was to run, as the study counts;
    None for the record's. ``has_full_state``: can it train on from what was kept?
    """

    state: TrialState = TrialState.PENDING
    step: int = 0
    epoch: int = 0
    has_full_state: bool = True
    target: int | None = None


Progress = Mapping[int, TrialProgress]
_NOTHING = TrialProgress()


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A study that goes on: its trials by number, and what each of them does now.

    ``ended`` stay as they are, ``continued`` train on or begin at last, ``added`` are
    new; together these are all ``trials``. ``changes`` says in a sentence each what is
    asked for now and was not before. ``record`` is what to write into ``study.json``.
    """

    trials: tuple[TrialSpec, ...]
    ended: tuple[int, ...]
    continued: tuple[int, ...]
    added: tuple[int, ...]
    changes: tuple[str, ...]
    record: StudyRecord


def merge(
    recorded: StudyRecord,
    progress: Progress,
    asked: StudyRecord,
    *,
    accept_recipe: bool = False,
) -> Merged:
    """The study that is asked for, with the trials that are there.

    They keep their numbers and seeds whatever order a wider space has. A trial that
    failed stays failed, unless nothing was trained yet and the recipe is another one. A
    trial that was stopped goes on only where there is more to do than it was stopped from.

    Args:
        accept_recipe: Whether trials may go on with another recipe than they trained with.

    Raises:
        SpecError: what cannot be merged, what was found, and what to do.
    """
    is_same_recipe = recorded.recipe.is_same(asked.recipe)
    pairing = _pairing(recorded, asked)
    longer = tuple(_with_more_to_do(recorded, progress, asked))
    is_first = not _trained(progress)
    accepts = is_same_recipe or is_first or accept_recipe
    refuse.another_study(recorded, asked)
    refuse.another_unit(recorded, asked)
    refuse.another_search(recorded, asked, accepts_sampler=accept_recipe)
    _refuse(recorded, progress, asked, pairing, accepts_recipe=accepts)
    refuse.weights_only(recorded, asked, _without_state(progress, longer))
    new = number_on(replace(asked, trials=recorded.trials), pairing.new, "asked")
    merged = replace(
        asked,
        trials=recorded.trials + new,
        additions=recorded.additions,
        fuse=recorded.fuse if asked.fuse is None else asked.fuse,
        recipe=recorded.recipe.allowing(asked.recipe) if is_same_recipe else asked.recipe,
        older=recorded.older if is_same_recipe or is_first else recorded.recipes,
    )
    may_retry = is_first and not is_same_recipe
    ended = tuple(_ended(recorded.trials, progress, longer, may_retry=may_retry))
    return Merged(
        trials=tuple(trial.to_spec() for trial in merged.trials),
        ended=ended,
        continued=tuple(t.number for t in recorded.trials if t.number not in ended),
        added=tuple(trial.number for trial in new),
        changes=(*_changes(recorded, merged, longer), *_more_trials(new)),
        record=merged,
    )


def _pairing(recorded: StudyRecord, asked: StudyRecord) -> Pairing:
    """Which points are new and which trials nobody asks for any more.

    Where a sampler goes by results, what is on record counts: what it would say today, of the
    first trials too, is the search's to compare, and any further trials are its to ask for.
    """
    if recorded.is_adaptive and asked.is_adaptive:
        return Pairing((), ())
    return pair(recorded.trials, [trial.hp for trial in asked.trials])


def _refuse(
    recorded: StudyRecord,
    progress: Progress,
    asked: StudyRecord,
    pairing: Pairing,
    *,
    accepts_recipe: bool,
) -> None:
    """Say no to the first thing of the same search that cannot be merged."""
    if recorded.is_adaptive:
        refuse.another_space(recorded, asked)
    refuse.another_seed(recorded, asked)
    refuse.missing_trials(recorded, asked, pairing.missing)
    if _trained(progress):
        refuse.another_evaluation(recorded, asked)
    if not accepts_recipe:
        refuse.another_recipe(recorded, asked, _trained(progress))
    refuse.less_training(asked, {n: _done(asked, known) for n, known in progress.items()})


# -- which trials -----------------------------------------------------------------------------


def _done(asked: StudyRecord, known: TrialProgress) -> int:
    """How much of its length a trial has begun."""
    return known.epoch if asked.unit == "epochs" else known.step


def _with_more_to_do(
    recorded: StudyRecord, progress: Progress, asked: StudyRecord
) -> Iterable[int]:
    """The trials that had come to their end, and now have a later one."""
    for number, known in sorted(progress.items()):
        target = recorded.length if known.target is None else known.target
        has_ended = known.state in (TrialState.FINISHED, TrialState.STOPPED)
        has_ended |= known.state is TrialState.PENDING and known.target is not None  # by its files
        if has_ended and asked.length > target:
            yield number


def _trained(progress: Progress) -> list[int]:
    return sorted(number for number, known in progress.items() if known.step)


def _without_state(progress: Progress, numbers: Iterable[int]) -> list[int]:
    return [n for n in numbers if progress[n].step and not progress[n].has_full_state]


def _ended(
    trials: Iterable[TrialRecord], progress: Progress, longer: tuple[int, ...], *, may_retry: bool
) -> Iterable[int]:
    for trial in trials:
        state = progress.get(trial.number, _NOTHING).state
        stays = state in (TrialState.FINISHED, TrialState.STOPPED) and trial.number not in longer
        if stays or state is TrialState.PRUNED or (state is TrialState.FAILED and not may_retry):
            yield trial.number


# -- in words ---------------------------------------------------------------------------------


def _more_trials(new: tuple[TrialRecord, ...]) -> Iterable[str]:
    if new:
        yield f"{counted(len(new), 'more trial')}: {list_some(trial.number for trial in new)}."


def _changes(recorded: StudyRecord, merged: StudyRecord, longer: tuple[int, ...]) -> Iterable[str]:
    """A sentence for each difference that is accepted."""
    if len(merged.older) > len(recorded.older):
        names = ", ".join(refuse.differences(recorded.recipe, merged.recipe)[0])
        yield (
            f"another recipe from here on, as was accepted (changed: {names}): trials that have "
            "not ended train on with it from their last state; those that ended keep what they "
            "have."
        )
        yield from _other_rates(recorded.recipe, merged.recipe)
    elif not merged.recipe.is_same(recorded.recipe):
        yield "another recipe: no trial had a step of the one before."
    else:
        yield from _other_permissions(recorded, merged)
    if other := refuse.other_sampler(recorded, merged):
        name, was, now = other
        yield (
            f"another sampler from here on, as was accepted: it has {name}={now}, before {was}; "
            "trials on record keep their points."
        )
    if merged.space != recorded.space:
        yield f"the space is {merged.space}; it was {recorded.space}."
    if merged.length != recorded.length:
        again = f" Trials that had ended go on: {list_some(longer)}." if longer else ""
        length = counted(merged.length, merged.unit.removesuffix("s"))
        yield f"{length} instead of {recorded.length}.{again}"
    elif longer:
        yield f"trials that had ended before go on: {list_some(longer)}."
    if merged.eval_every != recorded.eval_every:
        yield (
            f"evaluated {_how_often(merged)}, before {_how_often(recorded)}: histories have rows "
            "of both, the training is the same."
        )
    if (merged.metric, merged.mode) != (recorded.metric, recorded.mode):
        yield (
            f"ranked by {merged.mode} {merged.metric}, before by {recorded.mode} "
            f"{recorded.metric}: the training is the same."
        )
    if merged.seed != recorded.seed:
        yield (
            f"seed {merged.seed}, before {recorded.seed}: every trial has a seed of its own among "
            "its hyperparameters, and keeps it."
        )
    if recorded.fuse not in (None, merged.fuse):
        yield (
            f"fuse={merged.fuse or 'off'}; it was {recorded.fuse or 'off'}. Trials that have "
            "begun stay in the width that they have, unless other bits are accepted "
            "(--accept-numerics, accept_numerics=True)."
        )
    yield from _checkpoint_changes(recorded, merged)


def _other_rates(was: RecipeRecord, now: RecipeRecord) -> Iterable[str]:
    """What becomes of rates where what makes optimizers or schedules is another one."""
    changed = [
        name for name in ("optimizer", "schedule") if was.made_of(name) != now.made_of(name)
    ]
    begins, ends = ("schedule" not in recipe.fields for recipe in (was, now))
    paced, pace = (recipe.fields.get("schedule_interval") for recipe in (was, now))
    is_paced_otherwise = paced != pace and not (begins or ends)
    if is_paced_otherwise or (changed and not (changed == ["schedule"] and (begins or ends))):
        yield (
            "the options of optimizers and schedules are a part of that state (learning rates "
            "among them): what changed of these holds for trials that have no step yet. One whose "
            "optimizer or schedule is of another class now, or whose schedule goes by something "
            "else, fails, and what it saved stays. A schedule in place of none begins where the "
            "trial stands."
        )
    if begins and not ends:
        yield (
            "the schedule is new: in a trial that has steps it begins where the trial stands, "
            "from the learning rate that the optimizer is made with."
        )
    if ends and not begins:
        yield (
            "there is no schedule any more: a trial that has steps keeps the learning rate that "
            "it left."
        )


def _other_permissions(recorded: StudyRecord, merged: StudyRecord) -> Iterable[str]:
    """What the recipe allows now and did not, or the other way round."""
    was, now = recorded.recipe.allows(), merged.recipe.allows()
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            before, after = (allowed.get(name, "(default)") for allowed in (was, now))
            yield (
                f"Recipe({name}={after}); it was {before}: trials that have begun go on as they "
                "began."
            )


def _how_often(record: StudyRecord) -> str:
    every = record.eval_every
    return f"every {counted(every, 'step')}" if every else "at each epoch's end"


def _checkpoint_changes(recorded: StudyRecord, merged: StudyRecord) -> Iterable[str]:
    for name in sorted({*recorded.checkpoint, *merged.checkpoint}):
        old, now = recorded.checkpoint.get(name), merged.checkpoint.get(name)
        if old != now:
            yield f"{name} is {now!r}; it was {old!r}."
