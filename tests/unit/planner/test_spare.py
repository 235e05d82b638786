"""What the room is used for that whole shards leave."""

from __future__ import annotations

from shoal.core.technique import Spilled
from shoal.core.units import Bytes
from shoal.memory.layout import TensorSpec, head_sizes, lay_out
from shoal.planner.keep import keep_most
from shoal.planner.need import Request
from shoal.planner.predict import predict_shards
from shoal.planner.room import Room
from shoal.planner.spare import head_most, use_turn
from shoal.testing import make_layer, make_measure

MIB = 2**20
LAYERS = 8


def measure():
    """Layers of a mebibyte, with Adam's state and small activations."""
    small = MIB // 256
    changes = {
        "boundary_bytes": Bytes(small),
        "carry_bytes": Bytes(small),
        "forward_peak_bytes": Bytes(10 * small),
        "saved_bytes": Bytes(16 * small),
        "backward_peak_bytes": Bytes(24 * small + MIB),
    }
    layers = [make_layer(f"layer {i}", MIB, **changes) for i in range(LAYERS)]
    return make_measure(layers, batch_bytes=Bytes(0))


def divided(place, ratio, *, clip, layout=None, **named):
    """A shard a layer: what is kept, and that with the room used that this leaves."""
    found = measure()
    shards = predict_shards(found.layers, range(1, LAYERS))
    technique = Spilled(
        shards=LAYERS, optimizer=place, lookahead=0, lookbehind=0, recompute=True, **named
    )
    request = Request(micro_batches=1, clip=clip, technique=technique, prefers="host")
    room = Room(
        measure=found,
        shards=shards,
        technique=technique,
        request=request,
        budget=Bytes(int(4 * LAYERS * MIB / ratio)),
        active=1,
        layout=layout,
    )
    kept = keep_most(room)
    used = use_turn(room, kept)
    return kept, used, head_most(room, used)


def quarters():
    """Four tensors a layer."""
    names = [[f"{layer}.{i}" for i in range(4)] for layer in range(LAYERS)]
    flat = {n: spec(n) for shard in names for n in shard}
    states = {n: [spec(n, key) for key in ("exp_avg", "exp_avg_sq")] for n in flat}
    return lay_out(names, [()] * LAYERS, flat, states, [])


def spec(name, key=""):
    return TensorSpec(name, (MIB // 16,), (1,), "float32", MIB // 4, key)


def test_gradients_wait_where_there_is_room_until_the_norm():
    kept, used, _ = divided("device", 2, clip=True)
    assert used[0].keep_gradients > 0
    assert used[0].keep == kept[0].keep
    assert used[1].moved == kept[1].moved - 2 * MIB * used[0].keep_gradients


def test_nothing_waits_where_the_step_comes_at_once_or_was_asked_for():
    assert divided("device", 2, clip=False)[1][0].keep_gradients == 0
    assert divided("device", 2, clip=True, keep_gradients=0)[1][0].keep_gradients == 0


def test_fewer_whole_shards_stay_where_parameters_at_the_turn_leave_a_smaller_gap():
    kept, used, _ = divided("host", 4, clip=True)
    assert len(used[0].keep) < len(kept[0].keep)
    assert used[1].moved < kept[1].moved
    named = divided("host", 4, clip=True, keep=kept[0].keep)[1]
    assert named[0].keep == kept[0].keep


def test_a_head_has_as_many_tensors_as_fit_and_saves_their_bytes():
    layout = quarters()
    for ratio, saves in ((4, 3), (1.6, 2)):  # parameters: both loads and the store, or state
        _, used, headed = divided("device", ratio, clip=False, layout=layout)
        shard, size = headed[0].keep_head
        of_state = shard in headed[0].keep_weights
        part = layout.shards[shard].state if of_state else layout.shards[shard].param
        assert of_state == (saves == 2)
        assert size in head_sizes(part)
        assert headed[1].moved == used[1].moved - saves * size


def test_without_a_layout_or_with_named_shards_there_is_no_head():
    assert divided("device", 4, clip=False)[2][0].keep_head is None
    assert divided("device", 4, clip=False, keep=(), layout=quarters())[2][0].keep_head is None
