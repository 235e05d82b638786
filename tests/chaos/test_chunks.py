"""A step on the host that ends in mid-shard: nobody ever sees a shard of which half is stepped."""

from __future__ import annotations

import chunking
import pytest

import shoal
from shoal.memory import chunks
from shoal.testing import compare, plain_loop

STEPS = 7
HOST = shoal.Spilled(shards=3, optimizer="host", keep=(), recompute=True)


@pytest.fixture
def run(run_study, assert_alone, monkeypatch, tmp_path):
    """Trials whose every tensor is a chunk; those without an accident end on the plain bits."""
    monkeypatch.setattr(chunks, "CHUNK_S", 0.0)

    def run(accident, **options):
        space = shoal.grid(accident=[accident, "none"], lr=[1e-2], flag=[str(tmp_path / "flag")])
        recipe = chunking.recipe(optimizer=chunking.accidental, clip_grad_norm=0.5)
        options = {"technique": HOST, "steps": STEPS, "checkpoint_every": 0, **options}
        report = run_study(recipe, space, **options)
        harmed, other = report.trials
        assert_alone(report, [other], recipe, steps=STEPS)
        return report, harmed, recipe

    return run


@pytest.mark.slow
def test_an_optimizer_that_raises_at_a_chunk_fails_its_trial_and_leaves_the_step_before(run):
    _, harmed, recipe = run("raise again")
    assert harmed.state == "FAILED"
    assert "the optimizer gave up at step 4" in harmed.error
    saved = harmed.load_state()
    assert saved["step"] < chunking.FAILS_AT
    alone = plain_loop(recipe, harmed.hp, harmed.seed, steps=saved["step"])
    assert compare(alone, saved).equal


@pytest.mark.parametrize(("accident", "options"), [("raise", {"retries": 1}), ("kill", {})])
def test_the_trial_goes_on_from_the_step_before_to_the_plain_bits(
    accident, options, run, assert_alone, tmp_path
):
    report, harmed, recipe = run(accident, **options)
    assert (tmp_path / "flag").exists()
    assert_alone(report, [harmed], recipe, steps=STEPS)
