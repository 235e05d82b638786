"""Spilled stages as a study plans them: real models, measured on virtual devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import PlanError, SpecError
from shoal.core.plan import Plan
from shoal.core.technique import Pipelined, Spilled
from shoal.core.units import format_bytes
from shoal.planner import spilledstages
from shoal.planning import spillingstages

WIDTH, ROWS, BATCHES = 64, 16, 8
SMALL = "800KiB"  # half of the chain does not fit, in no cut


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(8)])

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Tied(Chain):
    """The first and the last layer share a weight."""

    def __init__(self):
        super().__init__()
        self.leave.weight = self.enter.weight


class Normed(Chain):
    """Two blocks of one stage share a BatchNorm, whose statistics each of them changes."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH)
        for block in self.blocks[:2]:
            block.outer = nn.Sequential(block.outer, norm)


MODELS = {"chain": Chain, "tied": Tied, "normed": Normed}


def build(hp):
    return MODELS[hp["model"]]()


def data(hp):
    batch = (torch.ones(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long))
    return [batch] * BATCHES, [batch]


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


@pytest.fixture
def plan(tmp_path, warm_workers):
    def make(technique="pipelined", model="chain", *, devices=2, memory=SMALL, trials=1):
        recipe = shoal.Recipe(model=build, data=data, loss=loss, accumulate=4)
        space = {"model": model, "lr": shoal.log_uniform(1e-4, 1e-2)}
        study = shoal.Study("s", recipe, space=space, trials=trials, directory=tmp_path, epochs=2)
        hardware = shoal.Hardware.virtual(devices=devices, memory=memory)
        shown = {"workers": warm_workers, "progress": False}
        return study.plan(hardware=hardware, technique=technique, **shown)

    return make


def test_stages_that_fit_in_no_cut_are_spilled_with_nothing_left_open(plan):
    found = plan()
    (job,) = found.jobs
    technique = job.technique
    assert technique.is_spilled
    assert job.gang == technique.stages == 2
    assert technique.shards == len(job.shards) > 2
    assert None not in (technique.optimizer, technique.lookahead, technique.keep, technique.cuts)
    assert job.held_bytes + job.unit_bytes <= 800 * 2**10
    assert Plan.from_json(found.to_json()) == found
    words = found.explain()
    assert "the stages are spilled" in words
    assert "and one has 800.0 KiB; no cut has whole stages that all fit" in words
    assert "in a step, over all links together" in words
    assert "on one device, spilled, a step would take" in words
    assert "stage 1:" in words
    assert "2 stages, a device each" in words


def test_stages_that_fit_stay_whole(plan):
    (job,) = plan(memory="16MiB").jobs
    assert not job.technique.is_spilled
    assert len(job.shards) == 2


def test_how_stages_are_spilled_is_placement(plan):
    keys = [  # workers are used again: what they compiled for other tests is none of this
        {**plan(technique, memory="16MiB").jobs[0].numerics, "compiled modules": 0}
        for technique in (
            Pipelined(stages=2),
            Pipelined(stages=2, shards=5, optimizer="host"),
            Pipelined(stages=2, shards=8, optimizer="device", schedule="gpipe"),
        )
    ]
    assert keys[0] == keys[1] == keys[2]


def test_what_is_asked_for_is_planned(plan):
    asked = Pipelined(
        cuts=(5,), shards=6, optimizer="device", lookahead=0, keep=(2,), keep_gradients=True
    )
    technique = plan(asked, memory="16MiB").jobs[0].technique
    assert (technique.cuts, technique.shards, technique.optimizer) == ((5,), 6, "device")
    assert (technique.lookahead, technique.keep, technique.keep_gradients) == (0, (2,), True)


def test_a_plan_says_what_spilled_stages_would_take_where_nobody_asked(plan):
    words = plan(None, trials=2).explain()
    assert "as a pipeline of 2 spilled stages a step would take about" in words


@pytest.mark.slow
def test_devices_that_would_idle_are_spilled_stages_where_those_are_quicker(plan, monkeypatch):
    from shoal.planner.price import Price
    from shoal.planning.deciding import Deciding

    monkeypatch.setattr(Deciding, "_price", lambda self, settled: Price(100.0, 1.0))
    (job,) = plan(None).jobs
    assert isinstance(job.technique, Pipelined)
    assert job.technique.is_spilled
    monkeypatch.setattr(Deciding, "_price", lambda self, settled: Price(1e-9, 1.0))
    assert isinstance(plan(None).jobs[0].technique, Spilled)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("technique", "options", "words"),
    [
        (
            "pipelined",
            {"memory": "200KiB"},
            r"even if its stages are spilled: cut into 10 shards over 2 stages",
        ),
        (
            Pipelined(stages=2, shards=3),
            {"memory": "600KiB"},
            r"into 3 shards over 2 stages, stage \d .* needs about .* leave shards= out",
        ),
        (Pipelined(stages=2, shards=11), {}, r"has 10 pieces .* Ask for at most 10\."),
        (
            Pipelined(stages=2, shards=4, keep=(3,)),
            {"model": "tied", "memory": "16MiB"},
            r"shard 3 is to stay on its device and borrows 16.0 KiB",
        ),
        (
            Pipelined(stages=2, shards=10),
            {"model": "normed", "memory": "16MiB"},
            "would change the same buffer",
        ),
        (Pipelined(cuts=(5,)), {}, r"needs .* on a device of 800.0 KiB.* with shards="),
    ],
)
def test_what_cannot_be_is_refused_with_numbers_and_a_way_out(technique, options, words, plan):
    with pytest.raises(PlanError, match=words):
        plan(technique, **options)


def test_what_was_measured_and_does_not_fit_is_told_as_measured(plan, monkeypatch):
    monkeypatch.setattr(spillingstages, "fitted", lambda *args: None)
    measured = []

    def as_measured(*args):
        measured.append(spilledstages.as_measured(*args))
        return measured[-1]

    monkeypatch.setattr(spillingstages, "as_measured", as_measured)
    with pytest.raises(PlanError, match="was measured and needs") as raised:
        plan(Pipelined(stages=2))
    least = min(max(need.total, need.peak) for need in [one.need for one in measured])
    assert f"was measured and needs {format_bytes(least)} on a device" in str(raised.value)


def test_a_plan_says_that_gpipe_adds_up_gradients_on_the_device(plan):
    asked = Pipelined(stages=2, shards=4, schedule="gpipe", keep_gradients=False)
    (job,) = plan(asked, memory="16MiB").jobs
    assert any("keep_gradients=False was asked for" in why for why in job.why)
    (job,) = plan(replace(asked, schedule="flush"), memory="16MiB").jobs
    assert not any("keep_gradients=False" in why for why in job.why)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"shards": 1}, "is a whole number from 2, got 1"),
        ({"stages": 3, "shards": 2}, "3 stages of 2 shards"),
        ({"shards": 4, "optimizer": "disk"}, "'device' or 'host', got 'disk'"),
        ({"shards": 4, "lookahead": 3}, "0, 1 or 2, got 3"),
        ({"shards": 4, "lookahead": True}, "0, 1 or 2, got True"),
        ({"shards": 4, "keep": (4,)}, "names shards from 0 to 3"),
        ({"keep": (0,)}, r"Pipelined\(keep=\(0,\)\) names shards; say how many"),
        ({"shards": 4, "keep_gradients": 1}, "True or False, got 1"),
        ({"shards": 4, "schedule": "zb-h1"}, "half backwards would have to travel too"),
        ({"shards": 4, "schedule": "2bw"}, "second weight version would have to travel too"),
        ({"optimizer": "host", "schedule": "2bw"}, "Use one of 'naive', 'gpipe', 'flush'"),
    ],
)
def test_what_no_model_can_be_is_refused_at_once(how, words):
    with pytest.raises(SpecError, match=words):
        Pipelined(**how)
