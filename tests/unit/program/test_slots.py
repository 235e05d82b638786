"""Which slot every action uses, and what a LOAD into a used slot waits for."""

from shoal.program.ir import Op, kept, parse_program
from shoal.program.slots import assign_slots
from shoal.spill.generate import departure, resident_step, spilled_step


def assign(text, **options):
    return assign_slots(parse_program(text).devices[0], **options)


def test_a_load_takes_the_lowest_free_slot():
    slots = assign("LOAD s0 param\nLOAD s1 param\nDROP s0 param\nLOAD s2 param")
    assert slots.slots == (0, 1, 0, 0)
    assert slots.num_slots == 2


def test_a_second_load_of_a_shard_joins_its_slot():
    slots = assign("LOAD s0 param\nLOAD s0 state\nDROP s0 param\nLOAD s1 param")
    assert slots.slots == (0, 0, 0, 1)


def test_a_slot_is_free_when_all_that_was_loaded_is_dropped():
    slots = assign("LOAD s0 param\nLOAD s0 state\nDROP s0 param\nDROP s0 state\nLOAD s1 param")
    assert slots.slots[-1] == 0


def test_the_step_consumes_loaded_gradients():
    slots = assign(
        "LOAD s0 param+state+grad\nB s0 m1\nSTEP s0\nSTORE s0 param+state\n"
        "DROP s0 param+state\nLOAD s1 param"
    )
    assert slots.slots[-1] == 0


def test_gradients_that_were_not_loaded_do_not_live_in_a_slot():
    slots = assign(
        "LOAD s0 param\nB s0 m0\nDROP s0 param\nLOAD s1 param\nSTORE s0 grad\nDROP s0 grad"
    )
    assert slots.slots == (0, 0, 0, 0, None, None)


def test_a_load_waits_for_the_units_and_stores_of_the_tenant_before():
    slots = assign(
        "LOAD s0 param+state\nB s0 m0\nSTEP s0\nSTORE s0 param+state\nDROP s0 param+state\n"
        "LOAD s1 param"
    )
    assert slots.waits[5] == (1, 2, 3)


def test_a_load_does_not_wait_for_a_store_of_gradients_outside_the_slot():
    slots = assign("LOAD s0 param\nB s0 m0\nSTORE s0 grad\nDROP s0 param+grad\nLOAD s1 param")
    assert slots.waits[4] == (1,)


def test_a_load_waits_for_a_load_that_nobody_used():
    slots = assign("LOAD s0 param\nDROP s0 param\nLOAD s1 param")
    assert slots.waits[2] == (0,)


def test_the_first_load_into_a_slot_waits_for_the_tails_of_the_run_before():
    slots = assign("LOAD s0 param\nF s0 m0\nDROP s0 param\nLOAD s1 param\nF s1 m0\nDROP s1 param")
    assert slots.is_first == (True, False, False, False, False, False)
    assert slots.tails == ((4,),)


def test_a_unit_waits_for_gradients_dropped_before_the_unit_before_it():
    slots = assign(
        "LOAD s1 param\nB s1 m0\nSTORE s1 grad\nDROP s1 param+grad\n"
        "LOAD s0 param\nB s0 m0\nSTORE s0 grad\nDROP s0 param+grad\n"
        "LOAD s0 param\nF s0 m1"
    )
    assert slots.waits[5] == ()
    assert slots.waits[9] == (2,)
    assert slots.stores_left == (6,)


def test_shards_of_two_trials_are_two_tenants():
    slots = assign("LOAD s0 param\nLOAD s0 param t1\nF s0 m0\nF s0 m0 t1")
    assert slots.slots == (0, 1, 0, 1)


def test_what_needs_no_slot_has_none():
    slots = assign("LOAD s0 param\nSYNC s0\nDROP s0 param\nSTEP@host s0\nCKPT s0")
    assert slots.slots == (0, None, 0, None, None)


def test_a_resident_shard_has_the_first_slot_from_the_start():
    resident = kept([0])
    assert assign_slots(resident_step().devices[0], start=resident).slots == (0, 0)
    assert assign_slots(departure().devices[0], start=resident).tails == ((0,),)


def test_a_step_with_lookahead_one_uses_two_slots_in_turn():
    actions = spilled_step(3).devices[0]
    slots = assign_slots(actions)
    loads = [slots.slots[i] for i, action in enumerate(actions) if action.op is Op.LOAD]
    assert (slots.num_slots, loads) == (2, [0, 1, 0, 1, 0])
