"""What a file puts into other modules holds in the workers that train its trials."""

from __future__ import annotations

import builtins
import importlib.util
import math
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.launch.replaced import find_changes
from shoal.pystate.changes import Change, with_changes
from shoal.source import load_study

FILE = """
import builtins
import functools
import torch
from torch import nn
import shoal
import patches
import registering
from registering import KINDS, register

forward = nn.Linear.forward
nn.functional.gelu = lambda x: 2 * x
nn.functional.silu = torch.tanh  # a library's own, in another's place
builtins.spread = lambda x: x.square().mean()

@functools.wraps(forward)
def mine(self, x):
    return 1.5 * forward(self, x)

nn.Linear.forward = mine
registering.Kind = type("Kind", (nn.Linear,), {"__module__": __name__})

@register
class Gelu(nn.Module):
    def forward(self, x):
        return nn.functional.gelu(nn.functional.silu(x))

def model(hp):
    layers = registering.make("Gelu"), nn.Linear(4, 4), nn.Sigmoid(), registering.Kind(4, 1)
    return nn.Sequential(*layers)

def data(hp):
    draws = torch.Generator().manual_seed(1)
    return [(torch.rand(5, 4, generator=draws), torch.rand(5, 1, generator=draws))] * 3, None

def loss(output, batch):
    return spread(output - batch[1])

recipe = shoal.Recipe(model=model, data=data, loss=loss)
study = shoal.Study("replaced", recipe, space={"lr": 0.1}, steps=3)
"""
PATCHES = """
import functools
from torch import nn

sigmoid = nn.Sigmoid.forward

@functools.wraps(sigmoid)
def forward(self, x):
    return 3 * sigmoid(self, x)

nn.Sigmoid.forward = forward
"""
REGISTERING = """
from collections import OrderedDict

class Kinds(OrderedDict):  # as transformers has activations
    def __getitem__(self, name):
        return super().__getitem__(name)()

KINDS, Kind = Kinds(), None

def register(kind):
    KINDS[kind.__name__] = kind
    return kind

def make(name):
    assert list(KINDS) == ["Gelu"]
    return KINDS[name]
"""


pytestmark = pytest.mark.usefixtures("look_at_modules")


@pytest.fixture
def written(tmp_path, monkeypatch):
    for kind in (nn.Linear, nn.Sigmoid):
        monkeypatch.setattr(kind, "forward", kind.forward)
    for name in ("gelu", "silu"):  # and back afterwards
        monkeypatch.setattr(nn.functional, name, getattr(nn.functional, name))
    monkeypatch.setattr(builtins, "spread", None, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "patches.py").write_text(PATCHES)
    (tmp_path / "registering.py").write_text(REGISTERING)
    (tmp_path / "study.py").write_text(FILE)
    yield tmp_path / "study.py"
    for name in ("patches", "registering"):  # a test that follows has others
        sys.modules.pop(name, None)


@pytest.mark.parametrize("technique", ["resident", shoal.Spilled(shards=2)], ids=str)
def test_functions_and_classes_of_the_file_are_where_it_put_them(
    technique, written, run_study, assert_alone, monkeypatch
):
    recipe = load_study(str(written)).study.recipe
    space = shoal.grid(lr=[0.1])
    report = run_study(recipe, space, steps=3, technique=technique)
    assert_alone(report, report.trials, recipe, steps=3)
    monkeypatch.undo()  # and a worker that goes on to another study has none of it
    assert_usual(run_study, assert_alone, space)


def test_a_builtin_that_a_file_has_made_is_one_change(monkeypatch):
    """It was one of every module that is imported here, and workers imported all of these."""
    mine = eval("lambda x: x", {"__name__": "__main__"})
    monkeypatch.setattr(builtins, "mine", mine, raising=False)
    compiled = vars(sys.modules[__name__])  # torch.compile gives a module them by such a name
    monkeypatch.setitem(compiled, "__builtins_dict___0", vars(builtins))
    assert [c.full_name for c in find_changes() if c.value is mine] == ["builtins.mine"]


def test_what_a_package_wrote_and_loaded_under_its_own_name_stays_here(tmp_path, monkeypatch):
    """As torch_geometric writes how its layers pass messages, when the first one is made."""
    package, kind = types.ModuleType("layers"), type("Layer", (), {"__module__": "layers"})
    package.__file__, package.Layer = "/usr/lib/site-packages/layers/__init__.py", kind
    (tmp_path / "written.py").write_text("def propagate(self):\n    return 1\n")
    spec = importlib.util.spec_from_file_location("layers.written", tmp_path / "written.py")
    written = importlib.util.module_from_spec(spec)
    for name, module in (("layers", package), ("layers.written", written)):
        monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(written)
    kind.propagate = written.propagate

    assert [change.module for change in find_changes() if change.name == "propagate"] == []


def test_a_module_that_this_process_alone_has_keeps_no_worker_from_its_work():
    """One that was made here, or found in a place that is gone: no recipe can have it there."""
    changes = (Change("only_here", "", "one", 1), Change("torch.nn", "Nothing", "one", 1))
    assert with_changes(changes, "a recipe") == "a recipe"


def assert_usual(run_study, assert_alone, space):
    recipe = shoal.Recipe(model=usual, data=usual_data, loss=distance)
    report = run_study(recipe, space, steps=2)
    assert_alone(report, report.trials, recipe, steps=2)


def usual(hp):
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.SiLU(), nn.Linear(4, 1))


def usual_data(hp):
    return [(torch.ones(5, 4), torch.ones(5, 1))], None


def distance(output, batch):
    return (output - batch[1]).square().mean()


# -- what calls put there -----------------------------------------------------------------

BLOCKS = """
import functools
import torch
from torch import nn

def traced(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args) * 1.25
    return inner

def act(x):
    return torch.relu(x)

@traced
def decorated(x):
    return torch.tanh(x)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return decorated(act(self.lin(x)))

def enable(factor):
    global act
    old = act
    @functools.wraps(old)
    def act_times(x):
        return old(x) * factor
    act = act_times
"""
CALLS = """
import functools
import threading
from torch import nn
import blocks

seen = []

def of_own(factor):
    old = blocks.Block.forward
    def forward(self, x):
        return old(self, x) * factor
    blocks.Block.forward = forward

def of_package(factor):
    old = nn.Linear.forward
    @functools.wraps(old)
    def forward(self, x):
        seen.append(len(seen))
        return old(self, x) * factor
    nn.Linear.forward = forward

def of_class(factor):
    class Wide(blocks.Block):
        def forward(self, x):
            return super().forward(x) * factor
    blocks.Block = Wide

def of_others(factor):
    blocks.extra = lambda x: x * factor
    blocks.Block.scale = property(lambda self: factor)
    blocks.Block.shift = staticmethod(lambda x: x + factor)

def with_lock(factor):
    old, lock = nn.Linear.forward, threading.Lock()
    def forward(self, x):
        with lock:
            return old(self, x) * factor
    nn.Linear.forward = forward
"""
CALLING = """
import torch
from torch import nn
import shoal
import blocks
import calls

CALL

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.lin = blocks.Block(), nn.Linear(4, 1)

    def forward(self, x):
        x = getattr(blocks, "extra", torch.abs)(self.block(x)) * getattr(self.block, "scale", 1)
        return self.lin(getattr(blocks.Block, "shift", torch.abs)(x))

def data(hp):
    draws = torch.Generator().manual_seed(1)
    return [(torch.rand(5, 4, generator=draws), torch.rand(5, 1, generator=draws))] * 3, None

def loss(output, batch):
    return (output - batch[1]).square().mean()

recipe = shoal.Recipe(model=lambda hp: Head(), data=data, loss=loss)
study = shoal.Study("calling", recipe, space={"lr": 0.1}, steps=3)
"""


@pytest.fixture
def calling(tmp_path, monkeypatch):
    """The recipe of a file with such a call in it, and of modules that may have one as well."""
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)  # and back afterwards
    monkeypatch.syspath_prepend(tmp_path)

    def load(call, *, in_calls="", at_end=""):
        (tmp_path / "blocks.py").write_text(BLOCKS)
        (tmp_path / "calls.py").write_text(CALLS + in_calls)
        (tmp_path / "study.py").write_text(CALLING.replace("CALL", call) + at_end)
        return load_study(str(tmp_path / "study.py")).study.recipe

    yield load
    for name in ("blocks", "calls"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "call",
    [
        "calls.of_own(0.5)",
        "calls.of_package(0.5)",
        "calls.of_class(0.5)",
        "calls.of_others(0.5)",
        "blocks.enable(0.5)",
        "calls.of_own(0.5); calls.of_own(0.7); calls.of_package(3.0); blocks.enable(0.5)",
    ],
)
def test_what_a_function_made_within_holds_in_workers(
    call, calling, run_study, assert_alone, monkeypatch
):
    recipe, space = calling(call), shoal.grid(lr=[0.1])
    report = run_study(recipe, space, steps=3)
    assert_alone(report, report.trials, recipe, steps=3)
    monkeypatch.undo()
    assert_usual(run_study, assert_alone, space)


@pytest.mark.parametrize("again", ["", "calls.of_own(0.7)", "calls.of_package(0.5)"])
def test_what_an_import_has_put_there_is_put_there_once(again, calling, run_study, assert_alone):
    here = "of_own(0.5)\nof_package(0.5)\nblocks.enable(0.5)\n"
    recipe, space = calling(again, in_calls=here), shoal.grid(lr=[0.1])
    report = run_study(recipe, space, steps=3, workers=None)  # none that others go on in
    assert_alone(report, report.trials, recipe, steps=3)


@pytest.mark.parametrize("by_import", [False, True])
def test_what_cannot_be_sent_is_told_of_where_no_import_makes_it(by_import, calling, tmp_path):
    call = "with_lock(0.5)"
    recipe = calling("", in_calls=call) if by_import else calling(f"calls.{call}")
    study = shoal.Study("locked", recipe, space={"lr": 0.1}, steps=1, directory=tmp_path)
    warnings = study.plan(hardware=shoal.Hardware.virtual(devices=1, memory="64MiB")).warnings
    told = "Linear.forward is what code of calls put there, which cannot be sent to workers"
    assert any(told in one for one in warnings) != by_import


NUMBERS = """
import math
import numpy as np

def twice(function):
    return lambda *args: 2 * function(*args)

math.sqrt, np.mean, np.exp = map(twice, (math.sqrt, np.mean, np.exp))
scale = Head.forward
Head.forward = lambda self, x: scale(self, x) * math.sqrt(2) * float(np.mean([np.exp(0.1), 1]))
"""


def test_functions_in_c_have_what_was_in_their_places(
    calling, run_study, assert_alone, monkeypatch
):
    for home, name in ((math, "sqrt"), (np, "mean"), (np, "exp")):
        monkeypatch.setattr(home, name, getattr(home, name))
    recipe = calling("", at_end=NUMBERS)
    report = run_study(recipe, shoal.grid(lr=[0.1]), steps=3)
    assert_alone(report, report.trials, recipe, steps=3)


def test_what_was_never_replaced_is_no_change(calling):
    calling("")
    assert [one for one in find_changes() if not one.is_sure] == []
