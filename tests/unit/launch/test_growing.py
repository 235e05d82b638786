"""What an order to add trials is told: what was added, or what goes on instead, in one line."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from shoal.control import CloneTrial, ExtendTrials
from shoal.core.errors import SpecError
from shoal.launch.growing import grow
from shoal.resume import StudyRecord, TrialRecord, with_points
from shoal.resume.recipe import record_of

NOON = datetime(2026, 3, 1, 12, 0).timestamp()
RECORD = StudyRecord(
    name="sweep",
    space="lr",
    trials=tuple(TrialRecord(number=n, hp={"lr": float(n)}, seed=n) for n in range(8)),
    epochs=3,
    steps=None,
    eval_every=None,
    metric="valid_loss",
    mode="min",
    seed=0,
    recipe=record_of({}, {}),
)


def more_points(record, more):
    points = [{"lr": float(n)} for n in range(record.sampled + more)]
    if len(points) > 16:
        raise SpecError(f"{len(points)} trials were asked for, but the space has only 16 points.")
    return with_points(record, points, more)


def give(record, order, ended=()):
    return grow(record, order, more_points, ended=ended, time=NOON)


def test_an_extension_says_what_it_added():
    assert give(RECORD, ExtendTrials(trials=4)).text == "added trials 8 to 11"
    assert give(RECORD, ExtendTrials(trials=1)).text == "added trial 8"


def test_a_repeated_extension_says_what_goes_on_and_how_to_have_more():
    record = give(RECORD, ExtendTrials(trials=4)).record

    assert give(record, ExtendTrials(trials=4), ended={8, 9, 10}).text == (
        "trials 8 to 11 were added by the same command on 2026-03-01 12:00 and have not all "
        "ended; going on with them (--again adds more)"
    )
    assert give(record, ExtendTrials(trials=4, again=True)).text == "added trials 12 to 15"


def test_a_repeated_clone_says_what_goes_on():
    order = CloneTrial(trial=0, changes={"lr": 3.0})
    record = give(RECORD, order).record

    assert give(record, order).text == (
        "trial 8 was added by the same command on 2026-03-01 12:00 and has not ended; going on "
        "with it (--again adds more)"
    )


def test_a_clone_with_its_parents_own_value_is_the_clone_without_changes():
    record = give(RECORD, CloneTrial(trial=3, changes={"lr": 3})).record

    assert not give(record, CloneTrial(trial=3)).is_new
    assert give(record, CloneTrial(trial=3, warm=False)).is_new


def test_an_extension_after_one_that_ended_says_so():
    record = give(RECORD, ExtendTrials(trials=2)).record

    assert give(record, ExtendTrials(trials=2), ended={8, 9}).text == (
        "added trials 10, 11; trials 8, 9, which the same command added on 2026-03-01 12:00, "
        "have all ended"
    )


def test_a_repeated_extension_of_a_space_without_more_points_goes_on():
    record = give(RECORD, ExtendTrials(trials=8)).record

    assert give(record, ExtendTrials(trials=8)).trials == tuple(range(8, 16))
    with pytest.raises(SpecError, match="the space has only 16 points"):
        give(record, ExtendTrials(trials=8, again=True))


def test_the_newest_of_several_equal_extensions_is_named():
    record = give(RECORD, ExtendTrials(trials=2)).record
    record = give(record, ExtendTrials(trials=2, again=True)).record

    assert give(record, ExtendTrials(trials=2)).trials == (10, 11)
    assert give(record, ExtendTrials(trials=2), ended={10, 11}).trials == (8, 9)


def test_so_many_in_all_says_what_was_missing_and_then_that_nothing_is():
    first = give(RECORD, ExtendTrials(to=10))
    again = give(first.record, ExtendTrials(to=10), ended=range(8))

    assert first.text == "added trials 8, 9: study 'sweep' has 10 in all"
    assert again.text == (
        "study 'sweep' has 10 trials already: none was added; going on with trials 8, 9"
    )
    assert give(first.record, ExtendTrials(to=10), ended=range(10)).text == (
        "study 'sweep' has 10 trials already: none was added"
    )


def test_fewer_in_all_than_there_are_is_refused_with_both_numbers():
    with pytest.raises(SpecError) as refused:
        give(RECORD, ExtendTrials(to=5))

    assert str(refused.value) == (
        "cannot extend study 'sweep' to 5 trials: it has 8, and none is ever removed. Give --to "
        "8 or more, or stop some: shoal stop STUDY TRIAL."
    )


def test_a_clone_that_cannot_be_is_refused_though_another_one_goes_on():
    record = give(RECORD, CloneTrial(trial=0)).record

    with pytest.raises(SpecError, match="has no hyperparameter 'rate'"):
        give(record, CloneTrial(trial=0, changes={"rate": 1.0}))


def test_what_so_many_in_all_added_is_not_what_so_many_more_did():
    record = give(RECORD, ExtendTrials(to=10)).record

    assert give(record, ExtendTrials(trials=2)).trials == (10, 11)


def test_trials_added_before_orders_were_on_record_are_nobodys():
    record = replace(give(RECORD, ExtendTrials(trials=2)).record, additions=())

    assert give(record, ExtendTrials(trials=2)).trials == (10, 11)
