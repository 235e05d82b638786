"""A recipe that is accepted, and makes what no trial's saved state is of: each is told so."""

from __future__ import annotations

import itertools
import re

import pytest
import studies
import torch

import shoal
from shoal.core.errors import TrialError
from shoal.core.event import CheckpointDamaged, StepFinished, StudyChanged
from shoal.recipes.schedules import give_state
from shoal.report import read_report
from shoal.source import load_study

FILE = """
import torch
from torch import nn
from torch.utils.data import DataLoader

import shoal

seen = [0]


def build(hp):
    width = 12 if hp["lr"] > 0.05 and WIDER else 8
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def data(hp):
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(16, 4, generator=random), torch.arange(16) % 2
    rows = torch.utils.data.TensorDataset(*rows)
    return DataLoader(rows, 4, shuffle=True), DataLoader(rows, 16)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def optimizer(named, hp):
    named = list(named)
    if hp["lr"] < 0.05:
        return torch.optim.Adam([p for _, p in named], lr=hp["lr"])
    return OTHER


def schedule(optimizer, hp):
    return SCHEDULE


def sure(output, batch):
    seen[0] += 1
    if seen[0] > 2 and WRONG:
        raise ValueError("late")
    return 0.0


recipe = shoal.Recipe(
    model=build, data=data, loss=loss, metrics={"sure": sure}, optimizer=optimizer,
    SCHEDULED,
)
study = shoal.Study(
    "misfit", recipe, space=shoal.grid(lr=[0.01, 0.1]), LENGTH, directory="PLACE",
    checkpoint_every=0,
)
"""
ADAM = "torch.optim.Adam([p for _, p in named], lr=hp['lr'])"
SGD = "torch.optim.SGD([p for _, p in named], lr=hp['lr'], momentum=0.9)"
GROUPS = (
    "torch.optim.Adam([{'params': [p for n, p in named if n[0] == k]} for k in '012'], "
    "lr=hp['lr'])"
)
SCHEDULED = 'schedule=schedule, schedule_interval="INTERVAL"'
BEGUN = {"WIDER": "False", "OTHER": ADAM, "WRONG": "True", "LENGTH": "epochs=5"}
BEGUN |= {"SCHEDULED": SCHEDULED, "INTERVAL": "step"}
BEGUN["SCHEDULE"] = "torch.optim.lr_scheduler.StepLR(optimizer, 3)"


@pytest.fixture
def misfit(tmp_path, warm_workers):
    """What runs the study of a file with some words in the places of others; the study."""
    file, runs = tmp_path / "misfit.py", itertools.count()

    def run(**words) -> shoal.Study:
        options = {name: words.pop(name) for name in list(words) if name.islower()}
        text = FILE.replace("PLACE", str(tmp_path / "runs"))
        for name, word in (BEGUN | words).items():
            text = text.replace(name, word)
        # Of another size each time: bytecode is found by a file's size and second.
        file.write_text(text + "#" * next(runs))
        loaded = load_study(str(file))
        loaded.study.source = loaded.source
        studies.run(loaded.study, warm_workers, **options)
        return loaded.study

    return run


def go_on(misfit, **words):
    """Both trials fail late, and go on with another recipe."""
    misfit()
    return misfit(WRONG="False", retry_failed=True, accept_recipe=True, **words)


MISFITS = {
    "optimizer": ({"OTHER": SGD}, "it was saved with the optimizer Adam, and SGD is made"),
    "groups": (
        {"OTHER": GROUPS},
        r"its optimizer had groups of parameters, 1 \(6 parameters from '0.bias' on\), and has 3 "
        r"\(2 parameters from '0.bias' on, 2 parameters from '1.bias' on, ",
    ),
    "shapes": (
        {"WIDER": "True"},
        r"'0.bias' was saved with the shape \(8,\), and the model that is made has \(12,\)",
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", MISFITS)
def test_a_trial_whose_state_is_of_something_else_fails_and_the_other_one_goes_on(misfit, what):
    words, said = MISFITS[what]

    study = go_on(misfit, **words)

    first, second = read_report(study.directory).trials
    assert (str(first.state), str(second.state)) == ("FINISHED", "FAILED")
    assert not studies.written(study, CheckpointDamaged)
    assert "trial 1 cannot go on from its own state of step " in second.error
    assert re.search(said, second.error)
    assert "as shoal clone STUDY 1 --cold. What was saved stays as it is." in second.error

    study = misfit(WRONG="False", retry_failed=True, accept_recipe=True)
    assert str(read_report(study.directory).trials[1].state) == "FINISHED"
    steps = [e.step for e in studies.written(study, StepFinished) if e.trial == 1]
    assert steps == list(range(1, 21))


WAYS = [
    {"fuse": 2},
    {"technique": shoal.Spilled(shards=2)},
    {"technique": shoal.Pipelined(stages=2, schedule="flush"), "devices": 2},
]


@pytest.mark.full
@pytest.mark.parametrize("how", WAYS, ids=["array", "spilled", "pipelined"])
@pytest.mark.parametrize("what", MISFITS)
def test_however_it_trains(misfit, what, how):
    misfit(**how)
    go_on = {"WRONG": "False", "retry_failed": True, "accept_recipe": True, **how}

    study = misfit(**MISFITS[what][0], **go_on)

    first, second = read_report(study.directory).trials
    assert (str(first.state), str(second.state)) == ("FINISHED", "FAILED")
    assert "trial 1 cannot go on from its own state of step " in second.error
    assert not studies.written(study, CheckpointDamaged)
    study = misfit(**go_on)
    assert str(read_report(study.directory).trials[1].state) == "FINISHED"


SCHEDULES = {
    "interval": (
        {"INTERVAL": "epoch"},
        "was stepped after each step, and is after each epoch now",
    ),
    "kind": (
        {
            "SCHEDULE": "torch.optim.lr_scheduler.SequentialLR(optimizer, ["
            "torch.optim.lr_scheduler.StepLR(optimizer, 3), "
            "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [4])"
        },
        "schedule is of StepLR, and Recipe(schedule=...) returns SequentialLR and StepLR and "
        "ExponentialLR now",
    ),
    "class": (  # whose numbers torch would take for its own
        {"SCHEDULE": "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)"},
        "schedule is of StepLR, and Recipe(schedule=...) returns ExponentialLR now",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SCHEDULES)
def test_a_schedule_that_cannot_go_on_from_what_was_saved_is_called_that(misfit, what):
    words, said = SCHEDULES[what]

    study = go_on(misfit, **words)

    trials = read_report(study.directory).trials
    assert [str(trial.state) for trial in trials] == ["FAILED", "FAILED"]
    assert all(said in trial.error for trial in trials)
    assert all("What was saved stays as it is." in trial.error for trial in trials)


@pytest.mark.parametrize("fuse", [None, 2])
def test_a_schedule_that_is_added_begins_from_the_rates_that_it_was_made_with(misfit, fuse):
    """Its first rate is a tenth, and not the whole that was saved, of which it makes ten."""
    misfit(SCHEDULE="None", fuse=fuse)
    warm_up = "torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)"

    study = misfit(SCHEDULE=warm_up, WRONG="False", retry_failed=True, accept_recipe=True)

    for trial in read_report(study.directory).trials:
        assert str(trial.state) == "FINISHED"
        (group,) = trial.load_state()["optimizer"]["groups"]
        assert group["lr"] == pytest.approx(trial.hp["lr"])
    (changed,) = studies.written(study, StudyChanged)
    assert any("begins where the trial stands" in words for words in changed.changes)


NONE_GIVEN, NONE_MADE = {"SCHEDULED": "schedule=None"}, {"SCHEDULE": "None"}
HALVES = {"SCHEDULE": "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)", "WRONG": "False"}


@pytest.mark.parametrize(
    ("interval", "without", "fuse"),
    [("epoch", NONE_GIVEN, None), ("epoch", NONE_MADE, 2), ("evaluation", NONE_GIVEN, None)],
)
def test_one_that_goes_by_epochs_or_evaluations_is_added_and_ends_with_those_of_the_trial(
    misfit, interval, without, fuse
):
    """In the middle of the second epoch of five, whose end is its first."""
    misfit(LENGTH="steps=6", **(HALVES | without), fuse=fuse)

    added = {**HALVES, "INTERVAL": interval, "LENGTH": "steps=20"}
    study = misfit(**added, accept_recipe=True)

    for trial in read_report(study.directory).trials:
        assert not trial.error
        (group,) = trial.load_state()["optimizer"]["groups"]
        assert group["lr"] == pytest.approx(trial.hp["lr"] * 0.5**4)


@pytest.mark.parametrize("interval", ["epoch", "evaluation"])
def test_where_one_that_goes_by_epochs_is_taken_away_the_rate_stays(misfit, interval):
    misfit(**HALVES, INTERVAL=interval, LENGTH="steps=10")

    without = {**NONE_GIVEN, "LENGTH": "steps=20", "WRONG": "False"}
    study = misfit(**without, accept_recipe=True)

    for trial in read_report(study.directory).trials:
        assert not trial.error
        (group,) = trial.load_state()["optimizer"]["groups"]
        assert group["lr"] == pytest.approx(trial.hp["lr"] * 0.25)


def test_a_state_that_does_not_say_of_which_schedule_it_is_goes_on_if_that_can_load_it():
    """As older ones do; and one that another kind cannot load is told of."""
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(made, 3)
    state = dict(torch.optim.lr_scheduler.StepLR(made, 7).state_dict())
    give_state(schedule, state)
    assert schedule.step_size == 7
    other = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0)
    with pytest.raises(TrialError, match=r"is not what LambdaLR, which Recipe.*lr_lambdas"):
        give_state(other, state)
