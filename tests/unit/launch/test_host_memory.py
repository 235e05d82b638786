"""A plan whose trials do not fit the host says how much they need, and which would."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shoal.core.errors import PlanError
from shoal.core.plan import Plan
from shoal.core.technique import Spilled
from shoal.core.units import Bytes, Seconds
from shoal.launch.plan import (
    check_host_memory,
    fits_host,
    with_fewer_at_once,
    with_less_on_host,
)
from shoal.memory.layout import TensorSpec, as_it_travels, lay_out
from shoal.planning import Planned, Planner
from shoal.testing import make_device, make_job, make_shard

MIB = 2**20


def plan(*sizes: int) -> Plan:
    shard = make_shard(0, 2**10)
    jobs = [
        make_job(trial, [shard], host_bytes=Bytes(size * MIB)) for trial, size in enumerate(sizes)
    ]
    return Plan(
        study="s", devices=(make_device(),), jobs=tuple(jobs), active=1, seconds=Seconds(1.0)
    )


def test_what_fits_or_has_no_bound_is_not_refused():
    check_host_memory(plan(5, 5), 11 * MIB)
    check_host_memory(plan(5, 5), None)


def test_a_refusal_names_the_bytes_and_the_trials_that_fit_together():
    with pytest.raises(PlanError) as refused:
        check_host_memory(plan(9, 2, 3, 4), 10 * MIB)
    words = str(refused.value)
    assert re.match(r"4 trials need 18\.\d MiB on the host, of 10\.0 MiB that it may use: ", words)
    assert re.search(
        r"18\.0 MiB of state and [\d.]+ KiB for a copy of one trial's while it", words
    )
    assert "the largest is trial 0 with 9.0 MiB" in words
    assert "Together fit trials 1 to 3." in words


def test_trials_of_a_search_wait_for_room_but_one_of_them_has_to_fit():
    check_host_memory(plan(9, 2, 3, 4), 10 * MIB, may_wait=True)
    with pytest.raises(PlanError, match="Not even the smallest fits"):
        check_host_memory(plan(9, 2, 3, 4), 1 * MIB, may_wait=True)
    assert fits_host(plan(5, 5).jobs, plan(5, 5), 11 * MIB)
    assert fits_host(plan(5, 5).jobs, plan(5, 5), None)
    assert not fits_host(plan(5, 5).jobs, plan(5, 5), 9 * MIB)


def test_fewer_share_a_device_where_that_is_what_fits_the_host():
    found = Planned(plan=replace(plan(4, 4, 4), active=3), layouts={}, num_batches={}, failures={})
    jobs = tuple(replace(job, waiting_bytes=Bytes(2 * MIB)) for job in found.plan.jobs)
    found = replace(found, plan=replace(found.plan, jobs=jobs))
    assert with_fewer_at_once(found, None) is found
    assert with_fewer_at_once(found, 13 * MIB) is found
    fewer = with_fewer_at_once(found, 9 * MIB).plan  # 6 of states, 2 that wait for each
    assert fewer.active == 1
    assert "up to 1 and not 3 trials share a device" in fewer.notes[-1]
    check_host_memory(fewer, 9 * MIB)
    assert with_fewer_at_once(found, 7 * MIB) is found  # refused, with the number


def test_where_none_fits_it_says_so():
    with pytest.raises(PlanError, match=r"Not even the smallest fits, which needs 8\.\d MiB with"):
        check_host_memory(plan(9, 8), MIB)


def test_copies_for_checkpoints_are_told_apart_from_state_and_what_waits():
    """Twice 3 MiB of state fit 8 MiB; with what is written and what waits they do not."""
    shard = make_shard(0, 2 * MIB)
    sizes = {"host_bytes": Bytes(4 * MIB), "waiting_bytes": Bytes(MIB)}
    jobs = tuple(make_job(trial, [shard], **sizes) for trial in range(2))
    both = replace(plan(1), jobs=jobs, active=2)
    words = (
        r"6\.0 MiB of state and 6\.\d MiB for a copy of one trial's while it is written as a "
        r"checkpoint, 2\.0 MiB wait there in a step; the largest"
    )
    with pytest.raises(PlanError, match=words):
        check_host_memory(both, 8 * MIB)
    two = replace(both, devices=both.devices * 2, active=1)
    with pytest.raises(PlanError, match=r"12\.\d MiB for copies of 2 trials' while they are"):
        check_host_memory(two, 8 * MIB)


# -- the float32 of what travels as bfloat16, in two parts ------------------------------------

COUNT = 2**20  # parameters of a trial: 16 MiB with Adam's state, 14.125 where they are split
CHUNK = 2**20  # bytes of a step


def narrow(trials: int, **settings: object) -> Planned:
    technique = Spilled(shards=1, optimizer="host", transfer="bf16", keep=(), **settings)
    weight = TensorSpec("weight", (COUNT,), (1,), "float32", 4 * COUNT)
    states = {"weight": [replace(weight, key=key) for key in ("mean", "square")]}
    layout = lay_out([["weight"]], [[]], {"weight": weight}, states, [])
    layout = as_it_travels(layout, technique, {"weight"}, sums=False)
    shard = replace(make_shard(0, 2**10), step_chunks=(CHUNK,) * 4)
    size = Bytes(layout.num_bytes)
    jobs = [make_job(t, [shard], technique=technique, host_bytes=size) for t in range(trials)]
    one = Plan(
        study="s", devices=(make_device(),), jobs=tuple(jobs), active=1, seconds=Seconds(1.0)
    )
    return Planned(
        plan=one, layouts=dict.fromkeys(range(trials), layout), num_batches={}, failures={}
    )


def planner() -> Planner:
    made = object.__new__(Planner)
    made.why_split = ""
    return made


def masters(planned: Planned) -> set[str | None]:
    return {job.technique.master for job in planned.plan.jobs}


def test_it_is_split_where_the_trials_fit_then_and_the_planner_goes_on_so():
    found, asks = narrow(4), planner()
    free = with_less_on_host(asks, found, 66 * MIB)
    assert (free, asks.why_split) == (found, "")
    tight = with_less_on_host(asks, found, 59 * MIB)
    assert masters(tight) == {"split"}
    check_host_memory(tight.plan, 59 * MIB)
    for job in tight.plan.jobs:
        assert job.waiting_bytes == CHUNK
        assert job.host_bytes == int(14.125 * MIB) + CHUNK
        assert tight.layouts[job.trial].num_bytes == int(14.125 * MIB)
        assert job.why[-1] == asks.why_split
    assert "would take 64." in asks.why_split
    assert "which may use 59.0 MiB, and so it takes 57." in asks.why_split


def test_a_refusal_is_of_the_smaller_number_and_float32_that_is_asked_for_stays():
    with pytest.raises(PlanError, match=r"4 trials need 57\.. MiB on the host"):
        check_host_memory(with_less_on_host(planner(), narrow(4), 40 * MIB).plan, 40 * MIB)
    asks = planner()
    kept = with_less_on_host(asks, narrow(4, master="float32"), 59 * MIB)
    assert (masters(kept), asks.why_split) == ({"float32"}, "")


def test_where_trials_wait_for_room_it_is_split_if_more_of_them_fit():
    room = {"may_wait": True}
    assert masters(with_less_on_host(planner(), narrow(4), 40 * MIB, **room)) == {None}
    assert masters(with_less_on_host(planner(), narrow(4), 47 * MIB, **room)) == {"split"}
