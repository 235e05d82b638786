"""Where the tensors of a trial lie: what a technique adds to it."""

from shoal.core.spec import ALIGNMENT
from shoal.core.units import round_up
from shoal.memory.layout import PREVIOUS, TensorSpec, lay_out, with_previous


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
