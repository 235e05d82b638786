"""Where the tensors of a trial lie: what a technique adds to it."""

from dataclasses import replace

from shoal.core.spec import ALIGNMENT
from shoal.core.technique import Spilled
from shoal.core.units import round_up
from shoal.memory.layout import (
    PREVIOUS,
    TensorSpec,
    as_it_travels,
    lay_out,
    split_bytes,
    with_previous,
    with_split_masters,
)


def spec(name, count, key=""):
    return TensorSpec(name, (count,), (1,), "float32", 4 * count, key)


def two_shards():
    """Adam's state for a weight; a weight without state; one that is borrowed, and frozen."""
    parameters = {n: spec(n, c) for n, c in (("tied", 300), ("bare", 10), ("late", 200))}
    states = {"tied": [spec("tied", 300, "exp_avg"), spec("tied", 300, "exp_avg_sq")]}
    owned, borrowed = [["tied", "bare"], ["late"]], [[], ["tied"]]
    return lay_out(owned, borrowed, parameters, states, [spec("mean", 5)])


def test_every_trained_parameter_has_its_version_before_after_its_state():
    before = two_shards()
    after = with_previous(before, {"tied", "bare"})

    named = [[(f.spec.name, f.spec.key) for f in s.state.fields] for s in after.shards]
    assert named == [
        [("tied", "exp_avg"), ("tied", "exp_avg_sq"), ("tied", PREVIOUS), ("bare", PREVIOUS)],
        [],
    ]
    for field in after.shards[0].state.fields:
        assert field.spec.shape == ((300,) if field.spec.name == "tied" else (10,))
    assert with_previous(before).shards[1].state.fields[0].spec == spec("late", 200, PREVIOUS)


def test_segments_follow_each_other_and_nothing_else_moves():
    before = two_shards()
    after = with_previous(before)

    end = 0
    for old, new in zip(before.shards, after.shards, strict=True):
        assert (new.param, new.grad, new.borrowed) == (old.param, old.grad, old.borrowed)
        assert new.param_at == end
        assert new.state_at == new.param_at + new.param.num_bytes
        assert new.grad_at == new.state_at + new.state.num_bytes
        end = new.grad_at + new.grad.num_bytes
        offsets = [field.offset for field in new.state.fields]
        assert offsets == sorted(offsets)
        assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert (after.buffers_at, after.buffers) == (end, before.buffers)
    more = sum(round_up(4 * count, ALIGNMENT) for count in (300, 10, 200))
    assert after.num_bytes == before.num_bytes + more


def test_what_is_frozen_has_no_gradient_however_it_travels():
    parameters = {n: spec(n, c) for n, c in (("base", 300), ("norm", 10), ("head", 200))}
    grads = {"head": parameters["head"]}
    layout = lay_out([["base", "norm", "head"]], [[]], parameters, {}, [], grads)
    (shard,) = layout.shards
    assert [field.spec.name for field in shard.grad.fields] == ["head"]
    assert layout.num_bytes == shard.param.num_bytes + round_up(800, ALIGNMENT)

    narrow = Spilled(shards=1, transfer="bf16", optimizer="host", keep=())
    for sums, dtype in ((False, "bfloat16"), (True, "float32")):
        travelling = as_it_travels(layout, narrow, {"base", "head"}, sums=sums)
        (field,) = travelling.shards[0].grad.fields
        assert (field.spec.name, field.spec.dtype) == ("head", dtype)


def test_of_a_split_weight_the_host_has_its_bfloat16_and_seventeen_bits():
    parameters = {"weight": spec("weight", 4096), "norm": spec("norm", 128)}
    states = {
        name: [replace(parameters[name], key=key) for key in ("mean", "square")]
        for name in parameters
    }
    before = lay_out([["weight", "norm"], []], [[], ["norm"]], parameters, states, [])
    asked = Spilled(shards=2, transfer="bf16", optimizer="host", keep=())
    whole = as_it_travels(before, asked, {"weight"}, sums=False)
    split = as_it_travels(before, replace(asked, master="split"), {"weight"}, sums=False)

    assert with_split_masters(whole) == split == with_split_masters(split)
    assert with_split_masters(before) == before
    shard = split.shards[0]
    assert [f.spec.name for f in shard.whole.fields] == ["norm"]
    assert shard.whole_at == shard.copy_at
    assert shard.param == before.shards[0].param
    assert shard.low.num_bytes == 2 * 4096 + 4096 // 8
    assert split_bytes(shard) == split_bytes(shard, {"weight"}) == 4 * 4096
    assert split_bytes(shard, {"norm"}) == split_bytes(whole.shards[0]) == 0
    norm = 4 * 128  # of what is not narrow one copy is enough
    assert whole.num_bytes - split.num_bytes == 2 * 4096 - 4096 // 8 + norm
    assert split.num_bytes == int(14.125 * 4096) + 4 * norm
