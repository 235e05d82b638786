"""Cuts against brute force over all ways to cut."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.spec import LayerMeasure
from shoal.core.units import Bytes, Seconds
from shoal.partition.cut import CutError, cut, shard_cost

Ranges = tuple[tuple[int, int], ...]


def layer(
    name: str = "block",
    *,
    parameters: int = 0,
    peak: int = 0,
    saved: int = 0,
    boundary: int = 0,
    cut_after: bool = True,
    reason: str = "",
) -> LayerMeasure:
    return LayerMeasure(
        name=name,
        parameter_bytes=Bytes(parameters),
        state_bytes=Bytes(2 * parameters),
        borrowed_bytes=Bytes(0),
        boundary_bytes=Bytes(boundary),
        carry_bytes=Bytes(boundary),
        forward_peak_bytes=Bytes(0),
        saved_bytes=Bytes(saved),
        backward_peak_bytes=Bytes(peak),
        forward_s=Seconds(0),
        backward_s=Seconds(0),
        step_s=Seconds(0),
        cut_after=cut_after,
        reason=reason,
    )


SMALL = st.integers(0, 9)
LAYERS = st.lists(
    st.builds(
        layer, parameters=SMALL, peak=SMALL, saved=SMALL, boundary=SMALL, cut_after=st.booleans()
    ),
    min_size=1,
    max_size=7,
)


def every_cut(layers: Sequence[LayerMeasure], num_shards: int) -> Iterator[Ranges]:
    places = [i for i in range(1, len(layers)) if layers[i - 1].cut_after]
    for chosen in itertools.combinations(places, num_shards - 1):
        edges = (0, *chosen, len(layers))
        yield tuple(itertools.pairwise(edges))


def cost_by_hand(layers: Sequence[LayerMeasure], start: int, stop: int) -> int:
    inside = layers[start:stop]
    peaks = [
        sum(before.saved_bytes for before in inside[:i])
        + inside[i].backward_peak_bytes
        + sum(after.parameter_bytes for after in inside[i + 1 :])
        for i in range(len(inside))
    ]
    entry = layers[start - 1].boundary_bytes if start else 0
    return max(peaks) + sum(one.parameter_bytes for one in inside) + entry


@given(LAYERS)
def test_the_cost_table_is_the_formula_of_its_docstring(layers: list[LayerMeasure]) -> None:
    cost = shard_cost(layers)
    for start, stop in itertools.combinations(range(len(layers) + 1), 2):
        assert cost(start, stop) == cost_by_hand(layers, start, stop)


@given(LAYERS, st.data())
def test_no_cut_has_a_smaller_largest_shard_or_as_small_a_one_with_fewer_boundary_bytes(
    layers: list[LayerMeasure], data: st.DataObject
) -> None:
    edges = range(len(layers) + 1)
    prices = {
        pair: data.draw(SMALL) for pair in itertools.combinations(edges, 2)
    }  # any cost, not only a growing one

    def score(ranges: Ranges) -> tuple[int, int]:
        largest = max(prices[shard] for shard in ranges)
        return largest, sum(layers[stop - 1].boundary_bytes for _, stop in ranges[:-1])

    for num_shards in range(1, len(layers) + 1):
        choices = list(every_cut(layers, num_shards))
        if not choices:
            with pytest.raises(CutError, match="may stand alone"):
                cut(layers, num_shards, lambda start, stop: prices[start, stop])
            continue
        cuts = cut(layers, num_shards, lambda start, stop: prices[start, stop])
        ranges = tuple(itertools.pairwise((0, *cuts, len(layers))))
        assert ranges in choices
        assert score(ranges) == min(map(score, choices))


def test_two_hundred_layers_are_cut_in_well_under_a_second() -> None:
    layers = [
        layer(str(i), parameters=i * 7919 % 101, peak=i * 31 % 57, boundary=i * 17 % 23)
        for i in range(200)
    ]
    before = time.process_time()
    cuts = cut(layers, 16)
    assert time.process_time() - before < 0.2
    assert len(cuts) == 15
