"""Rows of an array lie in memory as each trial's tensors do, shard by shard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.arraykeys import LEAST_BASE_BYTES
from shoal.core.spec import ALIGNMENT
from shoal.memory.layout import TensorSpec, lay_out
from shoal.memory.stacking import base_of, shared_spec, stacked_layout, stacked_spec

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def dense(name, shape, key=""):
    stride, size = [], 1
    for length in reversed(shape):
        stride.insert(0, max(1, size))
        size *= max(1, length)
    elements = 1
    for length in shape:
        elements *= length
    return TensorSpec(name, shape, tuple(stride), "float32", 4 * elements, key)


@st.composite
def layouts(draw):
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    params = {f"p{i}": dense(f"p{i}", shape) for i, shape in enumerate(shapes)}
    names = list(params)
    cut = draw(st.integers(0, len(names)))
    owned = [part for part in (names[:cut], names[cut:]) if part]
    borrowed = [[] for _ in owned]
    if len(owned) == 2:
        borrowed[1] = [owned[0][0]]
    states = {n: [dense(n, s.shape, "exp_avg")] for n, s in params.items()}
    return lay_out(owned, borrowed, params, states, [dense("b", (3,))])


@given(layouts(), st.integers(1, 7))
def test_each_shard_has_the_same_tensors_as_rows(layout, width):
    rows = stacked_layout(layout, width)
    assert len(rows.shards) == len(layout.shards)
    for one, many in zip(layout.shards, rows.shards, strict=True):
        for name in ("param", "state", "grad"):
            alone, stacked = getattr(one, name).fields, getattr(many, name).fields
            assert [f.spec.name for f in alone] == [f.spec.name for f in stacked]
            for field, wide in zip(alone, stacked, strict=True):
                assert wide.spec == stacked_spec(field.spec, width)
                assert wide.spec.shape == (width, *field.spec.shape)
                assert wide.spec.num_bytes == width * field.spec.num_bytes
                assert wide.offset % ALIGNMENT == 0
        assert [(owner, f.spec.name) for owner, f in one.borrowed] == [
            (owner, f.spec.name) for owner, f in many.borrowed
        ]
    assert rows.buffers.num_bytes == 0


@given(layouts(), st.integers(1, 7))
def test_rows_take_no_more_than_the_trials_do(layout, width):
    """Padding is paid once for all rows."""
    assert stacked_layout(layout, width).num_bytes <= width * layout.num_bytes


@st.composite
def adapted(draw):
    """Shards of which some tensors are frozen, and some of these large."""
    sizes = st.sampled_from([8, LEAST_BASE_BYTES // 4, LEAST_BASE_BYTES // 4 + 3])
    shapes = draw(st.lists(sizes.map(lambda size: (size,)), min_size=1, max_size=6))
    params = {f"p{i}": dense(f"p{i}", shape) for i, shape in enumerate(shapes)}
    grads = {n: s for n, s in params.items() if draw(st.booleans())}
    names = list(params)
    cut = draw(st.integers(0, len(names)))
    owned = [part for part in (names[:cut], names[cut:]) if part]
    return lay_out(owned, [[] for _ in owned], params, {}, (), grads)


@given(adapted(), st.integers(1, 7))
def test_one_base_lies_there_once_and_every_row_is_it(layout, width):
    rows, each = stacked_layout(layout, width, one_base=True), stacked_layout(layout, width)
    saved = 0
    for one, many, own in zip(layout.shards, rows.shards, each.shards, strict=True):
        trained = {field.spec.name for field in one.grad.fields}
        assert many.grad == own.grad
        for alone, wide in zip(one.param.fields, many.param.fields, strict=True):
            large = alone.spec.num_bytes >= LEAST_BASE_BYTES
            is_base = large and alone.spec.name not in trained
            assert is_base == (alone.spec.name in base_of(one))
            assert wide.spec.shape == (width, *alone.spec.shape)
            if is_base:
                assert wide.spec == shared_spec(alone.spec, width)
                assert wide.spec.stride[0] == 0
                saved += (width - 1) * alone.spec.num_bytes
            else:
                assert wide.spec == stacked_spec(alone.spec, width)
    assert abs(each.num_bytes - saved - rows.num_bytes) <= 6 * ALIGNMENT  # but for padding
