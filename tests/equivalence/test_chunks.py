"""Steps on the host in chunks of a tensor each: the plain bits, whoever goes in between."""

from __future__ import annotations

import chunking
import pytest
import squads
import test_several_optimizers as several
import torch
import traps
import watching
import zoo
from watching import Watched, rates, space_of

import shoal
from shoal.memory import chunks

STEPS = 4
HOST = shoal.Spilled(shards=3, optimizer="host", keep=(), recompute=True)
QUICK = ("SGD nesterov", "Adam fused", "AdamW foreach", "Adagrad", "RMSprop", "Muon")


@pytest.fixture(autouse=True)
def each_tensor(monkeypatch):
    """Plans are made in this process: every tensor is a chunk."""
    monkeypatch.setattr(chunks, "CHUNK_S", 0.0)


@pytest.fixture
def check(run_study, assert_alone, jobs):
    """Train, compare with the plain loop, and see that shards stepped in chunks."""

    def run(recipe, space, technique=HOST, **options):
        report = run_study(recipe, space, steps=STEPS, technique=technique, **options)
        assert_alone(report, report.trials, recipe, steps=STEPS)
        chunked = [any(len(s.step_chunks) > 1 for s in job.shards) for job in jobs]
        assert all(chunked)
        return report

    return run


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param(sorted({*traps.OPTIMIZERS} - {*QUICK}), marks=pytest.mark.full)],
    ids=["common", "others"],
)
def test_every_optimizer_steps_tensor_by_tensor_to_the_plain_bits(names, check):
    recipe = chunking.recipe(
        model=traps.no_bias, optimizer=traps.named_optimizer, clip_grad_norm=0.5
    )
    check(recipe, shoal.grid(optimizer=list(names), lr=[1e-2]))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_groups_a_schedule_that_changes_betas_and_one_norm_for_all_chunks(accumulate, check):
    recipe = chunking.recipe(
        optimizer=traps.two_rates,
        schedule=traps.one_cycle,
        clip_grad_norm=0.1,
        accumulate=accumulate,
    )
    check(recipe, rates(), poison=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["bf16", "bf16-sr"])
def test_weights_that_travel_narrow_and_such_as_are_rounded_by_chance(precision, check):
    recipe = zoo.recipe(precision=precision, clip=0.5, accumulate=2, schedule=True)
    check(recipe, space_of("gpt"), poison=True)


def test_tied_weights_step_with_the_shard_that_owns_them(check):
    recipe = chunking.recipe(model=traps.Build(traps.SharedLayer), clip_grad_norm=0.5)
    check(recipe, rates(), poison=True)


def test_parameters_without_an_optimizer_and_such_as_are_frozen(check):
    check(chunking.recipe(optimizer=traps.last_layers), rates(1))
    check(chunking.recipe(model=traps.Build(traps.FrozenStart)), rates(1))


@pytest.mark.parametrize("factory", [several.muon_and_adamw, several.in_a_list])
def test_two_optimizers_of_one_shard(factory, check):
    check(several.make(factory, accumulate=2), rates(), poison=True)


def test_shards_that_stay_step_on_the_device_beside_chunks_of_those_that_do_not(check):
    technique = shoal.Spilled(shards=4, optimizer="host", keep=(1,))
    check(chunking.recipe(clip_grad_norm=0.5), rates(3), technique, poison=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_goes_on_from_a_generation_to_the_same_bits(precision, check):
    recipe = chunking.recipe(clip_grad_norm=0.5, precision=precision)
    check(recipe, rates(3), devices=2, checkpoint_every=0)


def test_an_array_in_shards_steps_slot_by_slot(run_study):
    recipe = watching.chain(clip_grad_norm=0.5)
    report = run_study(recipe, rates(3), steps=STEPS, technique=HOST, fuse=3)
    squads.assert_arrayed(report, report.trials, recipe, 3, steps=STEPS)


def test_the_timeline_has_one_action_for_all_chunks_of_a_step(check):
    seen = Watched()
    check(chunking.recipe(), rates(), callbacks=[seen], timeline=True)
    stepped = [event for event in seen.actions if event.action.startswith("STEP@host")]
    assert len(stepped) == 2 * STEPS * 3
    assert len({(e.trial, e.step, e.action) for e in stepped}) == len(stepped)


class OfLayers(torch.optim.SGD):
    """Steps a weight by the norm of its bias's gradient too: no tensor alone."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=False):
            weight.grad = weight.grad / (1 + bias.grad.norm())
        return super().step(closure)


def of_layers(named_parameters, hp):
    return OfLayers([p for _, p in named_parameters], lr=hp["lr"])


def test_an_optimizer_that_needs_a_layer_at_a_time_steps_shards_whole(
    run_study, assert_alone, jobs
):
    recipe = chunking.recipe(optimizer=of_layers)
    report = run_study(recipe, rates(), steps=STEPS, technique=HOST)
    assert_alone(report, report.trials, recipe, steps=STEPS)
    assert all(shard.step_chunks == () for job in jobs for shard in job.shards)


@pytest.mark.slow
def test_in_the_midst_of_a_shard_the_turn_goes_to_whoever_has_most_left(
    tmp_path, warm_workers, assert_alone, jobs
):
    """A deep model and one a third as deep; the host's memory is what both wait for.

    A tensor takes milliseconds to step, so the deep one's step is ready in time.
    """
    steps = 3 * STEPS
    recipe = chunking.recipe(model=chunking.tower, optimizer=chunking.slow, clip_grad_norm=0.5)
    space = shoal.grid(lr=[1e-2], depth=[12, 4])
    seen = Watched()
    study = shoal.Study("turns", recipe, space=space, steps=steps, directory=tmp_path)
    report = study.run(
        hardware=shoal.Hardware.emulated("h200", memory="8MiB", scale=50_000),
        technique=shoal.Spilled(shards=2, optimizer="host", keep=(), recompute=True),
        callbacks=[seen],
        timeline=True,
        progress=False,
        workers=warm_workers,
    )
    assert_alone(report, report.trials, recipe, steps=steps)
    stepped = [event for event in seen.actions if event.action.startswith("STEP@host")]
    inside = [
        (outer.trial, inner.trial)
        for outer in stepped
        for inner in stepped
        if outer.start < inner.start and inner.end < outer.end
    ]
    assert (1, 0) in inside
