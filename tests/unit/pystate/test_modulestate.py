"""What modules hold goes to a process that has imported them anew, and none of it is doubled."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import pathlib
import random
import re
import sys
import threading
import types
import uuid

import numpy as np
import pytest
import torch
from torch import nn

from shoal.pystate.arriving import ABSENT, Bringing, arrive
from shoal.pystate.modulestate import LARGEST, ModuleState, may_go


class Color(enum.Enum):
    RED = 1


class Sealed(dict):
    def __setitem__(self, key, value):
        raise TypeError("sealed")


class Thing:
    def __init__(self, **values):
        vars(self).update(values)

    def __getstate__(self):
        raise TypeError("nobody pickles this")


Point = collections.namedtuple("Point", "x y")


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("held_here")
    monkeypatch.setitem(sys.modules, "held_here", made)
    return made


def arrived(module, **now):
    """Take what the module holds, have it hold others, and bring what was taken."""
    state = ModuleState([module])
    vars(module).update(now)
    meta_path, argv = list(sys.meta_path), list(sys.argv)
    try:
        arrive(argv, [], state.packed, b"N.")
    finally:
        sys.meta_path[:], sys.argv[:] = meta_path, argv


VALUES = [
    *(None, True, 3, 0.5, 1j, "x", b"x", (1, "a"), frozenset({1}), Color.RED, Point(1, 2)),
    *(range(3), pathlib.Path("x"), re.compile("a+"), uuid.UUID(int=1), decimal.Decimal("1.5")),
    *(datetime.datetime(2020, 1, 1), datetime.timedelta(1), np.float32(3), np.dtype("f4")),
    *(torch.float32, torch.device("cpu"), torch.Size([1]), nn.ReLU, torch.tanh, len),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_that_never_change_are_those_that_were_there(module, value):
    module.value = value
    arrived(module, value="another")
    assert module.value == value
    assert type(module.value) is type(value)


FILLED = [
    (lambda: {"a": 1, "b": {"c": 2}}, lambda: {"b": {"c": 3, "d": 4}, "e": 5}),
    (lambda: [1, [2]], lambda: [1, [3], 4]),
    (lambda: {1, 2}, lambda: {3}),
    (lambda: collections.OrderedDict(a=1), lambda: collections.OrderedDict(b=1, a=2)),
    (lambda: collections.deque([1]), lambda: collections.deque([2, 3])),
    (lambda: Sealed(a=1), lambda: Sealed(b=2)),
    (lambda: types.SimpleNamespace(a=1, b=2), lambda: types.SimpleNamespace(a=[3])),
]


@pytest.mark.parametrize(("then", "now"), FILLED)
def test_what_changes_in_place_is_filled_and_is_the_same_object(module, then, now):
    module.value, here = now(), then()
    arrived(module, value=here)
    assert module.value is here
    assert module.value == now()


def test_numbers_are_written_where_they_are(module):
    module.tensor, module.array = torch.arange(3.0), np.arange(3)
    module.layer = nn.Linear(2, 2)
    weight = module.layer.weight.clone()
    here = torch.zeros(3), np.zeros(3, int), nn.Linear(2, 2)
    parameter = here[2].weight
    arrived(module, tensor=here[0], array=here[1], layer=here[2])
    assert module.tensor is here[0]
    assert module.array is here[1]
    assert here[0].tolist() == [0, 1, 2] == here[1].tolist()
    assert module.layer.weight is parameter
    assert torch.equal(parameter, weight)


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng, np.random.RandomState])
def test_a_random_generator_goes_on_from_where_it_was(module, make):
    module.stream, here, expected = make(3), make(4), make(3)
    arrived(module, stream=here)
    assert module.stream is here
    draw = "random" if hasattr(here, "random") else "rand"
    assert getattr(here, draw)() == getattr(expected, draw)()


def test_a_part_that_cannot_go_stays_as_it_is_and_the_rest_arrives(module):
    module.thing = Thing(lock=threading.Lock(), width=3, act=nn.ReLU())
    lock = threading.Lock()
    here = Thing(lock=lock, width=1)
    arrived(module, thing=here)
    assert module.thing is here
    assert (here.lock, here.width, type(here.act)) == (lock, 3, nn.ReLU)


def test_two_names_of_one_object_are_of_one_and_two_objects_are_two(module):
    one = {"a": 1}
    module.first, module.second, module.holder, module.third = one, one, [one], {"a": 2}
    here = {"a": 0}  # there all names are of one
    arrived(module, first=here, second=here, holder=[here], third=here)
    assert module.first is here
    assert module.second is module.first is module.holder[0]
    assert module.third is not here
    assert (here, module.third) == ({"a": 1}, {"a": 2})


def test_what_refers_to_itself_arrives(module):
    module.ring = [1]
    module.ring.append(module.ring)
    here = [0]
    arrived(module, ring=here)
    assert module.ring[1] is here
    assert module.ring[0] == 1


def test_attributes_of_a_modules_classes_arrive(module):
    kind = type("Kind", (), {"__module__": "held_here", "width": 3, "sizes": [1]})
    module.Kind = kind
    state = ModuleState([module])
    kind.width, sizes = 1, kind.sizes
    sizes[:] = [9]
    arrive(sys.argv, [], state.packed, b"N.")
    sys.meta_path.pop(0)
    assert (kind.width, kind.sizes) == (3, [1])
    assert kind.sizes is sizes


def test_what_is_large_or_lives_in_a_process_stays(module):
    module.large, module.lock = bytes(LARGEST + 1), threading.Lock()
    module.tensor = torch.zeros(LARGEST)
    lock, tensor = threading.Lock(), torch.ones(1)
    arrived(module, large=b"here", lock=lock, tensor=tensor)
    assert (module.large, module.lock, module.tensor) == (b"here", lock, tensor)


def test_what_was_made_by_and_by_and_cannot_travel_is_made_here_too(module):
    module.whole, module.partly = Thing(width=1), Thing(width=1, lock=threading.Lock())
    module.large = Thing(width=1, data=torch.zeros(LARGEST))
    arrived(module, whole=None, partly=None, large=None)
    assert module.whole.width == 1
    assert module.partly is None
    assert module.large is None


def test_objects_of_torch_with_registries_behind_them_stay():
    assert not may_go(torch.ops.aten.view)
    assert not may_go(torch.optim.SGD([torch.zeros(1)], lr=0.1))


def test_nothing_is_brought_where_a_worker_has_nothing_to_keep():
    assert Bringing().bring({"a": ABSENT, "b": 1}, {}) == {"b": 1}
