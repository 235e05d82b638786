"""What must be complete before an action starts, in this run of a list and the one before."""

from shoal.program.ir import parse_program
from shoal.program.needs import Needs, find_needs, matching_sends
from shoal.program.slots import assign_slots

HOST = "LOAD s0 param\nB s0 m0\nSTORE s0 grad\nDROP s0 param+grad\nSTEP@host s0"


def needs_of(text):
    actions = parse_program(text).devices[0]
    return find_needs(actions, assign_slots(actions))


def test_a_unit_needs_the_loads_of_its_shard():
    assert needs_of("LOAD s0 param\nLOAD s0 state\nF s0 m0")[2].now == (0, 1)


def test_a_unit_needs_the_unit_before_it():
    needs = needs_of("LOAD s0 param\nLOAD s1 param\nF s0 m0\nB s1 m0")
    assert needs[3].now == (1, 2)


def test_a_store_needs_the_unit_that_made_the_part():
    assert needs_of(HOST)[2].now == (1,)


def test_a_host_step_needs_the_gradients_and_the_norm():
    assert needs_of(HOST)[4].now == (2,)
    assert needs_of(HOST.replace("STEP@host", "SYNC s0\nSTEP@host"))[5].now == (2, 4)


def test_a_load_needs_the_host_step_of_the_run_before():
    assert needs_of(HOST)[0] == Needs(now=(), before=(1, 4))


def test_a_load_needs_the_store_of_its_own_part_only():
    text = HOST.replace("STEP@host s0", "LOAD s0 param+grad")
    assert 2 in needs_of(text)[4].now
    assert 2 not in needs_of(text.replace("LOAD s0 param+grad", "LOAD s0 param"))[4].now


def test_a_unit_needs_what_was_received():
    needs = needs_of("LOAD s1 param\nRECV s1 m0 d0\nB s1 m0\nSEND s1 m0 grad d0")
    assert needs[2].now == (0, 1)
    assert needs[3].now == (2,)


def test_receives_match_the_sends_of_their_queue_in_order():
    program = parse_program(
        "device 0\nSEND s1 m0 d1\nSEND s1 m1 d1\ndevice 1\nCKPT s1\nRECV s1 m0 d0\nRECV s1 m1 d0"
    )
    assert matching_sends(program) == {(1, 1): (0, 0), (1, 2): (0, 1)}
