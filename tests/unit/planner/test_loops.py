"""Which loop of a step with several micro-batches is outside: what the price says, if both may."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.core.technique import Spilled, kept_heads, kept_shards, kept_weights
from shoal.core.units import Bytes
from shoal.planner.choose import choices, orders_of
from shoal.planner.growth import grown
from shoal.planner.keep import ALIKE, keep_best
from shoal.planner.loops import why_order
from shoal.planner.need import Request, fits, waiting_input_bytes
from shoal.planner.predict import predict_shards
from shoal.planner.price import Speeds
from shoal.planner.room import Room
from shoal.program.ir import kept as kept_on_device
from shoal.program.slots import assign_slots
from shoal.spill.generate import route_of
from shoal.testing import make_layer, make_measure

MIB = 2**20


def measure(num_layers=8, boundary=MIB // 32, **changes):
    """Layers of a mebibyte; of one a forward takes a millisecond, a backward three."""
    boundary = Bytes(boundary)
    layers = [
        make_layer(
            f"layer {index}",
            MIB,
            boundary_bytes=boundary,
            private_bytes=boundary,
            carry_bytes=boundary,
            forward_peak_bytes=Bytes(2 * boundary),
            saved_bytes=Bytes(4 * boundary),
            backward_peak_bytes=Bytes(6 * boundary + MIB),
        )
        for index in range(num_layers)
    ]
    return make_measure(layers, **({"draws": False, "num_batches": 100} | changes))


def speeds(mib_per_s):
    """Of a link that carries a layer's parameters in a millisecond at 1000."""
    rate = mib_per_s * MIB
    return Speeds(up_bytes_per_s=rate, down_bytes_per_s=rate, device_step=0.0, host_step=0.0)


SLOW, QUICK = speeds(50), speeds(1e6)


def request(technique=None, micro_batches=4, clip=False):
    return Request(
        micro_batches=micro_batches, clip=clip, technique=technique, prefers="host", place=None
    )


def state_of(found):
    return sum(4 * layer.parameter_bytes for layer in found.layers)


def room_of(found, asked, budget, choice):
    return Room(
        measure=found,
        shards=predict_shards(found.layers, choice.cuts),
        technique=choice.technique,
        request=asked,
        budget=Bytes(budget),
        active=choice.active,
    )


def taken(found, speeds_, asked=None, share=4.0, actives=(1,)):
    """What is planned for shards as they are on paper, and what a step with it takes."""
    asked, budget = asked or request(), Bytes(state_of(found) / share)
    for choice in choices(found, budget, actives, asked, speeds_):
        room = room_of(found, asked, budget, choice)
        if kept := keep_best(room, speeds_):
            assert fits([kept[1]], budget, choice.active)
            return kept, room.step_s(kept[0], speeds_), choice
    raise AssertionError("nothing fits")


@pytest.mark.sample(2)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("place", ["host", "device"])
def test_where_loads_take_the_time_a_shard_runs_all_micro_batches_in_one_visit(place, clip):
    found, asked = measure(), request(Spilled(optimizer=place), clip=clip)
    (technique, need), step_s, choice = taken(found, SLOW, asked)
    assert technique.order == "shard"
    plain = request(Spilled(optimizer=place, order="micro"), clip=clip)
    (_, by_micro), plain_s, _ = taken(found, SLOW, plain)
    assert need.moved < 0.7 * by_micro.moved
    assert ALIKE * step_s < plain_s
    assert choice.other_s == pytest.approx(plain_s, rel=0.1)
    words = why_order(found, technique, asked, choice)
    assert "a shard runs all 4 micro-batches of a step while it is there: a step would" in words
    assert words.endswith("if they went one after another")


def test_where_copies_hide_behind_kernels_the_order_is_the_plain_one():
    found = measure()
    (technique, _), step_s, choice = taken(found, QUICK)
    assert technique.order == "micro"
    assert choice.other_s >= step_s / ALIKE
    words = why_order(found, technique, request(), choice)
    assert "go through the model one after another: a step would take at least" in words
    assert words.endswith("if a shard ran all of them while it is there")


def test_what_does_not_pay_is_not_even_looked_at(monkeypatch):
    looked = []
    monkeypatch.setattr(
        "shoal.planner.choose._settings",
        lambda measure, asked, place, order: looked.append(order) or [],
    )
    monkeypatch.setattr("shoal.planner.choose._least_s", lambda found: 0.1)
    assert not list(choices(measure(), Bytes(MIB), (1,), request(), QUICK))
    assert set(looked) == {"micro"}  # kernels alone take 4 times 8 times 3 milliseconds


def test_large_inputs_of_all_micro_batches_have_no_room_and_the_order_is_the_plain_one():
    found = measure(boundary=MIB // 2)
    asked = request(Spilled(boundaries="device"), micro_batches=8)
    (technique, _), _, choice = taken(found, SLOW, asked, share=2.0)
    assert technique.order == "micro"
    assert choice.other_s is None
    words = why_order(found, technique, asked, choice)
    assert words.endswith("there is no room for all their inputs")


@pytest.mark.full
def test_inputs_of_all_micro_batches_may_wait_on_the_host():
    found = measure(10, boundary=MIB // 4)
    asked = request(Spilled(order="shard"), micro_batches=8)
    (technique, _), _, _ = taken(found, SLOW, asked, share=4.0)
    assert technique.boundaries == "host"
    (chosen, _), _, _ = taken(found, SLOW, request(micro_batches=8), share=4.0)
    assert chosen.order == "shard"
    assert chosen.boundaries == "host"
    little = replace(request(micro_batches=8), waiting_room=Bytes(MIB))
    (elsewhere, _), _, _ = taken(found, SLOW, little, share=4.0)
    assert elsewhere.order == "micro"  # the host has no room for them either


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draws": True}, "since it draws random numbers"),
        ({"num_batches": None}, "since their number is not known"),
        ({"num_batches": 1}, ""),
        (
            {"in_turn": "the forwards of 2 shards change 'norm.running_mean'"},
            "'norm.running_mean'",
        ),
    ],
)
def test_what_speaks_against_another_order_keeps_the_plain_one(changes, words):
    found = measure(**changes)
    assert orders_of(found, request()) == ("micro",)
    (technique, _), _, choice = taken(found, SLOW)
    assert technique.order == "micro"
    assert choice.other_s is None
    assert words in why_order(found, technique, request(), choice)


@pytest.mark.parametrize(
    "asked",
    [
        Spilled(order="micro"),
        Spilled(recompute=False),
        Spilled(shards=4, keep_activations=(0,)),
        Spilled(shards=4, spill_activations=(0,)),
    ],
)
def test_what_was_asked_for_by_name_may_leave_the_plain_order_alone(asked):
    assert orders_of(measure(), request(asked)) == ("micro",)


def test_with_one_micro_batch_there_is_one_order():
    asked = request(Spilled(order="shard"), micro_batches=1)
    assert orders_of(measure(), asked) == ("micro",)
    assert "one micro-batch" in why_order(measure(), Spilled(), asked, None)


def test_who_asks_for_it_is_not_told_what_it_would_take_otherwise():
    asked = request(Spilled(order="shard"))
    (technique, _), _, choice = taken(measure(), QUICK, asked)
    assert technique.order == "shard"
    assert choice.other_s is None


def test_several_trials_at_a_time_go_by_shard_where_that_is_quicker_for_them():
    (technique, _), _, _ = taken(measure(), SLOW, actives=(1, 2, 3))
    assert technique.order == "shard"


@given(
    st.floats(1.5, 6.0),
    st.sampled_from([20.0, 100.0, 300.0, 1000.0, 1e5]),
    st.booleans(),
    st.integers(2, 5),
    st.integers(1, 2),
)
@example(3.125, 1e5, False, 2, 2)  # the plain one has room where its inputs wait on the host
@example(3.125, 300.0, True, 2, 2)
@settings(max_examples=8, deadline=None)
def test_the_order_that_is_taken_costs_no_more_than_the_plain_one(
    share, rate, clip, micros, active
):
    found, asked = measure(5), request(clip=clip, micro_batches=micros)
    budget = Bytes(state_of(found) / share)
    plain = request(Spilled(order="micro"), clip=clip, micro_batches=micros)
    if next(choices(found, budget, (active,), plain, speeds(rate)), None) is None:
        return
    try:
        _, plain_s, _ = taken(found, speeds(rate), plain, share, (active,))
    except AssertionError:
        return
    (technique, _), step_s, choice = taken(found, speeds(rate), asked, share, (active,))
    assert step_s <= plain_s * (1 + 1e-9)
    if technique.order == "shard":
        assert choice.other_s is not None


@pytest.mark.parametrize("share", [2.5, 4.0])
def test_where_each_batch_is_a_program_nothing_waits_over_a_turn_it_does_not_have(share):
    found, asked = measure(num_batches=None), request()
    budget = Bytes(state_of(found) / share)
    choice = next(iter(choices(found, budget, (1,), asked, SLOW)))
    again = dict.fromkeys(("keep", "keep_turn", "keep_gradients", "keep_activations"))
    again |= {"keep_weights": (), "keep_head": None, "spill_activations": None}
    open_ = replace(choice.technique, **again)  # as where more trials share the device
    for technique in (choice.technique, open_):
        room = replace(room_of(found, asked, budget, choice), technique=technique)
        kept = keep_best(room, SLOW)[0]
        assert kept.keep_turn == 0
        route = route_of(kept, room.shards)
        start = kept_on_device(
            kept_shards(kept), kept_weights(kept), kept_heads(kept)
        )  # what is there
        slots = [
            max(s for s in assign_slots(p.devices[0], start=start).slots if s is not None)
            for p in (route.micro(0), route.evaluation(), route.step(4, clip=False))
        ]
        assert slots[0] <= max(slots[1:])  # for which the arena is laid out


def test_inputs_that_wait_on_the_host_have_room_there_whatever_is_tried():
    found = measure(boundary=MIB)
    for kib in (2048, 6144, 16384):
        asked = replace(request(), waiting_room=Bytes(kib * 1024))
        budget = Bytes(state_of(found) / 4)
        for choice in choices(found, budget, (1, 2), asked, SLOW):
            if choice.technique.order == "shard":
                shards = predict_shards(found.layers, choice.cuts)
                assert waiting_input_bytes(shards, choice.technique, 4) <= kib * 1024


def test_what_is_drawn_ahead_grows_with_the_batch():
    found = measure(draws=True, foretold=True, draw_bytes=Bytes(1000))
    found = replace(found, shards=predict_shards(found.layers, ()))
    assert grown(found, 2.0).draw_bytes == 2000
