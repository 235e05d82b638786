"""What a factory sets for its trial, wherever code of steps finds it, keeps trials out of arrays.

Slots of an array find one of each: that of the trial that was made last.
"""

from __future__ import annotations

import sys

import pytest

import shoal
from shoal.source import load_study

pytestmark = pytest.mark.usefixtures("look_at_modules", "warm_plans")

FILE = """
import dataclasses
import enum
import functools
from types import SimpleNamespace
import numpy as np
import torch
from torch import nn
import shoal
import held_elsewhere

class Mode(enum.Enum):
    HALF = 0.5
    TWICE = 2.0

class Settings:
    __slots__ = ("scale",)
    def gain(self):
        return self.scale

class Kind:
    scale = 1.0

@dataclasses.dataclass
class Data:
    scale: float = 1.0

def build():
    cfg = {cfg}

    def read():
        return {read}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.kept = nn.Linear(4, 1), cfg
            {init}

        def forward(self, x):
            return self.layer(x) * {forward}

    def model(hp):
        {put}
        return Net()

    def collate(items):
        x, y = (torch.stack(part) for part in zip(*items, strict=True))
        return x * {collate}, y

    def data(hp):
        draws = torch.Generator().manual_seed(0)
        pairs = [(torch.rand(4, generator=draws), torch.ones(1)) for _ in range(8)]
        return torch.utils.data.DataLoader(pairs, batch_size=4, collate_fn=collate), None

    def loss(output, batch):
        return (output - batch[1]).square().mean() * {loss}

    def optimizer(named, hp):
        return torch.optim.SGD([p for _, p in named], lr=0.1 * {optimizer})

    def schedule(optimizer, hp):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {schedule})

    return shoal.Recipe(
        model=model, data=data, loss=loss, optimizer=optimizer, schedule=schedule
    )

recipe = build()
study = shoal.Study("set", recipe, space=shoal.grid(scale=[0.5, 2.0]), steps=2)
"""
SET = 'cfg.scale = hp["scale"]'
HOLDERS = {
    "namespace": ("SimpleNamespace(scale=1.0)", "cfg.scale", SET),
    "dataclass": ("Data()", "cfg.scale", SET),
    "method": ("Settings()", "cfg.gain()", SET),
    "class": ("Kind", "cfg.scale", SET),
    "dict": ("dict(scale=1.0)", 'cfg["scale"]', 'cfg["scale"] = hp["scale"]'),
    "deep": (
        "[SimpleNamespace(one=dict(two=Kind()))]",
        'cfg[0].one["two"].scale',
        'cfg[0].one["two"].scale = hp["scale"]',
    ),
    "by name": ("Kind()", 'getattr(cfg, "".join(("sca", "le")))', SET),
    "variable": ("1.0", "cfg", 'nonlocal cfg; cfg = hp["scale"]'),
    "module": ("None", "held_elsewhere.SCALE", 'held_elsewhere.SCALE = hp["scale"]'),
    "local": ("None", "held_elsewhere.OWN.scale", 'held_elsewhere.OWN.scale = hp["scale"]'),
    "context": ("None", "held_elsewhere.SCALES.get()", 'held_elsewhere.SCALES.set(hp["scale"])'),
    "function": ("None", "held_elsewhere.gain()", 'held_elsewhere.put(hp["scale"])'),
}
SPACE = "SimpleNamespace(scale=1.0)"
VALUES = {
    "NumPy's number": ("float(cfg.scale)", 'cfg.scale = np.float32(hp["scale"])'),
    "member": ("cfg.scale.value", 'cfg.scale = Mode(hp["scale"])'),
    "bytes": ("float(cfg.scale)", 'cfg.scale = str(hp["scale"]).encode()'),
    "set": ("max(cfg.scale)", 'cfg.scale = set((hp["scale"],))'),
    "lists": ("cfg.scale[0][0]", 'cfg.scale = [[hp["scale"]], None]'),
    "keywords": ("sum(dict(**cfg.named).values())", 'cfg.named = dict(one=hp["scale"])'),
    "numbered": ("cfg.named[0]", 'cfg.named = dict(((0, hp["scale"]),))'),
    "closure": ("cfg.scale()", 'cfg.scale = lambda: hp["scale"]'),
    "default": ("cfg.scale()", 'cfg.scale = lambda one=hp["scale"]: one'),
    "partial": ("cfg.scale()", 'cfg.scale = functools.partial(float, hp["scale"])'),
    "tensors": ("cfg.scale[0]", 'cfg.scale = [torch.tensor(hp["scale"])]'),
    "large tensor": ("cfg.scale[-1]", 'cfg.scale = torch.full((99999,), hp["scale"])'),
    "module": ("cfg.scale(x)", 'cfg.scale = nn.Threshold(9.0, hp["scale"])'),
    "distribution": ("cfg.scale.scale", 'cfg.scale = torch.distributions.Normal(0, hp["scale"])'),
    "class": ("cfg.act()(x)", 'cfg.act = nn.Tanh if hp["scale"] > 1 else nn.ReLU'),
    "function": ("cfg.act(x)", 'cfg.act = torch.tanh if hp["scale"] > 1 else lambda x: x'),
    "absent": (
        '(cfg.more if hasattr(cfg, "more") else 1.0)',
        'cfg.__dict__.pop("more", 0); cfg.__dict__.update(more=2) if hp["scale"] > 1 else None',
    ),
}
ELSEWHERE = """
import contextvars
import threading

SCALE, OWN, SCALES = 1.0, threading.local(), contextvars.ContextVar("scales")

def gain():
    return SCALE

def put(value):
    global SCALE
    SCALE = value
"""
WAYS = ("forward", "loss", "collate", "schedule", "attribute", "default", "hook")
HOOK = "self.layer.register_forward_hook(lambda module, given, output: output * {read})"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Make the recipe of a holder, read in one way."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "held_elsewhere.py").write_text(ELSEWHERE)

    def load(holder, way):
        cfg, read, put = HOLDERS[holder]
        words = dict.fromkeys(("forward", "loss", "collate", "schedule", "optimizer"), "1.0")
        words |= {"init": "pass", "cfg": cfg, "read": read, "put": put} | {way: "read()"}
        text = FILE
        if way == "hook":
            words["init"] = HOOK.format(read=read)
        elif way == "in place":
            words["forward"] = read
        elif way == "attribute":
            words["forward"] = read.replace("cfg", "self.kept")
        elif way == "default":
            text = text.replace("forward(self, x)", "forward(self, x, cfg=cfg)")
            words["forward"] = read
        (tmp_path / "main.py").write_text(text.format(**words))
        return load_study(str(tmp_path / "main.py")).study.recipe

    yield load
    sys.modules.pop("held_elsewhere", None)


@pytest.mark.sample(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_trials_that_differ_in_it_train_as_alone(holder, way, load, run_study, assert_alone):
    if way in ("attribute", "default") and holder == "variable":
        pytest.skip("a copy is read, and that is each model's own")
    recipe = load(holder, way)
    report = run_study(recipe, shoal.grid(scale=[0.5, 2.0]), steps=2, fuse=2)
    assert_alone(report, report.trials, recipe, steps=2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", VALUES)
def test_of_whatever_type_it_is(value, load, run_study, assert_alone, monkeypatch):
    monkeypatch.setitem(HOLDERS, "value", (SPACE, *VALUES[value]))
    recipe = load("value", "in place")
    report = run_study(recipe, shoal.grid(scale=[0.5, 2.0]), steps=2, fuse=2)
    assert_alone(report, report.trials, recipe, steps=2)


@pytest.mark.parametrize("holder", ["namespace", "class", "variable"])
def test_what_only_the_making_of_trials_reads_keeps_none_out(holder, load, tmp_path):
    space = shoal.grid(scale=[0.5, 2.0])
    study = shoal.Study("s", load(holder, "optimizer"), space=space, steps=2, directory=tmp_path)
    plan = study.plan(hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"), fuse=2)
    assert "array of 2" in plan.explain()


def test_nor_does_what_lies_beside_what_steps_read(load, tmp_path, monkeypatch):
    """An object that the forward reads, of which the making of trials sets something else."""
    monkeypatch.setitem(HOLDERS, "data", ("Data()", "cfg.scale", 'cfg.rate = hp["scale"]'))
    space = shoal.grid(scale=[0.5, 2.0])
    study = shoal.Study("s", load("data", "forward"), space=space, steps=2, directory=tmp_path)
    plan = study.plan(hardware=shoal.Hardware.virtual(devices=1, memory="64MiB"), fuse=2)
    assert "array of 2" in plan.explain()
