"""What techniques need is worked out once for the same shards, and anew for others."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.technique import Spilled
from shoal.core.units import Bytes
from shoal.planner import room as rooms
from shoal.planner.need import Request
from shoal.planner.predict import predict_shards
from shoal.planner.room import Room
from shoal.testing import make_layer, make_measure

MIB = 2**20


def room_of(size):
    found = make_measure([make_layer(f"layer {index}", size) for index in range(4)])
    technique = Spilled(shards=4, optimizer="host", lookahead=1)
    return Room(
        measure=found,
        shards=predict_shards(found.layers, (1, 2, 3)),
        technique=technique,
        request=Request(micro_batches=1, clip=False, technique=technique, prefers="host"),
        budget=Bytes(64 * MIB),
        active=1,
    )


def test_a_need_is_worked_out_once_and_anew_for_other_shards(monkeypatch):
    small, large = room_of(MIB), room_of(2 * MIB)
    asked, plain = small.resolved(), rooms.need
    counted = []
    monkeypatch.setattr(rooms, "need", lambda *a, **k: counted.append(a) or plain(*a, **k))
    for technique in (asked, replace(asked), asked):
        assert small.tried(technique) == small.tried(asked)
    assert len(counted) == 1
    grown = replace(small, measure=large.measure, shards=large.shards)
    assert grown.tried(asked) == large.tried(asked) != small.tried(asked)
