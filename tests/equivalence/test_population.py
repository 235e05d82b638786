"""A trial of a population ends on the bits of plain loops that do what is on record of it."""

from __future__ import annotations

import populations
import pytest
import studies
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.testing import plain_loop, plain_population, same_bits

pytestmark = pytest.mark.usefixtures("warm_plans")

SPACE = {
    "lr": shoal.log_uniform(1e-3, 1e-1),
    "momentum": shoal.uniform(0.5, 0.95),
    "dropout": shoal.uniform(0.0, 0.5),
    "own": shoal.choice(1, 2),
}


def build(hp):
    blocks = [
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(hp["dropout"]))
        for _ in range(4)
    ]
    return nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 3))


def data(hp):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(80, 8, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    train, valid = TensorDataset(x[:56], y[:56]), TensorDataset(x[56:], y[56:])
    return DataLoader(train, 8 * hp["own"] // hp["own"], shuffle=True), DataLoader(valid, 8)


def loaded(hp):
    """The same data, each item with noise of its own, read by a process of its own."""
    train, valid = data(hp)
    return DataLoader(Noisy(train.dataset), 8, shuffle=True, num_workers=1), valid


class Noisy(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        x, y = self.items[index]
        return x + 0.1 * torch.randn(8), y


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(named, hp):
    weights = [p for _, p in named if p.dim() > 1]
    others = [p for _, p in named if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": others}]
    return torch.optim.SGD(groups, lr=hp["lr"], momentum=hp["momentum"], nesterov=True)


def adam(named, hp):
    return torch.optim.Adam([p for _, p in named], lr=hp["lr"], betas=(hp["momentum"], 0.99))


def cycle(optimizer, hp):
    """Sets the learning rate and the momentum of every step."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, hp["lr"], total_steps=40)


def decay(optimizer, hp):
    """Each step's learning rate follows from the one before it."""
    return torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.97)


SPILLED = {"technique": shoal.Spilled(shards=3, optimizer="device")}
HOST = {"technique": shoal.Spilled(shards=3, optimizer="host")}
SPLIT = {"technique": shoal.Spilled(shards=3, optimizer="host", keep=(), master="split")}
CASES = {
    "adamw": ({}, {}),
    "sgd, groups, one cycle": ({"optimizer": sgd, "schedule": cycle}, {}),
    "adam, recursive schedule": ({"optimizer": adam, "schedule": decay}, {}),
    "spilled": ({"optimizer": sgd, "schedule": cycle}, SPILLED),
    "spilled, host": ({"optimizer": adam, "schedule": decay, "clip_grad_norm": 0.5}, HOST),
    "accumulate, clip": ({"optimizer": sgd, "accumulate": 3, "clip_grad_norm": 0.5}, {}),
    "a loader of its own": ({"data": loaded, "optimizer": sgd}, {}),
    "bf16": ({"optimizer": adam, "precision": "bf16"}, {}),
    "bf16, split on the host": ({"optimizer": adam, "precision": "bf16"}, SPLIT),
    "bf16-sr": ({"optimizer": sgd, "precision": "bf16-sr"}, {}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("length", ["steps", pytest.param("epochs", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_every_trial_is_its_lineage_in_plain_loops(name, length, tmp_path, warm_workers):
    of_recipe, of_run = CASES[name]
    recipe = shoal.Recipe(model=build, loss=loss, **{"data": data, **of_recipe})
    loop = {"epochs": 4} if length == "epochs" else {"steps": 10, "eval_every": 2}
    study = shoal.Study(
        *("k", recipe), space=SPACE, trials=4, directory=tmp_path, **loop,
        pruner=shoal.PBT(quantile=0.5, vary=("lr", "momentum", "dropout")),
        checkpoint_every=0,
    )  # fmt: skip
    report = studies.run(study, warm_workers, devices=2, **of_run)
    assert [t.error for t in report.trials] == [""] * 4
    assert sum(len(trial.inherited) for trial in report.trials) == 2 * (
        3 if "epochs" in loop else 4
    )
    assert {trial.hp["own"] for trial in report.trials} <= {1, 2}
    populations.assert_lineage(report, recipe, **loop)


def test_a_plain_population_of_one_is_the_plain_loop():
    recipe = shoal.Recipe(model=build, data=data, loss=loss)
    hp = {"lr": 0.01, "dropout": 0.1, "own": 1}
    trials = {0: populations.PlainTrial(hp=hp, seed=3)}
    one, other = plain_population(recipe, trials, 0, epochs=2), plain_loop(recipe, hp, 3, epochs=2)
    assert one.losses == other.losses
    for mine, its in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert same_bits(mine, its)


def test_a_plain_trial_that_copies_has_the_sources_weights_and_its_own_data():
    recipe = shoal.Recipe(model=build, data=data, loss=loss)
    hp = {"lr": 0.01, "dropout": 0.0, "own": 1}
    frozen = {**hp, "lr": 0.0}
    trials = {
        0: populations.PlainTrial(hp=hp, seed=1),
        1: populations.PlainTrial(hp=hp, seed=2, inherits={7: (0, frozen)}),
    }
    copied = plain_population(recipe, trials, 1, steps=14)
    source, alone = plain_loop(recipe, hp, 1, steps=7), plain_loop(recipe, hp, 2, steps=14)
    assert copied.losses[:7] == alone.losses[:7]
    assert copied.losses[7:] != alone.losses[7:]
    for mine, its in zip(copied.model.parameters(), source.model.parameters(), strict=True):
        assert same_bits(mine, its)  # nothing was learnt since
    assert torch.equal(copied.rng.torch, alone.rng.torch)  # the same order of the same data


def partly_frozen(hp):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 3))
    model[:2].requires_grad_(not hp["frozen"])
    return model


def data_of_all(hp):
    return data({"own": 1})


def plain_sgd(named, hp):
    return torch.optim.SGD([p for _, p in named], lr=hp["lr"])


@pytest.mark.parametrize(("vary", "is_refused"), [(None, True), (["lr"], False)])
def test_in_shards_no_hyperparameter_freezes_or_unfreezes(vary, is_refused, tmp_path):
    """Shards have no room for gradients of what is frozen: four of six trials failed at rungs."""
    study = shoal.Study(
        "it",
        shoal.Recipe(model=partly_frozen, data=data_of_all, loss=loss, optimizer=plain_sgd),
        space={"lr": SPACE["lr"], "frozen": shoal.choice(0, 1)},
        trials=4,
        epochs=4,
        pruner=shoal.PBT(interval=1, quantile=0.5, vary=vary),
        directory=tmp_path,
    )
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    assert len(study.plan(hardware=hardware, technique="resident").jobs) == 4
    if not is_refused:
        assert len(study.plan(hardware=hardware, technique=shoal.Spilled(shards=2)).jobs) == 4
        return
    with pytest.raises(
        shoal.PlanError, match=r"'0\.bias' is trained with some hyperparam"
    ) as error:
        study.plan(hardware=hardware, technique=shoal.Spilled(shards=2))
    assert "Leave what freezes parameters out of shoal.PBT(vary=...)" in str(error.value)
