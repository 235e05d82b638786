"""What ran against what is asked for: merged, or refused with what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import choice, grid
from shoal.core.errors import SpecError
from shoal.core.spec import Scalar, TrialSpec
from shoal.observe.rows import TrialState
from shoal.resume import (
    StudyRecord,
    TrialProgress,
    TrialRecord,
    merge,
    with_clone,
    with_points,
    with_searched,
)
from shoal.resume.recipe import RecipeRecord, record_of
from shoal.search import sample

Point = Mapping[str, Scalar]
RECIPE = record_of({"model": "build"}, {"build": "def build(hp):\n    return 1", "N": "N = 1"})
OTHER = record_of({"model": "build"}, {"build": "def build(hp):\n    return 2", "N": "N = 1"})


def study(points: Sequence[Point], **changes: Any) -> StudyRecord:
    """A study over a list of points, for 3 epochs."""
    seed = changes.get("seed", 0)
    trials = tuple(
        TrialRecord(number=n, hp=hp, seed=hp.get("seed", seed + n))  # type: ignore[arg-type]
        for n, hp in enumerate(points)
    )
    usual: dict[str, Any] = {
        "name": "sweep",
        "space": f"{len(points)} points",
        "epochs": 3,
        "steps": None,
        "eval_every": None,
        "metric": "valid_loss",
        "mode": "min",
        "seed": 0,
        "recipe": RECIPE,
    }
    return StudyRecord(trials=trials, **{**usual, **changes})


def points(count: int, first: int = 0) -> list[Point]:
    return [{"lr": 0.1 * (n + 1)} for n in range(first, first + count)]


FINISHED = TrialProgress(state=TrialState.FINISHED, step=30, epoch=3, target=3)
RUNNING = TrialProgress(state=TrialState.RUNNING, step=12, epoch=2, target=3)
FAILED = TrialProgress(state=TrialState.FAILED, step=4, epoch=1, target=3)
STOPPED = TrialProgress(state=TrialState.STOPPED, step=5, epoch=1, target=3)
PRUNED = TrialProgress(state=TrialState.PRUNED, step=5, epoch=1, target=3)
PENDING = TrialProgress(target=3)


def refusal(recorded: StudyRecord, progress: Any, asked: StudyRecord) -> str:
    with pytest.raises(SpecError) as refused:
        merge(recorded, progress, asked)
    text = str(refused.value)
    assert text.startswith("cannot ")
    return text


# ---------------------------------------------------------------- what is merged


def test_the_same_study_goes_on_where_it_was() -> None:
    recorded = study(points(5))

    merged = merge(
        recorded, dict(enumerate([FINISHED, RUNNING, FAILED, STOPPED])), study(points(5))
    )

    assert (merged.ended, merged.continued, merged.added) == ((0, 2, 3), (1, 4), ())
    assert merged.changes == ()
    assert merged.record == recorded
    assert merged.trials[1] == TrialSpec(number=1, hp={"lr": 0.2}, seed=1)


STAYS = (
    "Trials that have begun stay in the width that they have, unless other bits are accepted "
    "(--accept-numerics, accept_numerics=True)."
)


@pytest.mark.parametrize(
    ("before", "asked", "then", "words"),
    [
        (None, None, None, ()),
        (2, None, 2, ()),
        (None, 2, 2, ()),
        (2, 2, 2, ()),
        (2, "auto", "auto", (f"fuse=auto; it was 2. {STAYS}",)),
        ("16/4/1", 0, 0, (f"fuse=off; it was 16/4/1. {STAYS}",)),
        (0, None, 0, ()),
    ],
)
def test_what_was_asked_of_arrays_holds_until_something_else_is(
    before, asked, then, words
) -> None:
    recorded = study(points(2), fuse=before)

    merged = merge(recorded, {0: RUNNING}, study(points(2), fuse=asked))

    assert merged.record.fuse == then
    assert merged.changes == words


SEARCH = {"sampler": "tpe", "pruner": "asha", "generation": "9"}


def test_a_search_goes_on_with_the_trials_that_its_sampler_came_to() -> None:
    first = study(points(3), search=SEARCH)
    recorded = with_searched(first, points(2, first=7))

    merged = merge(recorded, dict(enumerate([FINISHED, PRUNED, RUNNING, FAILED])), first)

    assert (merged.ended, merged.continued, merged.added) == ((0, 1, 3), (2, 4), ())
    assert merged.record == recorded
    assert [t.origin for t in merged.record.trials] == ["asked"] * 3 + ["searched"] * 2
    assert merged.trials[4] == TrialSpec(number=4, hp={"lr": 0.1 * 9}, seed=4)


def test_clones_change_no_seed_of_the_trials_that_a_search_comes_to_later() -> None:
    first = study(points(3), search=SEARCH)
    cloned = with_clone(first, 1, {}, warm=False)
    found = with_searched(cloned, points(2, first=7)).trials
    assert [t.seed for t in found if t.origin == "searched"] == [3, 4]
    assert [t.number for t in found] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"search": {**SEARCH, "pruner": "median"}}, "pruner=asha, and pruner=median is asked"),
        ({"search": {}}, "sampler=tpe, and sampler=grid or random is asked"),
        ({"epochs": 4}, "epochs=3, and epochs=4 is asked"),
        ({"eval_every": 5}, "eval_every=None, and eval_every=5 is asked"),
        ({"metric": "valid_accuracy"}, "metric=valid_loss, and metric=valid_accuracy"),
        ({"seed": 1}, "seed=0, and seed=1 is asked"),
    ],
)
def test_what_trials_of_a_search_follow_from_stays(change: dict[str, Any], words: str) -> None:
    recorded = study(points(3), search=SEARCH)
    asked = study(points(3), **{"search": SEARCH, **change})

    assert words in refusal(recorded, {}, asked)


def test_what_is_on_record_counts_though_the_sampler_says_otherwise_from_the_start() -> None:
    recorded = study(points(3), search=SEARCH)

    today = study(points(5, first=20), search=SEARCH)
    merged = merge(recorded, {}, replace(today, space=recorded.space))

    assert merged.record.trials == recorded.trials
    assert (merged.continued, merged.added) == ((0, 1, 2), ())


def test_a_sampler_goes_on_in_its_own_space_only() -> None:
    recorded = study(points(3), search=SEARCH)
    asked = replace(recorded, space="lr=Uniform(lo=0.0, hi=9.0, log=False)")

    assert "its sampler drew from the space" in refusal(recorded, {}, asked)


@pytest.mark.parametrize("what", ["sampler", "pruner"])
def test_a_parameter_that_both_have_stays_and_others_may_come_and_go(what: str) -> None:
    def made(values: str) -> StudyRecord:
        return study(points(3), search={**SEARCH, f"{what} parameters": values})

    recorded = made('{"n_startup_trials": "10", "old": "1"}')

    merge(recorded, {}, made('{"n_startup_trials": "10", "new": "2"}'))
    merge(study(points(3), search=SEARCH), {}, recorded)  # a record of before they were kept
    text = refusal(recorded, {}, made('{"n_startup_trials": "5"}'))
    assert f"its {what}, {SEARCH[what]}, had n_startup_trials=10, and n_startup_trials=5" in text


def test_a_sampler_made_with_other_values_can_be_accepted_and_a_pruner_cannot() -> None:
    def made(what: str, value: int) -> StudyRecord:
        return study(points(3), search={**SEARCH, f"{what} parameters": f'{{"n": "{value}"}}'})

    merged = merge(made("sampler", 1), {}, made("sampler", 2), accept_recipe=True)
    assert merged.record == made("sampler", 2)
    (words,) = merged.changes
    assert "another sampler from here on, as was accepted: it has n=2, before 1" in words
    with pytest.raises(SpecError, match="its pruner, asha, had n=1"):
        merge(made("pruner", 1), {}, made("pruner", 2), accept_recipe=True)


def test_a_pruner_of_the_studys_own_file_is_the_same_however_that_was_read() -> None:
    run, imported = (
        study(points(3), search={**SEARCH, "pruner": f"{main}'s Cut"})
        for main in ("__main__", "__shoal_main__")
    )
    merge(run, {}, imported)
    merge(imported, {}, run)


def test_one_pruner_does_not_become_another_beside_a_random_sampler() -> None:
    plain = {"sampler": "random", "pruner": "asha", "generation": "9"}
    asked = study(points(3), search={**plain, "pruner": "median"})

    text = refusal(study(points(3), search=plain), {}, asked)
    assert "had pruner=asha, and pruner=median is asked" in text


def test_a_plain_study_becomes_no_search() -> None:
    text = refusal(study(points(3)), {}, study(points(3), search=SEARCH))

    assert "its search had sampler=grid or random, and sampler=tpe is asked for now" in text


def test_a_wider_grid_keeps_the_numbers_that_are_there() -> None:
    narrow = sample(grid(width=[1, 2], lr=[0.1]), None)
    wide = sample(grid(width=[1, 3, 2], lr=[0.1, 0.2]), None)

    merged = merge(study(narrow), {}, study(wide))

    assert [(t.number, t.hp, t.seed) for t in merged.trials[:3]] == [
        (0, {"width": 1, "lr": 0.1}, 0),
        (1, {"width": 2, "lr": 0.1}, 1),
        (2, {"width": 1, "lr": 0.2}, 2),
    ]
    assert merged.added == (2, 3, 4, 5)
    assert merged.changes == (
        "the space is 6 points; it was 2 points.",
        "4 more trials: 2 to 5.",
    )


def test_one_and_one_point_zero_are_two_points() -> None:
    merged = merge(study([{"n": 1}]), {}, study([{"n": 1.0}, {"n": 1}, {"n": True}]))

    assert [repr(t.hp["n"]) for t in merged.trials] == ["1", "1.0", "True"]


def test_a_point_that_was_drawn_twice_is_two_trials() -> None:
    merged = merge(study([{"n": 1}, {"n": 1}]), {}, study([{"n": 1}, {"n": 1}, {"n": 1}]))

    assert merged.added == (2,)
    assert merged.changes[-1] == "1 more trial: 2."


def test_more_random_trials_are_the_same_ones_and_then_more() -> None:
    space = {"n": choice(*range(4))}

    merged = merge(
        study(sample(space, 8, sampler="random")), {}, study(sample(space, 12, sampler="random"))
    )

    assert [t.hp for t in merged.trials] == sample(space, 12, sampler="random")
    assert [t.seed for t in merged.trials] == list(range(12))


def test_a_seed_among_the_hyperparameters_is_the_trials_seed() -> None:
    merged = merge(study([{"seed": 7}]), {}, study([{"seed": 8}, {"seed": 7}]))

    assert [(t.number, t.seed) for t in merged.trials] == [(0, 7), (1, 8)]


def test_more_epochs_send_finished_and_stopped_trials_on() -> None:
    merged = merge(
        study(points(4)),
        dict(enumerate([FINISHED, FINISHED, STOPPED, FAILED])),
        study(points(4), epochs=6),
    )

    assert merged.continued == (0, 1, 2)
    assert merged.ended == (3,)
    assert merged.changes == ("6 epochs instead of 3. Trials that had ended go on: 0 to 2.",)


def test_a_trial_that_ended_before_the_last_extension_goes_on_too() -> None:
    recorded = study(points(2), epochs=6)
    progress = {0: FINISHED, 1: replace(FINISHED, target=6, epoch=6)}

    merged = merge(recorded, progress, recorded)

    assert (merged.ended, merged.continued) == ((1,), (0,))
    assert merged.changes == ("trials that had ended before go on: 0.",)


def test_fewer_epochs_are_welcome_where_nobody_got_that_far() -> None:
    merged = merge(study(points(1)), {0: RUNNING}, study(points(1), epochs=2))

    assert merged.changes == ("2 epochs instead of 3.",)
    assert merged.continued == (0,)


def test_what_changes_no_bit_is_accepted_and_said() -> None:
    asked = study(
        points(1), eval_every=5, metric="valid_accuracy", mode="max", checkpoint={"keep": 4}
    )

    merged = merge(study(points(1), checkpoint={"keep": 2, "reserve": 1}), {0: RUNNING}, asked)

    assert merged.changes == (
        "evaluated every 5 steps, before at each epoch's end: histories have rows of both, the "
        "training is the same.",
        "ranked by max valid_accuracy, before by min valid_loss: the training is the same.",
        "keep is 4; it was 2.",
        "reserve is None; it was 1.",
    )
    assert merged.record == asked


def test_another_seed_is_accepted_where_every_trial_has_its_own() -> None:
    merged = merge(study([{"seed": 3}]), {0: RUNNING}, study([{"seed": 3}], seed=5))

    assert merged.changes[0].startswith("seed 5, before 0: every trial has a seed of its own")
    assert merged.trials[0].seed == 3


def test_another_recipe_is_accepted_while_nothing_is_trained() -> None:
    broken = replace(FAILED, step=0, epoch=0)

    merged = merge(study(points(2)), {0: broken}, study(points(2), recipe=OTHER))

    assert merged.changes == ("another recipe: no trial had a step of the one before.",)
    assert merged.continued == (0, 1)  # what failed to build may do better now
    assert merged.record.recipes == (OTHER,)


def test_what_the_recipe_only_allows_may_change_while_trials_train() -> None:
    allows = record_of({**RECIPE.fields, "stale": "Stale(efficiency=0.8)"}, RECIPE.sources)
    before, after = study(points(1)), study(points(1), recipe=allows)

    merged = merge(before, {0: RUNNING}, after)

    assert merged.continued == (0,)
    assert merged.record.recipe == allows
    assert merged.changes == (
        "Recipe(stale=Stale(efficiency=0.8)); it was (default): trials that have begun go on as "
        "they began.",
    )
    back = merge(merged.record, {0: RUNNING}, before)
    assert back.record.recipe == RECIPE
    other = record_of({**allows.fields, "accumulate": "7"}, RECIPE.sources)
    said = refusal(before, {0: RUNNING}, study(points(1), recipe=other))
    assert "Recipe(accumulate=...)" in said
    assert "stale" not in said


def test_trials_added_by_hand_are_kept_though_nobody_asks() -> None:
    recorded = with_clone(with_points(study(points(2)), points(3), 1), 0, {"lr": 9.0}, warm=True)

    merged = merge(recorded, {0: FINISHED}, study(points(2)))

    assert merged.changes == ()
    assert merged.record == replace(recorded, space="2 points")
    assert merged.trials[3] == TrialSpec(number=3, hp={"lr": 9.0}, seed=3, parent=0, warm=True)


def test_a_trial_added_by_hand_is_the_point_that_is_asked_for_later() -> None:
    recorded = with_points(study(points(2)), points(3), 1)

    merged = merge(recorded, {}, study(points(4)))

    assert merged.added == (3,)
    assert merged.trials[3].hp == points(4)[3]


def test_a_clone_stands_for_no_point() -> None:
    recorded = with_clone(study(points(2)), 0, {"lr": points(3)[2]["lr"]}, warm=False)

    merged = merge(recorded, {}, study(points(3)))

    assert merged.added == (3,)


# ---------------------------------------------------------------- what is refused


def test_a_narrower_space_is_refused_with_the_trials_it_lost() -> None:
    said = refusal(study(points(6)), {}, study(points(1)))

    assert "5 of its 6 trials are not asked for any more: trial 1 (lr=0.2); trial 2" in said
    assert "and 2 more. Ask for all of them again" in said
    assert "overwrite=True" in said


def test_a_new_name_in_the_space_is_named() -> None:
    said = refusal(study([{"lr": 0.1}]), {}, study([{"rate": 0.1, "depth": 3}]))

    assert "The space no longer has lr and now has depth, rate." in said


def test_less_than_some_trial_did_is_refused() -> None:
    progress = {0: FINISHED, 1: RUNNING, 4: FINISHED}

    said = refusal(study(points(5)), progress, study(points(5), epochs=2))

    assert "for epochs=2: trials 0, 4 trained longer, up to 3 epochs." in said
    assert "at least epochs=3" in said


def test_steps_are_compared_with_steps() -> None:
    recorded, asked = (study(points(1), epochs=None, steps=n) for n in (20, 11))

    assert "trial 0 trained longer, up to 12 steps" in refusal(recorded, {0: RUNNING}, asked)
    assert merge(recorded, {0: RUNNING}, replace(asked, steps=12)).changes == (
        "12 steps instead of 20.",
    )


def test_epochs_do_not_become_steps() -> None:
    said = refusal(study(points(1)), {}, study(points(1), epochs=None, steps=9))

    assert "it trains for epochs=3, and steps=9 is asked for now. Give the length in ep" in said


def test_another_seed_is_refused_where_trials_seeds_came_from_it() -> None:
    said = refusal(study(points(2)), {}, study(points(2), seed=5))

    assert "with seed=5: it has seed=0, and the seeds of 2 trials came from it" in said


def test_another_study_is_refused() -> None:
    said = refusal(study(points(1)), {}, study(points(1), name="other"))

    assert "cannot go on with study 'other': the directory holds study 'sweep'" in said


def test_another_recipe_is_refused_with_the_difference() -> None:
    said = refusal(
        study(points(4)), dict.fromkeys(range(4), RUNNING), study(points(4), recipe=OTHER)
    )

    assert "trials 0 to 3 trained with another recipe" in said
    assert "Changed: build.\n  @@ -1,2 +1,2 @@\n   def build(hp):\n" in said
    assert "  -    return 1\n  +    return 2\n" in said
    assert "accept_recipe=True (--accept-recipe)" in said


def test_another_recipe_that_is_accepted_is_on_record_beside_the_one_before() -> None:
    recorded = study(points(4))
    progress = dict(enumerate([FINISHED, RUNNING, FAILED]))

    merged = merge(recorded, progress, study(points(4), recipe=OTHER), accept_recipe=True)

    assert (merged.ended, merged.continued) == ((0, 2), (1, 3))
    assert merged.record.recipes == (RECIPE, OTHER)
    (change,) = merged.changes
    assert (
        "another recipe from here on, as was accepted (changed: build): trials that have not"
        in change
    )
    again = merge(merged.record, progress, study(points(4), recipe=OTHER))
    assert (again.changes, again.record) == ((), merged.record)
    back = refusal(merged.record, progress, study(points(4)))
    assert "  -    return 2\n  +    return 1\n" in back


def recipe(fields: Mapping[str, str] | None = None, **sources: str) -> RecipeRecord:
    return record_of(fields or {"model": "build"}, sources)


SCHEDULED = {"model": "build", "optimizer": "opt", "schedule": "mine.sched"}
TEXTS = {
    "build": "def build(): pass",
    "opt": "def opt(named, hp): return SGD(named, lr=0.1)",
    "mine.sched": "def sched(o, hp): return StepLR(o, STEPS, gamma)",
    "mine.sched: gamma": "gamma = 0.9",
    "STEPS": "STEPS = 3",
    "metric": "def metric(): pass",
}
KEPT, NEW, GONE = "a part of that state (learning rates", "the schedule is new", "no schedule any"


@pytest.mark.parametrize(
    ("fields", "texts", "words"),
    [
        ({}, {"metric": "def metric(): return 1"}, ""),
        ({}, {"opt": "def opt(named, hp): return SGD(named, lr=0.2)"}, KEPT),
        ({}, {"STEPS": "STEPS = 4"}, KEPT),
        ({}, {"mine.sched: gamma": "gamma = 0.5"}, KEPT),
        ({"schedule": None}, {}, GONE),
        ({"schedule_interval": "'epoch'"}, {}, KEPT),
    ],
)
def test_what_becomes_of_rates_is_said_where_what_makes_them_changed(
    fields: dict[str, str | None], texts: dict[str, str], words: str
) -> None:
    """Whatever its functions are called, and where a number stands that they name."""
    now = {name: text for name, text in (SCHEDULED | fields).items() if text is not None}
    old, new = record_of(SCHEDULED, TEXTS), record_of(now, TEXTS | texts)

    merged = merge(
        study(points(1), recipe=old),
        {0: RUNNING},
        study(points(1), recipe=new),
        accept_recipe=True,
    )

    assert [word for word in (KEPT, NEW, GONE) if word in " ".join(merged.changes)] == (
        [words] if words else []
    )


@pytest.mark.parametrize("paced", [{}, {"schedule_interval": "'epoch'"}], ids=["steps", "epochs"])
def test_that_a_schedule_is_new_or_gone_is_said(paced: dict[str, str]) -> None:
    without = {name: text for name, text in SCHEDULED.items() if name != "schedule"}
    few, all_ = (
        study(points(1), recipe=record_of(fields, TEXTS))
        for fields in (without, SCHEDULED | paced)
    )
    for recorded, asked, words in ((few, all_, NEW), (all_, few, GONE)):
        changes = merge(recorded, {0: RUNNING}, asked, accept_recipe=True).changes
        assert [one for one in (KEPT, NEW, GONE) if one in " ".join(changes)] == [words]


def test_a_changed_field_a_new_and_a_lost_definition_are_named() -> None:
    old = recipe({"model": "build", "loss": "mse"}, build="def build(): pass", mse="mse = 1")
    now = recipe({"model": "build", "accumulate": "2"}, build="def build(): pass", mae="mae = 1")

    said = refusal(study(points(1), recipe=old), {0: RUNNING}, study(points(1), recipe=now))

    assert "Changed: mse, mae, Recipe(loss=...), Recipe(accumulate=...)." in said
    for line in ("-mse = 1", "+mae = 1", "-loss=mse", "+loss=(default)", "+accumulate=2"):
        assert f"\n  {line}\n" in said


def test_a_long_difference_is_cut() -> None:
    old, now = (
        recipe(build="\n".join(f"a{n} = {factor * n}" for n in range(99))) for factor in (1, 2)
    )

    said = refusal(study(points(1), recipe=old), {0: RUNNING}, study(points(1), recipe=now))

    assert len(said.splitlines()) < 45
    assert re.search(r"\.\.\. and \d+ more lines", said)


def test_a_trial_with_its_weights_only_cannot_train_on() -> None:
    bare = replace(FINISHED, has_full_state=False)
    progress = {0: bare, 1: FINISHED, 2: bare}

    said = refusal(study(points(3)), progress, study(points(3), epochs=6))

    assert said.startswith("cannot train trials 0, 2 of study 'sweep' on to epochs=6: of a fin")
    assert "Put epochs=3 back, or run a study of another name with keep_finished='all'" in said
    assert merge(study(points(3)), progress, study(points(3))).ended == (0, 1, 2)


# ---------------------------------------------------------------- extending and cloning


def test_more_points_are_numbered_on() -> None:
    record = with_points(study(points(2), seed=5), points(9), 3)

    assert [(t.number, t.hp["lr"], t.seed, t.origin) for t in record.trials[2:]] == [
        (n, points(9)[n]["lr"], 5 + n, "extended") for n in (2, 3, 4)
    ]
    assert record.sampled == 5


def test_a_clone_has_its_parents_settings_but_for_the_changes() -> None:
    record = study([{"lr": 0.1, "width": 8, "seed": 4}])

    warm = with_clone(record, 0, {"lr": 1}, warm=True)
    cold = with_clone(warm, 1, {"seed": 9}, warm=False)

    assert warm.trials[1] == TrialRecord(
        number=1,
        hp={"lr": 1.0, "width": 8, "seed": 4},
        seed=4,
        origin="cloned",
        parent=0,
        warm=True,
    )
    assert repr(warm.trials[1].hp["lr"]) == "1.0"
    assert (cold.trials[2].seed, cold.trials[2].hp["seed"], cold.trials[2].parent) == (9, 9, 1)
    assert cold.sampled == 1


@pytest.mark.parametrize(
    ("number", "changes", "said"),
    [
        (9, {}, "study 'sweep' has no trial 9; it has 2: 0, 1."),
        (0, {"rate": 1}, "trial 0 has no hyperparameter 'rate' to change; it has 'lr', 'width'"),
        (0, {"width": 0.5}, "'width' is int in study 'sweep', got 0.5"),
        (0, {"width": True}, "'width' is int in study 'sweep', got True"),
        (0, {"lr": "0.1"}, "'lr' is NoneType or float in study 'sweep', got '0.1'"),
        (1, {"seed": -1}, "trial 1 has no hyperparameter 'seed'"),
    ],
)
def test_a_clone_that_cannot_be_is_refused(
    number: int, changes: dict[str, Scalar], said: str
) -> None:
    record = study([{"lr": 0.1, "width": 8}, {"lr": None, "width": 8}])

    with pytest.raises(SpecError, match=re.escape(said)):
        with_clone(record, number, changes, warm=True)


def test_a_clone_may_have_any_value_that_the_study_has() -> None:
    record = with_clone(study([{"lr": 0.1}, {"lr": None}]), 0, {"lr": None}, warm=True)

    assert record.trials[2].hp == {"lr": None}


def test_a_clones_seed_is_a_seed() -> None:
    with pytest.raises(SpecError, match="a whole number from 0, got -1"):
        with_clone(study([{"seed": 3}]), 0, {"seed": -1}, warm=False)


# ---------------------------------------------------------------- properties

VALUES = st.sampled_from([0, 1, 1.0, True, None, "a", 0.5, 7])
POINTS = st.lists(st.fixed_dictionaries({"a": VALUES, "b": VALUES}), min_size=1, max_size=8)
STATES = st.sampled_from([FINISHED, RUNNING, FAILED, STOPPED, PENDING])


@st.composite
def histories(draw: st.DrawFn) -> tuple[StudyRecord, dict[int, TrialProgress], list[Point]]:
    """A study as it may be found: asked for, then extended and cloned, and partly run."""
    asked = draw(POINTS)
    record = study(asked)
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            parent = draw(st.sampled_from(record.trials))
            record = with_clone(record, parent.number, {}, warm=draw(st.booleans()))
        else:
            record = with_points(record, asked + draw(POINTS), 2)
    numbers = [trial.number for trial in record.trials]
    return record, draw(st.dictionaries(st.sampled_from(numbers), STATES)), asked


@settings(deadline=None)
@given(histories())
def test_asking_for_the_same_changes_nothing(
    history: tuple[StudyRecord, dict[int, TrialProgress], list[Point]],
) -> None:
    record, progress, asked = history

    merged = merge(record, progress, study(asked))

    assert (merged.changes, merged.added, merged.record) == ((), (), record)


@settings(deadline=None)
@given(histories(), POINTS, st.randoms())
def test_a_wider_space_keeps_every_trial_and_adds_what_is_new(
    history: tuple[StudyRecord, dict[int, TrialProgress], list[Point]],
    wider: list[Point],
    random: Any,
) -> None:
    record, progress, asked = history
    shuffled = [*asked, *wider]
    random.shuffle(shuffled)

    merged = merge(record, progress, study(shuffled))

    numbers = [trial.number for trial in merged.trials]
    before = {t.number: t for t in record.trials}
    assert numbers == list(range(len(numbers)))
    assert sorted((*merged.ended, *merged.continued, *merged.added)) == numbers
    assert all(merged.trials[n] == trial.to_spec() for n, trial in before.items())
    assert set(merged.added) == set(numbers) - set(before)
    for trial in merged.trials:
        assert trial.seed == trial.number

    again = merge(merged.record, progress, study(shuffled))
    assert (again.changes, again.record) == ((), merged.record)
