"""What the residency benchmark compares with: the solver is exact, the bound holds."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.technique import Spilled
from shoal.planner.need import Request, footprints
from shoal.program.costs import JobCosts
from shoal.program.footprint import footprint
from shoal.program.ir import Op
from shoal.spill.generate import spilled_step
from shoal.testing import make_job, make_shard

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS / "residency"))
bound, measured, optimum, rules, touches = (
    importlib.import_module(name) for name in ("bound", "measured", "optimum", "rules", "touches")
)

PLACES = ("device", "host")
FREE = {"boundary_bytes": 0, "carry_bytes": 0, "forward_peak_bytes": 0}


def load(folder, name):
    """A benchmark's ``run.py`` under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / folder / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


spill = load("spill", "spill_benchmark")


def shards_of(sizes):
    """Shards that are nothing but parts: Adam's state, and no activations."""
    return tuple(
        make_shard(index, size, backward_peak_bytes=size, **FREE)
        for index, size in enumerate(sizes)
    )


@st.composite
def steps(draw, *, most=4):
    shards = shards_of(draw(st.lists(st.integers(1, 5), min_size=2, max_size=most)))
    budget = draw(st.integers(4, 4 * sum(shard.parameter_bytes for shard in shards)))
    place, clip = draw(st.sampled_from(PLACES)), draw(st.booleans())
    step = touches.one_trial(shards, budget, place=place, clip=clip)
    if not all(touches.fits(step, access) for access in step.accesses):
        largest = max(step.needs(access) for access in step.accesses)
        step = touches.one_trial(shards, largest, place=place, clip=clip)
    return step


# The same question, answered otherwise: every part is absent, clean or dirty, anything may be
# loaded, written back or dropped at any moment, and the least cost of n steps is compared.

ABSENT, CLEAN, DIRTY = range(3)


def least_of_many_steps(step, steps):
    """The least bytes of so many steps, from and to any state; for every number of them."""
    shards = range(len(step.shards))
    axes = {
        part: i for i, part in enumerate(itertools.product(shards, ("param", "state", "grad")))
    }
    costs = np.full((3,) * len(axes), np.inf)
    costs[tuple(slice(1) if name == "grad" else slice(None) for _, name in axes)] = 0
    bytes_ = np.zeros(costs.shape)
    for part, axis in axes.items():
        index = np.arange(3).reshape([-1 if i == axis else 1 for i in range(len(axes))])
        bytes_ = bytes_ + step.size(part) * (index > 0)
    made = set()
    for _ in range(steps):
        for access in step.accesses:
            costs = changed(step, costs, axes, made)
            costs = run(step, access, costs, axes, bytes_, made)
        yield float(costs.min())


def changed(step, costs, axes, made):
    """Parts come, go and are written back, one by one."""
    for part, axis in axes.items():
        if part[1] == "grad" and part[0] not in made:
            continue
        was = np.moveaxis(costs, axis, 0)
        size = step.size(part)
        absent = np.minimum.reduce([was[ABSENT], was[CLEAN], was[DIRTY] + size])
        clean = np.minimum.reduce([was[ABSENT] + size, was[CLEAN], was[DIRTY] + size])
        costs = np.moveaxis(np.stack([absent, clean, was[DIRTY]]), 0, axis)
    return costs


def run(step, access, costs, axes, bytes_, made):
    """A unit runs in every state in which it can."""
    shard = access.shard
    params, state, grads = (axes[shard, name] for name in ("param", "state", "grad"))
    after = np.full(costs.shape, np.inf)
    if access.kind == "F":
        after = np.where(at(costs, {params: (CLEAN, DIRTY)}), costs, np.inf)
        return np.where(bytes_ <= access.room, after, np.inf)
    if access.kind == "B":
        made.add(shard)
        there = at(costs, {params: (CLEAN, DIRTY), grads: (ABSENT,)})
        after = moved(np.where(there, costs, np.inf), {grads: DIRTY})
        return np.where(bytes_ <= access.room, after, np.inf)
    made.discard(shard)
    present = {params: (CLEAN, DIRTY), state: (CLEAN, DIRTY), grads: (CLEAN, DIRTY)}
    there = at(costs, present) & (bytes_ <= access.room)
    after = moved(np.where(there, costs, np.inf), {params: DIRTY, state: DIRTY, grads: ABSENT})
    if step.place == "host":
        current = dict.fromkeys((params, state, grads), (ABSENT, CLEAN))
        there = np.where(at(costs, current), costs, np.inf)
        by_host = moved(there, dict.fromkeys((params, state, grads), ABSENT))
        after = np.minimum(after, by_host)
    return after


def at(costs, allowed):
    """Where parts, by axis, are in one of the states."""
    there = np.ones(costs.shape, bool)
    for axis, states in allowed.items():
        index = np.arange(3).reshape([-1 if i == axis else 1 for i in range(costs.ndim)])
        there &= np.isin(index, states)
    return there


def moved(costs, to):
    """The same costs, with parts in another state afterwards."""
    for axis, state in to.items():
        least = costs.min(axis=axis, keepdims=True)
        index = np.arange(3).reshape([-1 if i == axis else 1 for i in range(costs.ndim)])
        costs = np.where(index == state, least, np.inf)
    return costs


@pytest.mark.full
@settings(max_examples=20, deadline=None)
@given(steps(most=3))
def test_the_solver_finds_what_every_policy_over_many_steps_comes_to(step):
    best = optimum.Solver(step).least()
    # Cycles of one to four steps: once settled, 12 more steps cost 12 times the mean.
    totals = list(least_of_many_steps(step, 60))
    assert totals[59] - totals[47] == 12 * best


@settings(max_examples=60, deadline=None)
@given(steps())
def test_no_policy_moves_less_than_the_bound_and_no_pool_less_than_the_best(step):
    best = optimum.Solver(step).least()
    assert bound.least(step) <= best + 1e-9
    assert best <= rules.belady(step)
    assert best <= rules.lru(step)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clip", [False, True])
def test_the_bound_is_state_minus_budget_for_many_small_shards(place, clip):
    shards, params = shards_of([1] * 200), 200
    for room in (50, 100, 150, 225, 250, 450, 550):
        found = bound.least(touches.one_trial(shards, room, place=place, clip=clip))
        ways = {
            ("device", False): (7 * params - 3 * room, 6 * params - 2 * room),
            ("device", True): (10 * params - 4 * room, 8 * params - 2 * room),
            ("host", False): (3 * params - room,),
            ("host", True): (3 * params - room, 2 * params - room / 2),
        }
        assert found == pytest.approx(max(0, *ways[place, clip]), abs=20)


def test_where_the_whole_state_fits_nothing_moves():
    for place, clip in itertools.product(PLACES, (False, True)):
        step = touches.one_trial(shards_of([2, 3, 2]), 4 * 7, place=place, clip=clip)
        assert optimum.Solver(step).least() == 0
        assert bound.least(step) == 0


def test_with_room_for_one_unit_all_that_travels_is_counted():
    shards = shards_of([1] * 5)
    device = touches.one_trial(shards, 4, place="device", clip=False)
    # Loaded twice and stored once, state both ways; but what is there at the turn and at the
    # end of a step is used again at once.
    assert optimum.Solver(device).least() == rules.lru(device) == 7 * 5 - 2
    host = touches.one_trial(shards, 2, place="host", clip=False)
    assert optimum.Solver(host).least() == rules.lru(host) == 3 * 5 - 1


def test_a_pool_that_knows_what_comes_keeps_what_one_that_does_not_throws_away():
    # Without state: 8 shards of one byte, parameters and gradients, room for 5. What is used
    # last is what was used last, so that the most recent leave, where LRU keeps those.
    shards = tuple(
        make_shard(i, 1, backward_peak_bytes=1, state_bytes=0, **FREE) for i in range(8)
    )
    step = touches.one_trial(shards, 5, place="device", clip=False)
    assert bound.least(step) <= rules.belady(step) < rules.lru(step)


def test_a_unit_that_does_not_fit_has_no_optimum():
    assert (
        optimum.Solver(
            touches.one_trial(shards_of([4, 4]), 15, place="device", clip=False)
        ).least()
        is None
    )


def test_the_best_may_take_turns_over_several_steps():
    step = touches.one_trial(shards_of([1] * 4), 5, place="device", clip=False)
    assert optimum.Solver(step).least() == Fraction(68, 3)


@pytest.mark.parametrize(
    ("place", "clip", "of_a_shard"),
    [("device", False, 6), ("device", True, 10), ("host", False, 3), ("host", True, 3)],
)
def test_hydra_moves_all_that_a_unit_uses_both_ways(place, clip, of_a_shard):
    found = rules.hydra(shards_of([1] * 5), place=place, clip=clip)
    assert found == 2 * 4 + of_a_shard * 5  # parameters twice for each F, and the rest


def test_two_trials_share_the_room_and_move_more():
    shards = shards_of([1] * 4)
    alone = bound.least(touches.one_trial(shards, 8, place="device", clip=False))
    together = bound.least(touches.in_turns(shards, 2, 8, place="device", clip=False)) / 2
    assert together > alone


@pytest.mark.parametrize("lend", [False, True])
def test_what_is_beside_the_parts_is_what_the_footprint_counts(lend):
    budget = 10**6
    shards = tuple(
        make_shard(
            i,
            500,
            boundary_bytes=(7 + i) * (i > 0),
            carry_bytes=(5 + i) * (i > 0),
            forward_peak_bytes=31 * i + 3,
            backward_peak_bytes=900 - 40 * i,
        )
        for i in range(4)
    )
    step = touches.one_trial(shards, budget, place="device", clip=False, batch=11, lend=lend)
    actions = spilled_step(4, optimizer="device", lookahead=0).devices[0]
    found = footprint(actions, {0: JobCosts(shards=shards, batch_bytes=11)})
    beside = [
        found.running_bytes[i] - found.arena_bytes - (a.op is Op.B) * 500
        for i, a in enumerate(actions)
        if a.op in (Op.F, Op.B)
    ]
    rooms = [access.room for access in step.accesses if access.kind in ("F", "B")]
    expected = [budget - b for b in beside]
    assert rooms == (expected if lend else [min(expected)] * len(expected))


def test_a_step_with_a_visit_counts_and_another_does_not():
    planned = {"up": 10, "down": 4}
    moved = {
        (0, 1): {"up": 13, "down": 4},  # comes with 3
        (0, 2): {"up": 10, "down": 4},
        (0, 3): {"up": 13, "down": 7},  # had left, and comes again
        (0, 4): {"up": 10, "down": 5},  # one byte too many
        (0, 5): {"up": 0, "down": 3},  # leaves
    }
    assert measured.tally(moved, planned, 3, 4) == (3, 2)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_closed_formula_of_the_spill_benchmark_is_what_the_program_moves(data):
    count = data.draw(st.integers(2, 7))
    place = data.draw(st.sampled_from(PLACES))
    keep = data.draw(st.sets(st.integers(0, count - 1)))
    weights = data.draw(st.sets(st.integers(0, count - 1))) - keep if place == "device" else ()
    technique = Spilled(
        shards=count,
        optimizer=place,
        lookahead=data.draw(st.integers(0, 2)),
        keep=tuple(keep),
        keep_weights=tuple(weights),
    )
    shards = [make_shard(i, data.draw(st.integers(1, 1000))) for i in range(count)]
    request = Request(micro_batches=1, clip=False, technique=technique, prefers="host")
    found = footprints(shards, 0, technique, request)[0]
    job = make_job(shards=shards, technique=technique)
    assert spill.formula(job) == {"up": found.up_bytes, "down": found.down_bytes}
