"""Which trials are measured once."""

from __future__ import annotations

import torch
from torch import nn

from shoal.core.spec import HyperParameters, TrialSpec
from shoal.recipes.recipe import Recipe
from shoal.runtime.measuring import describe
from shoal.runtime.wire.messages import Describe


def signature(recipe: Recipe, hp: dict) -> str:
    trial = TrialSpec(number=0, hp=hp, seed=0)
    return describe.describe(recipe, Describe((trial,)), lambda trial: None).signatures[0]


def build(hp):
    return nn.Sequential(
        nn.Linear(4, hp.get("width", 8)), nn.Dropout(hp["drop"]), nn.Softplus(hp.get("beta", 1.0))
    )


def described(**hp) -> str:
    recipe = Recipe(
        model=build,
        data=lambda hp: ([torch.zeros(2, 4)], None),
        loss=lambda output, batch: output.sum(),
    )
    return signature(recipe, {"lr": 0.1, **hp})


def test_trials_that_differ_in_how_much_is_dropped_cost_the_same():
    assert described(drop=0.1) == described(drop=0.25) == described(drop=1e-5)


def test_whether_anything_is_dropped_counts_and_so_do_widths_and_other_floats():
    assert described(drop=0.1) != described(drop=0.0)
    assert described(drop=0.1) != described(drop=0.1, width=9)
    assert described(drop=0.1) != described(drop=0.1, beta=2.0)


def weighted(output, batch, hp):
    total = output.sum() if hp["kind"] == "sum" else output.mean()
    return hp["weight"] * total


def told(**hp) -> str:
    recipe = Recipe(
        model=lambda hp: nn.Linear(4, 8),
        data=lambda hp: ([torch.zeros(2, 4)], None),
        loss=weighted,
        metrics={"deep": lambda output, batch, hp: output.sum() * hp["depth"]},
        clip_grad_norm=lambda hp: hp["clip"],
    )
    values = {"lr": 0.1, "depth": 1, "kind": "sum", "weight": 0.5, "clip": 1.0, "note": "a"}
    return signature(recipe, values | hp)


def test_a_metric_may_cost_more_too():
    assert told() != told(depth=20)


def test_of_what_a_loss_reads_choices_count_and_whether_a_number_is_zero():
    assert told() == told(weight=0.1) == told(note="b") == told(lr=0.2)
    assert told() != told(weight=0.0)
    assert told() != told(kind="mean")


def test_whether_anything_is_clipped_counts():
    assert told() == told(clip=2.0)
    assert told() != told(clip=None)


def test_weights_that_are_loaded_as_a_model_is_described_warn_of_nothing():
    weights = nn.Linear(2, 2).state_dict()

    def tuned(hp):
        model = nn.Linear(2, 2)
        model.load_state_dict(weights)
        return model

    recipe = Recipe(model=tuned, data=lambda hp: ([], None))
    hollow = describe.hollow_model(recipe, HyperParameters({}), 0)
    assert hollow is not None
    assert hollow.weight.device.type == "meta"
