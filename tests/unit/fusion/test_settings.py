"""What steps find in globals is told of once, however it is tied together."""

from __future__ import annotations

import builtins
import decimal
import functools
import math
import os
import random
import sys
import types
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.fusion.effects.settings import MOST, configuration
from shoal.pystate import ambient
from shoal.rng import seeded_host


@pytest.fixture(autouse=True)
def nothing_else_is_trained(monkeypatch):
    monkeypatch.setattr(ambient, "_active", [])  # what another test's study has left


class Node:
    def __init__(self, parent=None, children=0):
        self.parent = parent
        self.children = [Node(self) for _ in range(children)]


TREE = Node(children=100)
TABLE = {str(row): {str(column): column for column in range(500)} for row in range(500)}


class Reads(nn.Module):
    def forward(self, x):
        return x + len(TREE.children) + TABLE["0"]["1"]


def told():
    recipe = shoal.Recipe(
        model=lambda hp: Reads(), data=lambda hp: ([], None), loss=lambda output, batch: output
    )
    with ambient.watching(recipe):
        return configuration(recipe, Reads())


def test_objects_that_lead_back_to_each_other_are_told_of_once():
    places = [place for place in told() if "TREE" in place]
    assert 0 < len(places) <= 2 * 101


def test_of_a_large_table_so_much_is_told():
    places = [place for place in told() if place.startswith(f"{__name__}.TABLE")]
    assert 0 < len(places) <= MOST + 1  # and a digest of the rest


def test_words_are_of_what_a_tensor_holds(monkeypatch):
    monkeypatch.setitem(TABLE, "0", {"1": torch.zeros(99_999)})
    before = told()
    TABLE["0"]["1"].fill_(1.0)
    assert told() != before


FORMAT = "{0.hidden}"
HELD = SimpleNamespace(value=None)  # by whatever name steps have of it


class Kind:
    pass


class Finds(nn.Module):
    def __init__(self, kept=None):
        super().__init__()
        self.layer, self.kept = nn.Linear(1, 1), kept

    def forward(self, x):
        x = HELD.value, math.added, self.layer.added, added, gain(), Kind.scale  # noqa: F821
        return os.environ["ADDED"], sys.argv, x, FORMAT.format(HELD)


def gain(by=1.0):
    return by


def put(value):
    return lambda patch: patch.setattr(HELD, "value", value)


def many(value):
    return put([Node(value) for _ in range(3000)])


def nested(value):
    return put([[SimpleNamespace(value=0.0), [1.0] * 60, value] for _ in range(99)] * 99)


def weakly(key):
    return put(weakref.WeakKeyDictionary({Kind: key}))


def yields(value):
    yield value


SET = {
    "an entry of no text": lambda v: put({(1, v): 1.0}),
    "an entry by its key": lambda v: put({v: 1.0}),
    "beyond what is looked at": many,
    "deep beyond it": nested,
    "in the middle of an array": lambda v: put(np.arange(200_000) == 7 * v),
    "a record": lambda v: put(np.array([(v, 0)], dtype=[("a", "f8"), ("b", "i4")])),
    "an array of objects": lambda v: put(np.array([v, None])),
    "bytes": lambda v: put(bytearray(str(v).encode())),
    "a sparse tensor": lambda v: put((torch.eye(2) * v).to_sparse()),
    "a distribution": lambda v: put(torch.distributions.Normal(0.0, v)),
    "held weakly": weakly,
    "a generator": lambda v: put(yields(v)),
    "code": lambda v: put(eval(f"lambda: {v}")),
    "a default": lambda v: lambda patch: patch.setattr(gain, "__defaults__", (v,)),
    "a property": lambda v: (
        lambda patch: patch.setattr(Kind, "scale", property(lambda self, by=v: by), raising=False)
    ),
    "a method of a partial": lambda v: (
        lambda patch: patch.setattr(Kind, "scale", functools.partialmethod(gain, v), raising=False)
    ),
    "in the standard library": lambda v: (
        lambda patch: patch.setattr(math, "added", v, raising=False)
    ),
    "on a class of torch": lambda v: (
        lambda patch: patch.setattr(nn.Linear, "added", v, raising=False)
    ),
    "among the builtins": lambda v: (
        lambda patch: patch.setattr(builtins, "added", v, raising=False)
    ),
    "by a format": lambda v: lambda patch: patch.setattr(HELD, "hidden", v, raising=False),
    "in the environment": lambda v: lambda patch: patch.setenv("ADDED", str(v)),
    "on the command line": lambda v: lambda patch: patch.setattr(sys, "argv", [str(v)]),
}


@pytest.mark.parametrize("where", SET)
def test_it_is_told_wherever_it_is_set(where, monkeypatch):
    words = []
    for value in (2.0, 3.0):
        SET[where](value)(monkeypatch)
        words.append((found_by(Finds()), found_by(Finds())))
    assert words[0][0] == words[0][1]
    assert words[0][0] != words[1][0]


def test_settings_of_the_process_are_told(monkeypatch):
    before = found_by(Finds())
    with decimal.localcontext(prec=5):
        assert found_by(Finds()) != before
    torch.set_default_dtype(torch.float64)
    try:
        assert found_by(Finds()) != before
    finally:
        torch.set_default_dtype(torch.float32)


def test_of_a_global_that_a_model_keeps_too_all_is_told(monkeypatch):
    monkeypatch.setitem(globals(), "UNNAMED", unnamed := [1.0])
    read = Kept(unnamed)
    before = found_by(read)
    unnamed[0] = 2.0
    assert found_by(read) != before


class Draws(nn.Module):
    def forward(self, x):
        return x + randrange(2) + legacy.rand() + generator.initial_seed()


randrange, legacy, generator = random.randrange, np.random.mtrand._rand, torch.default_generator


def test_generators_of_the_process_are_each_trials_own():
    with seeded_host(1):
        before = found_by(Draws())
    with seeded_host(2):
        assert found_by(Draws()) == before


class Kept(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.kept = (kept, UNNAMED)  # noqa: F821

    def forward(self, x):
        return x * next(iter(self.kept))


def found_by(module):
    recipe = shoal.Recipe(
        model=lambda hp: Finds() if hp else Kept(None),
        data=lambda hp: ([], None),
        loss=lambda output, batch: output,
    )
    with ambient.watching(recipe):
        return configuration(recipe, module)


def made_by(model):
    recipe = shoal.Recipe(
        model=model, data=lambda hp: ([], None), loss=lambda output, batch: output
    )
    with ambient.watching(recipe):
        return configuration(recipe, Reads())


@pytest.fixture
def package(monkeypatch):
    """An installed one."""
    made = types.ModuleType("package")
    made.__file__ = "/x/site-packages/package.py"
    monkeypatch.setitem(sys.modules, "package", made)
    exec(
        "rate, CONFIG, TABLE = 0.0, {}, {}\ndef configure(scale): CONFIG['scale'] = scale\n"
        "class Kind:\n    gain = 1.0",
        vars(made),
    )
    monkeypatch.setitem(globals(), "package", made)
    return made


def calls(hp):
    package.configure(2.0)


def sets(hp):
    package.Kind.gain, package.TABLE["x"] = 2.0, 3.0
    torch.nn.CELU.forward = nn.CELU.forward


def sets_by_words(hp):
    setattr(package, "".join(["ra", "te"]), 2.0)


def sets_what_it_imports(hp):
    import package as own

    own.rate = 2.0


def adds(hp):
    package.rate += 0.0


def updates(hp):
    vars(package).update(rate=2.0)


SETS = (sets_by_words, sets_what_it_imports, adds, updates)


@pytest.mark.parametrize(
    ("model", "change", "place"),
    [
        *((one, lambda it: setattr(it, "rate", 3.0), "what package holds") for one in SETS),
        (calls, lambda one: one.configure(3.0), "what package holds"),
        (sets, lambda one: setattr(one.Kind, "gain", 3.0), "package.Kind.gain"),
        (sets, lambda one: one.TABLE.update(x=4.0), "package.TABLE.x"),
    ],
)
def test_what_the_making_of_trials_sets_in_installed_packages_is_told(
    package, model, change, place
):
    model({})
    before = made_by(model)
    change(package)
    after = made_by(model)
    changed = {name for name in before if before[name] != after[name]}
    assert place in changed
    assert changed <= {place, "what package holds", "package.rate"}
    assert "torch.nn.CELU.forward" in before or model is not sets


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda here: here.chdir("/"), "the working directory"),
        (lambda here: torch.autograd.set_detect_anomaly(True), "the setting 'detect_anomaly'"),
        (lambda here: np.set_printoptions(precision=3), "how numbers are printed"),
    ],
)
def test_what_a_process_has_one_of_is_told(monkeypatch, change, place):
    before, options = told(), np.get_printoptions()
    monkeypatch.chdir(os.getcwd())  # to be back there afterwards
    try:
        change(monkeypatch)
        after = told()
    finally:
        torch.autograd.set_detect_anomaly(False)
        np.set_printoptions(**options)
    assert [name for name in before if before[name] != after[name]] == [place]
