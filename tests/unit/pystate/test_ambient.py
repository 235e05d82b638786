"""Globals of a recipe's code, of which each trial has its own values."""

from __future__ import annotations

import datetime
import functools
import types

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import TrialError
from shoal.core.spec import TrialSpec
from shoal.pystate import Ambient
from shoal.pystate.ambient import Hollow, tried, watch
from shoal.recipes.libraries import found_along, module_of
from shoal.runtime.measuring.describe import describe
from shoal.runtime.wire.messages import Describe

RATE = 1.0
SETTINGS = {"scale": 1, "cache": None}
CACHE = {}
LOADED = None
UNREAD = 0


class Net(nn.Module):
    temperature = 1.0

    def forward(self, x):
        return x * RATE * self.temperature * helped()


def helped(*_):
    return SETTINGS["scale"] + len(CACHE)


def model(hp):
    global RATE, UNREAD
    RATE = hp["rate"]
    UNREAD = hp["rate"]
    Net.temperature = hp["rate"]
    SETTINGS["scale"] = hp["rate"]
    return Net()


def data(hp):
    global LOADED
    if LOADED is None:
        LOADED = [object()]
    return [], None


def loss(output, batch):
    loss.calls = getattr(loss, "calls", 0) + 1
    return output.sum() if LOADED else output.mean()


class Sealed(dict):
    """A table that nobody writes as usual."""

    def __setitem__(self, key, value):
        raise TypeError("this table is sealed")


TABLE = Sealed(calls=0)


def counting(output, batch):
    dict.update(TABLE, calls=TABLE["calls"] + 1)
    SETTINGS["scale"] += 1
    return output.sum()


@pytest.fixture
def ambient():
    made = Ambient(shoal.Recipe(model=model, data=data, loss=loss))
    before = RATE, Net.temperature, dict(SETTINGS), LOADED
    yield made
    watch(shoal.Recipe(model=len, data=len, loss=max))
    globals().update(RATE=before[0], LOADED=before[3])
    Net.temperature = before[1]
    SETTINGS.clear()
    SETTINGS.update(before[2])
    CACHE.clear()
    vars(loss).clear()


def now():
    return RATE, Net.temperature, SETTINGS["scale"], vars(loss).get("calls")


def test_each_trial_has_what_it_set(ambient):
    notes = []
    for rate in (2, 3):
        ambient.begin()
        assert now() == (1.0, 1.0, 1, None)
        model({"rate": rate})
        loss.calls = rate
        notes.append(ambient.take())
    for _ in range(2):
        for rate, kept in zip((2, 3), notes, strict=True):
            ambient.put(kept)
            assert now() == (rate, rate, rate, rate)


def test_what_steps_change_goes_on_in_another_process(ambient):
    model({"rate": 5})
    built = ambient.take()
    loss.calls, SETTINGS["scale"] = 7, 6
    packed, _ = ambient.changed(built, ambient.take())
    assert not any("RATE" in place for place in packed)
    ambient.begin()
    model({"rate": 5})
    ambient.give(packed, "cpu")
    assert now() == (5, 5, 6, 7)


def test_what_making_a_trial_has_read_stays_and_what_steps_did_is_undone(ambient):
    data({})
    CACHE["table"] = object()
    ambient.settle()
    kept = LOADED, CACHE["table"]
    SETTINGS["scale"] = loss.calls = 5
    SETTINGS["late"] = torch.ones(3)
    CACHE["means"] = torch.zeros(100_000)
    ambient.begin()
    assert (LOADED, CACHE["table"]) == kept
    assert "means" not in CACHE
    assert now()[2:] == (1, None)
    assert "late" not in SETTINGS


def test_what_was_not_settled_is_undone(ambient):
    data({})
    CACHE["table"] = object()
    ambient.begin()
    assert LOADED is None
    assert not CACHE


def test_a_trials_model_in_a_global_is_left_alone(ambient):
    net = nn.Linear(2, 2)
    CACHE["model"] = net
    fixed = {id(net): "the model"} | {id(p): name for name, p in net.named_parameters()}
    notes = ambient.settle(fixed)
    CACHE["model"] = None
    with torch.no_grad():
        net.weight.fill_(7.0)
    assert not [p for p in ambient.changed(notes, ambient.take(fixed))[0] if "weight" in p]
    ambient.put(notes)
    assert CACHE["model"] is net
    assert net.weight.eq(7.0).all()


def test_only_what_steps_read_is_a_trials_own(ambient):
    places = [f"{__name__}.{name}" for name in ("RATE", "Net.temperature", "SETTINGS.scale")]
    assert all(map(ambient.has, places))
    assert not ambient.has(f"{__name__}.UNREAD")
    assert not ambient.has(f"{__name__}.RATES")


class Stepped(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def optimizer(named, hp):
    return Stepped([p for _, p in named], lr=0.1)


def test_what_torch_wraps_on_a_class_stays_wrapped():
    ambient = Ambient(shoal.Recipe(model=model, data=data, loss=loss, optimizer=optimizer))
    before = Stepped.step
    made = optimizer(list(nn.Linear(2, 2).named_parameters()), {})
    assert Stepped.step is not before
    ambient.begin()
    ambient.put(ambient.take())
    assert type(made).step is Stepped.step is not before


def load():
    global LOADED, RATE
    if LOADED is None:
        LOADED = torch.ones(3)
        RATE = float(LOADED.sum())  # which a tensor without memory has not


def loading(hp):
    load()
    return nn.Linear(2, 2)


def test_what_fails_without_memory_leaves_nothing(ambient):
    watch(shoal.Recipe(model=loading, data=data, loss=loss))
    with pytest.raises(RuntimeError), tried(), torch.device("meta"):
        loading({})
    assert LOADED is None
    loading({})
    assert RATE == 3.0


def test_what_has_no_memory_is_not_left_in_a_global_and_what_has_is(ambient):
    watch(shoal.Recipe(model=model, data=data, loss=loss))
    with pytest.raises(Hollow), tried():
        CACHE["net"], SETTINGS["scale"] = nn.Linear(2, 2, device="meta"), 4
    assert not CACHE
    assert SETTINGS["scale"] == 1
    with tried():
        SETTINGS["scale"] = 4
    assert SETTINGS["scale"] == 4


def cached(hp):
    CACHE["net"] = nn.Linear(2, 2)
    return CACHE["net"]


def of_the_cached(named, hp):
    return torch.optim.SGD(CACHE["net"].parameters(), lr=0.1)


def test_an_optimizer_may_find_the_model_in_a_global(ambient):
    def batches(hp):
        return [torch.ones(1, 2)], None

    recipe = shoal.Recipe(model=cached, data=batches, loss=loss, optimizer=of_the_cached)
    watch(recipe)
    order = Describe((TrialSpec(number=0, hp={}, seed=0),))
    assert not describe(recipe, order, lambda trial: None).errors


def test_code_that_came_by_value_has_globals_beside_those_of_its_module():
    apart = types.FunctionType(helped.__code__, {**globals(), "SETTINGS": {"scale": 5}})
    made = Ambient(shoal.Recipe(model=len, data=len, loss=loss, metrics={"a": apart, "b": helped}))
    before = made.take()
    for values in (apart.__globals__["SETTINGS"], SETTINGS):
        values["scale"] += 1
    made.put(before)
    assert apart.__globals__["SETTINGS"]["scale"] == 5
    assert SETTINGS["scale"] == 1


class Span(datetime.timedelta):
    """A type whose base, written in C, has members that nobody can write."""


SPAN = Span(seconds=5000)


def spanning(output, batch):
    SPAN.calls = getattr(SPAN, "calls", 0) + SPAN.seconds
    return output.sum()


def test_members_of_a_type_in_c_are_left_alone_and_what_is_beside_them_is_a_trials_own():
    made = Ambient(shoal.Recipe(model=len, data=len, loss=spanning))
    before = made.take()
    spanning(torch.ones(1), None)
    assert SPAN.calls == 5000
    made.put(before)
    assert not vars(SPAN)
    assert SPAN.seconds == 5000


def sealed_trial():
    made = Ambient(shoal.Recipe(model=len, data=len, loss=counting))
    before = made.take()
    counting(torch.ones(1), None)
    return made, before


@pytest.fixture
def unsealed():
    yield
    dict.update(TABLE, calls=0)
    SETTINGS["scale"] = 1


@pytest.mark.usefixtures("unsealed")
def test_what_cannot_be_put_back_is_named_and_all_else_is_put_back():
    made, before = sealed_trial()
    with pytest.raises(TrialError) as caught:
        made.put(before)
    words = str(caught.value)
    assert f"'TABLE' of {__name__}, of type Sealed, cannot be given back what it held" in words
    assert "TypeError: this table is sealed" in words
    assert SETTINGS["scale"] == 1


@pytest.mark.usefixtures("unsealed")
def test_a_trial_that_cannot_begin_for_it_fails_alone_with_these_words():
    recipe = shoal.Recipe(
        model=lambda hp: nn.Linear(2, 2),
        data=lambda hp: ([torch.ones(1, 2)], None),
        loss=counting,
    )
    watch(recipe)
    counting(torch.ones(1), None)
    noted = []
    found = describe(recipe, Describe((TrialSpec(number=7, hp={}, seed=0),)), noted.append)
    assert "'TABLE' of" in found.errors[7]
    assert isinstance(found.cause, TrialError)
    assert noted == [7, None]


SPACE, PACE = types.SimpleNamespace(rate=1.0), [1.0]


def paced():
    return PACE[0]


def spaced(hp):
    SPACE.rate = PACE[0] = hp["rate"]
    return nn.Linear(1, 1)


def by_pace(optimizer, hp):
    return lambda step: paced() * SPACE.rate


def test_namespaces_and_what_a_schedules_function_asks_are_each_trials_own():
    ambient = Ambient(shoal.Recipe(model=spaced, data=data, loss=max, schedule=by_pace))
    notes = []
    for rate in (2, 3):
        ambient.begin()
        assert (SPACE.rate, PACE) == (1.0, [1.0])
        spaced({"rate": rate})
        notes.append(ambient.take())
    for rate, kept in zip((2, 3), notes, strict=True):
        ambient.put(kept)
        assert (SPACE.rate, PACE) == (rate, [rate])
    ambient.begin()


def test_what_code_names_is_looked_up_and_nobodys_code_runs():
    """As of a client that is no good before it has been opened."""

    class Client:
        @property
        def config(self):
            raise RuntimeError

        def __getattr__(self, name):
            raise RuntimeError

        def close(self): ...

    package = types.SimpleNamespace(client=Client())
    assert module_of(found_along(package, ["client", "close"])).__name__ == __name__
    for path in (["client", "config", "update"], ["client", "nothing"], ["nothing", "close"]):
        assert module_of(found_along(package, path)) is None
    assert module_of(package.client) is None
    assert module_of(functools.partial(len)) is functools
    assert module_of(len).__name__ == "builtins"


def counted(x):
    counted.calls += 1
    return x


counted.calls = 0
MEMBERS, HIDDEN = {counted, Net}, {types.FunctionType((lambda: 1).__code__, globals(), "alone")}


def by_members(output, batch):
    for member in HIDDEN:
        member.calls = getattr(member, "calls", 0) + 1
    return counted(output) if counted in MEMBERS else output


def test_what_changes_in_a_sets_member_is_kept_by_the_members_own_name():
    ambient = Ambient(shoal.Recipe(model=model, data=data, loss=by_members))
    built = ambient.take()
    by_members(torch.ones(1), None)
    packed, lost = ambient.changed(built, ambient.take())
    assert [place.rpartition(": ")[2] for place in packed] == ["counted"]
    assert [place.rpartition(": ")[2] for place in lost] == ["HIDDEN"]
