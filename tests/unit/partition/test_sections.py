"""How layers are numbered where the forward is entered again between its blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.partition.sections import Sections


@st.composite
def sections(draw):
    num_blocks = draw(st.integers(2, 12))
    joints = draw(st.sets(st.integers(1, num_blocks - 1)))
    return Sections(num_blocks, tuple(sorted(joints)))


def drawn(sections):
    """The layers in a row, as in the note: a head as "s0", a block as 0."""
    row = ["s0"]
    for position in range(sections.num_blocks):
        if position in sections.joints:
            row.append(f"s{1 + sections.joints.index(position)}")
        row.append(position)
    return [*row, f"s{len(sections.joints) + 1}"]


@given(sections())
def test_every_layer_is_a_block_or_the_head_of_a_section(sections):
    row = drawn(sections)
    assert sections.num_layers == len(row)
    for layer, what in enumerate(row):
        headed = sections.headed_by(layer)
        if isinstance(what, str):
            assert f"s{headed}" == what
            assert sections.head(headed) == layer
        else:
            assert headed is None
            assert sections.position_of(layer) == what
            assert sections.layer_of(what) == layer


@given(sections())
def test_a_block_belongs_to_the_last_head_before_it(sections):
    for position in range(sections.num_blocks):
        section = sections.of_block(position)
        assert position in sections.blocks_of(section)
        assert sections.head(section) < sections.layer_of(position)
    assert sections.of_block(sections.num_blocks) == sections.epilogue
    assert not sections.blocks_of(sections.epilogue)


def test_the_example_of_the_note():
    five = Sections(5, (3,))
    assert [five.head(section) for section in range(3)] == [0, 4, 7]
    assert [five.layer_of(position) for position in range(5)] == [1, 2, 3, 5, 6]


@pytest.mark.parametrize("position", [0, 1])
def test_without_joints_there_is_one_section_of_blocks(position):
    assert Sections(2).of_block(position) == 0
