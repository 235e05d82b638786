"""Muon beside AdamW, in a recipe without a step of its own: the plain bits in every technique."""

from __future__ import annotations

import pytest
import squads
import staging
import torch
import traps

import shoal
from shoal.core.errors import SpecError
from shoal.recipes.recipe import Recipe
from shoal.testing import plain_loop

TECHNIQUES = {
    "resident": "resident",
    "shards": shoal.Spilled(shards=3, optimizer="device"),
    "shards, host": shoal.Spilled(shards=3, optimizer="host"),
    "shards, one stays": shoal.Spilled(shards=4, optimizer="device", keep=(1,)),
}


def muon_and_adamw(named, hp):
    """Matrices to the one, the rest to the other, as a mapping."""
    named = list(named)
    matrices = [p for _, p in named if p.dim() == 2]
    others = [p for _, p in named if p.dim() != 2]
    return {
        "muon": torch.optim.Muon(matrices, lr=hp["lr"], weight_decay=0.0),
        "adamw": torch.optim.AdamW(others, lr=hp["lr"] / 2, fused=True),
    }


def in_a_list(named, hp):
    """Every second parameter each; some shards have none of one."""
    named = list(named)
    return [
        torch.optim.SGD([p for _, p in named[::2]], lr=hp["lr"], momentum=0.9),
        torch.optim.Adam([p for _, p in named[1::2]], lr=hp["lr"]),
    ]


def decays(optimizers, hp):
    members = optimizers.values() if hasattr(optimizers, "values") else optimizers
    return [torch.optim.lr_scheduler.StepLR(o, 2 + i, 0.5) for i, o in enumerate(members)]


def make(factory, **changes) -> Recipe:
    settings = {"model": traps.Build(traps.Chain), "data": traps.data, "loss": traps.loss}
    settings |= {"optimizer": factory, "schedule": decays, "clip_grad_norm": 0.5}
    return Recipe(**settings, **changes)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "factory", [muon_and_adamw, pytest.param(in_a_list, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "fp32") for name in TECHNIQUES), ("shards, host", "bf16")]
)
def test_whole_and_in_shards(name, precision, factory, run_study, assert_alone):
    recipe = make(factory, accumulate=2, precision=precision)
    space = shoal.grid(lr=[1e-2, 3e-3])
    report = run_study(recipe, space, steps=5, technique=TECHNIQUES[name], poison=True)
    assert_alone(report, report.trials, recipe, steps=5)


@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
def test_in_stages(schedule, run_study):
    recipe = staging.rich(optimizer=muon_and_adamw, schedule=decays)
    technique = shoal.Pipelined(schedule=schedule, stages=2)
    report = run_study(recipe, {"lr": 1e-2}, epochs=2, technique=technique, devices=2)
    staging.assert_staged(report, recipe, technique, epochs=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("factory", [muon_and_adamw, in_a_list])
def test_in_an_array(factory, run_study):
    recipe = make(factory)
    space = shoal.grid(lr=[1e-2, 3e-3, 1e-3])
    report = run_study(recipe, space, steps=5, fuse=3)
    squads.assert_arrayed(report, report.trials, recipe, 3, steps=5)


def test_the_optimizers_have_their_own_options_in_the_groups():
    result = plain_loop(make(muon_and_adamw), {"lr": 1e-2}, 0, steps=1)
    groups = result.state()["optimizer"]["groups"]
    assert [group["lr"] for group in groups] == [1e-2, 5e-3]
    assert "ns_steps" in groups[0]
    assert "betas" in groups[1]


def both(named, hp):
    parameters = [p for _, p in named]
    return [torch.optim.SGD(parameters, lr=0.1), torch.optim.Adam(parameters[:2])]


def one_twice(named, hp):
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    return {"one": optimizer, "other": optimizer}


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (both, r"gave 2 parameters to more than one optimizer, the first '.*': each would step"),
        (one_twice, "returned one optimizer twice; return it once"),
        (lambda named, hp: [], "returned list; return one torch.optim.Optimizer .* or a list"),
        (
            lambda named, hp: {"a/b": torch.optim.SGD([p for _, p in named], lr=0.1)},
            r"an optimizer under the name 'a/b': a name is not empty and has no '/'",
        ),
        (
            lambda named, hp: [torch.optim.SGD([p for _, p in named], lr=0.1), None],
            "returned list of SGD, NoneType; return one",
        ),
    ],
)
def test_what_is_refused(factory, words):
    with pytest.raises(SpecError, match=words):
        plain_loop(
            Recipe(
                model=traps.Build(traps.Chain), data=traps.data, loss=traps.loss, optimizer=factory
            ),
            {"lr": 0.1},
            0,
            steps=1,
        )
