"""An array is never chosen that ends later than its trials one by one, or does not fit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.spec import ArrayMeasure, WidthMeasure
from shoal.core.units import Bytes, Seconds
from shoal.planner.lanes import Load, array_s, serial_s, shortened
from shoal.planner.width import (
    MOST,
    InShards,
    at_best,
    choose,
    gains,
    next_candidate,
    pace,
    when_spilled,
    why_no_look,
    why_not_compiled,
    widths_to_try,
    worth_spilling,
)

SECONDS = st.floats(1e-6, 10.0)
KINDS = st.sampled_from(("eager", "traced", "compiled", "branches"))


def found(width, step_s, **changes):
    """An array beside trials of a second's step."""
    values = {"step_s": Seconds(step_s), "alone_s": Seconds(1.0), **changes}
    return WidthMeasure(width=width, **values)


@st.composite
def candidates(draw):
    return WidthMeasure(
        width=draw(st.integers(2, MOST)),
        kind=draw(KINDS),
        step_s=Seconds(draw(SECONDS)),
        valid_s=Seconds(draw(SECONDS)),
        alone_s=Seconds(draw(SECONDS)),
        alone_valid_s=Seconds(draw(SECONDS)),
        build_s=Seconds(draw(st.floats(0, 100))),
        refill_s=Seconds(draw(st.floats(0, 5))),
        unit_bytes=Bytes(draw(st.integers(0, 1000))),
        noise=draw(st.floats(0, 0.5)),
        declined=draw(st.sampled_from(("", "", "it is odd"))),
    )


@st.composite
def measures(draw):
    some = draw(st.lists(candidates(), max_size=7, unique_by=lambda c: (c.width, c.kind)))
    return ArrayMeasure(widths=tuple(some), valid_batches=draw(st.integers(0, 4)))


@st.composite
def loads(draw):
    return Load(
        steps=tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=60))),
        devices=draw(st.integers(1, 5)),
        every=draw(st.none() | st.integers(1, 50)),
        step_s=draw(st.sampled_from((0.001, 1.0))),
    )


def fits_in(room):
    return lambda one: one.unit_bytes <= room


def the_one(measure, choice):
    return next(c for c in measure.widths if (c.width, c.kind) == choice[:2])


# ------------------------------------------------------------------ the choice


@given(measures(), loads(), st.integers(0, 1000))
def test_what_is_chosen_fits_and_all_are_through_sooner_than_one_by_one(measure, load, room):
    choice = choose(measure, load, fits_in(room))
    assert choice.why
    if choice.width == 1:
        assert choice.why[0].startswith("unfused: ")
        able = [c for c in measure.widths if not c.declined and c.unit_bytes <= room]
        assert not any(gains(c, load, measure.valid_batches) for c in able)
        return
    chosen = the_one(measure, choice)
    assert chosen.unit_bytes <= room
    assert not chosen.declined
    took = array_s(chosen, load, measure.valid_batches)
    assert took * (1 + chosen.noise) < serial_s(chosen, load, measure.valid_batches)


@given(measures(), loads(), st.floats(0.1, 1.0))
def test_what_is_chosen_stays_so_if_it_is_quicker_still(measure, load, by):
    choice = choose(measure, load, fits_in(1000))
    if choice.width == 1:
        return
    chosen = the_one(measure, choice)
    quicker = replace(
        chosen,
        step_s=Seconds(chosen.step_s * by),
        valid_s=Seconds(chosen.valid_s * by),
        build_s=Seconds(chosen.build_s * by),
    )
    others = tuple(quicker if c is chosen else c for c in measure.widths)
    assert choose(replace(measure, widths=others), load, fits_in(1000))[:2] == choice[:2]


@given(measures(), loads(), st.floats(1.0, 10.0))
def test_what_is_not_chosen_is_not_chosen_if_it_is_slower_still(measure, load, by):
    choice = choose(measure, load, fits_in(1000))
    others = tuple(
        c if (c.width, c.kind) == choice[:2] else replace(c, step_s=Seconds(c.step_s * by))
        for c in measure.widths
    )
    assert choose(replace(measure, widths=others), load, fits_in(1000))[:2] == choice[:2]


@given(st.integers(1, 60), st.integers(1, 4), st.integers(2, 20))
def test_a_tie_is_the_trials_own(trials, devices, width):
    load = Load(steps=(10,) * trials, devices=devices)
    each = math.ceil(trials / devices)
    serial = each * 10.0
    rounds = math.ceil(each / width) * 10
    tie = ArrayMeasure(widths=(found(width, serial / rounds),))
    assert choose(tie, load, fits_in(0)).width == 1


@given(candidates(), loads(), st.integers(0, 4))
def test_no_array_is_through_before_its_longest_lane(one, load, batches):
    each = math.ceil(len(load.steps) / (load.devices * one.width))
    assert array_s(one, load, batches) >= max(load.steps) * one.step_s * (1 - 1e-9)
    assert array_s(one, load, batches) >= each * min(load.steps) * one.step_s * (1 - 1e-9)


@given(candidates(), loads())
def test_more_devices_are_never_slower_one_by_one(one, load):
    more = replace(load, devices=load.devices + 1)
    costs = [steps * one.alone_s for steps in load.steps]
    assert serial_s(one, more, 0) <= serial_s(one, load, 0) + max(costs)
    assert serial_s(one, load, 0) >= sum(costs) / load.devices * (1 - 1e-9)


def test_idle_slots_count():
    load = Load(steps=(100,) * 20, devices=2)
    full, wide = found(10, 5.0), found(16, 5.0)
    assert array_s(full, load, 0) == 500  # ten each
    assert array_s(wide, load, 0) == 500  # six slots idle on both
    alone = Load(steps=(100,) * 17, devices=1)
    assert array_s(wide, alone, 0) == 1000  # one trial has the second turn for itself


def test_validation_counts_and_is_done_together_by_those_in_step():
    one = found(4, 1.0, valid_s=Seconds(3.0), alone_valid_s=Seconds(0.5))
    load = Load(steps=(10,) * 4, devices=1, every=5)
    assert array_s(one, load, 2) == 10 + 2 * 2 * 3
    assert serial_s(one, load, 2) == 4 * (10 + 2 * 2 * 0.5)
    uneven = replace(load, steps=(10, 9, 10, 9))  # 5, 9, 10
    assert array_s(one, uneven, 2) == 10 + 3 * 2 * 3
    each = replace(one, evaluates_each=True)  # 8 evaluations of a trial, a quarter of 3 s each
    assert array_s(each, load, 2) == array_s(each, uneven, 2) == 10 + 8 * 2 * 3 / 4


def test_a_slow_validation_turns_the_choice_around():
    quick = found(4, 2.0, valid_s=Seconds(60.0), alone_valid_s=Seconds(10.0))
    load = Load(steps=(10,) * 4, devices=1, every=1)
    assert choose(ArrayMeasure(widths=(quick,)), load, fits_in(0)).width == 4
    assert choose(ArrayMeasure(widths=(quick,), valid_batches=1), load, fits_in(0)).width == 1


def test_what_building_takes_counts_once_a_device_and_refilling_for_each_trial_after():
    one = found(2, 1.0, build_s=Seconds(7.0), refill_s=Seconds(0.5))
    assert array_s(one, Load(steps=(10,) * 8, devices=2), 0) == 7 + 20 + 2 * 0.5


def test_compiling_is_paid_by_long_trials_alone():
    some = ArrayMeasure(
        widths=(found(4, 1.5), found(4, 0.5, kind="compiled", build_s=Seconds(100.0)))
    )
    short, long = (Load(steps=(steps,) * 4, devices=1) for steps in (50, 5000))
    assert choose(some, short, fits_in(0))[:2] == (4, "eager")
    assert choose(some, long, fits_in(0))[:2] == (4, "compiled")


def test_a_gain_within_the_noise_is_none():
    load = Load(steps=(10,) * 4, devices=1)
    for noise, width in ((0.01, 4), (0.3, 1)):
        measure = ArrayMeasure(widths=(found(4, 3.4, noise=noise),))
        assert choose(measure, load, fits_in(0)).width == width


def test_what_ends_early_leaves_its_slot_to_the_next_or_idle():
    steps = shortened(90, 9, 10, 3)
    assert sorted(steps) == [10] * 6 + [30] * 2 + [90]
    assert shortened(90, 9, None, 3) == (90,) * 9
    one = found(9, 2.0)
    load = Load(steps=steps, devices=1, every=10)
    assert serial_s(one, load, 0) == 210
    assert array_s(one, load, 0) == 180  # as long as the longest: eight slots idle from 30 on


def test_what_is_through_at_once_is_not_looked_at():
    load = Load(steps=(10,) * 8, devices=2, step_s=0.01)
    assert why_no_look(load).startswith("one by one all are through in about 400 ms")
    for longer in (
        replace(load, steps=(100,) * 8),
        replace(load, is_known=False),
        replace(load, step_s=math.inf),
    ):
        assert why_no_look(longer) == ""
    assert why_no_look(replace(load, step_s=0.1, steps=(10,) * 7 + (9,)))  # some end early


def test_trials_of_few_long_steps_are_not_looked_at():
    """A look takes as long as 160 steps of one, and may find nothing."""
    load = Load(steps=(44,) * 8, devices=2, step_s=0.2)
    words = why_no_look(load)
    assert words.startswith("one by one all are through in about 35.2 s, too soon for arrays")
    assert words.endswith(", which takes some 32.0 s")
    assert why_no_look(replace(load, steps=(333,) * 8)).endswith("32.0 s")
    assert why_no_look(replace(load, steps=(334,) * 8)) == ""
    assert (
        why_no_look(replace(load, steps=(300,) * 8, step_s=0.009)) == ""
    )  # mostly Python, which arrays share


def test_what_was_declined_is_said():
    measure = ArrayMeasure(declined="it is odd")
    choice = choose(measure, Load(steps=(1,) * 4, devices=1), fits_in(0))
    assert choice == (1, "eager", ("unfused: it is odd",))


def test_each_candidate_is_explained():
    measure = ArrayMeasure(
        widths=(
            found(4, 2.0, noise=0.02),
            found(8, 9.0),
            found(16, 2.0, unit_bytes=Bytes(99)),
            found(4, 3.9, kind="traced"),
            found(8, 1.0, kind="compiled", declined="it cannot be"),
        ),
        took_s=Seconds(1.5),
    )
    choice = choose(measure, Load(steps=(10,) * 32, devices=2), fits_in(10))
    told = "\n".join(choice.why)
    assert choice[:2] == (4, "eager")
    for words in (
        "4 wide, eager: 500 ms a step and trial (alone 1.0 s)",
        "taken",
        "8 wide, eager: 1.1 s",
        "slower than one by one by 12 %",
        "over the device's budget",
        "not surely more than the noise (5 %)",
        "8 wide, compiled: none, it cannot be",
        "measuring this took 1.5 s",
    ):
        assert words in told


# ------------------------------------------------------------------ what is measured


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_the_widths_that_are_tried_are_few_and_rise_to_all_trials_of_a_device(trials, devices):
    widths = widths_to_try(trials, devices)
    each = min(MOST, math.ceil(trials / devices))
    assert list(widths) == sorted(set(widths))
    assert len(widths) <= 3
    assert all(2 <= width <= each for width in widths)
    assert (widths[-1] == each) if each > 1 else (widths == ())


@given(st.data(), loads())
def test_trying_ends_and_tries_nothing_twice(data, load):
    measure = ArrayMeasure(compiler="g++ 1", nodes=data.draw(st.sampled_from((0, 1))))
    asked = []
    while (candidate := next_candidate(measure, load, fits_in(500))) is not None:
        asked.append(candidate)
        one = replace(data.draw(candidates()), width=candidate.width, kind=candidate.kind)
        measure = replace(measure, widths=(*measure.widths, one))
        assert len(asked) <= 7
    assert len(set(asked)) == len(asked)
    assert {width for width, _ in asked} <= set(widths_to_try(len(load.steps), load.devices))
    assert bool(asked) == (math.ceil(len(load.steps) / load.devices) > 1)


def tried(*some, step_s=1.0, **changes):
    """What is measured next, of 64 trials on a device."""
    load = Load(steps=(1000,) * 64, devices=1, step_s=step_s)
    measure = ArrayMeasure(widths=some, **changes)
    return next_candidate(measure, load, fits_in(10))


def test_wide_ones_are_left_out_where_the_middle_loses():
    assert tried() == (16, "eager")
    assert tried(found(16, 20.0)) == (4, "eager")
    assert tried(found(16, 40.0), found(4, 9.0)) is None
    assert tried(found(16, 4.0)) == (64, "eager")
    assert tried(found(16, 4.0, unit_bytes=Bytes(11))) == (4, "eager")


def test_a_graph_is_tried_for_the_best_two_and_compiled_code_for_the_best():
    some = [found(16, 2.0), found(64, 4.0)]
    assert tried(*some) == (64, "traced")
    some.append(found(64, 3.0, kind="traced"))
    assert tried(*some) == (16, "traced")
    some.append(found(16, 1.0, kind="traced", declined="no"))
    assert tried(*some) is None
    assert tried(*some, compiler="g++ 12", nodes=100) == (64, "compiled")


def test_light_trials_are_tried_as_graphs_and_eagerly_where_that_is_none():
    def graph(*args, **changes):
        return found(*args, kind="traced", **changes)

    def light(*some, **changes):
        return tried(*some, step_s=0.001, **changes)

    assert light() == (16, "traced")
    assert light(graph(16, 4.0)) == (64, "traced")
    assert light(graph(16, 4.0), graph(64, 8.0)) is None
    assert light(graph(16, 1.0, declined="no")) == (16, "eager")
    assert light(graph(16, 1.0, unit_bytes=Bytes(11))) == (16, "eager")
    assert light(graph(16, 16.0)) == (4, "traced")  # eager it would be no quicker
    assert light(graph(16, 12.0, build_s=Seconds(9e4))) == (16, "eager")  # but sooner there
    assert light(graph(16, 1.0, declined="no"), found(16, 4.0)) == (64, "eager")
    spent = {"took_s": Seconds(21.0), "first_s": Seconds(1.0)}
    assert light(graph(16, 1.0, declined="no"), **spent) == (16, "eager")


def test_slots_own_passes_are_tried_last_and_where_they_may_overlap():
    some = [found(16, 40.0), found(4, 8.0)]  # stacked kernels lose by far
    assert tried(*some) is None
    assert tried(*some, overlaps=True) == (4, "branches")
    some.append(found(4, 2.0, kind="branches"))
    assert tried(*some, overlaps=True) is None

    none = [found(16, 0.0, declined="no"), found(4, 0.0, declined="no")]
    assert tried(*none) is None
    assert tried(*none, overlaps=True) == (4, "branches")

    some = [found(16, 4.0), found(64, 14.0), found(64, 3.0, kind="traced")]
    some.append(found(16, 1.0, kind="traced"))
    assert tried(*some, overlaps=True) == (64, "branches")


def test_nothing_is_looked_at_that_costs_more_than_it_may_bring():
    """Of a step of 16 in 4 s, beside one of a second alone, 0.8 s are shared: by 64, 15 % less."""
    load = Load(steps=(1,) * 64, devices=1, step_s=1.0)
    assert array_s(found(16, 4.0), load, 0) * 0.15 == pytest.approx(2.4)

    def after(last_s, *some):
        measure = ArrayMeasure(widths=some, last_s=Seconds(last_s))
        return next_candidate(measure, load, fits_in(10))

    assert after(0.59, found(16, 4.0)) == (64, "eager")
    assert after(0.61, found(16, 4.0)) == (16, "traced")
    assert after(1.0, found(16, 15.0)) == (4, "eager")
    assert after(1.0, found(16, 4.0), found(64, 16.0)) == (16, "traced")
    assert after(5.0, found(16, 4.0), found(64, 16.0)) is None  # of 16 s it may save 4.8
    assert next_candidate(
        ArrayMeasure(widths=(found(16, 4.0),), last_s=Seconds(0.9)),
        replace(load, is_known=False),
        fits_in(10),
    ) == (64, "eager")


@given(measures(), loads(), st.floats(0.0, 100.0))
def test_what_is_not_worth_a_look_is_not_if_looking_costs_more(measure, load, more):
    dearer = replace(measure, last_s=Seconds(measure.last_s + more))
    if next_candidate(measure, load, fits_in(500)) is None:
        assert next_candidate(dearer, load, fits_in(500)) is None


def test_short_trials_are_timed_for_less_long():
    load = Load(steps=(100,) * 64, devices=2, step_s=0.01)
    assert pace(load).rounds < pace(replace(load, step_s=1.0)).rounds
    assert pace(replace(load, is_known=False)) == pace(replace(load, step_s=math.inf))


def test_measuring_stops_when_it_has_cost_enough():
    assert tried(found(16, 4.0), took_s=Seconds(900.0)) is None
    assert tried(found(16, 4.0), took_s=Seconds(900.0), first_s=Seconds(899.0)) is not None
    spent = {"took_s": Seconds(21.0), "first_s": Seconds(21.0)}  # 20 more may be
    assert tried(found(16, 4.0), **spent, last_s=Seconds(4.0)) == (64, "eager")
    # Four times as many slots, or a graph of as many.
    assert tried(found(16, 4.0), **spent, last_s=Seconds(6.0)) == (16, "traced")
    assert tried(found(16, 4.0), **spent, last_s=Seconds(21.0)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compiler": ""}, "no C++ compiler"),
        ({"nodes": 0}, "no graph"),
        ({"nodes": 10**6}, "do not bring back"),
    ],
)
def test_why_nothing_is_compiled_is_said(changes, words):
    values = {"compiler": "g++ 12", "nodes": 10, "widths": (found(4, 1.0),), **changes}
    load = Load(steps=(1000,) * 8, devices=1)
    assert words in why_not_compiled(ArrayMeasure(**values), load)
    if words == "no graph":
        told = why_not_compiled(ArrayMeasure(**{**values, "nodes": 1}), load)
        assert told == ""
        assert "not known" in why_not_compiled(
            ArrayMeasure(**{**values, "nodes": 1}), replace(load, is_known=False)
        )
        assert "differ or change on the way" in why_not_compiled(
            ArrayMeasure(**{**values, "nodes": 1}), replace(load, varies=True)
        )


# -- arrays that do not fit ---------------------------------------------------------------


def in_shards(step_s, moved, **seconds):
    return InShards(shards=3, moved_bytes=moved, step_s=Seconds(step_s), **seconds)


def test_trials_that_follow_each_other_bring_home_what_stays_twice():
    whole = found(4, 1.0, build_s=Seconds(2.0), refill_s=Seconds(0.5))
    spilled = when_spilled(whole, in_shards(2.0, Bytes(5), visit_s=Seconds(3.0)))
    assert (spilled.build_s, spilled.refill_s) == (5.0, 6.5)
    load = Load(steps=(10,) * 8, devices=1)
    assert array_s(spilled, load, 0) == 5.0 + 20 * 2.0 + 4 * 6.5


def over(width, **changes):
    """An array that the device had no room for; a trial alone was timed."""
    return found(width, 0.0, is_over=True, **changes)


def test_an_array_that_was_not_there_is_looked_at_as_quick_as_one_may_hope():
    assert at_best(over(8), ArrayMeasure()).step_s == 1.0
    there = ArrayMeasure(widths=(found(2, 1.5),))
    assert at_best(over(8), there).step_s == pytest.approx(3.0)
    assert at_best(found(8, 0.7), there).step_s == 0.7


def test_an_array_that_was_not_there_is_never_taken_as_it_is():
    measure = ArrayMeasure(widths=(over(8, unit_bytes=Bytes(9)),))
    load = Load(steps=(10,) * 8, devices=1)
    choice = choose(measure, load, fits_in(5))
    assert choice.width == 1
    assert "8 wide, eager: over the device's budget, so it was not timed" in choice.why
    best = worth_spilling(measure, load, fits_in(5))
    assert best is not None
    spilled = when_spilled(best, in_shards(2.0, Bytes(5), valid_s=Seconds(0.5)))
    assert (spilled.step_s, spilled.valid_s, spilled.is_over) == (2.0, 0.5, False)
    every = replace(measure, widths=(*measure.widths, spilled))
    assert choose(every, load, lambda one: one.shards > 0)[:2] == (8, "eager")


@given(measures(), loads(), st.integers(0, 1000))
def test_what_is_worth_spilling_does_not_fit_and_would_gain_if_nothing_moved(measure, load, room):
    fits = fits_in(room)
    best = worth_spilling(measure, load, fits)
    if best is None:
        return
    assert not best.declined
    assert not fits(best)
    assert best.kind == "eager"
    assert gains(best, load, measure.valid_batches)


@given(measures(), loads(), st.integers(0, 1000), SECONDS)
def test_a_spilled_array_is_taken_only_where_it_ends_first(measure, load, room, step_s):
    best = worth_spilling(measure, load, fits_in(room))
    if best is None:
        return
    spilled = when_spilled(best, in_shards(step_s, Bytes(5)))
    assert spilled.step_s >= best.step_s

    def fits(one):
        return one.shards > 0 or one.unit_bytes <= room

    before = choose(measure, load, fits_in(room))
    with_it = replace(measure, widths=(*measure.widths, spilled))
    after = choose(with_it, load, fits)
    if (after.width, after.kind) == (before.width, before.kind):
        return
    assert (after.width, after.kind) == (spilled.width, spilled.kind)
    assert gains(spilled, load, measure.valid_batches)
    assert "spilled in 3 shards" in after.why[0]


def test_a_spilled_array_that_loses_is_told_among_the_losers():
    measure = ArrayMeasure(widths=(found(4, 0.5, unit_bytes=Bytes(9)),))
    load = Load(steps=(10,) * 4, devices=1)
    best = worth_spilling(measure, load, fits_in(5))
    assert best is measure.widths[0]
    spilled = when_spilled(best, in_shards(7.0, Bytes(2048)))
    every = replace(measure, widths=(*measure.widths, spilled))
    choice = choose(every, load, lambda one: one.shards > 0)
    assert choice.width == 1
    told = next(line for line in choice.why if "spilled in 3 shards" in line)
    assert "2.0 KiB moved a step" in told
    assert "slower than one by one" in told


def test_nothing_is_spilled_that_would_gain_no_more_than_what_fits():
    few, many = found(4, 1.0), found(16, 3.9, unit_bytes=Bytes(9))
    measure = ArrayMeasure(widths=(few, many))
    load = Load(steps=(10,) * 16, devices=1)
    assert worth_spilling(measure, load, fits_in(5)) is None
    quick = ArrayMeasure(widths=(few, replace(many, step_s=Seconds(2.0))))
    assert worth_spilling(quick, load, fits_in(5)) == quick.widths[1]
