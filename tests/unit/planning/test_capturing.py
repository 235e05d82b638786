"""Who is captured: the questions that are asked, and what their answers lead to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.core.errors import PlanError
from shoal.core.plan import Plan
from shoal.core.spec import CAPTURED_LAYOUTS, CaptureMeasure, TrialSpec
from shoal.core.technique import Captured, Resident
from shoal.core.units import Bytes, Seconds
from shoal.memory.layout import TensorSpec, lay_out
from shoal.planner.need import Request, need
from shoal.planning.capturing import Capturing
from shoal.planning.planned import Settled
from shoal.runtime.wire.messages import Measure, Measured
from shoal.testing import make_device, make_job, make_measure, make_shard

TRIAL = TrialSpec(number=3, hp={}, seed=3)
SPEC = TensorSpec("weight", (4,), (1,), "float32", 16)
LAYOUT = lay_out([["weight"]], [[]], {"weight": SPEC}, {}, [])
QUICK = CaptureMeasure(eager_s=Seconds(0.003), captured_s=Seconds(0.002), make_s=Seconds(0.1))


def settled():
    measure = make_measure(shards=[make_shard(0)], num_batches=100)
    return Settled(
        measure=measure, layout=LAYOUT, technique=Resident(), why=("it fits",), active=1
    )


def capturing(technique=None, *, budget=1 << 20, looks=True, steps=1000):
    request = Request(micro_batches=1, clip=False, technique=technique, prefers="host")
    return Capturing(
        request=request,
        budget=Bytes(budget),
        devices=2,
        total=lambda batches, each: steps,
        looks=looks,
    )


def ask(decides, capture=None, trials=8):
    """What is settled, and the orders that led to it."""
    question, orders = decides.instead(TRIAL, settled(), trials), []
    try:
        order = next(question)
        while True:
            orders.append(order)
            measure = replace(settled().measure, capture=capture)
            order = question.send(Measured(TRIAL.number, measure, LAYOUT))
    except StopIteration as end:
        return end.value, orders


def test_light_trials_are_captured_where_that_is_quicker():
    found, orders = ask(capturing(), QUICK)
    assert orders == [Measure(TRIAL, cut=False, captures=True)]
    assert found.technique == Captured()
    assert found.measure.shards[0].backward_s == pytest.approx(0.002)
    assert found.why[-1].startswith("captured, to the same bits: a pass takes")


def test_nobody_is_asked_where_nothing_may_come_of_it():
    for decides in (
        capturing(looks=False),
        capturing(Resident(), looks=False),
    ):
        found, orders = ask(decides)
        assert (found, orders) == (settled(), [])


def test_that_nobody_looked_is_said_with_the_reason():
    found, orders = ask(capturing(steps=9))
    assert (found.technique, orders) == (Resident(), [])
    assert found.why[-1].startswith("captured: not tried, all steps of a device take ")


def test_what_gains_nothing_or_has_no_room_stays_as_it_is():
    slow = replace(QUICK, captured_s=Seconds(0.003))
    found, _ = ask(capturing(), slow)
    assert found.technique == Resident()
    assert found.why[-1].endswith("no clear gain over the trial's life")

    args = (settled().measure, settled().measure.shards, Captured(), capturing().request)
    room = need(*args, LAYOUT)
    assert ask(capturing(budget=room.total), QUICK)[0].technique == Captured()
    found, orders = ask(capturing(budget=room.total - 1), QUICK)
    assert (found.technique, orders) == (Resident(), [])
    assert found.why[-1].startswith("captured: there is no room for ")


def test_what_was_asked_for_is_done_or_refused_in_words():
    found, _ = ask(capturing(Captured(), looks=False, steps=1), replace(QUICK, captured_s=1.0))
    assert found.technique == Captured()
    with pytest.raises(
        PlanError, match="trial 3 was asked to train captured, and its pass cannot"
    ):
        ask(capturing(Captured()), CaptureMeasure(declined="'0' has hooks"))
    with pytest.raises(PlanError, match=r"asked to train captured, which needs .* of 1\.0 KiB"):
        ask(capturing(Captured(), budget=1024), QUICK)


def test_a_graph_has_the_memory_of_a_pass_to_itself():
    measure = settled().measure
    request = capturing().request
    plain = need(measure, measure.shards, Resident(), request)
    here = need(measure, measure.shards, Captured(), request)
    pooled = need(measure, measure.shards, Captured(), replace(request, has_pools=True))
    shard = measure.shards[0]
    assert here.total == plain.total + shard.gradient_bytes + shard.owned_bytes
    assert pooled.held == plain.held + CAPTURED_LAYOUTS * plain.unit
    libraries = replace(request, has_pools=True, capture_bytes=Bytes(1000))
    streamed = need(measure, measure.shards, Captured(), libraries)
    assert (streamed.held, streamed.unit) == (pooled.held + 1000, pooled.unit)
    assert need(measure, measure.shards, Resident(), libraries) == plain


def test_a_plan_with_captured_trials_is_read_back():
    plan = Plan(
        study="one",
        devices=(make_device(),),
        jobs=(make_job(technique=Captured()),),
        active=1,
        seconds=Seconds(1.0),
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert "Captured" in plan.explain()
