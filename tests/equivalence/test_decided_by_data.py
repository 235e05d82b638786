"""Parts that decide by their data run slot by slot, and no bit of a trial tells of the others."""

from __future__ import annotations

import dataclasses

import pytest
import squads
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.arraykeys import LOOPED
from shoal.core.spec import WidthMeasure
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.plain import array_loop
from shoal.planner.width import Candidate
from shoal.planning.arrayshapes import Shape
from shoal.testing import assert_same
from shoal.verify.record import read_losses

WIDTH = 48
SOON = 16  # passes; by fewer an array is measured
LARGE = 3.0


class Router(nn.Module):
    """Rows go through one of two layers; how many go where is a number of Python's."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        # whose rule rounds otherwise than its kernel
        self.experts = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        order = scores[:, 0].argsort()
        first = int((scores[:, 0] > 0.5).sum())
        parts = order[:first], order[first:]
        out = torch.zeros_like(x)
        for at, rows in enumerate(parts):
            if len(rows):
                some = self.experts[at](x[rows]) * scores[rows, at : at + 1]
                out = out.index_add(0, rows, some)
        return x + out


def routed(hp):
    return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), Router(), nn.Linear(WIDTH, 3))


def data(hp):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=random)
    rows = TensorDataset(x, torch.randint(3, (64,), generator=random))
    return DataLoader(rows, batch_size=16, shuffle=True), DataLoader(rows, 16)


def with_a_short_batch(hp):
    """It runs by itself, and so do those that it has the gradients of its step with."""
    train, valid = data(hp)
    return DataLoader(train.dataset, batch_size=24, shuffle=True), valid


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def adam(named, hp):
    return torch.optim.AdamW([p for _, p in named], lr=hp["lr"])


class Late(nn.Module):
    """After some steps it takes another way where a batch has a large number."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(16, WIDTH)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.passes += 1
        out = self.before(self.layer(x))
        if self.passes > SOON and x.max() > LARGE:
            out = out.clamp(max=1.0)
        return self.after(out)


class Often(Late):
    """After some steps each batch has a way of its own, in training."""

    def forward(self, x):
        out = super().forward(x)
        if self.training and self.passes > SOON:
            out = out + 0.01 * x.mean().item()
        return out


def often(hp):
    return nn.Sequential(Often(), nn.Linear(WIDTH, 3))


class OfArray(Late):
    """After some passes NumPy sorts, in one of seven: an array of each trial's own."""

    def forward(self, x):
        out = super().forward(x)
        if self.passes > SOON and self.passes % 7 == 0:
            out = out * (1 + 0.01 * out.detach().sum(1).numpy().argsort()[0].item())
        return out


class OfRoot(Late):
    """The whole model decides: there is no part of it that could be looped."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.last(super().forward(x))


def late(hp):
    return nn.Sequential(Late(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))


class Capped(Late):
    """After some passes it asks which is larger of two numbers that each trial has its own of."""

    def __init__(self, cap):
        super().__init__()
        self.cap, self.least = float(cap), 2.5

    def forward(self, x):
        out = super().forward(x)
        return out * max(self.cap, self.least) if self.passes > SOON else out


def capped(hp):
    return nn.Sequential(Capped(hp["cap"]), nn.Linear(WIDTH, 3))


def late_by_numpy(hp):
    return nn.Sequential(OfArray(), nn.Linear(WIDTH, 3))


def late_at_its_root(hp):
    return OfRoot()


RECIPE = shoal.Recipe(model=routed, data=data, loss=loss, optimizer=adam)
SPACE = shoal.grid(lr=[1e-2, 1e-3, 3e-3])


def keys(report):
    return [dict(row.numerics) for row in Snapshot.of(read_outline(report.directory)).trials]


def by_itself(model, batch, optimizers, hp):
    value = loss(model(batch[0]), batch)
    optimizers.zero_grad()
    value.backward()
    optimizers.step()
    return value


def assert_slots(report, recipe):
    """Each is its slot with nobody beside it."""
    assert [key[LOOPED] for key in keys(report)] == ["2"] * len(report.trials)
    losses, slots = read_losses(report.directory), squads.slots_of(report)
    for trial in report.trials:
        slot, width = slots[trial.number]
        place = {"slot": slot, "width": width, "looped": ["2"]}
        plain = array_loop(recipe, trial.hp, trial.seed, epochs=2, **place)
        assert_same(plain, trial, losses=losses[trial.number])
    squads.assert_verified(report, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("technique", [None, shoal.Spilled(shards=2)])
def test_what_decided_otherwise_in_a_dry_run_runs_slot_by_slot_for_all(technique, run_study):
    """Three trials in two slots: the last one is alone in its array."""
    report = run_study(RECIPE, SPACE, epochs=2, fuse=2, technique=technique)
    assert_slots(report, RECIPE)


def test_without_what_is_on_record_the_bits_would_be_others():
    place = {"slot": 0, "width": 2, "epochs": 2}
    found, other = (
        array_loop(RECIPE, {"lr": 1e-2}, 0, looped=looped, **place) for looped in (["2"], [])
    )
    assert found.losses != other.losses


@pytest.mark.parametrize(
    "changes",
    [
        {"model": late, "accumulate": 2},
        {"model": late, "step": by_itself},
        {"model": late_by_numpy},
        {"model": late_at_its_root},
        {"model": late_at_its_root, "accumulate": 2, "data": with_a_short_batch},
    ],
)
def test_who_comes_to_answer_otherwise_is_in_a_pass_by_itself(changes, run_study):
    recipe = dataclasses.replace(RECIPE, **changes)
    report = run_study(recipe, SPACE, epochs=8, fuse=3)
    assert not any(LOOPED in key for key in keys(report))
    assert squads.widths(report) == [3] * 3
    squads.assert_verified(report, recipe)


@pytest.mark.slow
def test_where_each_goes_its_own_way_in_every_step_they_go_on_alone(run_study):
    """Three passes a step where one is what was planned, eight too many after eight steps."""
    recipe = dataclasses.replace(RECIPE, model=often)
    report = run_study(recipe, SPACE, epochs=8, fuse=3)
    told = [str(key["array"]) for key in keys(report)]
    assert all("; for good from step 1" in one for one in told), told
    squads.assert_verified(report, recipe)


def test_where_trials_come_to_answer_otherwise_by_their_own_numbers_they_go_on_alone(run_study):
    recipe = dataclasses.replace(RECIPE, model=capped)
    space = shoal.grid(lr=[1e-2], cap=[1.5, 3.5, 2.25])
    report = run_study(recipe, space, epochs=6, fuse=3)
    told = [str(key["array"]) for key in keys(report)]
    assert all("; for good from step" in one for one in told), told
    squads.assert_verified(report, recipe)


@pytest.mark.slow
def test_in_shards_who_comes_to_answer_otherwise_than_most_goes_on_alone(run_study):
    recipe = dataclasses.replace(RECIPE, model=late)
    report = run_study(recipe, SPACE, epochs=8, fuse=3, technique=shoal.Spilled(shards=2))
    assert 1 in squads.widths(report)
    squads.assert_verified(report, recipe)


def test_models_of_a_step_of_ones_own_do_too(run_study):
    recipe = dataclasses.replace(RECIPE, step=by_itself)
    assert_slots(run_study(recipe, SPACE, epochs=2, fuse=2), recipe)


def test_trials_that_come_later_do_as_those_on_record(tmp_path, warm_workers):
    shown = {"progress": False, "timeline": False, "workers": warm_workers}
    space = {"lr": shoal.log_uniform(1e-3, 1e-2)}
    study = shoal.Study("routed", RECIPE, space=space, trials=2, epochs=2, directory=tmp_path)
    shown["hardware"] = shoal.Hardware.virtual(devices=1, memory="64MiB")
    study.run(fuse=2, **shown)
    report = study.run(extend=1, **shown)
    assert len(report.trials) == 3
    assert_slots(report, RECIPE)


def test_what_is_on_record_is_what_all_arrays_of_a_shape_do():
    shape = Shape(signature=None, group="g")
    shape.found = {
        Candidate(2, "eager"): WidthMeasure(width=2, looped=("b", "a")),
        Candidate(4, "eager"): WidthMeasure(width=4, looped=("c", "a")),
    }
    seat = {"array": "slot 0 of 2"}
    others = [{}, seat | {"array_pass": "branches"}, seat | {"array_pass": "compiled, gcc"}]
    assert shape.looped([]) == shape.looped(others) == "a, b, c"
    assert shape.looped([*others, seat | {LOOPED: "b"}]) == "b"
    assert shape.looped([seat]) == ""  # they ran without
