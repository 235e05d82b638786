"""Which shards stay where the room counts, and what that is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.technique import Spilled, heads_of, kept_weights, turned_shards
from shoal.core.units import Bytes
from shoal.memory.layout import TensorSpec, head_sizes, lay_out, state_of
from shoal.planner.keep import keep_best, keep_most
from shoal.planner.lean import keep_lean, kept_lean
from shoal.planner.need import Request, fits
from shoal.planner.predict import predict_shards
from shoal.planner.price import Speeds
from shoal.planner.room import Room
from shoal.planner.spare import head_most, share_late
from shoal.testing import make_layer, make_measure

MIB = 2**20
SMALL = MIB // 4
FREE = Speeds(
    up_bytes_per_s=float("inf"), down_bytes_per_s=float("inf"), device_step=0.0, host_step=0.0
)
"""With copies and steps that take no time the fewest bytes decide."""
SLOW = Speeds(up_bytes_per_s=2e8, down_bytes_per_s=2e8, device_step=0.0, host_step=0.0)


def measure(sizes, seconds=0.0):
    """Layers of these bytes, whose inputs take a fourth of a mebibyte each."""
    layers = [
        make_layer(
            f"layer {index}",
            size,
            boundary_bytes=Bytes(SMALL),
            carry_bytes=Bytes(SMALL),
            forward_peak_bytes=Bytes(2 * SMALL),
            saved_bytes=Bytes(4 * SMALL),
            backward_peak_bytes=Bytes(6 * SMALL + size),
            forward_s=seconds,
            backward_s=3 * seconds,
        )
        for index, size in enumerate(sizes)
    ]
    return make_measure(layers, batch_bytes=Bytes(0))


def room(found, budget, *, clip=False, **named):
    """A shard a layer."""
    shards = predict_shards(found.layers, range(1, len(found.layers)))
    named = {"lookahead": 0, "lookbehind": 0, "recompute": True, **named}
    technique = Spilled(shards=len(shards), **named)
    return Room(
        measure=found,
        shards=shards,
        technique=technique,
        request=Request(micro_batches=1, clip=clip, technique=technique, prefers="host"),
        budget=Bytes(int(budget)),
        active=1,
    )


EMBEDDED = [MIB // 2, *[4 * MIB] * 10, MIB // 4]
"""Blocks between a small first and a small last layer."""


def whole(sizes):
    """Bytes of parameters and state."""
    return 3 * sum(sizes)


def short_of(missing, sizes, **named):
    """A device with so many bytes less than it takes to keep all shards."""
    given_ = room(measure(sizes), 1000 * whole(sizes), **named)
    all_ = given_.tried(replace(given_.resolved(), keep=tuple(range(len(sizes)))))
    return replace(given_, budget=Bytes(all_[1].total - missing))


def test_on_the_host_the_smallest_travel_and_of_equal_ones_the_last():
    given_ = room(measure(EMBEDDED), 1, optimizer="host")
    assert kept_lean(given_, 10) == tuple(range(1, 11))
    assert kept_lean(given_, 4) == (1, 2, 3, 4)


def test_on_the_device_the_state_of_the_largest_travels_and_of_equal_ones_the_first():
    given_ = room(measure(EMBEDDED), 1, optimizer="device")
    assert kept_lean(given_, 11) == (0, *range(2, 12))
    assert kept_lean(given_, 3) == (0, 10, 11)


def test_what_is_missing_is_not_the_slot_of_a_whole_block():
    given_ = short_of(MIB, EMBEDDED, optimizer="host")
    spread = keep_most(given_)
    lean = keep_lean(given_, spread)
    assert lean[0].keep == tuple(range(1, 11))
    assert lean[1].moved < spread[1].moved / 4


def test_state_comes_when_the_inputs_of_the_others_have_gone():
    sizes = [4 * MIB] * 24
    given_ = short_of(MIB, sizes, optimizer="device")
    spread = keep_most(given_)
    lean = keep_lean(given_, spread)
    assert lean[0].late_state
    assert kept_weights(lean[0]) == (0,)
    assert lean[1].moved == 16 * MIB < spread[1].moved
    assert keep_best(given_, FREE)[1] == lean[1]


def laid_out(sizes, parts=4):
    """Tensors of a shard: one of half of it, then ever smaller ones, and Adam's state."""
    names = [[f"{shard}.{part}" for part in range(parts)] for shard in range(len(sizes))]
    flat = {
        name: TensorSpec(name, (1,), (1,), "float32", size >> min(part + 1, parts - 1))
        for size, some in zip(sizes, names, strict=True)
        for part, name in enumerate(some)
    }
    states = {n: [replace(spec, key=key) for key in ("avg", "sq")] for n, spec in flat.items()}
    return lay_out(names, [()] * len(sizes), flat, states, [])


def test_several_shards_share_the_state_that_travels_late_in_small_tensors():
    sizes = [4 * MIB] * 24
    missing = 4 * MIB + MIB // 4  # tensors are of 2, 1 and half a mebibyte
    given_ = replace(short_of(missing, sizes, optimizer="device"), layout=laid_out(sizes))
    alone = head_most(given_, keep_lean(given_, keep_most(given_)))
    shared = share_late(given_, alone)
    heads = heads_of(shared[0])
    assert len(heads) > 1
    assert kept_weights(shared[0]) == tuple(heads)
    assert 2 * missing <= shared[1].moved < alone[1].moved
    assert keep_best(given_, FREE)[1].moved == shared[1].moved


def test_nothing_is_shared_where_no_state_comes_late_or_no_tensors_are_known():
    given_ = short_of(MIB, EMBEDDED, optimizer="device")
    lean = keep_lean(given_, keep_most(given_))
    assert share_late(given_, lean) == lean
    given_ = replace(given_, layout=laid_out(EMBEDDED))
    spread = keep_most(given_)
    assert share_late(given_, spread) == spread


def test_without_a_slot_too_many_all_that_travel_are_held_over_the_turn():
    missing = 2 * EMBEDDED[0] + 3 * EMBEDDED[-1] - MIB // 8  # less than a slot of the last one
    given_ = short_of(missing, EMBEDDED, optimizer="host")
    best = keep_best(given_, FREE)
    assert best[0].keep == tuple(range(1, 11))
    assert best[0].keep_turn == 2
    assert turned_shards(best[0], 12) == (0, 11)
    assert best[1].moved == 2 * (EMBEDDED[0] + EMBEDDED[-1])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 8), min_size=3, max_size=7),
    st.floats(0.6, 1.2),
    st.integers(0, 2),
    st.integers(2, 5),
)
def test_what_is_shared_fits_and_is_whole_tensors_of_shards_whose_parameters_stay(
    sizes, share, lookahead, parts
):
    sizes = [MIB * size // 2 for size in sizes]
    given_ = room(measure(sizes), share * whole(sizes), optimizer="device", lookahead=lookahead)
    given_ = replace(given_, layout=laid_out(sizes, parts))
    spread = keep_most(given_)
    lean = spread and keep_lean(given_, spread)
    if not lean:
        return
    shared = share_late(given_, lean)
    assert given_.tried(shared[0]) == shared
    assert shared[1].moved <= lean[1].moved
    for shard, size in heads_of(shared[0]).items():
        assert shard in kept_weights(shared[0])
        assert size in head_sizes(state_of(given_.layout, shared[0], shard))


def test_gradients_of_the_first_shards_come_when_the_turn_is_over():
    sizes = [MIB] * 6
    layers = (replace(x, boundary_bytes=Bytes(0)) for x in measure(sizes).layers)
    found = replace(measure(sizes), layers=tuple(layers))
    options = {"optimizer": "host", "clip": True}
    budgets = [n * MIB / 4 for n in range(48, 96, 8)]
    rooms = [room(found, budget, **options) for budget in budgets]
    best = [keep_best(given_, FREE) for given_ in rooms]
    found_lean = [one for one in best if one and one[0].keep == tuple(range(len(one[0].keep)))]
    assert any(one[0].keep and one[0].keep_turn for one in found_lean)


@pytest.mark.parametrize(
    ("clip", "named"),
    [
        (True, {"optimizer": "device"}),
        (False, {"optimizer": "device", "late_state": False}),
        (False, {"optimizer": "device", "keep": (1,)}),
        (False, {"optimizer": "host", "keep": ()}),
    ],
)
def test_nothing_is_chosen_that_was_asked_for_or_brings_nothing(clip, named):
    given_ = room(measure(EMBEDDED), 0.9 * whole(EMBEDDED), clip=clip, **named)
    assert keep_lean(given_, keep_most(given_)) is None


def test_where_shards_do_not_step_in_both_places_none_stays():
    given_ = room(measure(EMBEDDED), 0.9 * whole(EMBEDDED), optimizer="host")
    assert keep_lean(given_, keep_most(given_)) is not None
    alone = replace(given_, request=replace(given_.request, mixes=False))
    assert keep_lean(alone, keep_most(alone)) is None


def test_where_it_takes_longer_the_evenly_spread_ones_stay():
    sizes = [4 * MIB] * 24
    found = measure(sizes, seconds=0.02)
    given_ = room(found, 0.95 * whole(sizes), optimizer="device", lookahead=1)
    ways = keep_best(given_, FREE)[0], keep_best(given_, SLOW)[0]
    assert [bool(technique.late_state) for technique in ways] == [True, False]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 8), min_size=3, max_size=8),
    st.floats(0.3, 1.3),
    st.sampled_from(["device", "host"]),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 1),
)
def test_what_stays_fits_and_the_best_moves_no_more_than_either(
    sizes, share, place, clip, lookahead, lookbehind
):
    found = measure([MIB * size // 2 for size in sizes])
    given_ = room(
        found,
        share * whole([MIB * size // 2 for size in sizes]),
        clip=clip,
        optimizer=place,
        lookahead=lookahead,
        lookbehind=lookbehind,
    )
    spread, best = keep_most(given_), keep_best(given_, FREE)
    assert (best is None) == (spread is None)
    lean = spread and keep_lean(given_, spread)
    for technique, need_ in (way for way in (spread, lean) if way):
        assert fits([need_], given_.budget, 1)
        assert given_.tried(technique) == (technique, need_)
        assert best[1].moved <= need_.moved
