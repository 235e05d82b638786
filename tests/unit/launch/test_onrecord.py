"""Whose numerics keys say how the trials train that are left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.core.plan import Plan
from shoal.core.technique import DataParallel, Pipelined
from shoal.core.units import Seconds
from shoal.launch.onrecord import (
    keys_to_follow,
    keys_to_keep,
    place_to_follow,
    technique_to_follow,
    threads_to_follow,
)
from shoal.launch.starts import check_numerics
from shoal.observe.rows import TrialRow, TrialState
from shoal.testing import make_device, make_job

ALONE, TWO = {"threads": 1}, {"threads": 1, "replicas": 2}
CPU = make_device()


def rows(*keys, state=TrialState.FINISHED, step=4):
    return [TrialRow(number=n, numerics=k, state=state, step=step) for n, k in enumerate(keys)]


def plan_of(**numerics) -> Plan:
    return Plan(
        study="s",
        devices=(CPU,),
        jobs=(make_job(0, numerics=numerics),),
        active=1,
        seconds=Seconds(1.0),
        failures={},
    )


def test_what_is_saved_is_heard_before_plans_and_these_before_trials_that_have_ended():
    known = rows({"threads": 1}, {"threads": 2}, {"threads": 3}, {})

    assert keys_to_follow({1: {"threads": 8}}, known, {1, 2}) == {1: {"threads": 8}}
    assert keys_to_follow({1: {}}, known, {1, 2}) == {1: {"threads": 2}, 2: {"threads": 3}}
    assert keys_to_follow({}, known, {3, 4}).keys() == {0, 1, 2}
    assert keys_to_follow({}, [], {0}) == {}


def test_devices_are_as_wide_as_for_the_trials_that_have_ended():
    assert threads_to_follow(keys_to_follow({}, rows(ALONE, ALONE), {2}), CPU) == 1


def test_threads_of_another_kind_of_device_or_of_several_widths_say_nothing():
    gpu = replace(CPU, kind="cuda")
    keys = {0: {"threads": 2, "device": "NVIDIA H100"}, 1: {"threads": 4, "device": "cpu"}}

    assert threads_to_follow(keys, CPU) == 4
    assert threads_to_follow(keys, gpu) == 2
    assert threads_to_follow({0: {"threads": 1}, 1: {"threads": 2}}, CPU) is None
    assert threads_to_follow({}, CPU) is None


@pytest.mark.parametrize(
    ("key", "technique"),
    [
        (TWO, DataParallel(width=2)),
        ({"micro_batches": 4}, Pipelined(micro_batches=4)),
        ({"copies": 2}, Pipelined(width=2)),
        ({"weights": "one step old"}, Pipelined(schedule="2bw")),
        (ALONE, None),
    ],
)
@pytest.mark.parametrize("todo", [{0, 1}, {2}], ids=["planned", "all ended"])
def test_a_technique_holds_for_trials_that_have_saved_nothing(key, technique, todo):
    keys = keys_to_follow({}, rows(key, key), todo)

    assert technique_to_follow(keys, todo) == technique


def test_trials_that_have_ended_count_where_they_agree():
    assert technique_to_follow({0: TWO, 1: ALONE}, {2}) is None


@pytest.mark.parametrize("place", ["device", "host"])
def test_the_optimizer_steps_where_it_was_planned_to(place):
    keys = keys_to_follow({}, rows({"optimizer_place": place}), {0})

    assert place_to_follow(keys, {0}) == place
    assert place_to_follow(keys, {1}) is None, "nobody's bits depend on it"
    assert place_to_follow({0: {"optimizer_place": "cpu"}}, {0}) is None


def test_a_trial_that_has_begun_keeps_its_numerics_though_it_has_saved_nothing():
    begun = rows({"threads": 1}, state=TrialState.RUNNING)

    changes = check_numerics(plan_of(threads=2), keys_to_keep({}, begun, {0}))

    assert changes == ["threads of trial 0 was 1 and is 2"]


@pytest.mark.parametrize(
    ("state", "step", "todo"),
    [(TrialState.PENDING, 0, {0}), (TrialState.FAILED, 3, {0}), (TrialState.FINISHED, 4, {1})],
)
def test_who_has_not_begun_failed_or_ended_may_train_otherwise(state, step, todo):
    assert keys_to_keep({}, rows(ALONE, state=state, step=step), todo) == {}


@pytest.mark.parametrize(
    "seats",
    [
        "slot 1 of 4",
        "slot 1 of 4; from step 6 slot 0 of 2",
        "slot 0 of 2; as asked from step 6 slot 1 of 4",
    ],
)
def test_a_trial_that_begins_again_keeps_the_seat_of_its_first_step(seats):
    kept = keys_to_keep({}, rows({"array": seats}, state=TrialState.RUNNING), {0})

    assert kept == {0: {"array": "slot 1 of 4"}}
    assert check_numerics(plan_of(array="slot 1 of 4; from step 6 slot 0 of 2"), kept) == []
    assert check_numerics(plan_of(), kept) == ["array of trial 0 was 'slot 1 of 4' and is 'none'"]
