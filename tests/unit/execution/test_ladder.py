"""What is tried when a trial runs out of memory, and what it is planned for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.plan import of_its_arrays
from shoal.core.spec import LayerMeasure, ShardSpec
from shoal.core.technique import Captured, Pipelined, Resident, Spilled
from shoal.core.units import Bytes, Seconds
from shoal.execution.ladder import (
    LEAST_GROWTH,
    MAX_RUNGS,
    at_its_place,
    fewer_stages,
    grow,
    nothing_smaller,
    over_fewer,
    same_bits,
    stepped_here,
    steps_alike,
    techniques,
)
from shoal.planner.growth import grown
from shoal.testing import make_job, make_measure, make_shard


def tried(technique, shards=4, place="device", *, has_neighbours=False):
    return list(techniques(technique, shards, place, has_neighbours=has_neighbours))


def test_a_resident_trial_is_spilled_and_steps_where_it_did():
    assert tried(Resident(), 1) == [Spilled(optimizer="device", recompute=True)]


def test_a_captured_trial_is_tried_without_its_capture_first():
    assert tried(Captured(), 1) == [Resident(), Spilled(optimizer="device", recompute=True)]


def test_a_trial_with_neighbours_is_tried_as_it_is_and_alone_first():
    assert tried(Resident(), 1, has_neighbours=True)[0] == Resident()
    first = tried(Spilled(lookahead=1), has_neighbours=True)[0]
    assert first == Spilled(shards=4, optimizer="device", lookahead=1, recompute=True)


def test_a_spilled_trial_loses_its_lookahead_then_its_boundaries_and_then_gets_more_shards():
    assert tried(Spilled(shards=4, lookahead=1), place="host") == [
        Spilled(shards=4, optimizer="host", lookahead=0, recompute=True),
        Spilled(shards=4, optimizer="host", lookahead=0, boundaries="host", recompute=True),
        Spilled(optimizer="host", lookahead=0, recompute=True),
    ]


def test_the_plain_order_of_micro_batches_stays_and_the_other_one_is_open_again():
    plain = tried(Spilled(shards=4, lookahead=1, order="micro"))
    assert {rung.order for rung in plain} == {"micro"}
    assert tried(Spilled(shards=4, lookahead=1, order="shard"))[0].order is None


def test_a_trial_with_shards_that_stay_keeps_fewer_first():
    technique = Spilled(shards=4, lookahead=1, keep=(0, 1))
    assert tried(technique, place="host") == [
        Spilled(shards=4, optimizer="host", lookahead=1, recompute=True),
        Spilled(shards=4, optimizer="host", lookahead=0, recompute=True),
        Spilled(shards=4, optimizer="host", lookahead=0, keep=(0, 1), recompute=True),
        Spilled(shards=4, optimizer="host", lookahead=0, boundaries="host", recompute=True),
        Spilled(
            shards=4,
            optimizer="host",
            lookahead=0,
            boundaries="host",
            keep=(0, 1),
            recompute=True,
        ),
        Spilled(optimizer="host", lookahead=0, recompute=True),
    ]


def test_with_all_of_that_on_the_host_only_more_shards_are_left():
    technique = Spilled(shards=4, lookahead=0, boundaries="host")
    assert tried(technique) == [Spilled(optimizer="device", lookahead=0, recompute=True)]


def test_a_pipeline_recomputes_and_then_spills_its_stages():
    technique = Pipelined(stages=2, cuts=(3,), recompute=False)
    assert tried(technique, 2, place="host") == [
        Pipelined(stages=2, cuts=(3,), recompute=True),
        Pipelined(stages=2, optimizer="host"),
    ]
    half = Pipelined(stages=2, schedule="zb-h1", recompute=False)
    assert tried(half, 2) == [Pipelined(stages=2, schedule="zb-h1", recompute=True)]


def test_spilled_stages_keep_less_load_nothing_ahead_and_then_have_more_shards():
    same = {"stages": 2, "optimizer": "host", "recompute": True}
    technique = Pipelined(**same, cuts=(3,), shards=5, lookahead=1, keep=(1,), keep_gradients=True)
    assert tried(technique, 5, place="host") == [
        Pipelined(**same, cuts=(3,), shards=5, lookahead=1),
        Pipelined(**same, cuts=(3,), shards=5, lookahead=0),
        Pipelined(**same, lookahead=0),
    ]


def test_spilled_stages_that_lack_a_device_are_cut_anew_and_step_where_they_did():
    technique = Pipelined(stages=3, cuts=(2, 4), shards=6, optimizer="host", keep=(0,))
    first, *others = fewer_stages(technique, 2, 1)
    assert first == Pipelined(stages=2, optimizer="host")
    assert Spilled(optimizer="host") in others


@given(
    st.sampled_from([Resident(), Spilled(lookahead=0), Spilled(lookahead=1)]),
    st.sampled_from(["device", "host"]),
    st.booleans(),
)
def test_no_rung_moves_the_optimizer(technique, place, has_neighbours):
    found = tried(technique, place=place, has_neighbours=has_neighbours)
    assert found
    assert all(rung.optimizer == place for rung in found if isinstance(rung, Spilled))


@given(st.lists(st.floats(0.1, 100.0), min_size=MAX_RUNGS, max_size=MAX_RUNGS))
def test_each_rung_is_planned_for_more_than_the_one_before(by):
    growth = 1.0
    for factor in by:
        growth, before = grow(growth, factor), growth
        assert growth >= before * max(LEAST_GROWTH, factor)


def test_a_key_that_differs_means_other_bits_but_for_how_the_pilot_was_compared():
    key = {"torch": "2.10", "optimizer": "AdamW", "cut": "none"}
    assert same_bits(key, key | {"cut": "bitwise in the pilot"})
    assert not same_bits(key, key | {"optimizer": "SGD"})
    assert not same_bits(key, key | {"use_cache": "off"})
    assert same_bits(key, key | {"use_cache": "off", "cut": "bitwise in the pilot"})


# -- what a larger batch costs ------------------------------------------------------------------

SIZE = st.integers(0, 2**40).map(Bytes)


def bytes_of(kind, names, draw, **fixed):
    return kind(**fixed, **{name: draw(SIZE) for name in names})


@st.composite
def measures(draw):
    common = ["parameter_bytes", "state_bytes", "boundary_bytes", "carry_bytes"]
    peaks = ["forward_peak_bytes", "backward_peak_bytes"]
    seconds = {"forward_s": Seconds(1.0), "backward_s": Seconds(2.0), "step_s": Seconds(0.5)}
    layer = bytes_of(
        LayerMeasure,
        [*common, *peaks, "borrowed_bytes", "saved_bytes"],
        draw,
        name="0",
        **seconds,
    )
    shard = bytes_of(
        ShardSpec,
        [*common, *peaks, "owned_bytes", "gradient_bytes", "step_peak_bytes"],
        draw,
        index=0,
        layers=(0, 1),
        **seconds,
    )
    return make_measure(
        [layer],
        [shard],
        batch_bytes=draw(SIZE),
        buffer_bytes=draw(SIZE),
        resident_bytes=draw(SIZE),
        valid_scale=draw(st.floats(0.1, 10.0)),
    )


@given(measures(), st.floats(1.0, 1000.0))
def test_a_larger_batch_takes_more_of_what_depends_on_it_and_nothing_else(measure, growth):
    larger = grown(measure, growth)
    for before, after in zip(
        [*measure.layers, *measure.shards], [*larger.layers, *larger.shards], strict=True
    ):
        assert after.backward_peak_bytes >= before.backward_peak_bytes * growth
        assert after.boundary_bytes >= before.boundary_bytes * growth
        assert after.parameter_bytes == before.parameter_bytes
        assert after.state_bytes == before.state_bytes
    assert larger.buffer_bytes == measure.buffer_bytes
    assert larger.batch_bytes * larger.valid_scale == pytest.approx(
        measure.batch_bytes * measure.valid_scale, abs=2 * measure.valid_scale
    )


@given(measures())
def test_a_batch_of_the_same_size_costs_the_same(measure):
    assert grown(measure, 1.0) is measure


def test_a_pipeline_goes_on_over_as_many_devices_as_are_left_and_then_on_one():
    technique = Pipelined(stages=4, schedule="flush", cuts=(1, 2, 3), recompute=True)
    assert list(fewer_stages(technique, 3, accumulate=4)) == [
        Pipelined(stages=3, schedule="flush", recompute=True),
        Pipelined(stages=2, schedule="flush", recompute=True),
        Resident(),
        Spilled(optimizer="device"),
        Spilled(optimizer="host"),
    ]
    assert not list(fewer_stages(technique, 0, accumulate=4))


@pytest.mark.parametrize(
    "technique",
    [Pipelined(stages=3, schedule="2bw"), Pipelined(stages=3, micro_batches=8)],
)
def test_a_pipeline_whose_bits_one_device_has_not_needs_two(technique):
    assert [found.stages for found in fewer_stages(technique, 2, accumulate=4)] == [2]
    assert not list(fewer_stages(technique, 1, accumulate=4))


def test_copies_of_a_pipeline_stay_as_many():
    technique = Pipelined(stages=3, width=2, cuts=(1, 2))
    left = list(fewer_stages(technique, 5, accumulate=4))
    assert left == [Pipelined(stages=2, width=2)]
    assert not list(fewer_stages(technique, 3, accumulate=4))


# -- where each parameter steps ----------------------------------------------------------------

KEPT = Pipelined(stages=2, cuts=(4,), shards=4, optimizer="host", keep=(1,), lookahead=1)


def job_of(technique, place, edges=(0, 2, 4, 6, 8)):
    shards = [make_shard(n, layers=span) for n, span in enumerate(pairwise(edges))]
    return make_job(shards=shards, technique=technique, numerics={"optimizer_place": place})


def rungs(technique, place, shards=4):
    options = techniques(technique, shards, "host", has_neighbours=False)
    return list(at_its_place(options, job_of(technique, place)))


@pytest.mark.parametrize("technique", [KEPT, Spilled(shards=4, optimizer="host", keep=(1,))])
def test_on_a_gpu_no_rung_moves_the_step_of_a_shard_that_stays(technique):
    found = rungs(technique, "host, of 4 shards 1 on the device")
    assert found
    assert {rung.keep for rung in found} == {(1,)}
    assert {rung.shards for rung in found} == {4}
    assert 0 in {rung.lookahead for rung in found}


THREE = replace(KEPT, stages=3, cuts=(2, 4), shards=5, keep=(1, 4))
FIVE_SHARDS = (0, 2, 4, 5, 6, 8)  # one, one and three of them in the stages


def test_a_pipeline_that_lost_a_device_goes_on_with_the_same_shards_in_fewer_stages():
    job = job_of(THREE, "host, of 5 shards 1+4 on the device", FIVE_SHARDS)
    options = list(over_fewer(job, 2, accumulate=1))
    piped, alone = options
    assert (piped.stages, piped.cuts, piped.shards, piped.keep) == (2, (4,), 5, (1, 4))
    assert alone == Spilled(shards=5, optimizer="host", keep=(1, 4))
    assert list(over_fewer(job, 1, accumulate=1)) == [alone]


def test_a_pipeline_whose_places_have_the_same_bits_may_go_on_as_anything():
    job = job_of(THREE, "cpu", FIVE_SHARDS)
    assert list(over_fewer(job, 2, 1)) == list(fewer_stages(THREE, 2, 1))


@pytest.mark.parametrize("technique", [replace(KEPT, keep=()), Spilled(shards=4, keep=())])
def test_where_nothing_steps_on_the_gpu_no_rung_keeps_a_shard(technique):
    technique = replace(technique, optimizer="host")
    found = rungs(technique, "host")
    assert {rung.keep for rung in found} == {()}
    assert None in {rung.shards for rung in found}  # more of them is placement


def test_on_a_cpu_both_places_have_the_same_bits_and_less_is_kept():
    found = rungs(KEPT, "cpu")
    assert {rung.keep for rung in found} == {None}
    assert found == list(techniques(KEPT, 4, "host", has_neighbours=False))


def test_a_key_with_the_same_words_and_other_layers_is_not_the_same():
    here, place = job_of(KEPT, "host, of 4 shards 1 on the device"), {"optimizer_place": "cpu"}
    other = job_of(KEPT, here.numerics["optimizer_place"], edges=(0, 1, 4, 6, 8))
    assert stepped_here(here) == {2, 3}
    assert same_bits(here.numerics, other.numerics)
    assert not steps_alike(here, other)
    assert steps_alike(replace(here, numerics=place), replace(other, numerics=place))


def test_where_no_rung_is_left_the_words_say_which_shards_step_where():
    words = nothing_smaller(job_of(KEPT, "host, of 4 shards 1 on the device"))
    assert "4 shards 1 stay on the device and step there" in words
    assert nothing_smaller(job_of(KEPT, "cpu")) == "there is nothing smaller to try."


def test_an_order_that_was_rehearsed_for_other_shards_is_open_in_every_rung():
    asked = Spilled(shards=4, order="shard", keep=(1,), lookahead=1, optimizer="host")
    assert {rung.order for rung in tried(asked, has_neighbours=True)} == {None}


def test_having_left_an_array_is_carried_into_the_next_job():
    key = {"precision": "fp32", "array": "slot 1 of 4; for good from step 5 alone"}
    before, after = replace(make_job(0), numerics=key), {"precision": "fp32"}
    assert not same_bits(key, after)
    assert same_bits(key, after | of_its_arrays(before))
    assert of_its_arrays(make_job(0)) == {}
