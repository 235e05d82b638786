"""Which place in an array a job gets: by what is wished, recorded, measured, and what fits."""

from __future__ import annotations

import json

import pytest

from shoal.core.plan import ArrayPlace, LoneNeed, Plan, alone, plan_from_dict
from shoal.core.spec import ArrayMeasure, TrialSpec, WidthMeasure
from shoal.core.technique import Spilled
from shoal.core.units import Bytes, Seconds
from shoal.fusion.match import Signature
from shoal.planning.fusing import ALONE, Fusing, array_place, recorded_width
from shoal.testing import make_device, make_job

ONE, OTHER = Signature((("the model", "one"),)), Signature((("the model", "other"),))
NEED = LoneNeed(held_bytes=Bytes(1), unit_bytes=Bytes(2), peak_bytes=Bytes(3), step_s=Seconds(0.1))
QUICK = 0.002  # of an array's step; three trials alone take longer


def key(number, width, signature=ONE):
    """What is on record of a trial that was planned before."""
    (job,) = place(max(width, 2), [number], facts={number: signature})
    group = job.numerics["array_group"]
    array = {} if width == ALONE else {"array": f"slot {number % width} of {width}"}
    return {"array_group": group, **array}


class Asked:
    """Answers as a worker would, and counts."""

    def __init__(self, declined: str = "", step_s: float = QUICK) -> None:
        self.declined, self.step_s = declined, step_s
        self.orders = []

    def measure_array(self, order):
        self.orders.append(order)
        if self.declined:
            return ArrayMeasure(declined=self.declined)
        widths = tuple(
            WidthMeasure(width=w, step_s=Seconds(self.step_s), unit_bytes=Bytes(4096))
            for w in order.widths
        )
        return ArrayMeasure(alone_s=Seconds(0.001), widths=widths)


def place(
    wish, numbers=range(6), *, recorded=None, facts=None, asked=None, memory=2**28, fusing=None
):
    """The jobs of trials with these numbers."""
    specs = [TrialSpec(number=n, hp={"lr": 0.1}, seed=n) for n in numbers]
    fusing = fusing or Fusing(wish, [make_device(memory=memory)], recorded or {})
    facts = facts or dict.fromkeys(numbers, ONE)
    return fusing.places([make_job(n) for n in numbers], specs, facts, asked or Asked())


def widths(jobs):
    return [job.array.width if job.array else ALONE for job in jobs]


@pytest.mark.parametrize("wish", [None, 0, 1])
def test_without_a_wish_nobody_is_in_an_array(wish):
    asked = Asked()
    assert widths(place(wish, asked=asked)) == [ALONE] * 6
    assert not asked.orders


def test_a_wish_for_a_width_is_followed_slot_by_slot():
    jobs = place(4)
    assert widths(jobs) == [4] * 6
    assert [job.array.slot for job in jobs] == [0, 1, 2, 3, 0, 1]
    assert len({job.array.group for job in jobs}) == 1
    assert [recorded_width(job.numerics) for job in jobs] == [4] * 6
    assert jobs[5].numerics["array"] == "slot 1 of 4"
    assert all(job.peak_bytes == job.held_bytes + job.unit_bytes for job in jobs)


def test_automatic_is_measured_once_for_each_shape():
    asked = Asked()
    facts = dict.fromkeys(range(4), ONE) | dict.fromkeys(range(4, 8), OTHER)
    jobs = place("auto", range(8), facts=facts, asked=asked)
    assert widths(jobs) == [4] * 8
    assert len(asked.orders) == 2
    assert len({job.array.group for job in jobs}) == 2


def test_automatic_takes_none_that_gains_nothing():
    jobs = place("auto", asked=Asked(step_s=1.0))
    assert widths(jobs) == [ALONE] * 6
    assert all("gain nothing" in job.why[-1] for job in jobs)


@pytest.mark.parametrize("wish", [None, 0, 2, "auto"])
def test_what_trained_in_an_array_stays_there_and_what_did_not_stays_out(wish):
    recorded = {0: key(0, 3), 1: key(1, 3), 2: key(2, ALONE)}
    assert widths(place(wish, range(3), recorded=recorded)) == [3, 3, ALONE]


@pytest.mark.parametrize(("wish", "width"), [(None, 3), (0, ALONE), (2, 3), ("auto", 3)])
def test_trials_that_come_later_train_as_those_before_them(wish, width):
    assert widths(place(wish, range(4), recorded={0: key(0, 3), 1: key(1, 3)})) == [
        *(3, 3, width, width)
    ]


def test_what_was_settled_holds_for_trials_that_come_in_the_same_run():
    fusing, asked = Fusing("auto", [make_device()], {}), Asked()
    first = place("auto", range(3), fusing=fusing, asked=asked)
    later = place("auto", range(3, 9), fusing=fusing, asked=asked)
    assert widths(first + later) == [3] * 9
    assert len(asked.orders) == 1


@pytest.mark.parametrize("wish", [4, "auto"])
def test_what_is_declined_trains_alone_and_is_asked_for_once(wish):
    asked = Asked("it is odd")
    jobs = place(wish, asked=asked)
    assert widths(jobs) == [ALONE] * 6
    assert all(job.why[-1] == "unfused: it is odd" for job in jobs)
    assert len(asked.orders) == 1


@pytest.mark.parametrize("wish", [4, "auto"])
def test_what_does_not_fit_the_device_trains_alone(wish):
    jobs = place(wish, memory=4200)
    assert widths(jobs) == [ALONE] * 6
    assert all("fit" in job.why[-1] for job in jobs)


def test_spilled_trials_and_those_without_a_signature_are_in_none():
    specs = [TrialSpec(number=n, hp={"lr": 0.1}, seed=n) for n in range(3)]
    jobs = [make_job(0), make_job(1, technique=Spilled(shards=1)), make_job(2)]
    fusing = Fusing(2, [make_device()], {})
    found = fusing.places(jobs, specs, {0: ONE, 1: ONE}, Asked())
    assert widths(found) == [2, ALONE, ALONE]


def test_a_numerics_key_tells_the_place():
    assert array_place({"array": "slot 2 of 7"}) == (2, 7)
    assert array_place({"torch": "2"}) is None
    assert recorded_width({}) == ALONE


def test_a_plan_with_arrays_can_be_written_and_read():
    array = ArrayPlace(group="abcx4", slot=3, width=4, alone=NEED)
    plan = Plan(
        study="k",
        devices=(make_device(),),
        active=1,
        jobs=(make_job(3, array=array), make_job(4)),
        seconds=Seconds(1.0),
    )
    assert plan_from_dict(json.loads(plan.to_json())) == plan
    assert plan.at_once == 4
    assert "slot 3 of an array of 4" in plan.explain()


def test_slots_are_given_by_rank_within_a_shape():
    facts = {n: OTHER if n % 4 else ONE for n in range(16)}  # as a grid numbers them
    jobs = place(4, range(16), facts=facts)
    assert [job.array.slot for job in jobs if job.trial % 4 == 0] == [0, 1, 2, 3]
    assert [job.array.slot for job in jobs if job.trial % 4] == [0, 1, 2, 3] * 3


def test_those_that_come_after_a_resume_get_the_slots_that_they_would_have_got():
    recorded = {job.trial: job.numerics for job in place(4, range(3))}
    later = place(None, [3, 4], recorded=recorded)
    assert [job.array.slot for job in later] == [3, 0]


def test_that_a_shape_has_no_array_is_on_record_too():
    recorded = {job.trial: job.numerics for job in place("auto", asked=Asked(step_s=1.0))}
    asked = Asked()
    assert widths(place("auto", [6, 7], recorded=recorded, asked=asked)) == [ALONE] * 2
    assert not asked.orders


def test_another_shape_does_not_take_over_a_width():
    recorded = {job.trial: job.numerics for job in place(4, range(3))}
    facts = {3: ONE, 4: OTHER}
    assert widths(place(None, [3, 4], recorded=recorded, facts=facts)) == [4, ALONE]


def test_a_trial_that_leaves_its_array_says_since_when_and_stays_out():
    (job,) = place(2, [0])
    lone = alone(job, 7, "it is odd")
    assert lone.array is None
    assert (lone.held_bytes, lone.step_s) == (make_job(0).held_bytes, make_job(0).step_s)
    assert lone.numerics["array"] == "none since step 7"
    (again,) = place(2, [0], recorded={0: lone.numerics})
    assert again.array is None
    assert again.numerics["array"] == "none since step 7"
    assert "array" not in alone(job, 0, "it is odd").numerics
