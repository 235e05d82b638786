"""Which schedule is the soonest at the loss, whatever steps take."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.spec import JobMeasure
from shoal.core.stale import Stale
from shoal.core.technique import Pipelined
from shoal.core.units import Bytes, Seconds
from shoal.pipeline.stops import Stops
from shoal.planner.need import Request
from shoal.planner.pipeline import WORTH, candidates
from shoal.planner.price import Speeds
from shoal.planner.steptime import Steps, Terms
from shoal.planner.timetoloss import Pace, Place, in_words, pace_of, rival, soonest
from shoal.testing import make_layer

quick = settings(max_examples=60, deadline=None)
SECONDS = st.floats(1e-3, 1e3)
PARTS = st.floats(0.01, 1.0)


def pace(name, step_s, efficiency=1.0):
    seconds = Seconds(step_s)
    stale = name == "2bw"
    return Pace(name=name, step_s=seconds, turn_s=seconds, efficiency=efficiency, is_stale=stale)


# -- choosing ----------------------------------------------------------------------------------


@quick
@given(SECONDS, SECONDS, SECONDS, PARTS)
def test_what_is_taken_is_clearly_sooner_and_nothing_stale_is_taken_beside_what_is_near(
    flush_s, half_s, stale_s, efficiency
):
    first, half = pace("flush", flush_s), pace("zb-h1", half_s)
    stale = pace("2bw", stale_s, efficiency)
    found = soonest(first, [half, stale])
    if found is not first:
        assert found.loss_s < WORTH * first.loss_s
    if found is stale:
        assert stale_s / efficiency < WORTH * min(flush_s, half_s)
    else:
        assert stale.loss_s >= WORTH * min(first.loss_s, half.loss_s)


@quick
@given(SECONDS, SECONDS, SECONDS, PARTS, PARTS)
def test_the_more_a_stale_step_is_worth_the_sooner_it_is_taken(
    flush_s, half_s, stale_s, one, other
):
    less, more = sorted((one, other))
    others = pace("flush", flush_s), pace("zb-h1", half_s)

    def taken(efficiency):
        return soonest(others[0], [others[1], pace("2bw", stale_s, efficiency)]).is_stale

    assert taken(more) or not taken(less)


@quick
@given(SECONDS, SECONDS, PARTS)
def test_the_words_name_all_that_was_weighed_with_the_efficiency(flush_s, stale_s, efficiency):
    paces = [pace("flush", flush_s), pace("2bw", stale_s, efficiency)]
    chosen = soonest(paces[0], paces[1:])
    said = in_words(chosen, paces, {"zb-h1": "it does not fit"}, Stale(efficiency=efficiency))
    text = "\n".join(said)
    assert said[0].startswith(f"{chosen.name} is taken")
    assert all(f"{one.name} is not taken: " in text for one in paces if one is not chosen)
    assert "zb-h1 is not taken: it does not fit" in text
    assert f"at an efficiency of {efficiency:g}" in text
    assert ("times the steps" in text) == (chosen.is_stale and efficiency < 1)


# -- pipelines ---------------------------------------------------------------------------------


def terms(layers, micro_batches):
    measure = JobMeasure(
        layers=layers,
        shards=(),
        batch_bytes=Bytes(64),
        buffer_bytes=Bytes(0),
        resident_bytes=Bytes(0),
        num_batches=8 * micro_batches,
        valid_scale=1.0,
        optimizer="AdamW",
        cuttable=True,
        bitwise=True,
        draws=False,
    )
    request = Request(micro_batches=micro_batches, clip=False, technique=None, prefers="host")
    speeds = Speeds(up_bytes_per_s=inf, down_bytes_per_s=inf)
    return Terms(measure=measure, request=request, speeds=speeds)


def even_layers(count, forward_s=0.02):
    sizes = {name: Bytes(256) for name in ("boundary_bytes", "carry_bytes", "private_bytes")}
    return tuple(
        make_layer(
            f"layer {index}",
            1024,
            **sizes,
            saved_bytes=Bytes(512),
            forward_peak_bytes=Bytes(256),
            backward_peak_bytes=Bytes(2048),
            forward_s=Seconds(forward_s),
            backward_s=Seconds(3 * forward_s),
        )
        for index in range(count)
    )


def paces(stages, micro_batches, trials, budget=2**40, efficiency=1.0, stops=None):
    some = replace(terms(even_layers(stages), micro_batches), stops=stops)
    place = Place(budget=Bytes(budget), devices=stages, trials=trials)
    stale = Stale(efficiency=efficiency)
    found = {}
    for schedule in ("flush", "zb-h1", "2bw"):
        asked = Pipelined(schedule=schedule, stages=stages)
        one, *_ = candidates(asked, some, place.budget, stages, trials)
        found[schedule] = pace_of(one, None, some, place, stale)
    return found


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 4), (4, 4)])
def test_one_trial_alone_is_soonest_without_bubbles_and_a_stale_step_is_weighed(
    stages, micro_batches
):
    found = paces(stages, micro_batches, trials=1)
    assert found["2bw"].step_s < found["zb-h1"].step_s < found["flush"].step_s
    worth = paces(stages, micro_batches, trials=1, efficiency=0.5)["2bw"]
    assert worth.loss_s == pytest.approx(2 * found["2bw"].loss_s)
    assert worth.turn_s == worth.step_s == found["2bw"].step_s


def test_where_a_pipeline_often_stops_stale_weights_are_not_taken():
    """Four stages, four micro-batches: 12 of 80 ms to fill and drain, and 16 a step."""
    often, seldom = Stops(steps=400, eval_every=3), Stops(steps=400)
    unpriced, stopped, going = (
        paces(4, 4, trials=1, stops=some) for some in (None, often, seldom)
    )
    assert soonest(unpriced["flush"], [unpriced["2bw"]]).is_stale
    assert not soonest(stopped["zb-h1"], [stopped["2bw"]]).is_stale
    assert soonest(going["flush"], [going["2bw"]]).is_stale
    for name in ("flush", "zb-h1"):
        assert stopped[name] == unpriced[name]
    assert stopped["2bw"].turn_s == pytest.approx(unpriced["2bw"].turn_s + stopped["2bw"].stops_s)
    said = in_words(stopped["2bw"], list(stopped.values()), {}, Stale(efficiency=1.0))
    assert "of it since it runs empty at stops)" in said[0]


def test_trials_compute_in_what_the_stops_of_others_leave_empty():
    often = Stops(steps=400, eval_every=3)
    alone, shared = (paces(4, 4, trials=n, stops=often)["2bw"] for n in (1, 3))
    assert shared.stops_s < alone.stops_s / 2


@pytest.mark.parametrize(("stages", "width"), [(2, 1), (4, 1), (2, 2)])
def test_a_steps_part_of_the_stops_is_what_a_replay_of_the_training_has(stages, width):
    """Twelve steps that stop after each three, against the same without a stop."""
    some = terms(even_layers(stages), 8)
    asked = Pipelined(schedule="2bw", stages=stages, width=width)
    place = (some, Bytes(2**40), stages * width, 1)
    (one, *_) = candidates(asked, *place)
    (two, *_) = candidates(asked, replace(some, stops=Stops(steps=12, eval_every=3)), *place[1:])
    steps = Steps(
        technique=one.technique,
        stages=one.stages,
        ties=(),
        batch=some.batch(8),
        terms=some,
    )
    (stopping_s, _), (going_s, _) = steps._ran(8, 3, programs=4), steps._ran(8, 12)
    assert two.stops == 5 / 12  # an epoch has eight steps
    assert two.stops_s / two.stops == pytest.approx((stopping_s - going_s) / 3, rel=0.02)


@pytest.mark.parametrize("trials", [2, 3, 7])
def test_trials_that_fill_each_others_bubbles_leave_stale_weights_little(trials):
    alone, shared = paces(4, 4, trials=1), paces(4, 4, trials=trials)
    flush, stale = shared["flush"], shared["2bw"]
    assert flush.together == min(trials, 3)
    assert flush.rounds == trials
    assert flush.turn_s < 0.8 * alone["flush"].step_s
    assert flush.loss_s / stale.loss_s < alone["flush"].loss_s / alone["2bw"].loss_s
    assert not soonest(flush, [stale, shared["zb-h1"]]).is_stale


def test_where_memory_has_room_for_one_nobody_fills_a_bubble():
    (one,) = candidates(
        Pipelined(stages=3), terms(even_layers(3), 4), Bytes(2**40), devices=3, trials=3
    )
    tight = paces(3, 4, trials=3, budget=one.need.total)["flush"]
    assert tight.together == 1
    assert tight.turn_s == tight.step_s
    assert tight.rounds == 3


def test_trials_beside_each_other_are_no_rounds():
    some, stale = terms(even_layers(4), 4), Stale(efficiency=1.0)
    place = Place(budget=Bytes(2**40), devices=4, trials=2)
    (one,) = candidates(Pipelined(stages=2), some, place.budget, 4, 2)
    found = pace_of(one, None, some, place, stale)
    assert (found.rounds, found.together) == (1, 1)


@quick
@given(st.sampled_from(["zb-h1", "2bw"]), st.booleans(), st.integers(0, 2))
def test_a_rival_is_what_was_asked_for_but_for_the_schedule(schedule, predict, lag):
    asked = Pipelined(stages=2, schedule="flush", cuts=(3,), recompute=True, lag=lag)
    found = rival(asked, schedule, Stale(efficiency=0.5, predict=predict))
    if lag and schedule == "zb-h1":
        assert f"lag={lag} was asked for" in found
        return
    assert found.schedule == schedule
    assert found.predict == (predict and schedule == "2bw")
    assert replace(found, schedule="flush", predict=False, lag=lag) == asked


def test_what_a_rival_cannot_have_is_said_in_words():
    stale = Stale(efficiency=0.5)
    spilled = Pipelined(schedule="flush", stages=2, shards=4)
    assert "stages that are spilled" in rival(spilled, "2bw", stale)
    few = Pipelined(schedule="flush", stages=3, micro_batches=2)
    assert "2bw with 3 stages needs 3 micro-batches" in rival(few, "2bw", stale)
