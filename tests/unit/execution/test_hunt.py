"""What a search hears of what happens."""

from __future__ import annotations

import pytest

from shoal.core.event import (
    Evaluated,
    StepFinished,
    TrialExploited,
    TrialFailed,
    TrialFinished,
    TrialPruned,
    TrialRestarted,
    TrialStopped,
)
from shoal.execution.hunt import Hunt, Telling
from shoal.observe.snapshot import Folder
from shoal.search import PBT, Exploit, Population, Search
from shoal.search.rules import Halving

END = {"reason": "r", "checkpoint": "c", "seconds": 1.0}


@pytest.fixture
def search():
    search = Search(2, Halving("min"))
    search.enroll(0, {})
    search.enroll(1, {})
    return search


def step(number, loss, trial=0, epoch=1):
    where = {"epoch": epoch, "seconds": 1.0, "device": "cpu:0"}
    return StepFinished(time=0.0, trial=trial, step=number, loss=loss, **where)


def evaluated(number, trial=0, **metrics):
    return Evaluated(time=0.0, trial=trial, step=number, epoch=1, metrics=metrics)


def facts(search, number=0):
    return search._facts[number]


def test_values_are_heard_in_their_order_and_once(search):
    tell = Telling(search, "valid_loss", "min")
    for event in (
        evaluated(2, valid_loss=0.5),
        evaluated(4, valid_loss=0.4),
        TrialRestarted(time=0.0, trial=0, step=1),
        evaluated(2, valid_loss=0.5),
        evaluated(6, valid_loss=0.3),
        evaluated(6, trial=7, valid_loss=9.0),  # a clone
    ):
        tell(event)
    assert facts(search).values == [0.5, 0.4, 0.3]


def test_the_end_of_a_trial_has_the_value_that_reports_show(search):
    tell = Telling(search, "valid_loss", "min")
    done = {"metrics": {"valid_loss": 0.2}, "checkpoint": "c", "seconds": 1.0}
    tell(TrialFinished(time=0.0, trial=0, step=9, **done))  # its last evaluation was lost
    assert (facts(search).how, facts(search).value) == ("finished", 0.2)
    assert facts(search).values == [0.2]


@pytest.mark.parametrize(
    ("event", "how"),
    [
        (TrialPruned(time=0.0, trial=0, step=3, metrics={}, **END), "pruned"),
        (TrialStopped(time=0.0, trial=0, step=3, metrics={}, **END), "failed"),
        (TrialFailed(time=0.0, trial=0, step=3, error="it"), "failed"),
    ],
)
def test_other_ends_are_heard_too(search, event, how):
    Telling(search, "valid_loss", "min")(event)
    assert facts(search).how == how
    search.reopen(0)
    assert facts(search).how is None


def test_a_population_hears_who_went_on_from_whom_and_a_search_of_pruners_does_not(search):
    taken = {"source": 1, "before": {"lr": 0.1}, "hp": {"lr": 0.2}, "checkpoint": "c"}
    event = TrialExploited(time=0.0, trial=0, step=4, **taken)
    population = Population(PBT(), {}, mode="min", seed=0)
    population.enroll(0, {"lr": 0.1})
    for told in (search, population):
        Telling(told, "valid_loss", "min")(event)
    assert population.happened(0) == {4: Exploit(source=1, hp={"lr": 0.2}, before={"lr": 0.1})}
    assert Hunt(population).hp_now(0) == {"lr": 0.2}
    assert Hunt(population).hp_now(1) is Hunt(search).hp_now(0) is Hunt().hp_now(0) is None


def test_the_training_loss_is_the_mean_that_reports_show(search):
    tell = Telling(search, "train_loss", "min")
    for event in (step(1, 4.0), step(2, 2.0), evaluated(2), step(3, 1.0), step(4, 9.0)):
        tell(event)
    tell(TrialRestarted(time=0.0, trial=0, step=3))
    for event in (step(4, 3.0), evaluated(4)):
        tell(event)
    assert facts(search).values == [3.0, 2.0]


@pytest.mark.parametrize("epochs", [(1, 1), (1, 2)], ids=["one epoch", "two"])
def test_without_validation_data_a_trial_ends_with_the_training_loss_of_its_last_epoch(
    search, epochs
):
    tell, folder = Telling(search, "train_loss", "min"), Folder()
    done = TrialFinished(time=0.0, trial=0, step=2, metrics={}, checkpoint="c", seconds=1.0)
    for event in (step(1, 4.0), step(2, 2.0, epoch=epochs[1]), done):
        tell(event)
        folder.add(event)
    assert facts(search).value == (3.0 if epochs == (1, 1) else 2.0)
    assert facts(search).value == folder.trial(0).metrics["train_loss"]


def test_a_hunt_of_nothing_knows_nobody():
    Hunt().enroll(0, {})
    Hunt().grow([])
