"""Ranges with a step: every value is a whole number of steps, in decimals, and stays one."""

from __future__ import annotations

import json
import random
import warnings
from decimal import Decimal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.search.library import to_optuna
from shoal.search.pbt import PBT, exploits
from shoal.search.sampler import sample
from shoal.search.space import Integer, Uniform, size, uniform

STEPS = st.integers(1, 200)  # of a unit
PLACES = st.integers(-1000, 1000)
COUNTS = st.integers(2, 60)


@st.composite
def ranges(draw):
    """A range with a step, and its values as decimals."""
    places = draw(st.integers(0, 4))
    unit = Decimal(1).scaleb(-places)
    step, low, count = draw(STEPS) * unit, draw(PLACES) * unit, draw(COUNTS)
    exact = [low + index * step for index in range(count)]
    if not places and draw(st.booleans()):
        return Integer(int(low), int(exact[-1]), step=int(step)), exact
    return Uniform(float(low), float(exact[-1]), step=float(step)), exact


@given(ranges())
def test_values_are_the_nearest_floats_of_their_decimals_and_survive_a_record(made):
    entry, exact = made
    values = [entry.at(index) for index in range(entry.count)]
    assert values == [type(entry.lo)(one) for one in exact]
    assert values[0] == entry.lo
    assert values[-1] == entry.hi
    assert json.loads(json.dumps(values)) == values
    assert len({repr(value) for value in values}) == entry.count == size({"a": entry})
    assert [point["a"] for point in sample({"a": entry}, None, sampler="grid")] == values


@given(
    st.floats(-1e3, 1e3, allow_subnormal=False),
    st.floats(1e-3, 1e3) | st.sampled_from([1 / 3, 0.1 + 0.2, 1 / 7]),
    st.integers(1, 40),
)
def test_ends_that_sums_have_rounded_are_the_ends_for_optuna_too(low, step, count):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the last value is the one before
        entry = uniform(low, low + count * step, step=step)
    assert entry.count in (count, count + 1)
    assert entry.at(entry.count - 1) == entry.hi
    assert entry.hi <= low + count * step + 1e-6 * step
    optuna = pytest.importorskip("optuna")
    theirs = to_optuna(optuna, entry)
    assert (theirs.low, theirs.high, theirs.step) == (entry.lo, entry.hi, entry.step)
    for value in {entry.at(index) for index in (0, 1, entry.count // 2, entry.count - 1)}:
        assert theirs._contains(value)
        assert entry.has(value)
        assert entry.nearest(value) == value


@given(ranges(), st.integers(0, 59), st.floats(-0.499, 0.499))
def test_the_nearest_value_is_found_again_from_sums_and_from_between(made, index, off):
    entry, _ = made
    assume(index < entry.count)
    value = entry.at(index)
    assert entry.has(value)
    summed = entry.lo + index * entry.step  # as Optuna has it
    assert entry.nearest(summed) == value
    assert entry.nearest(summed + off * entry.step) == value
    if abs(off) > 0.01 and not isinstance(entry, Integer):
        assert not entry.has(value + off * entry.step)


@given(ranges(), st.floats(0, 1, exclude_max=True))
def test_what_is_drawn_is_a_value_and_all_are_as_likely(made, unit):
    entry, _ = made
    assert entry.pick(unit) == entry.at(int(unit * entry.count))


@given(ranges(), st.integers(0, 10**6), st.sampled_from([0.5, 0.8, 1.25, 2.0]))
def test_a_population_stays_on_the_steps(made, seed, factor):
    entry, _ = made
    hp = {"a": entry.pick(random.Random(seed).random())}
    asked = PBT(resample=0.0, perturb=(factor,))
    found = exploits(
        asked, {"a": entry}, mode="min", seed=seed, rung=1, values={0: 0.1, 1: 0.2},
        points={0: hp, 1: hp},
    )  # fmt: skip
    assert any(found[1].hp["a"] == entry.at(index) for index in range(entry.count))
