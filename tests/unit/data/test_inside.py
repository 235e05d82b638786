"""What can be seen inside a dataset."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch

from shoal.data.inside import changed_number, look_inside


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def method(self):
        return self


class Counter:
    count = 0


class Proxy:
    """Answers whatever it is asked with an error."""

    def __getattribute__(self, name):
        raise RuntimeError("not connected")


def closure(generator):
    return lambda x: x + generator.random()


@pytest.mark.parametrize(
    ("root", "path"),
    [
        (Thing(rng=random.Random()), "d.rng"),
        (Thing(inner=Thing(rng=np.random.default_rng())), "d.inner.rng"),
        (Thing(steps=[None, Thing(g=torch.Generator())]), "d.steps[1].g"),
        (Thing(by={"train": np.random.RandomState()}), "d.by['train']"),
        (functools.partial(max, key=random.Random()), "d.key"),
        (Thing(rng=random.Random()).method, "d.__self__.rng"),
        (closure(random.Random()), "d(generator)"),
    ],
)
def test_a_generator_is_found_wherever_it_is_kept(root, path):
    assert list(look_inside(d=root).generators) == [path]


def test_what_is_long_is_data_and_is_not_looked_through():
    assert look_inside(d=Thing(examples=[random.Random()] * 1000)).generators == {}


def test_what_points_to_itself_is_looked_at_once():
    thing = Thing(rng=random.Random(), count=1)
    thing.itself = thing

    assert list(look_inside(d=thing).numbers) == ["d.count"]


def test_a_proxy_that_answers_with_errors_is_left_alone():
    assert look_inside(d=Thing(proxy=Proxy())).numbers == {}


def test_a_number_that_moved_is_named():
    thing = Thing(inner=Thing(calls=1))
    before = look_inside(d=thing)
    thing.inner.calls += 1

    assert changed_number(before, look_inside(d=thing)) == "d.inner.calls"


def test_a_number_of_the_class_moves_too():
    thing = Counter()
    before = look_inside(d=thing)
    thing.count += 1

    assert changed_number(before, look_inside(d=thing)) == "d.count"


def test_a_generator_that_was_made_meanwhile_is_named():
    thing = Thing(rng=None)
    before = look_inside(d=thing)
    thing.rng = random.Random()

    assert changed_number(before, look_inside(d=thing)) == "d.rng"


def test_a_file_that_was_opened_and_a_cache_that_grew_are_no_change():
    thing = Thing(file=None, is_open=False, cache={})
    before = look_inside(d=thing)
    thing.file, thing.is_open, thing.cache[3] = Thing(size=4), True, 5

    assert changed_number(before, look_inside(d=thing)) is None


@pytest.mark.parametrize("rows", [torch.zeros(3), np.zeros(3), torch.zeros(2, 2).t()])
@pytest.mark.parametrize("path", ["d.rows", "d.rows[0]"])
def test_rows_that_are_written_to_have_changed(rows, path):
    thing = Thing(rows=[rows] if "[" in path else rows)
    before = look_inside(d=thing)
    assert changed_number(before, look_inside(d=thing)) is None
    rows[1] += 1
    assert changed_number(before, look_inside(d=thing)) == path


def test_no_large_array_is_read_and_none_of_objects():
    thing = Thing(rows=np.zeros(2**20), empty=np.zeros(0), names=np.array([None, "a"]))
    assert look_inside(d=thing).numbers == {}
