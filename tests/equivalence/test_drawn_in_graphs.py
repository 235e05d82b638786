"""What a forward draws, in an array: each slot's own numbers, and the pass is a graph."""

from __future__ import annotations

import pytest
import squads
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal

SPACE = shoal.grid(lr=[1e-2, 1e-3, 3e-3])
WIDTH = 8


class Coder(nn.Module):
    """A variational autoencoder whose code is what ``draw`` makes of a mean and a deviation."""

    def __init__(self, draw):
        super().__init__()
        self.inside, self.outside = nn.Linear(6, 2 * WIDTH), nn.Linear(WIDTH, 6)
        self.draw = draw

    def forward(self, x):
        mean, deviation = self.inside(x).chunk(2, -1)
        code = self.draw(mean, F.softplus(deviation))
        return self.outside(code), mean, deviation


def with_noise(mean, deviation):
    return mean + deviation * torch.randn_like(deviation)


def of_a_distribution(mean, deviation):
    """It looks at its numbers first: that there is no NaN, and that deviations are positive."""
    return torch.distributions.Normal(mean, deviation).rsample()


def with_paths_dropped(mean, deviation):
    keep = mean.new_empty((len(mean), 1)).bernoulli_(0.7)
    return (mean + deviation) * keep / 0.7


def chosen(mean, deviation):
    return deviation * F.gumbel_softmax(mean)


def masked(mean, deviation):
    shown = torch.rand(len(mean), WIDTH).argsort(1) < 5
    return torch.where(shown, mean, deviation)


def by_chance(mean, deviation):
    return mean * torch.bernoulli(deviation.detach().clamp(max=1)) + deviation


def gated(mean, deviation):
    return mean * torch.bernoulli(deviation.clamp(max=1)) + deviation


def sampled(mean, deviation):
    return mean + torch.distributions.Normal(mean, deviation).sample()


class Diffusion(nn.Module):
    """It draws a time and noise, and is its own loss."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 6))
        self.register_buffer("left", torch.linspace(0.99, 0.01, 50))

    def forward(self, x):
        time = torch.randint(0, 50, (len(x),))
        noise, left = torch.randn_like(x), self.left[time][:, None]
        seen = left.sqrt() * x + (1 - left).sqrt() * noise
        found = self.body(torch.cat([seen, time[:, None] / 50], 1))
        return {"loss": F.mse_loss(found, noise)}


def data(hp):
    rows = TensorDataset(torch.rand(40, 6, generator=torch.Generator().manual_seed(1)).double())
    return DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows, 20)


def loss(output, batch):
    found, mean, deviation = output
    return F.mse_loss(found, batch[0]) + 0.01 * (mean.square() + deviation.square()).mean()


def recipe(draw):
    return shoal.Recipe(model=lambda hp: Coder(draw).double(), data=data, loss=loss)


RECIPES = {
    **{
        draw.__name__: recipe(draw)
        for draw in (
            *(with_noise, of_a_distribution, with_paths_dropped, chosen, masked, by_chance),
            *(gated, sampled),
        )
    },
    "diffusion": shoal.Recipe(model=lambda hp: Diffusion().double(), data=data),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_pass_that_draws_is_a_graph_and_each_slot_has_its_own_numbers(name, run_study):
    """Three trials in two slots: the last one is alone in its array."""
    report = run_study(RECIPES[name], SPACE, epochs=2, fuse="2 traced")
    assert squads.kinds(report) == ["traced"] * 3
    squads.assert_near(report.trials, RECIPES[name], 1e-9, epochs=2)
    squads.assert_verified(report, RECIPES[name])


@pytest.mark.slow
def test_a_compiled_pass_draws_too(run_study):
    report = run_study(RECIPES["diffusion"], SPACE, epochs=2, fuse="3 compiled")
    assert squads.kinds(report) == ["compiled"] * 3
    squads.assert_near(report.trials, RECIPES["diffusion"], 1e-9, epochs=2)
    squads.assert_verified(report, RECIPES["diffusion"])


def test_a_distribution_of_no_such_numbers_fails_its_trial_alone(run_study):
    """Graphs take what is looked at to hold, and have it checked: the eager pass says whose."""

    def narrow(mean, deviation):
        return torch.distributions.Normal(mean, deviation - 0.2).rsample()

    mine, space = recipe(narrow), shoal.grid(lr=[1.0, 1e-4, 3e-4])
    report = run_study(mine, space, epochs=6, fuse="3 traced")
    alone = run_study(mine, space, epochs=6)
    found, states = (
        {trial.number: trial.state for trial in one.trials} for one in (report, alone)
    )
    assert found == states == {0: "FAILED", 1: "FINISHED", 2: "FINISHED"}
    assert {"constraint" in trial.error for trial in report.trials if trial.error} == {True}
    squads.assert_verified(report, mine, failed=(0,))


def test_a_probability_beyond_one_fails_its_trial_alone(run_study):
    def high(mean, deviation):
        return mean * torch.bernoulli(deviation.detach() / 2) + deviation

    mine, space = recipe(high), shoal.grid(lr=[1.0, 1e-3, 3e-3])
    report = run_study(mine, space, epochs=6, fuse=3)
    alone = run_study(mine, space, epochs=6)
    found, states = (
        {trial.number: trial.state for trial in one.trials} for one in (report, alone)
    )
    assert found == states == {0: "FAILED", 1: "FINISHED", 2: "FINISHED"}
    assert {"p_in" in trial.error for trial in report.trials if trial.error} == {True}
