"""Schedules that do more than set numbers: freeze, draw, look at gradients, write weights."""

from __future__ import annotations

import random
from random import betavariate

import numpy as np
import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import shoal
from shoal.core.errors import TrialError
from shoal.recipes.habits import Habits, habits_of
from shoal.recipes.schedules import catch_up
from shoal.testing import assert_same, plain_loop
from shoal.ui.show import planned_reasons

HARDWARE = shoal.Hardware.virtual(devices=1, memory="64MiB")
EPOCHS = 3


class Busy(LambdaLR):
    """Does something else after each step."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda epoch: 1.0)


class Unfreezes(Busy):
    """The first layer, which was frozen by whoever made it, after the third step."""

    def step(self):
        super().step()
        if self.last_epoch == 3:
            for parameter in self.optimizer.param_groups[0]["params"]:
                parameter.requires_grad_(True)


class Keeps(Busy):
    """The layer that it unfreezes, in an attribute, which torch makes a part of its state."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.layer = optimizer.param_groups[0]["params"][:2]
        for parameter in self.layer:
            parameter.requires_grad_(False)

    def step(self):
        super().step()
        if self.last_epoch == 3:
            for parameter in self.layer:
                parameter.requires_grad_(True)


class Freezes(Busy):
    def step(self):
        super().step()
        if self.last_epoch == 5:
            for parameter in self.optimizer.param_groups[0]["params"][:2]:
                parameter.requires_grad_(False)


class Decays(Busy):
    """Gives parameters other data."""

    def step(self):
        super().step()
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.data = parameter.data * 0.97


class Follows(Busy):
    """The rate falls with the norm of the gradients."""

    def step(self):
        super().step()
        group = self.optimizer.param_groups[0]
        found = [p.grad.norm() for p in group["params"] if p.grad is not None]
        if found:
            group["lr"] = group["initial_lr"] / (1 + float(sum(found)))


class Restarts(Busy):
    """Forgets the momentum."""

    def step(self):
        super().step()
        if self.last_epoch % 4 == 0:
            self.optimizer.state.clear()


class Draws(Busy):
    def step(self):
        super().step()
        group = self.optimizer.param_groups[0]
        group["lr"] = group["initial_lr"] * (random.random() + float(torch.rand(())))


def drawing(optimizer, hp):
    return LambdaLR(optimizer, lambda epoch: 0.5 + float(torch.rand(())))


def unfreezing(optimizer, hp):
    for parameter in optimizer.param_groups[0]["params"][:2]:
        parameter.requires_grad_(False)
    return Unfreezes(optimizer)


def model(hp):
    layers = (nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2))
    return nn.Sequential(*layers).double()


def data(hp):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, 8, generator=generator, dtype=torch.float64)
    return [(one, (one.sum(1) > 0).long()) for one in x], None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def momentum(named, hp):
    return torch.optim.SGD([p for _, p in named], lr=hp["lr"], momentum=0.9)


def adam(named, hp):
    return torch.optim.AdamW([p for _, p in named], lr=0.1 * hp["lr"], fused=True)


LEAVES = ("unfreezes", "keeps", "freezes")
SCHEDULES = {
    "unfreezes": unfreezing,
    "keeps": lambda o, hp: Keeps(o),
    "freezes": lambda o, hp: Freezes(o),
    "decays": lambda o, hp: Decays(o),
    "follows": lambda o, hp: Follows(o),
    "restarts": lambda o, hp: Restarts(o),
    "draws": lambda o, hp: Draws(o),
    "draws in a function": drawing,
}


@pytest.fixture
def run(tmp_path, warm_workers):
    def runs(of, fuse=False, **options):
        study = shoal.Study(
            *("it", of),
            space=shoal.grid(lr=[0.03, 0.1, 0.2]),
            metric="train_loss",
            **{"epochs": EPOCHS, "directory": tmp_path},
        )
        how = {"hardware": HARDWARE, "fuse": fuse, "workers": warm_workers, **options}
        return study.run(**how)

    return runs


def recipe(schedule, optimizer=momentum):
    return shoal.Recipe(model=model, data=data, loss=loss, optimizer=optimizer, schedule=schedule)


@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_trial_alone_ends_as_the_loop(name, optimizer, run):
    of = recipe(SCHEDULES[name], optimizer)
    for trial in run(of).trials:
        assert not trial.error
        assert_same(plain_loop(of, trial.hp, trial.seed, epochs=EPOCHS), trial)


@pytest.mark.sample(4)
@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("name", SCHEDULES)
def test_in_an_array_too_or_it_leaves_it(name, optimizer, run):
    of = recipe(SCHEDULES[name], optimizer)
    report = run(of, fuse=3)
    assert set(squads.widths(report)) == ({1} if name in LEAVES else {3})
    for trial in report.trials:
        assert not trial.error
        alone = plain_loop(of, trial.hp, trial.seed, epochs=EPOCHS)
        state = trial.load_state()
        for key, tensor in alone.state()["model"].items():
            assert torch.allclose(state["model"][key], tensor, rtol=0, atol=1e-12), key
        assert torch.equal(state["rng"].torch, alone.rng.torch)
        assert state["rng"].python == alone.rng.python
    squads.assert_verified(report, of)


def test_shards_are_not_for_them(run):
    report = run(recipe(SCHEDULES["follows"]), technique="spilled")
    reasons = planned_reasons(report.directory)[0]
    assert any("the code of its schedule touches parameters, which" in why for why in reasons)


class Warmup:
    """A schedule of one's own that sets numbers only."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self):
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = min(1.0, self.count / 10)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize(
    ("make", "habits"),
    [
        (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5), Habits()),
        (lambda o: LambdaLR(o, lambda epoch: 0.9**epoch), Habits()),
        (Warmup, Habits()),
        (Draws, Habits(draws=True)),
        (lambda o: drawing(o, {}), Habits(draws=True)),
        (Follows, Habits(touches=True)),
        (Restarts, Habits(touches=True)),
        (
            lambda o: torch.optim.lr_scheduler.ChainedScheduler([Busy(o), Freezes(o)]),
            Habits(touches=True, freezes=True),
        ),
    ],
)
def test_what_a_schedule_does_is_read_in_its_code(make, habits):
    optimizer = momentum(list(model({}).named_parameters()), {"lr": 0.1})
    assert habits_of(make(optimizer)) == habits
    assert habits_of(None) == Habits()


def replaced(models, batch, optimizers, hp, number):
    if number == 2:
        models[3] = nn.Linear(12, 2).double()
        optimizers.param_groups[0]["params"][2:] = list(models[3].parameters())
    optimizers.zero_grad()
    found = F.cross_entropy(models(batch[0]), batch[1])
    found.backward()
    optimizers.step()
    return found


def grown(optimizer, args, kwargs):
    group = optimizer.param_groups[0]["params"]
    if len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": [group.pop()], "lr": 0.01})


def growing(named, hp):
    optimizer = momentum(named, hp)
    optimizer.register_step_post_hook(grown)
    return optimizer


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (
            shoal.Recipe(model=model, data=data, step=replaced, optimizer=momentum),
            "the step gave the model another '3.weight', and a trial's parameters are those",
        ),
        (recipe(None, growing), "the optimizer has groups of [3, 1] parameters, and had groups"),
    ],
    ids=["another module", "another group"],
)
def test_other_parameters_are_refused_in_words(of, words, run):
    for trial in run(of).trials:
        assert words in trial.error


DRAWS = {
    "random.choice": lambda epoch: random.choice([0.5, 1.0]),
    "random.sample": lambda epoch: random.sample([0.5, 1.0], 1)[0],
    "random.expovariate": lambda epoch: random.expovariate(1.0),
    "np.random.normal": lambda epoch: np.random.normal(),
    "torch.normal": lambda epoch: float(torch.normal(0.0, 1.0, (1,))),
    "torch.randperm": lambda epoch: int(torch.randperm(2)[0]),
    "in place": lambda epoch: float(torch.zeros(1).exponential_()),
    "nn.init": lambda epoch: float(nn.init.trunc_normal_(torch.zeros(1))),
    "imported from random": lambda epoch: betavariate(1.0, 1.0),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_all_common_ways_to_draw_are_known(draw):
    optimizer = momentum(list(model({}).named_parameters()), {"lr": 0.1})
    assert habits_of(LambdaLR(optimizer, draw)).draws
    assert habits_of(LambdaLR(optimizer, draw)).touches is False


def test_a_schedule_that_changes_weights_is_refused_for_those_of_another_trial():
    parameter = nn.Parameter(torch.zeros(1).expand(4), requires_grad=False)
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    class Decays(LambdaLR):
        def step(self):
            super().step()
            if self.last_epoch:
                parameter.mul_(0.9)

    with pytest.raises(TrialError, match=r"could not be brought to step 3 .*shoal\.PBT"):
        catch_up(Decays(optimizer, lambda epoch: 1.0), 3)
