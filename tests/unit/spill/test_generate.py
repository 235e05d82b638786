"""Generated steps: which units, which visits, how far ahead a load stands."""

import pytest

from shoal.program.ir import Action, Op, Part, parse_program
from shoal.spill.generate import (
    Route,
    arrival,
    departure,
    resident_evaluation,
    resident_step,
    spilled_step,
)


def actions_of(program, *ops):
    return [action for action in program if action.op in ops]


def texts(program, *ops):
    return [str(action) for action in actions_of(program, *ops)]


def test_a_resident_step_moves_nothing():
    assert str(resident_step(micro_batches=2)) == "B s0 m0\nB s0 m1\nSTEP s0"


def test_a_clipped_resident_step_steps_after_the_norm():
    assert str(resident_step(clip=True)) == "B s0 m0\nSYNC s0\nSTEP s0"


def test_the_last_shard_has_no_forward():
    assert texts(spilled_step(3), Op.F, Op.B) == [
        "F s0 m0",
        "F s1 m0",
        "B s2 m0",
        "B s1 m0",
        "B s0 m0",
    ]


def test_a_shard_stays_in_its_slot_at_the_turn():
    loads = texts(spilled_step(3), Op.LOAD)
    assert loads == [
        "LOAD s0 param",
        "LOAD s1 param",
        "LOAD s2 param+state",
        "LOAD s1 state",
        "LOAD s0 param+state",
    ]


def test_with_more_slots_more_shards_stay_at_the_turn():
    loads = texts(spilled_step(4, lookahead=2), Op.LOAD)
    assert [load for load in loads if "param" in load].count("LOAD s2 param") == 1
    assert loads[-3:] == ["LOAD s1 state", "LOAD s2 state", "LOAD s0 param+state"]


def test_the_load_of_a_shard_that_travels_stands_before_the_units_of_those_that_stay():
    program = spilled_step(4, keep=(0, 2), lookahead=0)
    assert texts(program, Op.LOAD, Op.F, Op.B)[:5] == [
        "LOAD s1 param",
        "F s0 m0",
        "F s1 m0",
        "LOAD s3 param+state",
        "F s2 m0",
    ]


def test_kept_shards_step_first_when_the_norm_is_known():
    program = spilled_step(3, keep=(1,), optimizer="host", clip=True)
    assert texts(program, Op.STEP) == ["STEP s1", "STEP@host s0", "STEP@host s2"]


def test_gradients_of_a_kept_shard_stay_on_the_device():
    program = spilled_step(3, keep=(1,), micro_batches=3, optimizer="host", clip=True)
    assert not [a for a in actions_of(program, Op.LOAD, Op.STORE) if a.shard == 1]


def test_a_single_shard_is_loaded_once():
    assert texts(spilled_step(1), Op.LOAD) == ["LOAD s0 param+state"]


def test_with_the_step_on_the_device_the_state_comes_with_the_last_backward():
    loads = texts(spilled_step(2, micro_batches=2, lookahead=0), Op.LOAD)
    assert [load for load in loads if "state" in load] == [
        "LOAD s1 param+state+grad",
        "LOAD s0 param+state+grad",
    ]


def test_with_the_step_on_the_host_the_state_never_travels():
    program = spilled_step(3, micro_batches=2, optimizer="host")
    assert not [action for action in program if Part.STATE in action.parts]


def test_a_host_step_follows_the_drop_of_its_shard():
    program = parse_program(
        "LOAD s0 param\nB s0 m0\nSTORE s0 grad\nDROP s0 param+grad\nSTEP@host s0"
    )
    assert spilled_step(1, optimizer="host") == program


def test_with_clipping_every_step_follows_the_sync():
    for place in ("device", "host"):
        ops = [
            a.op for a in actions_of(spilled_step(3, clip=True, optimizer=place), Op.SYNC, Op.STEP)
        ]
        assert ops == [Op.SYNC, Op.STEP, Op.STEP, Op.STEP]


def test_earlier_gradients_are_loaded_from_the_second_micro_batch_on():
    program = spilled_step(2, micro_batches=3, optimizer="host")
    with_gradients = [a for a in actions_of(program, Op.LOAD) if Part.GRAD in a.parts]
    assert len(with_gradients) == 2 * 2


def test_without_lookahead_a_load_stands_just_before_its_unit():
    order = [
        action.op for action in spilled_step(3, lookahead=0) if action.op in (Op.LOAD, Op.F, Op.B)
    ]
    assert order == [Op.LOAD, Op.F, Op.LOAD, Op.F, Op.LOAD, Op.B, Op.LOAD, Op.B, Op.LOAD, Op.B]


def test_with_lookahead_the_next_load_stands_before_this_unit():
    order = texts(spilled_step(2, lookahead=1), Op.LOAD, Op.F, Op.DROP)[:3]
    assert order == ["LOAD s0 param", "LOAD s1 param+state", "F s0 m0"]


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
def test_a_load_never_moves_above_an_earlier_visit_of_its_shard(lookahead):
    program = spilled_step(3, micro_batches=2, clip=True, lookahead=lookahead)
    on_device = set()
    for action in program:
        parts = {(action.shard, part) for part in action.parts}
        if action.op is Op.LOAD:
            assert not parts & on_device
            on_device |= parts
        elif action.op is Op.DROP:
            on_device -= parts


def test_a_spilled_evaluation_is_forwards_with_the_last_shard_included():
    assert texts(Route(3).evaluation(), Op.F) == ["F s0 m0", "F s1 m0", "F s2 m0"]
    assert not actions_of(Route(3).evaluation(), Op.B, Op.STORE)


def test_a_resident_evaluation_is_one_forward():
    assert list(resident_evaluation()) == [Action(Op.F, 0, 0)]


def test_arrival_and_departure_are_inverse():
    assert str(arrival()) == "LOAD s0 param+state"
    assert str(departure()) == "STORE s0 param+state\nDROP s0 param+state"
