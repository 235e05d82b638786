"""What only its own type can take apart goes to a worker too, or is compared there."""

from __future__ import annotations

import argparse
import array
import configparser
import enum
import itertools
import pickle
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sentover import arrived

from shoal.core.errors import SpecError
from shoal.pystate.standins import DECLARED
from shoal.pystate.statepickler import LARGEST


def objects(seed):
    return np.array([seed, "x", [seed]], dtype=object)


def frame(seed):
    pandas = pytest.importorskip("pandas")
    held = {"a": [0.5 * seed, 1.0], "b": ["x", str(seed)], "c": [pandas.NA, seed]}
    return pandas.DataFrame({**held, "d": pandas.to_datetime(["2020-01-01", f"2020-01-0{seed}"])})


def column(seed):
    return pytest.importorskip("pandas").Series([seed, 2.5])


def tokenizer(seed, more=0):
    tokenizers = pytest.importorskip("tokenizers")
    known = {"a": seed, "b": 0, **{f"word {n}": n + 9 for n in range(more)}}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="b"))


KINDS = {
    "object array": (objects, pickle.dumps),
    "masked array": (
        lambda seed: np.ma.masked_less(np.arange(3.0) * seed, 2),
        lambda one: (one.tolist(), one.mask.tolist()),
    ),
    "record array": (lambda seed: np.rec.array([(seed, 1.0)]), lambda one: one.tolist()),
    "sparse": (
        lambda seed: (seed * torch.eye(3)).to_sparse(),
        lambda one: one.to_dense().tolist(),
    ),
    "array": (lambda seed: array.array("d", [seed]), list),
    "bytearray": (lambda seed: bytearray([seed]), bytes),
    "cycle": (lambda seed: itertools.cycle([seed, 1]), lambda one: [next(one), next(one)]),
    "bit generator": (lambda seed: np.random.PCG64(seed), lambda one: one.state),
    "frame": (frame, lambda one: one.fillna(0).to_dict()),
    "column": (column, lambda one: one.to_dict()),
    "tokenizer": (tokenizer, lambda one: one.to_str()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_only_its_type_takes_apart_is_that_of_the_study(module, kind):
    make, read = KINDS[kind]
    module.value = there = make(2)
    module.holder = {"it": there, "lock": threading.Lock()}
    here = make(3)
    assert not arrived(module, value=here, holder={"it": here, "lock": None})
    assert module.holder["it"] is module.value
    assert read(module.value) == read(make(2))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bytearray"])
def test_what_is_the_same_there_stays_the_object_that_it_is(module, kind):
    make, _ = KINDS[kind]
    module.value, here = make(2), make(2)
    assert not arrived(module, value=here)
    assert module.value is here


def test_a_configuration_that_refers_to_itself_arrives(module):
    there, here = configparser.ConfigParser(), configparser.ConfigParser()
    there["net"], here["net"] = {"width": "4"}, {"width": "3"}
    module.config = there
    assert not arrived(module, config=here)
    assert module.config["net"].getint("width") == module.config.getint("net", "width") == 4
    module.config["net"]["width"] = "5"
    assert there["net"]["width"] == "4"


def test_an_object_within_is_the_one_that_other_names_have(module):
    module.rows = [1.0]
    module.table = np.array([module.rows, None], dtype=object)
    rows = [3.0]
    assert not arrived(module, rows=rows, table=np.array([[3.0], None], dtype=object))
    assert module.table[0] is module.rows is rows
    assert rows == [1.0]


def test_one_with_a_part_that_cannot_go_stays(module):
    module.table, here = np.array([threading.Lock(), 1], dtype=object), objects(3)
    assert not arrived(module, table=here)
    assert module.table is here


def test_one_that_can_be_looked_at_and_cannot_go_is_told_of_where_it_differs(module):
    """A parser has functions that it has made for itself."""

    def parser(width):
        made = argparse.ArgumentParser()
        made.add_argument("--width", type=int, default=width)
        return made

    module.parser, here = parser(4), parser(4)
    assert not arrived(module, parser=here)
    module.parser = parser(4)
    (told,) = arrived(module, parser=parser(3))
    assert told.endswith("a ArgumentParser, and workers have other contents")


def test_a_mark_stays_the_one_that_code_compares_with(module):
    module.MISSING, here = object(), object()
    assert not arrived(module, MISSING=here)
    assert module.MISSING is here


@pytest.mark.parametrize("make", [np.ma.asarray, None], ids=["masked", "frame"])
def test_a_large_table_that_is_another_one_there_is_refused(module, make):
    make = make or pytest.importorskip("pandas").DataFrame
    module.table, here = make(np.zeros(LARGEST)), make(np.zeros(LARGEST))
    assert not arrived(module, table=here)
    assert module.table is here
    module.table = make(np.ones(LARGEST))
    with pytest.raises(SpecError, match=r"held_here.table: a .* and workers have other contents"):
        arrived(module, table=here)


def test_another_one_that_is_too_large_is_told_of(module):
    """Its use changes it by the way (padding): nobody can tell whether a trial is another one."""
    module.words = tokenizer(1, more=60_000)
    assert not arrived(module, words=tokenizer(1, more=60_000))
    module.words = tokenizer(1, more=60_000)
    (told,) = arrived(module, words=tokenizer(2, more=60_000))
    assert "holds as 'words' cannot be sent to workers" in told
    assert told.endswith("a Tokenizer, and workers have other contents")


def test_defaults_of_a_named_tuple_arrive(module):
    def point(default):
        class Point(NamedTuple):
            x: float = default

        Point.__module__, Point.__qualname__ = "held_here", "Point"
        return Point

    module.Point, here = point(2.0), point(3.0)
    assert not arrived(module, Point=here)
    assert here().x == 2.0


def test_other_values_of_an_enumeration_are_told_of(module):
    def rates(default):
        return enum.Enum("Rates", {"LOW": default}, module="held_here")

    module.Rates = rates(2.0)
    assert not arrived(module, Rates=rates(2.0))
    module.Rates = rates(2.0)
    (told,) = arrived(module, Rates=rates(3.0))
    assert "the module held_here holds as 'Rates.(values)' cannot be sent to workers" in told


def test_other_defaults_that_pydantic_has_are_told_of(module):
    pydantic = pytest.importorskip("pydantic")

    def settings(default):
        made = pydantic.create_model("Settings", lr=(float, default), __module__="held_here")
        made.__qualname__ = "Settings"
        return made

    module.Settings = settings(2.0)
    assert not arrived(module, Settings=settings(2.0))
    module.Settings = settings(2.0)
    (told,) = arrived(module, Settings=settings(3.0))
    assert "the module held_here holds as 'Settings.(values)' cannot be sent to workers" in told


def test_what_a_package_holds_otherwise_is_told_of_and_left(module):
    module.CONFIG, module.width, named = {"a": 1}, 3, ["CONFIG", "width"]
    named = [(module, f"{DECLARED}{name}") for name in named]
    (told,) = arrived(module, named=named, CONFIG={}, width=3)
    assert told == (
        "what the module held_here holds as 'CONFIG' cannot be sent to workers, which have of it "
        "what its import makes: a dict of 1 items, and workers have a dict of 0 items"
    )
    assert module.CONFIG == {}


def test_another_tensor_with_a_history_is_told_of(module):
    def scaled(by):
        return by * torch.ones(2, requires_grad=True)

    module.scale, here = scaled(2.0), scaled(2.0)
    assert not arrived(module, scale=here)
    module.scale = scaled(2.0)
    (told,) = arrived(module, scale=scaled(3.0))
    assert told.endswith("a float32 tensor of 2, 8 B, and workers have other contents")
