"""Points that are tried first, in spaces with steps and branches: what trials come of them."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.core.errors import SpecError
from shoal.search.points import check_points, complete, is_whole, key, repeats
from shoal.search.sampler import sample
from shoal.search.space import Choice, check_space, choice, integer, size, uniform

LEAVES = st.sampled_from(
    [
        choice(1, 1.0, True, "1", None),
        choice(0.1, 0.2),
        integer(1, 3),
        integer(-4, 4, step=4),
        uniform(0.0, 0.3, step=0.1),
        7,
    ]
)


@st.composite
def spaces(draw):
    """A finite space; one of its names may bring others, one of which brings more."""
    space = {name: draw(LEAVES) for name in draw(st.sampled_from(["a", "ab", "abc"]))}
    if draw(st.booleans()):
        inner = choice("u", "v", when={"v": {"deep": draw(LEAVES)}})
        space["k"] = choice("x", "y", when={"x": {"own": draw(LEAVES), "inner": inner}})
    return check_space(space)


@st.composite
def asked(draw):
    """A space and points of it, some of which leave names out."""
    space = draw(spaces())
    whole = sample(space, None, sampler="grid")
    points = draw(st.lists(st.sampled_from(whole), max_size=4))
    return space, [_without_some(draw, space, dict(point)) for point in points]


def _without_some(draw, space, point):
    """Leave out names, with a choice all that it brings."""
    for name in list(point):
        if name in point and draw(st.booleans()):
            del point[name]
            for bringing, brought in {"k": ("own", "inner", "deep"), "inner": ("deep",)}.items():
                if bringing not in point:
                    for one in brought:
                        point.pop(one, None)
    return point


def agrees(trial, point):
    return key(point) <= key(trial)


@given(asked())
def test_points_of_the_space_are_taken_as_they_are_and_survive_a_record(made):
    space, points = made
    checked = check_points(space, points)
    assert [key(point) for point in checked] == [key(point) for point in points]
    assert repr(json.loads(json.dumps(checked))) == repr(list(checked))


@given(asked(), st.integers(0, 3), st.integers(0, 5))
def test_drawn_trials_begin_with_the_points_and_go_on_as_without_them(made, more, seed):
    space, points = made
    assume(points or more)
    checked, total = check_points(space, points), len(points) + more
    trials = sample(space, total, seed, sampler="random", points=checked)
    assert all(map(agrees, trials, points))
    assert all(is_whole(space, trial) and list(trial) for trial in trials)
    rest = sample(space, more, seed, sampler="random") if more else []
    assert repr(trials[len(points) :]) == repr(rest)


@given(asked(), st.integers(0, 5), st.data())
def test_a_grid_has_every_point_once_and_repeats_those_that_are_named_again(made, seed, data):
    space, points = made
    checked = check_points(space, points)
    try:
        first = complete(space, checked)
    except SpecError as error:
        assert "leaves names out, and all of the grid's" in str(error)  # noqa: PT017
        return
    everything = sample(space, None, seed, sampler="grid", points=checked)
    counts = Counter(map(key, everything))
    assert counts.keys() == {key(point) for point in sample(space, None, sampler="grid")}
    assert len(everything) == size(space) + repeats(first)
    assert all(map(agrees, everything, points))
    named = Counter(key(point) for point in checked if is_whole(space, point))
    assert all(count == max(1, named[one]) for one, count in counts.items())
    some = data.draw(st.integers(max(1, len(points)), len(everything)))
    part = sample(space, some, seed, sampler="grid", points=checked)
    assert len(part) == some
    assert not Counter(map(key, part)) - counts
    assert repr(part[: len(points)]) == repr(everything[: len(points)])


@given(asked(), st.data())
def test_a_name_of_a_branch_that_is_not_taken_is_refused(made, data):
    space, _ = made
    assume("k" in space)
    assert isinstance(space["k"], Choice)
    name = data.draw(st.sampled_from(["own", "inner", "deep"]))
    value = {"own": 1, "inner": "v", "deep": 1}[name]
    given_ = data.draw(st.sampled_from([{"k": "y"}, {}]))
    for point in (given_ | {name: value}, {"k": "x", "inner": "u", "deep": value}):
        try:
            check_points(space, [point])
        except SpecError as error:
            assert "which only trials with" in str(error)  # noqa: PT017
        else:
            raise AssertionError(point)
