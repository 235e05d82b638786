"""A warm clone goes on from a state of another trial: what it may differ in, and what not."""

from __future__ import annotations

import pytest
import studies
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.control import CloneTrial
from shoal.core.event import StepFinished
from shoal.launch.directory import read_record


def build(hp):
    return nn.Sequential(nn.Linear(4, hp["width"]), nn.Linear(hp["width"], 2))


def data(hp):
    random = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(32, 4, generator=random), torch.arange(32) % 2)
    return DataLoader(rows, hp["batch"], shuffle=True), DataLoader(rows, 16)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def optimizer(named, hp):
    kind = getattr(torch.optim, hp["optimizer"])
    more = {"amsgrad": hp["amsgrad"]} if hp["optimizer"] == "Adam" else {}
    return kind([p for _, p in named], lr=hp["lr"], **more)


def by_epochs(optimizer, hp):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


POINT = {"width": 8, "batch": 4, "optimizer": "Adam", "lr": 0.01, "amsgrad": False}


@pytest.fixture
def begun(tmp_path, warm_workers):
    """What runs a study of one trial, and goes on with clones of it after its 6 or 8 steps."""

    def run(*changes, **options):
        recipe = shoal.Recipe(
            model=build, data=data, loss=loss, optimizer=optimizer, **options.pop("recipe", {})
        )
        space = shoal.grid(**{name: [value] for name, value in POINT.items()})
        study = shoal.Study("c", recipe, space=space, directory=tmp_path, **options)
        clones = [CloneTrial(trial=0, changes=change, warm=True) for change in changes]
        return study, studies.run(study, warm_workers, **({"clones": clones} if clones else {}))

    return run


def epochs(study, trial):
    steps = [e for e in studies.written(study, StepFinished) if e.trial == trial]
    return [(event.step, event.epoch) for event in steps]


def test_a_clone_with_another_batch_size_begins_an_epoch_anew(begun):
    begun(steps=6)  # within the first epoch of 8 batches

    study, report = begun({"batch": 8}, {"lr": 0.02}, steps=12)  # an epoch has 4 of these

    assert [str(trial.state) for trial in report.trials] == ["FINISHED"] * 3
    assert epochs(study, 1) == [(7, 1), (8, 1), (9, 1), (10, 1), (11, 2), (12, 2)]
    assert epochs(study, 2) == [(7, 1), (8, 1), (9, 2), (10, 2), (11, 2), (12, 2)]


@pytest.mark.parametrize(
    ("length", "recipe", "counts"),
    [
        ({"epochs": 1}, {}, "Study(epochs=3)"),
        (
            {"steps": 6},
            {"schedule": by_epochs, "schedule_interval": "epoch"},
            "Recipe(schedule_interval='epoch')",
        ),
    ],
)
def test_one_whose_epochs_are_counted_is_refused_and_not_added(begun, length, recipe, counts):
    study, _ = begun(**length, recipe=recipe)
    longer = {name: 3 * value for name, value in length.items()}

    with pytest.raises(shoal.SpecError) as refused:
        begun({"batch": 8}, **longer, recipe=recipe)

    step = length.get("steps", 8)
    assert str(refused.value) == (
        "a clone of trial 0 would read 4 batches an epoch, and its parent read 8: in which epoch "
        f"it begins after step {step} nobody can say, and {counts} counts epochs. Clone it cold "
        "(--cold, warm=False), or have the length, and the schedule, go by steps."
    )
    assert len(read_record(study.directory).trials) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 16}, "'0.bias' was saved with the shape (8,), and the model that is made has"),
        ({"optimizer": "SGD"}, "it was saved with the optimizer Adam, and SGD is made"),
        (
            {"amsgrad": True},
            "it was saved with amsgrad=False in the optimizer's groups, and amsgrad=True needs "
            "'max_exp_avg_sq', which was not kept then",
        ),
    ],
)
def test_one_that_its_parents_state_does_not_fit_is_told_what_differs(begun, change, said):
    begun(steps=6)

    _, report = begun(change, {"optimizer": "AdamW"}, steps=12)

    assert [str(trial.state) for trial in report.trials] == ["FINISHED", "FAILED", "FINISHED"]
    error = report.trials[1].error
    assert f"trial 1 cannot go on from the state of trial 0 after step 6: {said}" in error
    assert "clone it cold (--cold, warm=False)." in error
