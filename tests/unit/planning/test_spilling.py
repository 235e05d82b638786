"""Arrays in shards: what a technique leaves open for them, and what is said if there is none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.arraykeys import stacks_all
from shoal.core.plan import seated
from shoal.core.seats import ALONE, Epoch, epochs_of
from shoal.core.spec import JobMeasure, LayerMeasure, TrialSpec
from shoal.core.technique import Pipelined, Resident, Spilled
from shoal.core.units import Bytes, Seconds
from shoal.fusion.matching.match import Signature
from shoal.memory.layout import Segment, TrialLayout, lay_out
from shoal.planner.need import Need, Request
from shoal.planner.price import Speeds
from shoal.planning.arrayjobs import ArraySlot, in_spilled_array
from shoal.planning.asking import Asking
from shoal.planning.fusing import Fusing
from shoal.planning.spilling import (
    ASKED,
    Rows,
    SpilledArrayPlan,
    Spilling,
    array_measure,
    asked_of,
    with_batches,
)
from shoal.runtime.wire.messages import (
    ArrayTry,
    Measure,
    MeasureArrayShards,
    Measured,
    MeasuredArray,
    MeasuredArrayShards,
    MeasureShards,
    TimeArray,
    TimedArray,
)
from shoal.testing import make_device, make_job

SIGNATURE = Signature((("the model", "one"),))
REQUEST = Request(micro_batches=1, clip=False, technique=None, prefers="host")
SPEEDS = Speeds(up_bytes_per_s=1e9, down_bytes_per_s=1e9)


def measure(layers=(), *, cuttable=True, notes=()):
    return JobMeasure(
        layers=tuple(layers),
        shards=make_job(0).shards,
        batch_bytes=Bytes(8),
        buffer_bytes=Bytes(4),
        resident_bytes=Bytes(1000),
        num_batches=3,
        valid_scale=1.0,
        optimizer="SGD",
        cuttable=cuttable,
        bitwise=True,
        notes=notes,
    )


def layer(size):
    fields = dict.fromkeys(
        (
            *("parameter_bytes", "state_bytes", "borrowed_bytes", "boundary_bytes", "carry_bytes"),
            *("forward_peak_bytes", "saved_bytes", "backward_peak_bytes"),
        ),
        Bytes(size),
    )
    return LayerMeasure(
        name="l", **fields, forward_s=Seconds(1), backward_s=Seconds(2), step_s=Seconds(3)
    )


@given(st.lists(st.integers(0, 99), min_size=1, max_size=5), st.integers(1, 64))
def test_on_paper_an_array_is_a_trial_so_many_times_as_large(sizes, width):
    lone = measure([layer(size) for size in sizes])
    wide = array_measure(lone, Rows(width))
    assert wide.batch_bytes == width * lone.batch_bytes
    assert wide.buffer_bytes == width * lone.buffer_bytes
    for one, many in zip(lone.layers, wide.layers, strict=True):
        assert many.parameter_bytes == width * one.parameter_bytes
        assert many.backward_peak_bytes == width * one.backward_peak_bytes
        assert many.backward_s == width * one.backward_s


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 64))
def test_on_paper_what_is_frozen_is_there_once_where_all_have_the_same(frozen, trained, width):
    half = replace(layer(frozen + trained), gradient_bytes=Bytes(trained))
    (own,) = array_measure(measure([half]), Rows(width)).layers
    (once,) = array_measure(measure([half]), Rows(width, one_base=True)).layers
    assert own.parameter_bytes == width * (frozen + trained)
    assert once.parameter_bytes == frozen + width * trained
    assert once.gradient_bytes == own.gradient_bytes == width * trained
    (all_trained,) = array_measure(measure([layer(9)]), Rows(width, one_base=True)).layers
    assert all_trained.parameter_bytes == 9 * width


def test_a_longer_batch_that_was_measured_makes_those_of_validation_no_longer():
    wide = replace(array_measure(measure([layer(1)]), Rows(4)), valid_scale=3.0)
    found = with_batches(wide, Bytes(5 * wide.batch_bytes))
    assert found.batch_bytes == 5 * wide.batch_bytes
    assert found.valid_scale * found.batch_bytes == pytest.approx(3.0 * wide.batch_bytes)
    assert with_batches(wide, Bytes(0)) == wide  # a worker that says nothing of it


def test_batches_that_outgrow_what_was_measured_are_larger_in_shards_too(monkeypatch):
    asking = Asking(None, None, growth=1.5)
    reply = MeasuredArrayShards(0, (), "", batch_bytes=Bytes(100))
    monkeypatch.setattr(asking, "_ask_one", lambda order: (None, reply))
    assert asking.answer(object()).batch_bytes == 150


def test_what_is_forced_stays_forced_and_an_array_recomputes():
    assert asked_of(None) == (ASKED, "")
    found, why = asked_of(Spilled(shards=4, optimizer="device", keep=(0,)))
    assert not why
    assert (found.shards, found.optimizer, found.keep, found.recompute) == (
        4,
        "device",
        (0,),
        True,
    )
    assert "resident" in asked_of(Resident())[1]
    assert "pipelined" in asked_of(Pipelined())[1]


@pytest.mark.parametrize(
    "named",
    [
        {"order": "shard"},
        {"transfer": "bf16"},
        {"recompute": False},
        {"spill_activations": (0,), "shards": 4},
    ],
)
def test_what_an_array_has_not_is_named(named):
    _, why = asked_of(Spilled(**named))
    name, value = next(iter(named.items()))
    assert f"{name}={value!r}" in why


class Answers:
    """Answers orders in turn."""

    def __init__(self, *replies):
        self.replies = list(replies)

    def answer(self, order):
        return self.replies.pop(0)


def spilling(**changes):
    return Spilling(request=REQUEST, speeds=SPEEDS, budget=Bytes(100), **changes)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("a worker ended meanwhile: killed", "a worker ended meanwhile: killed"),
        (Measured(0, measure(cuttable=False, notes=("it is in one piece",)), None), "one piece"),
        (Measured(0, measure([layer(90), layer(90)]), None), "need more than 100 B in any cut"),
    ],
)
def test_where_there_is_none_it_says_why(reply, words):
    trial = TrialSpec(number=0, hp={}, seed=0)
    assert words in spilling().find(Answers(reply), [trial], 4)


class Cut:
    """Answers as a worker whose device has no room for an array in these shards."""

    def __init__(self):
        self.asked = []

    def answer(self, order):
        self.asked.append(order)
        if isinstance(order, Measure):
            return Measured(0, measure([layer(1)] * 9), None)
        if isinstance(order, MeasureShards):
            return Measured(0, measure([layer(1)] * 9), lay_out([], [], {}, {}, ()))
        return MeasuredArrayShards(0, (), "cannot allocate memory", is_over=True)


def test_no_room_in_one_cut_is_no_reason_against_others():
    trial, asking = TrialSpec(number=0, hp={}, seed=0), Cut()
    words = spilling().find(asking, [trial], 4)
    assert words == "in shards 4 of them need more than 100 B in any cut"
    cuts = [order.cuts for order in asking.asked if isinstance(order, MeasureArrayShards)]
    assert len(set(cuts)) > 1


def test_a_study_that_may_not_asks_nobody():
    assert spilling(why_not="it may not").find(Answers(), [], 4) == "it may not"


# -- a job ----------------------------------------------------------------------------------

PLAN = SpilledArrayPlan(
    technique=Spilled(shards=1, optimizer="host", lookahead=0, keep=()),
    measure=measure(),
    layout=TrialLayout((), Segment((), 0), 0, 7),
    need=Need(held=Bytes(60), unit=Bytes(30), peak=Bytes(80), moved=Bytes(50)),
    step_s=Seconds(0.4),
    lone=measure(),
    lone_technique=Spilled(shards=1, optimizer="host", lookahead=0, keep=(0,)),
    lone_need=Need(held=Bytes(20), unit=Bytes(10), peak=Bytes(25), moved=Bytes(0)),
    host_bytes=Bytes(640),
)


class Found(Spilling):
    """Always finds the same."""

    def find(self, asking, trials, width, *, fits=False, one_base=False, varies=False):
        return PLAN


class Timed:
    """One worker, for which all arrays are quick."""

    def __init__(self):
        self.kinds = []  # of those that it was to build

    def measure_arrays(self, order, count, only=()):
        number = order.trial.number
        if isinstance(order, TimeArray):
            return {0: TimedArray(number, ((0.001, 0.001, 0.0, 0.0),) * order.rounds)}
        self.kinds.append(order.kind)
        return {
            0: MeasuredArray(number, ArrayTry(unit_bytes=Bytes(9), once_s=(0.1, 0.1, 0.0, 0.0)))
        }


def placed(found, asking=None, **options):
    jobs = [make_job(n) for n in range(2)]
    trials = [TrialSpec(number=n, hp={}, seed=n) for n in range(2)]
    fusing = Fusing(2, [make_device(memory=1)], {})
    facts = dict.fromkeys(range(2), SIGNATURE)
    asking = asking or Timed()
    return fusing, fusing.places(jobs, trials, facts, asking, spilling=found, **options)


def test_a_trial_of_an_array_that_does_not_fit_is_spilled_with_it():
    found = Found(request=REQUEST, speeds=SPEEDS, budget=Bytes(100))
    fusing, jobs = placed(found)
    for slot, job in enumerate(jobs):
        assert job.technique == PLAN.technique
        assert job.array.slot == slot
        assert (job.held_bytes, job.unit_bytes, job.waiting_bytes) == (60, 30, 640)
        assert job.numerics["array"] == f"slot {slot} of 2"
        assert "array_pass" not in job.numerics
        assert any("50 B move over the link" in words for words in job.why)
        assert fusing.layouts[job.trial] is PLAN.layout


@pytest.mark.parametrize(("is_forced", "kinds"), [(True, ["eager"]), (False, ["traced"])])
def test_where_shards_are_asked_for_no_graph_is_made_that_they_have_no_use_for(is_forced, kinds):
    found = Found(request=REQUEST, speeds=SPEEDS, budget=Bytes(100), is_forced=is_forced)
    asked = Timed()
    placed(found, asked)
    assert asked.kinds == kinds


def test_where_batches_vary_in_length_all_lengths_run_together():
    job = make_job(0)
    job = replace(job, numerics={**job.numerics, "array_batches": "tuple(int64 [4, ~])"})
    inside = in_spilled_array(job, ArraySlot("g", 0, ""), PLAN, 2, ())
    assert stacks_all(inside.numerics)


def test_one_that_leaves_it_trains_alone_in_the_same_shards():
    _, jobs = placed(Found(request=REQUEST, speeds=SPEEDS, budget=Bytes(100)))
    job = seated(jobs[0], (*epochs_of(jobs[0].numerics), Epoch(5, 0, ALONE, for_good=True)))
    assert job.array is None
    assert job.technique == PLAN.lone_technique
    assert (job.held_bytes, job.unit_bytes, job.waiting_bytes) == (20, 10, 0)
    assert job.host_bytes == jobs[0].host_bytes - 640
    assert job.numerics["array"] == "slot 0 of 2; for good from step 5 alone"


def test_without_shards_it_trains_alone_and_says_why():
    _, jobs = placed(spilling(why_not="it may not"))
    assert all(job.array is None for job in jobs)
    assert "are no array in shards: it may not" in jobs[0].why[-1]


def test_a_trial_that_would_draw_ahead_alone_does_not_in_an_array_in_shards_nor_after_it():
    job = replace(make_job(0, technique=Spilled(shards=1, order="shard")), foretells=True)
    technique = Spilled(shards=1, order="micro", optimizer="host")
    made = SimpleNamespace(
        host_bytes=Bytes(0),
        lone_need=SimpleNamespace(held=Bytes(1), unit=Bytes(1), peak=Bytes(2)),
        lone_technique=technique,
        lone=SimpleNamespace(shards=job.shards),
        technique=technique,
        measure=SimpleNamespace(shards=job.shards),
        need=SimpleNamespace(held=Bytes(1), unit=Bytes(1), peak=Bytes(2)),
        step_s=1.0,
    )
    inside = in_spilled_array(job, ArraySlot("g", 0, ""), made, 2, ())
    assert not inside.foretells
    assert not seated(inside, (Epoch(5, 0, ALONE, for_good=True),)).foretells
