"""The matrix: models x optimizers x techniques x company x clip, accumulate, schedule, bf16.

Each row is one study. ``company`` says who else is there: nobody, other trials on the same
device, or other trials on two devices. All trials of the study must end on the bits of
the plain loop: losses, weights, buffers, optimizer state, schedule, random streams.

The rows are a pairwise covering array, warm workers shared by all; most runs take a sample of them
in which every value occurs. The full product is marked ``full``.
"""

from __future__ import annotations

import pytest
import zoo
from covering import cover_pairs, full_product

import shoal

STEPS = 6
TECHNIQUES = {
    "resident": "resident",
    "1 shard": shoal.Spilled(shards=1, optimizer="device"),
    "2 shards": shoal.Spilled(shards=2, optimizer="device"),
    "4 shards": shoal.Spilled(shards=4, optimizer="device"),
    "3 shards, host step": shoal.Spilled(shards=3, optimizer="host"),
    "4 shards, 2 stay": shoal.Spilled(
        shards=4,
        optimizer="device",
        lookahead=0,
        keep=(0,),
        keep_weights=(2,),
        boundaries="host",
    ),
    "4 shards, 2 stay, host step": shoal.Spilled(
        shards=4, optimizer="host", lookahead=0, keep=(1,), keep_turn=2
    ),
}
FACTORS = {
    "model": zoo.MODELS,
    "technique": tuple(TECHNIQUES),
    "company": ("alone", "neighbours", "two devices"),
    "optimizer": ("sgd", "adamw"),
    "clip": (None, 0.5),
    "accumulate": (1, 3),
    "schedule": (False, True),
    "precision": ("fp32", "bf16"),
}
COVERING = cover_pairs(FACTORS)
IN_HP = ("model", "optimizer")  # these the trials of one study can differ in
PRODUCT = full_product({key: values for key, values in FACTORS.items() if key not in IN_HP})
LEARNING_RATES = (1e-2, 3e-3)


def name_of(row):
    unclear = ("clip", "accumulate", "schedule")
    return ", ".join(f"{key}={row[key]}" if key in unclear else str(row[key]) for key in row)


def neighbour_of(model):
    """Another model of the zoo, so that neighbours differ in shape."""
    return {"gpt": "resnet", "resnet": "mlp", "mlp": "gpt", "bert": "llama", "llama": "bert"}[
        model
    ]


def make_space(row):
    models, rates = [row["model"], neighbour_of(row["model"])], LEARNING_RATES
    if row["company"] == "alone":
        models, rates = models[:1], rates[:1]
    return shoal.grid(model=models, optimizer=[row["optimizer"]], lr=rates)


@pytest.fixture
def check(run_study, assert_alone):
    """Run one study and compare every trial of it with the plain loop."""

    def run(row, space):
        keys = ("clip", "accumulate", "schedule", "precision")
        recipe = zoo.recipe(**{key: row[key] for key in keys})
        report = run_study(
            recipe,
            space,
            steps=STEPS,
            devices=2 if row["company"] == "two devices" else 1,
            technique=TECHNIQUES[row["technique"]],
        )
        assert_alone(report, report.trials, recipe, steps=STEPS)
        return report

    return run


@pytest.mark.sample(4)
@pytest.mark.parametrize("row", COVERING, ids=map(name_of, COVERING))
def test_a_trial_of_a_study_ends_on_the_bits_of_the_plain_loop(row, check):
    report = check(row, make_space(row))
    assert len(report.trials) == (1 if row["company"] == "alone" else 4)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", PRODUCT, ids=map(name_of, PRODUCT))
def test_every_combination_ends_on_the_bits_of_the_plain_loop(row, check):
    optimizers, rates = FACTORS["optimizer"], LEARNING_RATES[:1]
    if row["company"] != "alone":
        check(row, shoal.grid(model=zoo.MODELS, optimizer=optimizers, lr=rates))
        return
    for model in zoo.MODELS:
        for optimizer in optimizers:
            check(row, shoal.grid(model=[model], optimizer=[optimizer], lr=rates))


def test_the_rows_hold_every_pair_and_are_few():
    assert len(COVERING) <= 36
    assert {(row["model"], row["technique"]) for row in COVERING} == {
        (model, technique) for model in zoo.MODELS for technique in TECHNIQUES
    }
