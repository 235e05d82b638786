"""Unmodified models train as an array as they would alone, each slot with its own everything."""

import forms
import fusing
import pytest
import torch
import zoo
from machine import needs_bf16_lstm

from shoal.fusion import LoopBackend, StackedBackend, dry_run

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 200
SHORTER = {"resnet": 40, "mobilenet": 40, "t5": 40, "bert": 60, "unet": 80, "gru": 80}
# 200 for these too, in the full lane
RUNS = [(name, SHORTER.get(name, STEPS)) for name in fusing.MODELS]
RUNS += [pytest.param(name, STEPS, marks=pytest.mark.full) for name in SHORTER]
TIMES_ONE_ULP = 10
ROUNDING = 1e-15


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", fusing.MODELS)
def test_one_step_from_equal_state_is_the_step_alone(name):
    recipe, hps = fusing.recipe(name, clip_grad_norm=None), fusing.hps(name)

    array, losses = fusing.train(recipe, hps, 1)

    notes = [n for n in array.backend.notes if not n.endswith("it counts its batches in Python")]
    assert notes == []  # nothing else ran slot by slot
    for slot, hp in enumerate(hps):
        plain = fusing.alone(recipe, hp, slot, 1)
        assert losses[slot] == pytest.approx(plain.losses, abs=1e-12)
        found, expected = array.extract(slot), plain.state()
        assert_close(statistics(found), statistics(expected), 1e-12)
        (group,) = expected["optimizer"]["groups"]
        for parameter, moments in expected["optimizer"]["state"].items():  # after one step
            mine = found["optimizer"]["state"][parameter]
            assert_close(mine, moments, 1e-12)
            one, other = (m["exp_avg"] / (1 - group["betas"][0]) for m in (mine, moments))
            assert_close({parameter: one}, {parameter: other}, 1e-12)  # the gradients
        assert torch.equal(found["rng"].torch, plain.rng.torch)
        assert found["schedule"] == expected["schedule"]
        assert found["optimizer"]["groups"] == expected["optimizer"]["groups"]


def statistics(state):
    return {k: t for k, t in state["model"].items() if "running" in k or "num_batches" in k}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "steps"), RUNS)
def test_a_long_run_drifts_like_one_whose_weights_were_moved_by_one_ulp(name, steps):
    recipe, hps = fusing.recipe(name), fusing.hps(name)

    array, _ = fusing.train(recipe, hps, steps)

    for slot, hp in enumerate(hps):
        plain = fusing.alone(recipe, hp, slot, steps).state()
        moved = fusing.alone(recipe, hp, slot, steps, ulp=True).state()
        bound = TIMES_ONE_ULP * max(fusing.drift(moved, plain), ROUNDING)
        assert fusing.drift(array.extract(slot), plain) <= bound
        assert torch.equal(array.extract(slot)["rng"].torch, plain["rng"].torch)


@pytest.mark.parametrize("name", fusing.MODELS)
def test_in_float32_a_step_is_within_rounding(name):
    recipe = fusing.recipe(name, clip_grad_norm=None)
    hps = fusing.hps(name, dtype="float32", optimizer="sgd", decay=0.0)

    array, losses = fusing.train(recipe, hps, 1)

    for slot, hp in enumerate(hps):
        plain = fusing.alone(recipe, hp, slot, 1)
        assert losses[slot] == pytest.approx(plain.losses, abs=1e-5)
        assert_close(momentum(array.extract(slot)), momentum(plain.state()), 1e-5)


def momentum(state):
    """After one step of SGD the gradients."""
    return {k: v["momentum_buffer"] for k, v in state["optimizer"]["state"].items()}


@pytest.mark.parametrize("name", fusing.MODELS)
def test_a_dry_run_finds_nothing(name):
    made = fusing.trials(fusing.recipe(name), fusing.hps(name))

    assert dry_run([t.member for t in made], [next(next(t.groups)) for t in made]) == ""


OLDER = pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.10 declines its products")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=OLDER if n == "mixtral" else ()) for n in (*zoo.MODELS, *forms.LAYERS)],
)
def test_a_model_of_the_zoo_passes_its_dry_run(name):
    recipe = zoo.recipe() if name in zoo.MODELS else forms.recipe()
    hps = [{"model": name, "optimizer": "adamw", "lr": 1e-2 * (slot + 1)} for slot in range(2)]
    made = fusing.trials(recipe, hps)
    backend = StackedBackend()

    reason = dry_run(
        [t.member for t in made], [next(next(t.groups)) for t in made], backend=backend
    )

    assert reason == ""
    looped = [note for note in backend.notes if "runs slot by slot" in note]
    assert looped == [] or name == "mixture"  # whose experts take as many rows as they are sent


@pytest.mark.parametrize("name", ["mlp", "cnn", "language", "lstm"])
def test_slot_by_slot_the_bits_are_those_of_trials_alone(name):
    recipe, hps = fusing.recipe(name), fusing.hps(name)

    array, losses = fusing.train(recipe, hps, 5, backend=LoopBackend())

    for slot, hp in enumerate(hps):
        plain = fusing.alone(recipe, hp, slot, 5)
        assert losses[slot] == list(plain.losses)
        assert fusing.drift(array.extract(slot), plain.state()) == 0


@pytest.mark.parametrize("name", ["mlp", "cnn", "language"])
def test_accumulated_and_clipped_steps_are_those_alone(name):
    recipe = fusing.recipe(name, accumulate=3, clip_grad_norm=0.05)  # the last group is short
    hps = fusing.hps(name)

    array, losses = fusing.train(recipe, hps, 4)

    for slot, hp in enumerate(hps):
        plain = fusing.alone(recipe, hp, slot, 4)
        assert losses[slot] == pytest.approx(plain.losses, abs=1e-12)
        moved = fusing.alone(recipe, hp, slot, 4, ulp=True).state()
        bound = TIMES_ONE_ULP * max(fusing.drift(moved, plain.state()), ROUNDING)
        assert fusing.drift(array.extract(slot), plain.state()) <= bound


@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "cnn", "mobilenet", "generator", "vit"),
        pytest.param("lstm", marks=needs_bf16_lstm),
    ],
)
def test_under_autocast_a_step_is_within_bfloat16(name):
    recipe = fusing.recipe(name, precision="bf16")
    hps = fusing.hps(name, dtype="float32")

    _, losses = fusing.train(recipe, hps, 2)

    for slot, hp in enumerate(hps):
        assert losses[slot] == pytest.approx(fusing.alone(recipe, hp, slot, 2).losses, abs=2e-2)
