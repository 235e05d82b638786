"""Chunks of a step on the host: all of it, in order, and none longer than it may be."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.builders import make_shard
from shoal.memory.chunks import CHUNK_S, SMALL, chunk_bytes, chunk_names
from shoal.memory.layout import TensorSpec, lay_out

SIZES = st.lists(st.integers(1, 10**6).map(lambda units: 512 * units), min_size=1, max_size=40)
SECONDS = st.floats(1e-4, 10.0)


def groups_of(sizes, chunks):
    """The tensors of each chunk; fails where a chunk ends inside one."""
    left, found = list(sizes), []
    for num_bytes in chunks or (sum(sizes),):
        group = []
        while sum(group) < num_bytes:
            group.append(left.pop(0))
        assert sum(group) == num_bytes
        found.append(group)
    assert not left
    return found


@given(SIZES, SECONDS)
def test_chunks_are_whole_tensors_in_order_and_short_unless_one_tensor_is_long(sizes, seconds):
    most = CHUNK_S / seconds * sum(sizes)
    for group in groups_of(sizes, chunk_bytes(sizes, seconds)):
        assert sum(group) <= (1 + SMALL) * max(most, *group) + 1e-6 * sum(sizes)


@given(SIZES, SECONDS)
def test_there_are_no_more_chunks_than_are_worth_a_call_each(sizes, seconds):
    chunks = chunk_bytes(sizes, seconds)
    small = [c for c in chunks if c < SMALL * CHUNK_S / seconds * sum(sizes)]
    assert len(chunks) != 1
    assert len(small) <= 1


@given(SIZES, SECONDS, st.data())
def test_a_worker_finds_the_names_of_what_was_planned(sizes, seconds, data):
    trained = data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1))
    parameters = {
        str(index): TensorSpec(str(index), (size // 4,), (1,), "float32", size)
        for index, size in enumerate(sizes)
    }
    layout = lay_out([list(parameters)], [[]], parameters, {}, []).shards[0]
    counted = [size if index in trained else 0 for index, size in enumerate(sizes)]
    chunks = chunk_bytes(counted, seconds)
    named = chunk_names(make_shard(0, step_chunks=chunks), layout, set(map(str, trained)))
    found = [sum(counted[int(name)] for name in names) for names in named]
    assert found == list(chunks or (sum(counted),))
    assert [name for names in named for name in names] == list(parameters)
