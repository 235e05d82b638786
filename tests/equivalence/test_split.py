"""Weights whose float32 the host keeps in two parts: the plain bits, in less memory."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import pytest
import torch
import zoo
from test_narrow import SPACE, _Frozen, _Later, products, recipe_of, with_block
from torch import nn
from watching import space_of

import shoal
from shoal.core.event import TrialReplanned
from shoal.core.units import Bytes, format_bytes
from shoal.launch.plan import fits_host


def split(**settings):
    return shoal.Spilled(transfer="bf16", optimizer="host", master="split", **settings)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_trials_have_the_plain_bits(accumulate, clip, optimizer, watch, jobs):
    recipe = zoo.recipe(precision="bf16", clip=clip, accumulate=accumulate)
    watch(recipe, space_of("gpt", optimizer), split(shards=4, keep=()), poison=True)
    assert all(job.technique.master == "split" for job in jobs)


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("model", zoo.MODELS)
def test_every_model_beside_a_shard_that_stays(model, watch):
    recipe = zoo.recipe(precision="bf16", clip=0.5, accumulate=2)
    watch(recipe, space_of(model), split(shards=4, keep=(1,)), poison=True)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("order", ["micro", "shard"])
def test_shards_that_take_several_micro_batches_and_keep_their_place_at_the_turn(order, watch):
    recipe = recipe_of(products, accumulate=3)
    watch(recipe, SPACE, split(shards=5, keep=(), keep_turn=2, order=order), poison=True)


def test_a_frozen_weight_is_loaded_and_never_stepped(watch):
    watch(recipe_of(with_block(_Frozen)), SPACE, split(shards=5, keep=()), poison=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_weights_that_are_no_numbers_any_more_are_those_of_the_plain_loop(clip, watch):
    recipe = recipe_of(products, on_nonfinite="ignore", clip_grad_norm=clip)
    rates = shoal.grid(lr=[1e20, 3e38])
    watch(recipe, rates, split(shards=4, keep=()), poison=True)


class _Convolutions(nn.Sequential):
    def __init__(self) -> None:
        inner = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(4)]
        super().__init__(
            nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 1), *inner, nn.Flatten(), nn.Linear(128, 5)
        )
        self.to(memory_format=torch.channels_last)


def convolutions(hp):
    return _Convolutions()


def test_weights_whose_memory_is_in_another_order(watch, jobs):
    watch(recipe_of(convolutions), SPACE, split(shards=4, keep=()), poison=True)
    assert any(s.gradient_bytes < s.owned_bytes for s in jobs[0].shards)


def test_chunks_of_a_step_are_put_together_one_after_another(watch, jobs, monkeypatch):
    monkeypatch.setattr("shoal.memory.chunks.CHUNK_S", 1e-6)
    watch(recipe_of(products), SPACE, split(shards=2, keep=()), poison=True)
    assert any(len(shard.step_chunks) > 1 for shard in jobs[0].shards)
    largest = max(max(shard.step_chunks) for shard in jobs[0].shards)
    assert jobs[0].waiting_bytes > 0
    assert largest < max(shard.owned_bytes for shard in jobs[0].shards)


@pytest.mark.full
def test_who_reads_otherwise_goes_on_with_whole_weights(run_study, assert_alone):
    recipe, replanned = recipe_of(with_block(_Later)), []

    def note(event):
        if isinstance(event, TrialReplanned):
            replanned.append(event)

    report = run_study(
        recipe, SPACE, steps=48, technique=split(shards=5, keep=()), callbacks=[note]
    )
    assert_alone(report, report.trials, recipe, steps=48)
    assert len(replanned) == 2


# -- a generation -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("first", "then"), [("split", "split"), ("split", "float32"), ("float32", "split")]
)
def test_a_trial_goes_on_with_its_float32_kept_otherwise(
    first, then, tmp_path, warm_workers, assert_alone, jobs
):
    recipe, shown = recipe_of(products), {"progress": False, "timeline": False}
    hardware = shoal.Hardware.virtual(devices=1, memory="64MiB")
    for steps, master in ((3, first), (6, then)):
        technique = shoal.Spilled(shards=4, optimizer="host", keep=(), master=master)
        study = shoal.Study(
            "k", recipe, space=SPACE, directory=tmp_path, steps=steps, eval_every=3
        )
        jobs.append(study.plan(hardware=hardware, technique=technique).jobs[0])
        report = study.run(hardware=hardware, technique=technique, workers=warm_workers, **shown)
    assert {job.technique.master for job in jobs} == {first, then}
    assert all(job.numerics == jobs[0].numerics for job in jobs)
    assert_alone(report, report.trials, recipe, steps=6, eval_every=3)


# -- what it is worth ---------------------------------------------------------------------


def plan(tmp_path, workers, technique, *, name="p", recipe=None, **hardware):
    recipe = recipe or recipe_of(products)
    study = shoal.Study(name, recipe, space=SPACE, steps=2, directory=tmp_path)
    devices = shoal.Hardware.virtual(devices=1, memory="64MiB", **hardware)
    shown = {"progress": False, "workers": workers}
    return study.plan(hardware=devices, technique=technique, **shown)


WHOLE = shoal.Spilled(
    shards=4, optimizer="host", keep=(), keep_turn=0, spill_activations=(), master="float32"
)
PARTS = replace(WHOLE, master="split")


def test_the_host_holds_two_bytes_less_of_a_weight_but_for_a_bit(tmp_path, warm_workers):
    plans = [plan(tmp_path, warm_workers, technique) for technique in (WHOLE, PARTS)]
    whole, parts = (each.jobs[0] for each in plans)
    weights = sum((16 * 128, *[128 * 128] * 5, 128 * 5))  # of a bias 512 bytes are the least
    saved = weights * (4 - 2 - 1 / 8)
    states = [job.host_bytes - job.waiting_bytes for job in (whole, parts)]
    assert states[0] - states[1] == pytest.approx(saved, abs=7 * 512)
    largest = max(shard.owned_bytes for shard in parts.shards)
    assert 0 < parts.waiting_bytes - whole.waiting_bytes <= largest
    assert whole.numerics == parts.numerics
    text = " ".join(plans[1].explain().split())
    assert "the host keeps them as that, and what it lacks of their float32" in text
    assert "no more than the 17 bits that it lacks of each" in text
    assert shoal.Plan.from_json(plans[1].to_json()) == plans[1]


def host_needs(found):
    """The least host memory in which a plan's trials fit, in bytes, one at a time on a device."""
    found = replace(found, active=1)
    sizes = range(sum(job.host_bytes for job in found.jobs) * 3)
    return bisect_left(sizes, True, key=lambda size: fits_host(found.jobs, found, size))


@pytest.mark.full
@pytest.mark.parametrize("transfer", ["bf16", None])
def test_between_the_two_sizes_the_host_splits_and_says_why(
    transfer, tmp_path, warm_workers, assert_alone
):
    plans = (plan(tmp_path, warm_workers, asked) for asked in (WHOLE, PARTS))
    whole, parts = map(host_needs, plans)
    assert parts < 0.97 * whole
    room = int((whole + parts) / 2)
    asked = replace(WHOLE, master=None, transfer=transfer)
    found = plan(tmp_path, warm_workers, asked, host_memory=room)
    assert [job.technique.master for job in found.jobs] == ["split", "split"]
    text = " ".join(found.explain().split())
    assert "whole, the study's state would take" in text
    assert f"which may use {format_bytes(Bytes(room))}" in text
    free = plan(tmp_path, warm_workers, asked, host_memory=int(2 * whole))
    assert [job.technique.master for job in free.jobs] == [None, None]
    with pytest.raises(shoal.PlanError, match=r"of state and .* for (a copy|copies)"):
        plan(tmp_path, warm_workers, WHOLE, host_memory=room)
    with pytest.raises(
        shoal.PlanError,
        match=r"2 trials need .* on the host, of .* of state and .* for (a copy|copies)",
    ):
        plan(tmp_path, warm_workers, asked, host_memory=parts // 2)
    study = shoal.Study("ran", recipe_of(products), space=SPACE, steps=3, directory=tmp_path)
    report = study.run(
        hardware=shoal.Hardware.virtual(devices=1, memory="64MiB", host_memory=room),
        technique=asked,
        workers=warm_workers,
        progress=False,
    )
    assert_alone(report, report.trials, recipe_of(products), steps=3)


def test_what_was_asked_for_and_cannot_be_is_said(tmp_path, warm_workers):
    with pytest.raises(shoal.PlanError, match=r"float32 .* split on the host, but its recipe"):
        plan(tmp_path, warm_workers, PARTS, recipe=recipe_of(products, precision="fp32"))
    asked = shoal.Spilled(shards=2, optimizer="host", keep=(0, 1), master="split")
    with pytest.raises(shoal.PlanError, match=r"of its 2 shards those that travel have none"):
        plan(tmp_path, warm_workers, asked)
    for settings in ({"transfer": "fp32"}, {"optimizer": "device"}):
        with pytest.raises(shoal.SpecError, match="to a step on the host"):
            shoal.Spilled(shards=4, master="split", **settings)
    with pytest.raises(shoal.SpecError, match="master is 'split' or 'float32', got 'half'"):
        shoal.Spilled(shards=4, master="half")


def test_an_array_has_no_split_weights_and_says_so(tmp_path, warm_workers):
    shown = {"progress": False, "workers": warm_workers}
    study = shoal.Study("wide", recipe_of(products), space=SPACE, steps=2, directory=tmp_path)
    devices = shoal.Hardware.virtual(devices=1, memory="64MiB")
    with pytest.raises(shoal.PlanError, match=r"no array has: .*master='split'"):
        study.plan(hardware=devices, technique=PARTS, fuse=2, **shown)
