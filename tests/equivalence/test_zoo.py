"""Each model of the zoo trains alone, twice to the same bits, and learns something."""

import pickle
import subprocess
import sys

import pytest
import zoo

from shoal.testing import compare, plain_loop


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
