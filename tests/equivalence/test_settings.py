"""What is set for a whole process at the head of a file holds for its trials, in workers."""

from __future__ import annotations

import decimal
import locale

import numpy
import pytest
import torch
from torch import nn

import shoal
from shoal.kernels.kernelchoice import KernelChoice
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.recipes.recipe import Recipe


class Attends(nn.Module):
    """With weights among the denormals, attention, products that oneDNN has a kernel for, and a
    weight that is cast for two uses."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(64, 96), nn.Linear(96, 64)
        self.twice = nn.Linear(64, 64)
        self.tiny = nn.Parameter(torch.full((8,), 1e-37))

    def forward(self, x):
        h = self.into(x).view(4, 2, 8, 48)
        h = nn.functional.scaled_dot_product_attention(h, h, h).reshape(-1, 96)
        h = self.out(nn.functional.gelu(h))
        with torch.autocast("cpu"):
            h = self.twice(self.twice(h).relu())
        return h.float() + (self.tiny * 1e-3).mul(1e30).sum()


def build(hp):
    return Attends()


def data(hp):
    draws = torch.Generator().manual_seed(1)
    batch = torch.rand(32, 64, generator=draws), torch.rand(32, 64, generator=draws)
    return [batch] * 3, None


def loss(output, batch):
    return (output - batch[1]).square().mean()


SETTINGS = {
    "flushed denormals": lambda: torch.set_flush_denormal(True),
    "without oneDNN": lambda: torch.backends.mkldnn.set_flags(False),
    "without flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "autocast of CPUs": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "weights cast for each use": lambda: torch.set_autocast_cache_enabled(False),
}


@pytest.fixture
def restored():
    before = KernelChoice.here()
    yield
    before.take()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trial_has_the_settings_of_who_asks_for_it(name, restored, run_study, assert_alone):
    SETTINGS[name]()
    recipe = Recipe(model=build, data=data, loss=loss)
    report = run_study(recipe, shoal.grid(lr=[0.01]), steps=3)
    assert_alone(report, report.trials, recipe, steps=3)
    (row,) = Snapshot.of(read_outline(report.directory)).trials
    assert row.numerics[name] in ("yes", "float16")


def divide(hp):
    numpy.float64(1) / numpy.float64(0)
    return nn.Linear(64, 64)


def test_what_raises_alone_raises_in_a_worker(restored, run_study):
    numpy.seterr(divide="raise")
    with pytest.raises(shoal.TrialError, match="FloatingPointError"):
        run_study(Recipe(model=divide, data=data, loss=loss), shoal.grid(lr=[0.1]), steps=1)


def by_context(output, batch):
    exact = decimal.Decimal(1) / 3
    named = len(locale.setlocale(locale.LC_CTYPE))
    return float(exact) * named * (output - batch[1]).square().mean()


def test_the_decimal_context_and_the_locale_are_those_of_who_asks(
    restored, run_study, assert_alone
):
    decimal.getcontext().prec = 3
    locale.setlocale(locale.LC_CTYPE, "C")
    recipe = Recipe(model=build, data=data, loss=by_context)
    report = run_study(recipe, shoal.grid(lr=[0.01]), steps=2)
    assert_alone(report, report.trials, recipe, steps=2)
