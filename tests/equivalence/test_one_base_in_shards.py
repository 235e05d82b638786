"""An array in shards over one frozen base: it crosses the link once for all, to the same bits."""

from __future__ import annotations

from signal import SIGTERM, raise_signal

import pytest
import squads
import torch
from listening import Heard
from test_one_base import (
    SPACE,
    adam,
    assert_slots,
    headed,
    loss,
    merged,
    pretrained,
    rows,
    shrinking,
)
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.core.arraykeys import has_one_base
from shoal.core.event import PeakMeasured, StepFinished, TrialReplanned
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot

pytestmark = pytest.mark.usefixtures("warm_plans")

WAYS = {
    "host": shoal.Spilled(shards=3, optimizer="host"),
    "kept": shoal.Spilled(shards=3, optimizer="device", keep=(0,)),
    "weights": shoal.Spilled(shards=2, optimizer="device", keep=(), keep_weights=(0,)),
    "one slot": shoal.Spilled(shards=3, optimizer="host", lookahead=0, lookbehind=0),
}


class Tied(nn.Module):
    """Its last product reads the first one's frozen weights, in another shard."""

    def __init__(self, hp) -> None:
        super().__init__()
        self.layers = nn.ModuleList(pretrained(hp))

    def forward(self, x):
        first, *others, last = self.layers
        h = first(x)
        for layer in others:
            h = layer(h)
        return last(h @ first.base.weight)


def backbone(hp):
    """A frozen backbone below a trained head: no backward comes to it."""
    model = pretrained(hp)
    for layer in model[:-1]:
        layer.requires_grad_(False)
    return model


MODELS = {
    "adapted": pretrained,
    "merged": merged,  # code writes into what it makes of the base
    "tied": Tied,
    "backbone": backbone,
    "headed": headed,  # a small frozen tensor of each trial's own
}


def uneven(hp):
    """The last batch of an epoch is short, and such slots run by themselves."""
    return DataLoader(rows(22, 0), batch_size=4, shuffle=True), DataLoader(rows(9, 1), 4)


def recipe(**changes):
    settings = {"model": pretrained, "data": uneven, "loss": loss, "optimizer": adam}
    return shoal.Recipe(**(settings | changes))


def assert_in_shards(report):
    trials = Snapshot.of(read_outline(report.directory)).trials
    assert {row.technique for row in trials} == {"Spilled"}
    assert all(has_one_base(row.numerics) for row in trials)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("changes", [{}, {"clip_grad_norm": 0.5, "accumulate": 2}])
def test_each_trial_is_its_slot_alone(changes, way, name, run_study):
    """The last three trials come into slots that were others'."""
    of, heard = recipe(model=MODELS[name], **changes), Heard()
    options = {"technique": WAYS[way], "poison": True, "checkpoint_every": 0}
    report = run_study(of, SPACE, epochs=2, fuse="3-eager", callbacks=[heard], **options)
    assert_in_shards(report)
    assert_slots(report, of, epochs=2)
    assert all(e.peak_bytes <= e.predicted_bytes for e in heard.of(PeakMeasured))


STAYS = {
    "weights": shoal.Spilled(shards=3, optimizer="device", keep=(), keep_weights=(2,)),
    "shard": shoal.Spilled(shards=3, optimizer="host", keep=(2,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [False, "3-eager"])
@pytest.mark.parametrize("way", STAYS)
def test_a_shard_may_stay_that_borrows_what_nobody_steps(way, fuse, run_study, assert_alone):
    """The copy that stays is never an old one."""
    of, options = recipe(model=Tied), {"technique": STAYS[way], "poison": True}
    report = run_study(of, SPACE, epochs=2, fuse=fuse, **options)
    for event in read_outline(report.directory):
        assert not isinstance(event, TrialReplanned)
    if fuse:
        assert_in_shards(report)
        assert_slots(report, of, epochs=2)
    else:
        assert_alone(report, report.trials, of, epochs=2)


def deep(hp):
    """Six layers of 384 with adapters: 6.8 MiB, which no device of 4 MiB holds."""
    made = [*pretrained(hp)[:-1], *pretrained(hp)[:-1], *pretrained(hp)]
    random = torch.Generator().manual_seed(9)
    for layer in made[:-1]:
        layer.base.weight.data.normal_(0.0, 0.05, generator=random)
    return nn.Sequential(*made)


def planned(name, model, tmp_path, **options):
    study = shoal.Study(name, recipe(model=model), space=SPACE, epochs=1, directory=tmp_path)
    return study.plan(hardware=shoal.Hardware.virtual(devices=1, memory="4MiB"), **options)


@pytest.mark.slow
def test_where_the_base_does_not_fit_it_comes_once_for_all_of_them(tmp_path):
    """Of shards none of which stays, since what would pay follows from this machine's links."""
    travels = {"technique": shoal.Spilled(optimizer="host", keep=())}
    plans = {
        "once": planned("once", deep, tmp_path, fuse=3, **travels),
        "alone": planned("alone", deep, tmp_path, **travels),
    }
    jobs = plans["once"].jobs
    assert {job.array.width for job in jobs} == {3}
    assert "of weights that are not trained are in it once" in str(plans["once"])
    moved = {
        name: sum(shard.parameter_bytes for job in plan.jobs[:3] for shard in job.shards)
        for name, plan in plans.items()
    }
    base = sum(p.nbytes for layer in deep({"drop": 0.0})[:-1] for p in layer.base.parameters())
    assert moved["alone"] > 3 * base
    assert moved["once"] / 3 < moved["alone"] / 2.5


def test_it_trains_within_the_budget_and_is_verified(run_study):
    heard, of = Heard(), recipe(model=deep)
    report = run_study(of, SPACE, epochs=1, fuse=3, memory="4MiB", callbacks=[heard])
    assert_in_shards(report)
    squads.assert_verified(report, of)
    peaks = heard.of(PeakMeasured)
    assert peaks
    assert all(event.peak_bytes <= event.predicted_bytes for event in peaks)


class StopAtStep:
    """Once a trial has come so far."""

    def __init__(self, step):
        self.step = step

    def __call__(self, event):
        if isinstance(event, StepFinished) and event.step == self.step:
            raise_signal(SIGTERM)


@pytest.mark.slow
def test_what_has_more_memory_goes_on_as_a_whole_array(tmp_path):
    """The same bits, so that where a study goes on is nobody's business."""
    of = recipe(model=deep)
    study = shoal.Study("it", of, space=SPACE, epochs=2, directory=tmp_path)

    def go_on(memory, **options):
        hardware = shoal.Hardware.virtual(devices=1, memory=memory)
        return study.run(hardware=hardware, fuse="3-eager", progress=False, **options)

    with pytest.raises(SystemExit):
        go_on("4MiB", callbacks=[StopAtStep(7)])
    assert_in_shards(study)
    report = go_on("64MiB")
    trials = Snapshot.of(read_outline(report.directory)).trials
    assert {row.technique for row in trials} == {"Resident"}
    assert_slots(report, of, epochs=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["host", "kept"])
def test_who_writes_to_it_fails_and_nothing_of_it_is_saved(way, run_study):
    report = run_study(recipe(optimizer=shrinking), SPACE, technique=WAYS[way], epochs=2, fuse=3)
    assert_in_shards(report)
    for trial in report.trials:
        assert trial.state == "FAILED"
        assert "is frozen, and the trials of its array have it in memory once" in trial.error_line
