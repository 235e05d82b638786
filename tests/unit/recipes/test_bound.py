"""A recipe of a trial: who is given hyperparameters, and what of them is read by name."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import sys
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.core.errors import SpecError
from shoal.core.spec import HyperParameters
from shoal.fusion.declined import Declined
from shoal.fusion.rows.blend import blend
from shoal.fusion.rows.sealed import sealed
from shoal.recipes.bound import OfTrial, bound, clip_limit, takes_hp, unspelled_reads
from shoal.recipes.libraries import _is_of_library, is_library
from shoal.recipes.recipe import Recipe, compute_loss
from shoal.recipes.spelled import spelled

HP = {"lr": 0.1, "smoothing": 0.2, "kind": "mse"}
NAMED = "smoothing"


def data(hp):
    return [], None


def recipe(**changes):
    return Recipe(model=lambda hp: nn.Linear(1, 1), data=data, **changes)


def two(output, batch):
    return output.sum()


def weighted(output, batch, weight=0.5):
    return weight * output.sum()


def with_hp(output, batch, hp):
    return hp["smoothing"] * output.sum()


def with_default(output, batch, hp=None):
    return output.sum() if hp is None else hp["smoothing"] * output.sum()


def by_keyword(output, batch, *, hp):
    return hp["smoothing"] * output.sum()


def swallows(output, batch, **others):
    return len(others) + output.sum()


def passes_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def passes_values_on(function):
    @functools.wraps(with_hp)
    def wrapper(*args):
        return function(*args)

    return wrapper


def fills_in(function):
    @functools.wraps(function)
    def wrapper(output, batch):
        return function(output, batch, hp={"smoothing": 3.0})

    return wrapper


class Module(nn.Module):
    def forward(self, output, batch, hp):
        return hp["smoothing"] * output.sum()


class Called:
    def __call__(self, output, batch, hp):
        return self.scaled(output, hp)

    def scaled(self, output, hp):
        return hp["smoothing"] * output.sum()


TAKES = (
    with_hp,
    with_default,
    by_keyword,
    passes_on(with_hp),
    Module(),
    Called(),
    Called().__call__,
    lambda output, batch, hp: hp["smoothing"] * output.sum(),
    functools.partial(lambda scale, output, batch, hp: scale * with_hp(output, batch, hp), 1.0),
)
TAKES_NONE = (
    two,
    weighted,
    swallows,
    fills_in(with_hp),
    nn.CrossEntropyLoss(),
    F.mse_loss,
    functools.partial(with_hp, hp={"smoothing": 3.0}),
    functools.partial(weighted, weight=0.1),
    lambda output, batch: output.sum(),
    passes_values_on(two),
    torch.sub,
)


@pytest.mark.parametrize("loss", TAKES, ids=range(len(TAKES)))
def test_a_parameter_called_hp_is_given_the_trials(loss):
    assert takes_hp(loss)
    own = bound(recipe(loss=loss), HP)
    assert compute_loss(own, torch.ones(2), None) == pytest.approx(0.4)
    again = bound(own, {**HP, "smoothing": 1.0})
    assert compute_loss(again, torch.ones(2), None) == pytest.approx(2.0)
    assert bound(own, dict(HP)) is own


@pytest.mark.parametrize("loss", TAKES_NONE, ids=range(len(TAKES_NONE)))
def test_all_other_functions_are_as_they_were(loss):
    given = recipe(loss=loss, metrics={"same": loss}, clip_grad_norm=0.5)
    assert bound(given, HP) is given
    assert clip_limit(given) == 0.5


def test_metrics_are_given_them_too():
    own = bound(recipe(loss=two, metrics={"plain": two, "told": with_hp}), HP)
    assert own.loss is two
    assert own.metrics["plain"] is two
    assert own.metrics["told"](torch.ones(2), None) == pytest.approx(0.4)


def test_they_travel():
    own = bound(recipe(loss=with_hp), HP).loss
    for other in (copy.copy(own), copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert other(torch.ones(2), None) == own(torch.ones(2), None)
        assert dict(other.hp) == HP


# -- clipping -----------------------------------------------------------------------------


@pytest.mark.parametrize(("clip", "limit"), [(0.5, 0.5), (None, None), (2, 2.0)])
def test_a_limit_is_a_trials_own(clip, limit):
    given = recipe(clip_grad_norm=lambda hp: hp["clip"])
    own = bound(given, {**HP, "clip": clip})
    assert clip_limit(own) == limit
    assert own.clip_grad_norm is not None  # its plan is that of a trial that clips
    assert clip_limit(bound(own, {**HP, "clip": 7.0})) == 7.0
    assert bound(own, {**HP, "clip": clip}) is own


@pytest.mark.parametrize("clip", [0, -1.0, float("nan"), True, "much", torch.ones(1)])
def test_nonsense_is_refused_with_the_trial_it_was_said_of(clip):
    with pytest.raises(SpecError, match=r"returned .* for the trial with \{'lr': 0\.1"):
        bound(recipe(clip_grad_norm=lambda hp: clip), HP)


# -- what is read -------------------------------------------------------------------------


def helps(output, hp):
    return hp["in a helper"]


def doubled(output, batch, hp):
    inside = [hp["in a list"] for _ in range(2)]
    return helps(output, hp), inside, hp[NAMED], hp.get("weight", 0.1), TABLE[hp["kind"]]


TABLE = {"mse": lambda output, hp: hp["in a table"]}


def test_strings_are_found_wherever_the_code_leads():
    inside = "of a closure"

    def closes(output, batch, hp):
        return doubled(output, batch, hp), hp[inside]

    names = {"in a helper", "in a list", "smoothing", "weight", "kind", "in a table", inside}
    assert names <= spelled(closes)
    assert {"smoothing"} <= spelled(Called())
    assert {"smoothing"} <= spelled(functools.partial(with_hp, hp=HP))
    assert "label_smoothing" not in spelled(lambda output, batch: F.cross_entropy(output, batch))


class Task:
    """Everything about a training in one place."""

    scale = "scale"

    def __init__(self):
        self.weights = ("first", "second")
        self.table = nn.ModuleDict({"inside": Module()})

    def optimizer(self, named, hp):
        return hp["optimizer"], hp["lr"]

    def loss(self, output, batch, hp):
        return hp[self.scale], [hp[name] for name in self.weights], self.table.inside(output, hp)


def test_of_an_object_what_the_loss_asks_for_counts():
    found = spelled(Task().loss)
    assert {"scale", "first", "second", "smoothing"} <= found
    assert not {"optimizer", "lr"} & found


def test_values_are_those_that_the_code_spells_in_the_order_of_their_names():
    own = bound(recipe(loss=doubled), {"smoothing": 0.1, "lr": 1.0, "kind": "mse", "note": "a"})
    assert isinstance(own.loss, OfTrial)
    assert list(own.loss.hp.spelled.items()) == [("kind", "mse"), ("smoothing", 0.1)]
    assert own.loss.hp["note"] == "a"
    assert list(own.loss.hp) == ["smoothing", "lr", "kind", "note"]
    assert "note" in own.loss.hp
    assert own.loss.hp.get("weight", 3) == 3
    with pytest.raises(SpecError, match="unknown hyperparameter 'weight'; this trial has"):
        own.loss.hp["weight"]


def test_reads_by_other_names_are_heard():
    hp = bound(recipe(loss=doubled), {"smoothing": 0.1, "note": "a"}).loss.hp
    with unspelled_reads() as heard:
        hp["smoothing"], hp.get("weight")
    assert not heard
    with unspelled_reads() as heard:
        hp["note"], len(hp)
    assert heard == {"note", ""}


def test_the_code_of_an_array_reads_what_it_spells_alone():
    losses = [bound(recipe(loss=doubled), {"smoothing": s, "note": "a"}) for s in (0.1, 0.3)]
    both = blend([one.loss for one in losses], "the loss").hp
    for hp in (both, sealed(losses[0]).loss.hp):
        assert hp.get("weight", 3) == 3
        assert "weight" not in hp
        for read in (lambda hp=hp: hp["note"], lambda hp=hp: "note" in hp):
            with pytest.raises(Declined, match="reads the hyperparameter 'note', and no string"):
                read()
        with pytest.raises(Declined, match="all hyperparameters at once"):
            dict(hp)
    assert both["smoothing"].values == (0.1, 0.3)


def test_an_empty_string_spells_no_name_and_not_all_of_them():
    def loss(output, batch, hp):
        return len("".join(hp)) * output.sum()

    own = bound(recipe(loss=loss), HP)
    with unspelled_reads() as heard:
        own.loss(torch.ones(2), None)
    assert heard == {""}
    with pytest.raises(Declined, match="all hyperparameters at once"):
        sealed(own).loss(torch.ones(2), None)


def test_a_compiled_module_is_given_them_as_it_would_be_itself():
    compiled = torch.compile(Module(), backend="eager")
    assert takes_hp(compiled)
    assert "smoothing" in spelled(compiled)


def test_a_module_of_the_users_may_be_called_as_one_of_the_standard_library(tmp_path, monkeypatch):
    (tmp_path / "profile.py").write_text("def loss(output, batch, hp):\n    return hp['mine']\n")
    monkeypatch.delitem(sys.modules, "profile", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    _is_of_library.cache_clear()
    try:
        assert "mine" in spelled(importlib.import_module("profile").loss)
    finally:
        del sys.modules["profile"]
        _is_of_library.cache_clear()
    assert is_library(importlib.import_module("statistics"))


def test_what_is_spelled_runs_nothing_and_is_the_same_in_every_process():
    names = frozenset(f"name {number:04d}" for number in range(300))

    class Loud(Mapping):
        def __getitem__(self, name):
            raise AssertionError("it was read")

        __iter__ = __len__ = __getitem__

    loud = Loud()

    def loss(output, batch, hp):
        return output.sum() if loud is None else sum(hp[name] for name in names)

    assert sorted(spelled(loss) & names) == sorted(names)[:100]


def test_printed_are_all_of_them():
    own = bound(recipe(loss=with_hp), HP).loss
    assert repr(own.hp) == repr(HyperParameters(HP))
