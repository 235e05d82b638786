"""Into which groups of tensors a step on the host is cut."""

import json
from dataclasses import replace

import pytest

from shoal.builders import make_device, make_job, make_measure, make_shard
from shoal.core.plan import Plan, plan_from_dict
from shoal.core.spec import ALIGNMENT
from shoal.core.units import Seconds, round_up
from shoal.memory.chunks import CHUNK_S, chunk_bytes, chunk_names, in_chunks
from shoal.memory.layout import TensorSpec, lay_out

COUNTS = {"first.weight": 4096, "first.bias": 64, "second.weight": 8192, "second.bias": 128}


def spec(name, count):
    return TensorSpec(name, (count,), (1,), "float32", 4 * count)


def layout_of(counts=COUNTS):
    parameters = {name: spec(name, count) for name, count in counts.items()}
    return lay_out([list(counts)], [[]], parameters, {}, [])


def measure_of(step_s, **changes):
    owned = sum(round_up(4 * count, ALIGNMENT) for count in COUNTS.values())
    shard = make_shard(0, owned_bytes=owned, step_s=step_s)
    return make_measure(shards=[shard], **({"steps_by_tensor": True} | changes))


def test_a_step_that_is_no_longer_than_a_chunk_stays_whole():
    assert chunk_bytes([100, 100], CHUNK_S) == ()


def test_tensors_fill_chunks_of_the_length_that_is_wanted():
    assert chunk_bytes([100] * 8, 4 * CHUNK_S) == (200, 200, 200, 200)


def test_a_small_tensor_goes_with_a_large_one_beside_it():
    assert chunk_bytes([4, 1000, 4, 1000, 4], 10 * CHUNK_S) == (1008, 1004)


def test_many_small_tensors_behind_a_full_chunk_make_one_of_their_own():
    found = chunk_bytes([100, *[10] * 20], 3 * CHUNK_S)
    assert sum(found) == 300
    assert max(found) <= 125


def test_a_tensor_is_never_cut():
    assert chunk_bytes([1000, 10_000, 1000], 100 * CHUNK_S) == (1000, 10_000, 1000)


def test_a_measured_shard_gets_the_chunks_of_its_seconds_on_the_host():
    layout = layout_of()
    quick, slow = in_chunks(measure_of(CHUNK_S), layout), in_chunks(measure_of(CHUNK_S), layout, 4)
    assert quick.shards[0].step_chunks == ()
    chunks = chunk_names(slow.shards[0], layout.shards[0])
    assert chunks == (("first.weight", "first.bias"), ("second.weight", "second.bias"))


def test_frozen_tensors_take_no_time_and_go_with_the_chunk_beside_them():
    counts = {"frozen.embedding": 10**6, **COUNTS, "frozen.head": 10**6}
    layout = layout_of(counts)
    measure = in_chunks(measure_of(4 * CHUNK_S, trained=tuple(COUNTS)), layout)
    alone = in_chunks(measure_of(4 * CHUNK_S), layout_of())
    assert measure.shards[0].step_chunks == alone.shards[0].step_chunks
    first, *_, last = names = chunk_names(measure.shards[0], layout.shards[0], COUNTS)
    assert [name for chunk in names for name in chunk] == list(counts)
    assert first[0] == "frozen.embedding"
    assert last[-1] == "frozen.head"


def test_an_optimizer_that_needs_a_layer_at_a_time_has_no_chunks():
    measure = in_chunks(measure_of(1.0, steps_by_tensor=False), layout_of())
    assert measure.shards[0].step_chunks == ()


@pytest.mark.parametrize("wrong", [(512,), (100, 512), (512 * 1000, 512)])
def test_chunks_of_another_layout_are_one_of_all(wrong):
    shard = replace(measure_of(1.0).shards[0], step_chunks=wrong)
    assert chunk_names(shard, layout_of().shards[0]) == (tuple(COUNTS),)


def test_a_plan_that_is_read_back_has_the_same_chunks():
    shard = replace(measure_of(1.0).shards[0], step_chunks=(512, 1024))
    jobs = (make_job(shards=[shard]),)
    plan = Plan(study="k", devices=(make_device(),), jobs=jobs, active=1, seconds=Seconds(1.0))
    assert plan_from_dict(json.loads(plan.to_json())) == plan
