"""How many shards, which of them stay, and what moves then: decided on paper."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.technique import Spilled, kept_shards
from shoal.core.units import Bytes
from shoal.planner.choose import choices, may_go_by_shard
from shoal.planner.keep import keep_best, keep_most
from shoal.planner.need import Request, fits, need
from shoal.planner.paper import _least_outside
from shoal.planner.predict import predict_shards
from shoal.planner.price import Speeds, price
from shoal.planner.room import Room
from shoal.spill.generate import kept_of, route_with
from shoal.testing import make_layer, make_measure

MIB = 2**20
FAST = Speeds(up_bytes_per_s=1e15, down_bytes_per_s=1e15, device_step=0.0, host_step=0.0)
"""With copies and steps that take no time the fewest bytes decide."""


def measure(num_layers, *, tied=False, **changes):
    """Layers of a mebibyte, with Adam's state and small activations."""
    small = Bytes(MIB // 32)
    layers = [
        make_layer(
            f"layer {index}",
            MIB,
            boundary_bytes=small,
            carry_bytes=small,
            forward_peak_bytes=Bytes(2 * small),
            saved_bytes=Bytes(4 * small),
            backward_peak_bytes=Bytes(6 * small + MIB),
            borrowed_bytes=Bytes(MIB // 4 if tied and index == num_layers - 1 else 0),
        )
        for index in range(num_layers)
    ]
    return make_measure(layers, **changes)


def request(*, technique=None, clip=False, micro_batches=1):
    return Request(micro_batches=micro_batches, clip=clip, technique=technique, prefers="host")


def room(found, shards, technique, asked, budget, active=1):
    return Room(
        measure=found,
        shards=shards,
        technique=technique,
        request=asked,
        budget=Bytes(budget),
        active=active,
    )


def state_of(found):
    return sum(4 * layer.parameter_bytes for layer in found.layers)


def best(found, budget, *, active=1, **options):
    """The first choice and what is kept then."""
    asked = request(**options)
    choice = next(choices(found, Bytes(budget), (active,), asked, FAST))
    shards = predict_shards(found.layers, choice.cuts)
    kept = keep_most(room(found, shards, choice.technique, asked, budget, active))
    assert kept is not None
    return kept


RATIOS = [8 / 1.06**n for n in range(35)]  # of the state to the budget, down to 1.1
DEEP, DEEP_CLIPPED = (pytest.param(clip, 24, marks=pytest.mark.full) for clip in (False, True))


def moved_with(place, clip, ratios, layers):
    found = measure(layers)
    technique = Spilled(optimizer=place)
    return [
        best(found, state_of(found) / ratio, technique=technique, clip=clip)[1].moved
        for ratio in ratios
    ]


@pytest.mark.parametrize(("clip", "layers"), [(False, 12), DEEP, DEEP_CLIPPED])
def test_more_memory_never_moves_more_with_the_step_on_the_device(clip, layers):
    moved = moved_with("device", clip, RATIOS, layers)
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < moved[0] / 4


@pytest.mark.full
@pytest.mark.parametrize(("clip", "layers"), [(True, 12), DEEP, DEEP_CLIPPED])
def test_more_memory_hardly_ever_moves_more_with_the_step_on_the_host(clip, layers):
    """Another number of shards may be as quick and move more: what is chosen by is time."""
    moved = moved_with("host", clip, RATIOS, layers)
    assert all(more <= 1.12 * less for less, more in itertools.pairwise(moved))
    assert moved[-1] < moved[0] / 4


def test_a_model_a_quarter_too_large_moves_less_than_a_quarter_of_itself():
    found = measure(32)
    budget = state_of(found) / 1.25
    _, need_ = best(found, budget, clip=True)
    assert need_.moved <= 0.25 * state_of(found)


def test_where_only_gradients_are_too_much_all_shards_stay():
    found = measure(16)
    technique, need_ = best(found, 0.85 * state_of(found))
    assert len(kept_shards(technique)) == technique.shards
    assert need_.moved == 0


def test_shards_that_borrow_travel():
    found = measure(16, tied=True)
    technique, _ = best(found, 0.85 * state_of(found))
    assert kept_shards(technique) == tuple(range(technique.shards - 1))


def test_with_the_step_on_the_device_parameters_stay_before_state():
    found = measure(32)
    technique, _ = best(found, state_of(found) / 4, technique=Spilled(optimizer="device"))
    assert not technique.keep
    assert len(technique.keep_weights) > technique.shards / 2
    technique, _ = best(found, state_of(found) / 2, technique=Spilled(optimizer="device"))
    assert len(technique.keep) + len(technique.keep_weights) == technique.shards


def deep(num_layers, boundary):
    """Layers whose inputs are large beside their parameters; no other layer reads them."""
    found = measure(num_layers)
    layers = tuple(
        replace(
            layer,
            boundary_bytes=Bytes(boundary),
            carry_bytes=Bytes(boundary),
            private_bytes=Bytes(boundary if index else 0),
        )
        for index, layer in enumerate(found.layers)
    )
    return replace(found, layers=layers)


def test_inputs_wait_on_the_host_where_the_device_has_no_room_for_all_of_them():
    found, budget = deep(24, MIB), 10 * MIB
    technique, need_ = best(found, budget)
    assert technique.boundaries == "host"
    assert need_.peak <= budget
    with pytest.raises(StopIteration):
        best(found, budget, technique=Spilled(boundaries="device"))


def test_inputs_stay_where_there_is_room_and_nothing_to_gain():
    technique, _ = best(deep(24, MIB // 64), 30 * MIB)
    assert technique.boundaries == "device"


def test_room_that_inputs_leave_is_given_to_shards_where_that_moves_less():
    found, budget = deep(32, MIB // 2), 64 * MIB
    here, there = (
        best(found, budget, technique=Spilled(optimizer="device", boundaries=place))
        for place in ("device", "host")
    )
    assert len(kept_shards(there[0])) > len(kept_shards(here[0]))
    chosen = best(found, budget, technique=Spilled(optimizer="device"))
    assert chosen[1].moved <= 1.05 * min(here[1].moved, there[1].moved)


def with_seconds(found):
    """Forwards of a third of a backward, which is worth not running twice."""
    layers = (replace(layer, forward_s=1e-3, backward_s=3e-3) for layer in found.layers)
    return replace(found, layers=tuple(layers))


def divided(found, budget, technique=None, speeds=FAST, active=1, **changes):
    """The room of a budget as it is divided for the cheapest choice."""
    asked = request(technique=technique, **changes)
    choice = next(choices(found, Bytes(budget), (active,), asked, speeds))
    shards = predict_shards(found.layers, choice.cuts)
    kept = keep_best(room(found, shards, choice.technique, asked, budget, active), speeds)
    assert kept is not None
    assert fits([kept[1]], Bytes(budget), active)
    return kept[0]


def test_activations_stay_where_there_is_room():
    found = with_seconds(measure(24))
    technique = divided(found, 0.7 * state_of(found))
    assert technique.keep_activations
    stay = route_with(technique, technique.shards).may_save
    assert set(technique.keep_activations) <= set(stay)


def test_nothing_that_recompute_forbids_is_kept():
    found = with_seconds(measure(24))
    technique = divided(found, 0.7 * state_of(found), Spilled(recompute=True))
    assert technique.keep_activations == ()


def test_room_goes_to_activations_where_copies_hide_and_to_shards_where_they_do_not():
    found = with_seconds(measure(24))
    layers = (replace(layer, saved_bytes=Bytes(2 * MIB)) for layer in found.layers)
    found, budget = replace(found, layers=tuple(layers)), 55 * MIB
    slow = Speeds(up_bytes_per_s=1e8, down_bytes_per_s=1e8, device_step=0.0, host_step=0.0)
    hidden = divided(found, budget, Spilled(optimizer="device"), active=2)
    bound = divided(found, budget, Spilled(optimizer="device"), slow, active=2)
    assert len(hidden.keep_activations) > len(bound.keep_activations)
    here = [len(t.keep) + len(t.keep_weights) for t in (hidden, bound)]
    assert here[0] <= here[1]


@given(
    st.sampled_from(["device", "host"]),
    st.sampled_from(["device", "host"]),
    st.sampled_from(["micro", "shard"]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(2, 6),
)
@settings(max_examples=60, deadline=None)
def test_what_is_ruled_out_without_a_program_would_not_have_fitted(
    place, boundaries, order, clip, micros, lookahead, count
):
    found = deep(12, MIB // 2)
    shards = predict_shards(found.layers, range(12 // count, 12, 12 // count))
    technique = Spilled(
        shards=len(shards),
        optimizer=place,
        lookahead=lookahead,
        boundaries=boundaries,
        order=order,
        recompute=True,
    )
    asked = request(technique=technique, clip=clip, micro_batches=micros)
    with_state = place == "device" and not clip
    slot = max(s.parameter_bytes + with_state * s.state_bytes for s in shards)
    slots = min(1 + lookahead, len(shards)) * slot
    least = _least_outside(shards, found.batch_bytes, technique, asked) + slots
    assert least <= need(found, shards, technique, asked).held


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["device", "host"])
@given(st.floats(0.2, 0.95), st.booleans(), st.integers(1, 2), st.integers(1, 2))
@settings(max_examples=8, deadline=None)
def test_however_the_room_is_divided_it_is_not_more_than_there_is(
    place, share, clip, micros, active
):
    found = with_seconds(measure(12))
    budget = share * active * state_of(found)
    divided(
        found, budget, Spilled(optimizer=place), active=active, clip=clip, micro_batches=micros
    )


def test_shards_that_are_named_are_kept_or_nothing_fits():
    found = measure(8)
    shards = predict_shards(found.layers, tuple(range(1, 8)))
    named = Spilled(shards=8, optimizer="device", lookahead=1, keep=(2, 5))
    technique, _ = keep_most(room(found, shards, named, request(), state_of(found)))
    assert technique.keep == (2, 5)
    assert keep_most(room(found, shards, named, request(), 8 * MIB)) is None


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 12),
    st.floats(0.1, 1.2),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from(["host", "device"]),
    st.integers(0, 2),
    st.integers(1, 2),
)
def test_as_many_stay_as_there_is_room_for(layers, share, clip, micros, place, lookahead, active):
    found, asked = measure(layers), request(clip=clip, micro_batches=micros)
    budget = Bytes(int(share * state_of(found)))
    shards = predict_shards(found.layers, tuple(range(1, layers)))
    technique = Spilled(optimizer=place, lookahead=lookahead)
    kept = keep_most(room(found, shards, technique, asked, budget, active))

    def works(keep, weights=()):
        tried = replace(technique, shards=layers, keep=keep, keep_weights=weights)
        return fits([need(found, shards, tried, asked)], budget, active)

    if kept is None:
        assert not works(())
        return
    chosen, need_ = kept
    assert fits([need_], budget, active)
    if len(chosen.keep) == layers:
        return
    weights = tuple(s for s in range(layers) if s not in chosen.keep) * (place == "device")
    if place == "host" or set(weights) == set(chosen.keep_weights):
        keep = kept_of(layers, len(chosen.keep) + 1)
        rest = tuple(s for s in range(layers) if s not in keep)
        assert not works(keep, rest * (place == "device"))
    else:
        assert not works((), kept_of(layers, len(chosen.keep_weights) + 1))


@pytest.mark.full
def test_by_shard_a_load_is_paid_once_for_all_micro_batches():
    found = measure(16, draws=False, num_batches=100)
    budget, asked = state_of(found) / 4, Spilled(order="shard")
    technique, need_ = best(found, budget, micro_batches=4, technique=asked)
    assert technique.order == "shard"
    _, drawing = best(found, budget, micro_batches=4)
    _, once = best(found, budget)
    assert need_.moved < 0.4 * drawing.moved
    assert need_.moved <= 1.25 * once.moved  # its boundaries leave less room for shards


def test_by_shard_is_no_other_order_where_a_step_has_one_micro_batch():
    found = measure(16, draws=True, num_batches=100)
    technique, _ = best(found, state_of(found) / 4, technique=Spilled(order="shard"))
    assert technique.order == "micro"


@pytest.mark.parametrize(
    ("draws", "foretold", "num_batches", "may"),
    [
        (False, False, 9, True),
        (True, True, 9, True),
        (True, False, 9, False),
        (False, False, None, False),
        (True, True, None, False),
    ],
)
def test_by_shard_a_model_may_go_whose_draws_are_foretold(draws, foretold, num_batches, may):
    found = measure(4, draws=draws, foretold=foretold, num_batches=num_batches)
    assert may_go_by_shard(found, request(micro_batches=2)) == may
    assert not may_go_by_shard(found, request())


def test_there_is_room_for_what_is_recorded_and_drawn_ahead():
    shards = predict_shards(measure(4).layers, range(1, 4))
    technique, asked = Spilled(shards=4, order="shard", keep=()), request(micro_batches=2)
    technique = replace(technique, optimizer="host", lookahead=0)
    plain = need(measure(4, draws=False), shards, technique, asked)
    little = measure(4, draws=True, foretold=True, draw_bytes=Bytes(1024))
    assert need(little, shards, technique, asked) == plain  # there is room for it anyway
    much = replace(little, draw_bytes=Bytes(64 * MIB))
    assert need(much, shards, technique, asked).peak == plain.held + 64 * MIB
    in_turns = replace(technique, order="micro")  # where nothing is drawn ahead
    assert need(much, shards, in_turns, asked) == need(little, shards, in_turns, asked)
    forward = [replace(shard, forward_peak_bytes=Bytes(32 * MIB)) for shard in shards]
    small = replace(little, valid_scale=0.1)
    assert need(small, forward, technique, asked).peak >= 32 * MIB


def test_by_itself_the_micro_batches_go_one_after_another():
    found = measure(16, draws=False, num_batches=100)
    technique, _ = best(found, state_of(found) / 4, micro_batches=4)
    assert technique.order == "micro"


# -- the price --------------------------------------------------------------------------------


def priced(active, *, clip=True, place="host", link=1e9, steps=1.0, lookahead=1, layers=16):
    """The price of a model all of whose shards travel; a layer computes for 3 ms."""
    found, asked = measure(layers), request(clip=clip)
    shards = [
        replace(shard, step_s=0.003) for shard in predict_shards(found.layers, range(1, layers))
    ]
    speeds = Speeds(up_bytes_per_s=link, down_bytes_per_s=link, device_step=steps, host_step=steps)
    technique = Spilled(shards=layers, optimizer=place, lookahead=lookahead, keep=())
    return price(shards, Bytes(1024), technique, asked, speeds, active)


def test_a_second_trial_hides_the_step_on_the_host_which_alone_comes_after_the_norm():
    alone, two = priced(1, link=1e12), priced(2, link=1e12)
    assert alone.busy < 0.7
    assert two.busy > 0.95
    assert alone.step_s / two.step_s > 1.4


def test_nothing_hides_a_link_that_is_too_slow():
    found, slow = priced(3), priced(3, link=1e8)
    assert slow.step_s > 3 * found.step_s
    assert slow.busy < 0.3


def test_without_clipping_the_step_hides_behind_the_trial_itself():
    assert priced(1, clip=False, link=1e12).busy > 1.4 * priced(1, link=1e12).busy


def test_lookahead_hides_loads_where_one_trial_is_alone():
    link = 0.7e9  # a load takes about half of a backward
    alone = [priced(1, steps=0.0, link=link, lookahead=n).step_s for n in (0, 1)]
    assert alone[1] < 0.8 * alone[0]


def test_the_price_is_what_a_long_replay_says():
    once, again = priced(2), priced(2)
    assert once == again
    bound = 16 * 0.003
    assert once.step_s >= bound * 0.9


@pytest.mark.parametrize(("host_step", "place"), [(0.1, "host"), (50.0, "device")])
def test_the_step_is_taken_where_it_costs_the_device_less(host_step, place):
    found = measure(16)
    speeds = Speeds(
        up_bytes_per_s=1e11, down_bytes_per_s=1e11, device_step=0.1, host_step=host_step
    )
    budget = Bytes(state_of(found) // 4)
    chosen = next(choices(found, budget, (1, 2), request(clip=True), speeds))
    assert chosen.technique.optimizer == place


@pytest.mark.full
def test_as_many_trials_share_a_device_as_make_a_step_cheapest():
    found = measure(32)
    speeds = Speeds(up_bytes_per_s=1e12, down_bytes_per_s=1e12)
    layers = tuple(replace(layer, step_s=layer.backward_s) for layer in found.layers)
    found, budget = replace(found, layers=layers), Bytes(state_of(found) // 2)
    assert next(choices(found, budget, (1, 2, 3), request(clip=True), speeds)).active > 1
    assert next(choices(found, budget, (1,), request(clip=True), speeds)).active == 1


def test_trials_that_go_on_step_where_they_did():
    found = measure(16)
    asked = replace(request(), place="device", mixes=False)
    budget = Bytes(state_of(found) // 4)
    assert {c.technique.optimizer for c in choices(found, budget, (1,), asked, FAST)} == {"device"}


def test_where_the_place_is_part_of_the_bits_shards_do_not_step_in_both():
    found, asked = measure(16), replace(request(), place="host", mixes=False)
    budget = Bytes(state_of(found) // 2)
    choice = next(choices(found, budget, (1,), asked, FAST))
    shards = predict_shards(found.layers, choice.cuts)
    technique, _ = keep_most(room(found, shards, choice.technique, asked, budget))
    assert technique.keep == ()
