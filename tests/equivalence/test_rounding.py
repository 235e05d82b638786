"""Weights in bfloat16 that each step rounds by chance: the same chance wherever they train."""

from __future__ import annotations

import pytest
import torch
import zoo

import shoal
from shoal.core.event import PeakMeasured

STEPS = 5


@pytest.fixture
def train(run_study, assert_alone):
    def run(recipe, technique, model="gpt", optimizer="adamw", **options):
        peaks = []

        def note(event):
            if isinstance(event, PeakMeasured):
                peaks.append(event)

        space = shoal.grid(model=[model], optimizer=[optimizer], lr=[1e-2, 3e-3])
        report = run_study(
            recipe, space, steps=STEPS, technique=technique, callbacks=[note], **options
        )
        assert_alone(report, report.trials, recipe, steps=STEPS)
        assert all(peak.peak_bytes <= peak.predicted_bytes for peak in peaks)
        return report

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize("technique", ["resident", "spilled"])
@pytest.mark.parametrize("model", zoo.MODELS)
def test_every_model_has_the_plain_bits(model, technique, train):
    train(zoo.recipe(precision="bf16-sr", clip=0.5), technique, model=model)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_where_it_steps_changes_nothing(optimizer, accumulate, place, train):
    recipe = zoo.recipe(precision="bf16-sr", clip=0.5, accumulate=accumulate, schedule=True)
    technique = shoal.Spilled(shards=4, optimizer=place, keep=(1,))
    train(recipe, technique, optimizer=optimizer, poison=True)


@pytest.mark.slow
def test_matrices_are_saved_as_bfloat16_and_read_back(train):
    report = train(zoo.recipe(precision="bf16-sr"), "spilled")
    weights = report.trials[0].load_state()["model"]
    kinds = {tensor.dtype for tensor in weights.values() if tensor.dim() > 1}
    assert kinds == {torch.bfloat16}
    model = report.best.load()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, report.best.load_state()["model"][name].to(parameter.dtype))


def test_it_goes_on_from_a_generation_to_the_same_bits(run_study, assert_alone):
    recipe = zoo.recipe(precision="bf16-sr")
    space = shoal.grid(model=["gpt"], optimizer=["adamw"], lr=[1e-2, 3e-3, 1e-3])
    report = run_study(
        recipe, space, steps=STEPS, technique="spilled", devices=2, checkpoint_every=0
    )
    assert_alone(report, report.trials, recipe, steps=STEPS)
