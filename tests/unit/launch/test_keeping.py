"""Which checkpoints stay of trials that have ended."""

from __future__ import annotations

import math

import pytest
from generating import generate, planned, steps

from shoal.core.aim import Aim
from shoal.core.event import StepFinished, TrialFailed, TrialFinished, TrialPruned
from shoal.launch.keeping import Keeper
from shoal.observe.db import Database
from shoal.storage.generations import Generations


def keeper(
    study, *, keep=2, only_weights=False, best=None, mode="min", metric="valid_loss"
) -> Keeper:
    aim = Aim(metric, mode)
    return Keeper(study, keep=keep, only_weights=only_weights, best=best, aim=aim)


def finish(place, values: dict[int, float | None], study) -> set[int]:
    """Finish trials in this order; returns those that still have generations."""
    for trial, value in values.items():
        generate(study, trial, 5)
        generate(study, trial, 9, ended=True)
        place.finished(trial, {} if value is None else {"valid_loss": value})
    return {trial for trial in values if steps(study, trial)}


def test_one_that_stayed_until_the_end_was_on_record_goes(tmp_path):
    assert finish(keeper(tmp_path, keep=1), {0: 1.0}, tmp_path) == {0}
    assert steps(tmp_path, 0) == [9]


def test_a_failed_trial_keeps_as_many_as_were_asked_for(tmp_path):
    for step in (3, 5, 9):
        generate(tmp_path, 0, step)
    place = keeper(tmp_path, keep=1, only_weights=True, best=2)
    place.see(TrialFailed(time=0.0, trial=0, step=9, error="it"))
    assert steps(tmp_path, 0) == [9]


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, [5, 9]), ({"keep": 1}, [9]), ({"only_weights": True}, [9]), ({"best": 2}, [])],
    ids=["all", "one", "weights", "the best"],
)
def test_a_pruned_trial_keeps_its_state_unless_only_the_best_do(options, kept, tmp_path):
    for step in (5, 9):
        generate(tmp_path, 0, step)
    pruned = {"reason": "r", "checkpoint": "c", "metrics": {"valid_loss": 0.0}, "seconds": 1.0}
    keeper(tmp_path, **options).see(TrialPruned(time=0.0, trial=0, step=9, **pruned))
    assert steps(tmp_path, 0) == kept


def test_all_keeps_all(tmp_path):
    assert finish(keeper(tmp_path), {0: 1.0, 1: 2.0}, tmp_path) == {0, 1}
    assert steps(tmp_path, 0) == [5, 9]


@pytest.mark.parametrize(
    ("mode", "values", "kept"),
    [
        ("min", {0: 3.0, 1: 1.0, 2: 2.0}, {1, 2}),
        ("max", {0: 3.0, 1: 1.0, 2: 2.0}, {0, 2}),
        ("min", {2: 1.0, 1: 1.0, 0: 1.0}, {0, 1}),
        ("min", {0: math.nan, 1: None, 2: 5.0, 3: math.inf}, {0, 2}),
        ("min", {0: math.nan, 1: 7.0}, {0, 1}),
        ("max", {0: math.nan, 1: -math.inf, 2: -9.0, 3: -8.0}, {2, 3}),
    ],
    ids=["min", "max", "ties go to the first", "no number is worst", "few", "max, no number"],
)
def test_the_best_two_keep_everything_and_the_others_nothing(mode, values, kept, tmp_path):
    place = keeper(tmp_path, best=2, mode=mode)

    assert finish(place, values, tmp_path) == kept
    assert all(steps(tmp_path, trial) == [5, 9] for trial in kept)


def test_the_best_are_the_same_in_whatever_order_they_finish(tmp_path):
    values = {0: 4.0, 1: 2.0, 2: 3.0, 3: 1.0}
    for place, order in enumerate(([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2])):
        study = tmp_path / str(place)
        study.mkdir()
        assert finish(keeper(study, best=2), {n: values[n] for n in order}, study) == {1, 3}


def test_a_trial_that_is_none_of_the_best_is_looked_at_once(tmp_path, monkeypatch):
    looked, real = [], Generations.all

    def look(self):
        looked.append(self.directory.name)
        return real(self)

    monkeypatch.setattr(Generations, "all", look)
    place = keeper(tmp_path, best=2)
    for trial in range(40):
        place.finished(trial, {"valid_loss": float(trial)})
    assert len(looked) <= 2 * 40


def test_only_weights_keeps_the_last_generation(tmp_path):
    assert finish(keeper(tmp_path, only_weights=True), {0: 1.0}, tmp_path) == {0}
    assert steps(tmp_path, 0) == [9]


def test_it_listens_to_trials_that_finish(tmp_path):
    place = keeper(tmp_path, best=1)
    for trial, value in ((0, 1.0), (1, 2.0)):
        generate(tmp_path, trial, 9)
        place.see(
            TrialFinished(
                time=0.0,
                trial=trial,
                step=9,
                metrics={"valid_loss": value},
                checkpoint="",
                seconds=1.0,
            )
        )

    assert (steps(tmp_path, 0), steps(tmp_path, 1)) == ([9], [])


def test_the_best_by_train_loss_are_those_of_the_tables(tmp_path):
    """The event that a trial finished has what was measured on validation data alone."""
    place, of_step = keeper(tmp_path, best=1, metric="train_loss"), {"seconds": 1.0, "device": "d"}
    with Database(tmp_path) as database:
        for trial, loss in ((0, 3.0), (1, 1.0), (2, 2.0)):
            generate(tmp_path, trial, 1)
            valid = {"valid_loss": float(trial)}
            done = StepFinished(time=0.0, trial=trial, step=1, epoch=1, loss=loss, **of_step)
            ended = TrialFinished(
                time=0.0, trial=trial, step=1, metrics=valid, checkpoint="", seconds=1.0
            )
            database.write([planned(trial), done, ended])
            place.see(ended)

    assert [steps(tmp_path, trial) for trial in range(3)] == [[], [1], []]


def test_a_trial_without_generations_is_no_trouble(tmp_path):
    place = keeper(tmp_path, only_weights=True, best=1)

    place.finished(0, {"valid_loss": 2.0})
    place.finished(1, {"valid_loss": 1.0})
