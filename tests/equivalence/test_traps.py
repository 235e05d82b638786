"""One test for each known way to lose the plain loop's bits.

Every study here is run in shards with recompute, accumulation, clipping and a step on the
device unless the test is about something else.
"""

from __future__ import annotations

import pytest
import torch
import traps
import zoo
from torch import nn

import shoal
from shoal.core.errors import PlanError
from shoal.memory.layout import TensorSpec
from shoal.memory.store import describe, view
from shoal.testing import compare, plain_loop

HP = {"lr": 1e-2}
STEPS = 5


def make_recipe(model, **changes):
    settings = {
        "model": model if callable(model) and not isinstance(model, type) else traps.Build(model),
        "data": traps.data,
        "loss": traps.loss,
        "optimizer": traps.adamw,
        "clip_grad_norm": 0.5,
        "accumulate": 2,
    }
    return shoal.Recipe(**(settings | changes))


@pytest.fixture
def check(run_study, assert_alone):
    """Run a recipe's trials, in shards if not told otherwise, and compare them all."""

    def run(recipe, *, space=None, shards=3, optimizer="device", **options):
        space = shoal.grid(**{name: [value] for name, value in HP.items()}) | (space or {})
        technique = shoal.Spilled(shards=shards, optimizer=optimizer) if shards else "resident"
        length = {"epochs": options.pop("epochs")} if "epochs" in options else {"steps": STEPS}
        length |= {name: options.pop(name) for name in ("steps", "eval_every") if name in options}
        report = run_study(recipe, space, technique=technique, **length, **options)
        assert_alone(report, report.trials, recipe, **length)
        return report

    return run


# ------------------------------------------------------------------ gradients that meet


@pytest.mark.parametrize("model", [traps.SharedBoundary, traps.Skips])
def test_a_boundary_read_by_several_shards_gets_its_gradient_in_the_plain_order(model, check):
    check(make_recipe(model))


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_tied_weight_with_accumulation_adds_head_and_embedding_first(place, check):
    space = shoal.grid(model=["gpt"], optimizer=["sgd", "adamw"])
    check(zoo.recipe(accumulate=3), space=space, optimizer=place)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [traps.SharedLayer, traps.Reused, traps.SharedArgument])
def test_a_weight_with_two_uses_far_apart_keeps_its_bits(model, precision, check):
    check(make_recipe(model, precision=precision))


def test_gradients_are_accumulated_in_the_plain_order_through_structured_boundaries(check):
    check(make_recipe(traps.Structured))


def test_a_block_that_begins_in_place_does_not_touch_the_boundary(check):
    check(make_recipe(traps.InPlace), shards=4)


@pytest.mark.slow
def test_a_key_value_cache_is_not_filled_twice(check):
    recipe = make_recipe(traps.gpt2, data=traps.token_data, loss=None)
    check(recipe)


# ------------------------------------------------------------------ the step


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_parameter_without_a_gradient_is_skipped_as_torch_skips_it(place, check):
    report = check(make_recipe(traps.Unused), optimizer=place)
    state = report.trials[0].load_state()["optimizer"]["state"]
    assert "blocks.0.used.weight" in state
    assert not [name for name in state if ".unused." in name or ".frozen." in name]


@pytest.mark.parametrize("optimizer", [traps.momentum, traps.adamw])
def test_a_parameter_whose_first_gradient_comes_late_begins_its_state_then(optimizer, check):
    check(make_recipe(traps.LateGradient, optimizer=optimizer, accumulate=1), steps=8)


@pytest.mark.parametrize("place", ["device", "host"])
def test_clipping_takes_norms_per_parameter_in_the_models_order(place, check):
    recipe = make_recipe(traps.Chain, clip_grad_norm=1e-2, optimizer=traps.momentum)
    check(recipe, shards=4, optimizer=place)


@pytest.mark.parametrize("place", ["device", "host"])
def test_the_first_momentum_is_the_gradient_and_not_a_damped_zero(place, check):
    check(make_recipe(traps.Chain, optimizer=traps.momentum), steps=1, optimizer=place)


def test_parameters_that_the_optimizer_does_not_hold_stay_as_they_are(check):
    check(make_recipe(traps.Chain, optimizer=traps.last_layers, clip_grad_norm=None))


def test_a_kernel_with_other_bits_without_gradients_is_run_with_them(check):
    """torch's LSTM on the CPU: the forward of a shard and its recompute would differ."""
    check(make_recipe(traps.Recurrent))


def test_layers_that_learn_nothing_at_the_start_of_a_chain_stay_as_they_are(check):
    check(make_recipe(traps.FrozenStart), shards=4)


@pytest.mark.parametrize("shards", [None, 3])
def test_a_study_of_epochs_ends_after_the_last_batch_of_the_last_one(shards, check):
    check(make_recipe(traps.Stochastic, data=traps.trailing_data), shards=shards, epochs=2)


def test_groups_keep_their_own_rates_and_a_schedule_may_change_betas(check):
    report = check(make_recipe(traps.Chain, optimizer=traps.two_rates, schedule=traps.one_cycle))
    body, head = report.trials[0].load_state()["optimizer"]["groups"]
    assert head["lr"] == pytest.approx(5 * body["lr"])
    assert head["params"] == ["leave.weight", "leave.bias"]


@pytest.mark.full
@pytest.mark.parametrize("place", ["device", "host"])
def test_every_optimizer_that_steps_parameters_one_by_one_keeps_its_bits(place, check):
    recipe = make_recipe(traps.no_bias, optimizer=traps.named_optimizer)
    space = shoal.grid(optimizer=list(traps.OPTIMIZERS))
    check(recipe, space=space, steps=4, optimizer=place)


def test_an_optimizer_that_couples_all_parameters_is_refused_with_the_reason(run_study):
    recipe = make_recipe(traps.Chain, optimizer=traps.lbfgs)
    with pytest.raises(shoal.ShoalError, match="LBFGS"):
        run_study(recipe, shoal.grid(lr=[0.1]), steps=1, technique=shoal.Spilled(shards=2))


# ------------------------------------------------------------------ memory


def test_slots_of_one_arena_do_not_share_a_version_counter():
    arena = torch.zeros(4096, dtype=torch.uint8)
    spec = TensorSpec(name="w", shape=(8, 8), stride=(8, 1), dtype="float32", num_bytes=256)
    first, second = view(arena, 0, spec), view(arena, 512, spec)
    weight = nn.Parameter(first)
    output = torch.ones(2, 8, requires_grad=True) @ weight
    version = first._version

    second.copy_(torch.ones(8, 8))  # a prefetch into the other slot, before the backward

    output.sum().backward()
    assert second.data_ptr() - first.data_ptr() == 512
    assert first._version == version


def test_a_stored_tensor_keeps_its_strides():
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    arena = torch.zeros(1024, dtype=torch.uint8)
    stored = view(arena, 0, describe("w", weight))
    assert stored.stride() == weight.stride()
    stored.copy_(weight)
    assert torch.equal(stored, weight)


@pytest.mark.parametrize("place", ["device", "host"])
def test_strides_and_memory_format_survive(place, check):
    recipe = make_recipe(traps.ChannelsLast, data=traps.image_data)
    report = check(recipe, optimizer=place)
    loaded, built = report.trials[0].load(), traps.ChannelsLast()
    for name, parameter in built.named_parameters():
        assert loaded.get_parameter(name).stride() == parameter.stride(), name


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("model", [traps.Double, traps.Scaled])
def test_tensors_of_other_types_and_shapes_keep_their_bits(model, place, check):
    check(make_recipe(model), optimizer=place)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["device", "host"])
def test_poison_changes_no_bits(place, check):
    """Freed slots are NaN and copies late, so a read before its load would be seen."""
    space = shoal.grid(model=["gpt", "resnet"], optimizer=["adamw", "sgd"])
    recipe = zoo.recipe(accumulate=3, clip=0.5, schedule=True)
    check(recipe, space=space, shards=4, optimizer=place, devices=2, poison=True)


def test_a_forward_that_changes_its_own_weight_trains_as_alone(check):
    check(make_recipe(traps.Renormed), optimizer="host")


@pytest.mark.parametrize("optimizer", ["device", "host"])
def test_a_forward_that_changes_its_weight_behind_autograds_back_trains_as_alone(optimizer, check):
    check(make_recipe(traps.Clamped), optimizer=optimizer)


def test_a_block_that_changes_another_ones_weight_is_not_cut(run_study):
    recipe = make_recipe(traps.ClampsEarlier)
    with pytest.raises(
        PlanError, match=r"writes to weights outside .*: blocks\.0\.linear\.weight"
    ):
        run_study(recipe, shoal.grid(lr=[0.1]), steps=1, technique=shoal.Spilled(shards=2))


# ------------------------------------------------------------------ random streams, statistics


@pytest.mark.parametrize("model", [traps.Stochastic, traps.InnerCheckpoint])
def test_a_recompute_sees_the_random_numbers_of_its_forward(model, check):
    check(make_recipe(model), shards=4)


def test_statistics_of_a_forward_are_counted_once(check):
    report = check(make_recipe(traps.Normalized), shards=4, steps=3)
    state = report.trials[0].load_state()["model"]
    assert int(state["blocks.0.1.num_batches_tracked"]) == 5


@pytest.mark.sample(2)
@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize(
    "source",
    [
        traps.shuffled_data,
        traps.trailing_data,
        traps.private_generator_data,
        traps.worker_data,
    ],
)
def test_a_data_source_draws_from_its_trials_streams_in_turn(source, shards, check):
    recipe = make_recipe(traps.Stochastic, data=source)
    check(recipe, space=shoal.grid(lr=[0.01, 0.02]), steps=7, shards=shards)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shards", [None, 3])
def test_when_one_evaluates_changes_nothing(shards, check):
    recipe = make_recipe(traps.Normalized, data=traps.random_valid_data)
    reports = [check(recipe, eval_every=every, shards=shards) for every in (None, 1, 2)]
    never = make_recipe(traps.Normalized)
    plain = plain_loop(never, HP, reports[0].trials[0].seed, steps=STEPS)
    for report in reports:
        found = compare(plain, report.trials[0].load_state())
        assert found.equal, found.first_difference


def test_computation_between_blocks_is_a_layer_of_its_own(check):
    check(make_recipe(traps.Glue), shards=9)  # four blocks, three joints, and the two ends


# ------------------------------------------------------------------ kernels that call others


class FusedWhenEvaluated(nn.Module):
    """torch has one kernel for such a layer, which it takes in evaluation alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def sequences(hp):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(4, 6, 8, generator=generator) for _ in range(6)]
    batches = [(x, x[:, 0].argmax(-1) % 4) for x in rows]
    return batches, batches[:3]


def test_an_evaluation_that_is_counted_casts_within_fused_kernels_as_any_other(check):
    """The first one of a trial on a device is counted, operation by operation."""
    recipe = make_recipe(FusedWhenEvaluated, data=sequences, precision="bf16")
    check(recipe, shards=0, epochs=2)
