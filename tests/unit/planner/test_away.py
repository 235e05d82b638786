"""Which shards' activations wait on the host: by what the links have time for."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.technique import Spilled
from shoal.core.units import Bytes, Seconds
from shoal.planner.away import candidates, movable_shards, spread
from shoal.planner.keep import ALIKE, keep_best
from shoal.planner.need import Request, fits, moved_saved_bytes, need, waiting_bytes
from shoal.planner.price import Speeds, price
from shoal.planner.room import Room
from shoal.testing import make_measure, make_shard

MIB = 2**20
COUNT = 12


def blocks(count=COUNT, **changes):
    """Shards of a mebibyte that save four in the hundredth of a second of their forward."""
    values = {
        "boundary_bytes": Bytes(MIB // 4),
        "private_bytes": Bytes(MIB // 4),
        "saved_bytes": Bytes(4 * MIB),
        "movable_bytes": Bytes(4 * MIB),
        "saving_peak_bytes": Bytes(4 * MIB),
        "backward_peak_bytes": Bytes(6 * MIB),
        "forward_s": Seconds(0.01),
        "backward_s": Seconds(0.03),
        "step_s": Seconds(0.0),
    }
    shards = [make_shard(index, MIB, **(values | changes)) for index in range(count)]
    shards[-1] = replace(shards[-1], saved_bytes=None, movable_bytes=None)
    return shards


def measure(shards):
    return make_measure(shards=shards, num_batches=8)


def link(bytes_per_s):
    return Speeds(up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s)


def best(shards, speeds, budget=40 * MIB, active=1, **options):
    """The technique, and its price."""
    asked = {"shards": len(shards), "optimizer": "host", "lookahead": 1, "keep": ()}
    asked |= {"keep_turn": None if options.get("optimizer") == "device" else 0}
    waits = options.pop("waiting_room", None)
    request = Request(
        micro_batches=1, clip=False, technique=None, prefers="host", waiting_room=waits
    )
    technique = Spilled(**(asked | options))
    room = Room(
        measure=measure(shards),
        shards=shards,
        technique=technique,
        request=request,
        budget=Bytes(budget),
        active=active,
    )
    found = keep_best(room, speeds)
    if found is None:
        return None
    assert fits([found[1]], Bytes(budget), active)
    return found[0], price(shards, Bytes(1024), found[0], request, speeds, active).step_s


def test_they_move_where_the_links_are_idle_and_nothing_recomputes():
    technique, step_s = best(blocks(), link(4e9))
    assert technique.spill_activations == tuple(range(COUNT - 2))
    _, again_s = best(blocks(), link(4e9), recompute=True)
    assert again_s / step_s > 1.3


def test_where_the_links_have_less_time_fewer_move_evenly_apart():
    fast, medium = (best(blocks(), link(speed))[0] for speed in (4e9, 2.5e8))
    assert 0 < len(medium.spill_activations) < len(fast.spill_activations)
    gaps = [b - a for a, b in itertools.pairwise(medium.spill_activations)]
    assert max(gaps) - min(gaps) <= 1


def test_where_the_links_are_the_bottleneck_none_moves():
    technique, _ = best(blocks(), link(2e7))
    assert technique.spill_activations == ()


def test_what_saves_nothing_that_is_not_there_anyway_never_recomputes():
    much = Bytes(40 * MIB)
    shards = blocks(saved_bytes=much, movable_bytes=much, backward_peak_bytes=2 * much)
    shards[0] = replace(shards[0], saved_bytes=Bytes(0), movable_bytes=Bytes(0))
    technique, _ = best(shards, link(4e8), budget=300 * MIB)
    assert technique.spill_activations == (0,)


def test_no_more_waits_than_the_host_has_room_for():
    for room in (0, 9 * MIB, 21 * MIB):
        technique, _ = best(blocks(), link(4e9), waiting_room=Bytes(room))
        assert waiting_bytes(blocks(), technique, 1) <= room
        assert len(technique.spill_activations) <= room // (4 * MIB)
    assert technique.spill_activations


def test_named_shards_move_and_those_alone():
    technique, _ = best(blocks(), link(2e7), spill_activations=(1, 5))
    assert technique.spill_activations == (1, 5)
    assert moved_saved_bytes(blocks(), technique) == 8 * MIB


def test_without_recompute_the_rest_stays_wherever_it_may():
    technique, _ = best(blocks(), link(1e9), recompute=False)
    assert without_recompute(technique) == list(range(COUNT - 1))

    # Next to the turn its parameters leave, and are loaded again at once.
    technique, _ = best(blocks(), link(1e9), recompute=False, lookahead=0, keep_turn=0)
    assert without_recompute(technique) == list(range(COUNT - 2))

    stuck = blocks()
    stuck[3] = replace(stuck[3], saved_bytes=None, movable_bytes=None)
    technique, _ = best(stuck, link(1e9), recompute=False)
    assert without_recompute(technique) == [s for s in range(COUNT - 1) if s != 3]


def without_recompute(technique):
    return sorted((*technique.keep_activations, *technique.spill_activations))


def test_forwards_that_are_over_in_no_time_run_again():
    shards = blocks()
    shards[3] = replace(shards[3], forward_s=Seconds(1e-4))
    technique, _ = best(shards, link(4e9))
    assert technique.spill_activations == tuple(s for s in range(COUNT - 2) if s != 3)
    named, _ = best(shards, link(4e9), spill_activations=(3,))
    assert named.spill_activations == (3,)


def test_what_cannot_leave_stays_out():
    shards = blocks()
    shards[2] = replace(shards[2], movable_bytes=None)
    shards[4] = replace(shards[4], saved_bytes=None)
    technique = Spilled(
        shards=COUNT, optimizer="host", lookahead=1, keep=(), keep_activations=(0,)
    )
    assert movable_shards(shards, technique) == (1, 3, 5, 6, 7, 8, 9)


@given(st.lists(st.integers(0, 99), unique=True, min_size=1).map(sorted), st.data())
def test_some_of_the_shards_evenly_apart(shards, data):
    count = data.draw(st.integers(1, len(shards)))
    some = spread(shards, count)
    assert len(set(some)) == count
    assert some[0] == shards[0]
    places = [shards.index(shard) for shard in some] + [len(shards)]
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["device", "host"])
@given(st.floats(1e7, 1e10), st.integers(20, 80), st.integers(1, 2), st.integers(0, 12))
@settings(max_examples=8, deadline=None)
def test_moving_is_never_dearer_than_not(place, speed, room, active, cheap):
    shards = blocks()
    for shard in range(min(cheap, COUNT - 1)):
        shards[shard] = replace(shards[shard], movable_bytes=Bytes(MIB // 8))
    options = {"optimizer": place, "active": active, "budget": room * MIB}
    free, forbidden = (
        best(shards, link(speed), **options, **more) for more in ({}, {"spill_activations": ()})
    )
    assert (free is None) == (forbidden is None)
    if free is not None:
        assert free[1] <= ALIKE * forbidden[1] * (1 + 1e-9)


def test_sets_to_try_grow():
    technique = Spilled(shards=COUNT, optimizer="host", keep=(), lookahead=1)
    sets = candidates(blocks(), technique)
    assert [len(some) for some in sets] == sorted({len(some) for some in sets})
    assert sets[-1] == tuple(range(COUNT - 2))
    request = Request(micro_batches=2, clip=True, technique=None, prefers="host")
    for some in sets:
        moved = replace(technique, spill_activations=some, boundaries="host", lookbehind=1)
        need(measure(blocks()), blocks(), moved, request)
