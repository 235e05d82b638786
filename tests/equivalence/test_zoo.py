"""Each model of the zoo trains alone, twice to the same bits, and learns something.

Those of other forms than a row of blocks also train in shards, each here once or twice; the
full lane has them in 1, 2 and as many shards as there are layers, with either place of the
step, clipped and not, accumulated and not, in both precisions.
"""

import itertools
import pickle
import subprocess
import sys

import forms
import pytest
import zoo

import shoal
from shoal.core.plan import Plan
from shoal.core.technique import Spilled
from shoal.testing import compare, plain_loop

STEPS = 4
ROWS = {  # model, shards (0: as many as layers), place of the step, clip, accumulate, precision
    "vit": [(0, "device", 0.5, 2, "fp32"), (2, "host", None, 1, "bf16")],
    "t5": [(0, "device", 0.5, 2, "bf16"), (2, "host", 0.5, 1, "fp32")],
    "bart": [(0, "host", None, 2, "bf16")],
    "beit": [(2, "device", 0.5, 1, "fp32")],
    "clip": [(0, "device", None, 1, "bf16")],
    "mixtral": [(2, "host", 0.5, 2, "fp32")],
    "translator": [(0, "host", 0.5, 3, "bf16")],
    "siamese": [(3, "device", 0.5, 2, "fp32")],
    "unet": [(0, "host", 0.5, 1, "fp32")],
    "mobilenet": [(4, "device", None, 2, "bf16")],
    "unlisted": [(0, "host", 0.5, 2, "fp32")],
    "layers": [(0, "device", 0.5, 2, "bf16")],
    "mixture": [(0, "host", 0.5, 2, "bf16")],
    "looped": [(0, "device", 0.5, 2, "fp32")],
}
NORMAL = [(model, *row) for model, rows in ROWS.items() for row in rows]
FULL = [
    (model, shards, place, clip, accumulate, precision)
    for model, shards, place, precision in itertools.product(
        ROWS, (1, 2, 0), ("device", "host"), ("fp32", "bf16")
    )
    for clip, accumulate in ((None, 1), (0.5, 3))
]


def name_of(row):
    model, shards, place, clip, accumulate, precision = row
    return f"{model}, {shards or 'all'} shards, {place}, {clip=}, {accumulate=}, {precision}"


@pytest.fixture
def train(run_study, assert_alone):
    """Train one model of another form in shards, and compare it with the plain loop."""

    def run(model, shards, place, clip, accumulate, precision):
        recipe = forms.recipe(clip=clip, accumulate=accumulate, precision=precision, schedule=True)
        report = run_study(
            recipe,
            shoal.grid(model=[model], optimizer=["adamw"], lr=[1e-2]),
            steps=STEPS,
            technique=shoal.Spilled(shards=shards or forms.LAYERS[model], optimizer=place),
        )
        assert_alone(report, report.trials, recipe, steps=STEPS)

    return run


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("row", NORMAL, ids=map(name_of, NORMAL))
def test_a_model_of_another_form_trains_in_shards_as_alone(row, train):
    train(*row)


@pytest.mark.full
@pytest.mark.parametrize("row", FULL, ids=map(name_of, FULL))
def test_every_form_trains_in_any_shards_as_alone(row, train):
    train(*row)


def test_a_model_that_skips_blocks_by_chance_is_cut_around_them(run_study, assert_alone):
    """What draws the number, and what it skips, is one shard's, which draws it again."""
    recipe = forms.recipe()
    space = shoal.grid(model=["layerdrop"], optimizer=["sgd"], lr=[1e-2])

    report = run_study(recipe, space, steps=2 * STEPS, technique="spilled")

    (job,) = Plan.from_json((report.directory / "plan.json").read_text()).jobs
    assert isinstance(job.technique, Spilled)
    assert_alone(report, report.trials, recipe, steps=2 * STEPS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", zoo.MODELS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_lone_runs_agree_and_learn(model, optimizer):
    recipe = zoo.recipe(clip=1.0, accumulate=3, schedule=True, precision="bf16")
    hp = {"model": model, "optimizer": optimizer, "lr": 1e-2}
    first, second = (plain_loop(recipe, hp, 1, steps=8) for _ in range(2))
    assert compare(first, second.state(), losses=second.losses).equal
    assert min(first.losses[2:]) < first.losses[0]


def test_another_process_reads_the_recipe_by_name():
    sent = pickle.dumps(zoo.recipe())
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).model.__module__)"
    paths = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    answer = subprocess.run(
        [sys.executable, "-c", code], input=sent, capture_output=True, env=paths
    )
    assert answer.stdout.decode().strip() == "zoo", answer.stderr.decode()
