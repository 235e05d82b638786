"""A backbone that is frozen: nothing goes backward through it, and the bits are the plain ones."""

from __future__ import annotations

import pytest
import squads
import traps
import watching
import zoo
from listening import Heard
from torch import nn
from watching import space_of

import shoal
from shoal.core.event import PeakMeasured, TrialReplanned

pytestmark = pytest.mark.usefixtures("warm_plans")

LAST = {"gpt": 13, "bert": 20, "llama": 11, "resnet": 5, "mlp": 4}
"""So many of a model's parameters are trained, the last ones."""


def tuned(hp):
    """A model of ``zoo`` of which the end is trained."""
    model = zoo.build(hp)
    for parameter in list(model.parameters())[: -LAST[hp["model"]]]:
        parameter.requires_grad_(False)
    return model


def recipe(**changes):
    names = ("data", "loss", "metrics", "optimizer")
    base = zoo.recipe()
    return shoal.Recipe(**({"model": tuned} | {n: getattr(base, n) for n in names} | changes))


def spilled(**settings):
    return shoal.Spilled(**({"keep": ()} | settings))


WAYS = {
    "host": spilled(shards=4, optimizer="host"),
    "device": spilled(shards=4, optimizer="device"),
    "far ahead": spilled(shards=5, optimizer="host", lookahead=2),
    "one slot": spilled(shards=4, optimizer="device", lookahead=0, lookbehind=0),
    "kept": spilled(shards=4, optimizer="host", keep=(0, 2)),
    "weights": spilled(shards=4, optimizer="device", keep=(1,), keep_weights=(0, 2)),
    "gradients": spilled(shards=4, optimizer="device", keep_gradients=2),
    "turn": spilled(shards=4, optimizer="host", keep_turn=2),
    "away": spilled(shards=5, optimizer="host", boundaries="host", lookahead=0),
    "in turn": spilled(shards=4, optimizer="host", order="shard"),
    "once": spilled(shards=5, optimizer="host", recompute=False),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("model", zoo.MODELS)
def test_two_trials_have_the_plain_bits(model, way, accumulate, clip, watch, jobs):
    asked = recipe(clip_grad_norm=clip, accumulate=accumulate)
    seen = watch(asked, space_of(model), WAYS[way], poison=True)
    frozen = [shard.index for shard in jobs[0].shards if shard.frozen]
    assert frozen == list(range(len(frozen)))
    back = {int(words.split()[1][1:]) for words in seen.words if words.startswith("B ")}
    assert back == set(range(len(frozen), len(jobs[0].shards)))


@pytest.mark.parametrize("model", ["resnet", "mlp", "llama"])
def test_some_shards_of_these_are_frozen(model, watch, jobs):
    watch(recipe(), space_of(model), WAYS["host"], steps=1)
    assert jobs[0].shards[0].frozen


@pytest.mark.parametrize("order", ["micro", "shard"])
@pytest.mark.parametrize("keep", [(), (1,)])
def test_weights_that_travel_as_bfloat16(keep, order, watch, jobs):
    asked = recipe(precision="bf16", accumulate=2)
    technique = shoal.Spilled(transfer="bf16", shards=3, keep=keep, order=order)
    watch(asked, space_of("mlp"), technique, poison=True)
    assert jobs[0].technique.transfer == "bf16"
    assert jobs[0].shards[0].frozen


# ------------------------------------------------------------------ what crosses the links


def unvalidated(hp):
    return traps.data(hp)[0], None


def chain(model):
    return watching.chain(model=model, data=unvalidated)


def head_alone(hp):
    model = watching.blocks(hp)
    model[:-1].requires_grad_(False)
    return model


def adapters(hp):
    """A low-rank addition to each frozen layer, as LoRA has it."""
    return nn.Sequential(*[Adapted(12 if not i else 64) for i in range(5)], nn.Linear(64, 3))


def trained_bytes(model):
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


class Adapted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x):
        return (self.base(x) + self.up(self.down(x))).tanh()


@pytest.mark.parametrize("optimizer", ["host", "device"])
def test_a_frozen_backbone_comes_once_and_leaves_no_gradients(optimizer, watch, jobs):
    technique = spilled(shards=4, optimizer=optimizer, lookahead=1)
    seen = watch(chain(head_alone), watching.rates(), technique, steps=2)
    shards = jobs[0].shards
    assert [shard.frozen for shard in shards] == [True, True, True, False]
    moved = seen.bytes_by_kind()
    state = shards[-1].state_bytes * (optimizer == "device")
    steps = 2 * 2  # of two trials
    assert moved["LOAD"] == steps * (sum(s.parameter_bytes for s in shards) + state)
    head = trained_bytes(head_alone({}))
    assert moved["STORE"] == steps * (
        head if optimizer == "host" else shards[-1].owned_bytes + state
    )


def test_of_adapters_gradients_alone_come_back(watch, jobs):
    technique = spilled(shards=3, optimizer="host")
    seen = watch(chain(adapters), watching.rates(), technique, steps=2)
    shards = jobs[0].shards
    assert not any(shard.frozen for shard in shards)
    trained = trained_bytes(adapters({}))
    assert seen.bytes_by_kind()["STORE"] == 2 * 2 * trained
    assert trained < sum(shard.owned_bytes for shard in shards) / 3


# ------------------------------------------------------------------ arrays, and what is asked


def deep(hp):
    model = squads.mlp(hp)
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)
    return model


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["host", "device"])
def test_an_array_in_shards_goes_forward_only_too(optimizer, run_study):
    asked = squads.recipe(model=deep, data=squads.uneven, clip_grad_norm=0.5, accumulate=2)
    heard = Heard()
    technique = shoal.Spilled(shards=2, optimizer=optimizer, keep=())
    space = shoal.grid(lr=[0.01, 0.003], drop=[0.0, 0.4], rows=[22])
    report = run_study(asked, space, epochs=2, fuse=4, technique=technique, callbacks=[heard])
    assert [trial.error for trial in report.trials] == [""] * 4
    assert set(squads.widths(report)) == {4}
    squads.assert_near(report.trials, asked, 1e-6, epochs=2)
    assert all(peak.peak_bytes <= peak.predicted_bytes for peak in heard.of(PeakMeasured))
    assert not heard.of(TrialReplanned)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep": (0,), "keep_activations": (0,)}, "keep the activations of shard 0"),
        ({"keep": (), "spill_activations": (0,)}, "shard 0 of 4 saves wait on the host"),
    ],
)
def test_a_frozen_shard_has_no_activations_to_keep(settings, words, tmp_path):
    study = shoal.Study(
        "it",
        watching.chain(model=head_alone),
        space=watching.rates(1),
        steps=2,
        directory=tmp_path,
    )
    technique = shoal.Spilled(shards=4, optimizer="host", **settings)
    with pytest.raises(shoal.PlanError, match=words) as refused:
        study.plan(hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"), technique=technique)
    assert "nothing goes backward through it" in str(refused.value)


def test_a_frozen_part_behind_a_trained_one_hands_gradients_on(watch, jobs):
    watch(watching.chain(model=first_alone), watching.rates(), WAYS["host"], poison=True)
    assert not any(shard.frozen for shard in jobs[0].shards)


def first_alone(hp):
    model = watching.blocks(hp)
    model[1:].requires_grad_(False)
    return model


def shared(hp):
    """Later blocks use weights of an earlier one, which are trained, or frozen."""
    model = traps.SharedLayer()
    model.enter.requires_grad_(False)
    for parameter in list(model.blocks.parameters())[: 2 * hp["frozen"]]:
        parameter.requires_grad_(False)
    return model


@pytest.mark.sample(2)
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_tied_weights_that_are_frozen_or_not(frozen, watch):
    space = shoal.grid(lr=[1e-2, 3e-3], frozen=[frozen])
    watch(watching.chain(model=shared), space, spilled(shards=4, optimizer="host"), poison=True)
