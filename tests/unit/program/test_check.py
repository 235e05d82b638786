"""The checker: legal programs pass with exact bytes; every broken rule is said."""

import re

import pytest

from shoal.core.errors import ProgramError
from shoal.program.check import check, check_devices
from shoal.program.ir import Part, kept, parse_program, single
from shoal.spill.generate import (
    Route,
    arrival,
    departure,
    resident_evaluation,
    resident_micro,
    resident_step,
    spilled_step,
)

RESIDENT = {0: (Part.PARAM, Part.STATE)}

PIPELINE = """
device 0
LOAD s0 param+state
F s0 m0
SEND s1 m0 d1
RECV s1 m0 grad d1
B s0 m0
STEP s0
STORE s0 param+state
DROP s0 param+state
device 1
LOAD s1 param+state
RECV s1 m0 d0
B s1 m0
SEND s1 m0 grad d0
STEP s1
STORE s1 param+state
DROP s1 param+state
"""


@pytest.fixture
def refusal_of(make_costs):
    """The message with which a program, given as text, is refused."""

    def refuse(text, num_shards=2, trials=(0,), **options):
        with pytest.raises(ProgramError) as refusal:
            check_devices(parse_program(text), make_costs(num_shards, trials=trials), **options)
        return str(refusal.value)

    return refuse


# Legal programs and their bytes


def test_a_resident_step_starts_and_ends_with_its_shard_on_the_device(make_costs):
    footprint = check(resident_step(), make_costs(1), start=RESIDENT, end=RESIDENT)
    assert (footprint.num_slots, footprint.kept_bytes) == (0, 300)
    assert footprint.running_bytes == (300 + 7 + 300, 300 + 80 + 5)
    assert footprint.held_bytes == 300 + 80
    assert (footprint.up_bytes, footprint.down_bytes) == (0, 0)


def test_arrival_and_departure_move_a_resident_shard(make_costs):
    assert check(arrival(), make_costs(1), end=RESIDENT).up_bytes == 300
    assert check(departure(), make_costs(1), start=RESIDENT).down_bytes == 290


def test_the_bytes_of_a_two_shard_step_action_by_action(make_costs):
    footprint = check(spilled_step(2), make_costs(2))
    slots = 2 * 300
    outside = [
        ("LOAD s0", 0),
        ("LOAD s1", 0),
        ("F s0", 7 + 50),
        ("LOAD s0", 7 + 10),
        ("B s1", 7 + 10 + 300),
        ("STEP s1", 7 + 11 + 80 + 5),
        ("STORE s1", 7 + 11),
        ("DROP s1", 7 + 11),
        ("B s0", 7 + 11 + 300),
        ("STEP s0", 80 + 5),
        ("STORE s0", 0),
        ("DROP s0", 0),
    ]
    assert footprint.running_bytes == tuple(slots + more for _, more in outside)
    assert footprint.peak_bytes == slots + 7 + 11 + 300
    assert footprint.held_bytes == slots + 7 + 11 + 80
    assert footprint.unit_bytes == 300


def test_a_store_of_parameters_writes_back_the_owned_ones_only(make_costs):
    footprint = check(spilled_step(2), make_costs(2))
    assert footprint.up_bytes == 2 * 100 + 2 * 200  # s0 stays at the turn
    assert footprint.down_bytes == 2 * (90 + 200)


def test_gradients_loaded_into_a_slot_are_counted_there(make_costs):
    footprint = check(spilled_step(1, micro_batches=2, lookahead=0), make_costs(1))
    assert footprint.slot_bytes == 100 + 200 + 80
    stored = 80  # of the first micro-batch, until the second unit after it
    assert footprint.running_bytes[-4:] == (380 + stored + 7 + 300, 380 + 5, 380, 380)


def test_dropped_gradients_are_counted_until_a_unit_waits_for_their_store(make_costs):
    program = spilled_step(3, optimizer="host", lookahead=0)
    running = dict(
        zip(map(str, program), check(program, make_costs(3)).running_bytes, strict=True)
    )
    carried, gradients = 7 + 10 + 11, 80  # at B s1: boundary into s1, carry out of s2
    assert running["STORE s2 grad"] == 100 + carried + gradients
    assert running["DROP s2 param+grad"] == 100 + carried + gradients
    assert running["B s1 m0"] == 100 + carried + gradients + 300
    assert running["STORE s1 grad"] == 100 + 7 + 11 + 2 * gradients
    assert running["B s0 m0"] == 100 + 7 + 11 + gradients + 300
    assert running["STEP@host s0"] == 100 + 2 * gradients


def test_an_evaluation_holds_one_boundary_at_a_time(make_costs):
    footprint = check(Route(3).evaluation(), make_costs(3))
    assert footprint.held_bytes == 2 * 100 + 7 + 10
    assert footprint.peak_bytes == 2 * 100 + 7 + 10 + 50


def test_a_resident_evaluation_is_legal(make_costs):
    check(resident_evaluation(), make_costs(1), start=RESIDENT, end=RESIDENT)


def test_two_trials_may_share_a_program(make_costs):
    text = str(Route(2, lookahead=0).evaluation())
    both = text + "\n" + "\n".join(line + " t1" for line in text.splitlines())
    assert check(parse_program(both), make_costs(2, trials=(0, 1))).num_slots == 1


def test_a_pipeline_over_two_devices_has_a_footprint_for_each(make_costs):
    first, second = check_devices(parse_program(PIPELINE), make_costs(2))
    assert first.running_bytes[1:5] == (357, 307, 318, 618)
    assert second.running_bytes[1:4] == (310, 617, 380)
    assert check(parse_program(PIPELINE), make_costs(2)) == first


def test_a_second_step_uses_the_next_weight_version(make_costs):
    steps = "B s0 m0\nSTEP s0\nB s0 m1 v1\nSTEP s0 v1"
    check(parse_program(steps), make_costs(1), start=RESIDENT, end=RESIDENT)


def test_an_older_version_may_be_used_while_it_is_kept(make_costs, refusal_of):
    text = "B s0 m0\nSTEP s0\nB s0 m1 v1\nSTEP s0 v1\nB s0 m2 v{}\nSTEP s0 v2"
    options = {"start": RESIDENT, "end": RESIDENT, "versions": 2}
    check_devices(parse_program(text.format(1)), make_costs(1), **options)
    assert "1 B of s0 come later" in refusal_of(text.format(0), 1, **options)


# The message


def test_the_refusal_shows_the_program_with_an_arrow_on_the_action(refusal_of):
    text = str(spilled_step(2, lookahead=0)).replace("LOAD s1 param+state\n", "")
    assert refusal_of(text) == (
        "the program cannot run: at B s1 m0, B needs the parameters of s1 on the device. "
        "Put LOAD s1 param before it.\n"
        "device 0, action 4 of 12:\n"
        "  LOAD s0 param\n"
        "  F s0 m0\n"
        "  DROP s0 param\n"
        "  B s1 m0 <-- here\n"
        "  STEP s1\n"
        "  STORE s1 param+state\n"
        "  DROP s1 param+state\n"
        "  ..."
    )


# Rules: (program, the action the arrow is on, words of the rule). Two shards.

FORM = [
    ("F s0 m0 t3", "F s0 m0 t3", "trial 3 has no costs"),
    ("LOAD s2 param", "LOAD s2 param", "the model has 2 shards, s0 to s1"),
    ("LOAD s0", "LOAD s0", "LOAD needs parts"),
    ("LOAD s0 param+param", "LOAD s0 param+param", "a part is named twice"),
    ("F s0", "F s0", "F needs a micro-batch"),
    ("SEND s1 m0 d1", "SEND s1 m0 d1", "no other device; there are 1"),
    ("F@host s0 m0", "F@host s0 m0", "only STEP can"),
]

ORDER = [
    ("LOAD s1 param\nF s1 m0", "F s1 m0", "needs the boundary into s1 of m0"),
    (
        "LOAD s0 param+state\nLOAD s1 param+state\nF s0 m0\nB s0 m0",
        "B s0 m0",
        "B needs the carry out of s1 of m0",
    ),
    ("LOAD s0 param\nB s0 m0", "B s0 m0", "B needs F s0 m0 to have run"),
    ("LOAD s0 param\nF s0 m0\nF s0 m0", "F s0 m0", "this unit has run already"),
    (
        "LOAD s0 param\nLOAD s1 param\nF s0 m0\nF s1 m0\nB s1 m0",
        "F s1 m0",
        "the last shard has no F in training",
    ),
    (
        "LOAD s0 param\nLOAD s1 param+state\nF s0 m0\nF s0 m1\nB s1 m0\nSTEP s1\nB s1 m1",
        "STEP s1",
        "1 B of s1 come later",
    ),
    (
        "LOAD s0 param\nLOAD s1 param\nF s0 m0\nF s0 m1\nB s1 m1\nB s1 m0",
        "B s1 m0",
        "in the order of the plain loop",
    ),
    (
        "LOAD s0 param\nLOAD s1 param+state\nF s0 m0\nB s1 m0\nSTEP s1\nSYNC s0",
        "STEP s1",
        "known only after SYNC",
    ),
    ("LOAD s0 param\nF s0 m0\nSYNC s0\nLOAD s1 param\nB s1 m0", "SYNC s0", "1 B come later"),
    ("SYNC s0\nSYNC s0", "SYNC s0", "Use one SYNC a step"),
]

RESIDENCY = [
    ("F s0 m0", "F s0 m0", "F needs the parameters of s0 on the device"),
    (
        "LOAD s0 param\nLOAD s1 param\nF s0 m0\nB s1 m0\nSTEP s1",
        "STEP s1",
        "STEP needs the optimizer state of s1 on the device. Put LOAD s1 state before it",
    ),
    ("LOAD s0 param\nLOAD s0 param+state", "LOAD s0 param+state", "are on the device already"),
    ("LOAD s0 param\nSTORE s0 state", "STORE s0 state", "the optimizer state of s0 are not on"),
    ("LOAD s0 param\nDROP s0 grad", "DROP s0 grad", "the gradients of s0 are not on the device"),
    ("LOAD s0 grad", "LOAD s0 grad", "the host has no gradients of s0"),
    (
        "LOAD s0 param\nLOAD s1 param\nF s0 m0\nB s1 m0\nDROP s1 param+grad",
        "DROP s1 param+grad",
        "the gradients of s1 are dirty",
    ),
    (
        "LOAD s0 param\nLOAD s1 param+state\nF s0 m0\nB s1 m0\nSTEP s1\nDROP s1 param",
        "DROP s1 param",
        "the parameters of s1 are dirty: only the device has them",
    ),
    (
        "LOAD s0 param\nLOAD s1 param\nF s0 m0\nF s0 m1\nB s1 m0\nSTORE s1 grad\nDROP s1 grad\n"
        "B s1 m1",
        "B s1 m1",
        "Put LOAD s1 grad before it",
    ),
]

LATE = [
    ("LOAD s0 param late", "LOAD s0 param late", "only a LOAD of state takes a late slot"),
    ("DROP s0 state late", "DROP s0 state late", "only a LOAD of state takes a late slot"),
    (
        "LOAD s0 param+state late",
        "LOAD s0 param+state late",
        "a late slot is beside the parameters. LOAD those by themselves",
    ),
    ("LOAD s0 state late", "LOAD s0 state late", "beside the parameters of s0. LOAD those first"),
    (
        "LOAD s0 param\nLOAD s0 state late\nDROP s0 param",
        "DROP s0 param",
        "the state of s0 is in a late slot beside them. DROP both",
    ),
    ("LOAD s0 param now", "LOAD s0 param now", "only a DROP of gradients, of a boundary"),
    (
        "LOAD s0 param\nDROP s0 param now",
        "DROP s0 param now",
        "only a DROP of gradients, of a boundary",
    ),
]

HOST_STEP = [
    (
        "LOAD s0 param\nLOAD s1 param\nF s0 m0\nB s1 m0\nSTEP@host s1",
        "STEP@host s1",
        "the host does not have all gradients of s1",
    ),
    (
        "LOAD s0 param\nLOAD s1 param\nF s0 m0\nB s1 m0\nSTORE s1 grad\nSTEP@host s1",
        "STEP@host s1",
        "device 0 still holds grad+param of s1",
    ),
    ("STEP@host s0 v1", "STEP@host s0 v1", "starts from version 0, not 1"),
]

END = [
    ("LOAD s0 param", "LOAD s0 param", "the parameters of s0 are still on the device at the end"),
    ("LOAD s0 param\nF s0 m0\nDROP s0 param", "F s0 m0", "Add F s1 m0"),
    (
        "LOAD s0 param\nLOAD s1 param\nF s0 m0\nB s1 m0\nSTORE s1 grad\nDROP s0 param\n"
        "DROP s1 param+grad\nSTEP@host s1",
        "B s1 m0",
        "the carry out of s1 of m0 is never used. Add B s0 m0",
    ),
]


@pytest.mark.parametrize(
    ("text", "culprit", "rule"), [*FORM, *ORDER, *RESIDENCY, *LATE, *HOST_STEP, *END]
)
def test_a_broken_rule_is_said_with_an_arrow_on_the_action(refusal_of, text, culprit, rule):
    message = refusal_of(text)
    assert rule in message
    arrow = re.search(r"^  (.*) <-- here$", message, re.MULTILINE)
    assert arrow is not None
    assert arrow[1] == culprit


def test_late_slots_are_counted_from_the_first_load_to_the_end(make_costs):
    program = spilled_step(2, clip=True, lookahead=0, weights=(0, 1), waits=(0,))
    costs, here = make_costs(2), kept((), (0, 1))
    running = dict(
        zip(
            map(str, program),
            check(program, costs, start=here, end=here).running_bytes,
            strict=True,
        )
    )
    held, late, gradients = 2 * 100, 200 + 80, 80
    stored = 80  # those of s1, on their way down until the next unit waits
    assert running["SYNC s0"] == held + gradients + stored
    assert running["LOAD s0 state late"] == held + gradients + stored + late
    assert running["STEP s0"] == held + gradients + late + 5
    assert running["LOAD s1 state+grad late"] == held + late
    assert running["DROP s1 state"] == held + late


def test_of_a_shard_with_a_head_the_rest_moves(make_costs):
    heads = {"head_bytes": 60}
    costs, here = make_costs(1, shard=heads), kept((), (), (0,))
    program = spilled_step(1, lookahead=0)
    found = check(program, costs, start=here, end=here)
    assert (found.up_bytes, found.down_bytes) == (100 - 60 + 200, 90 - 60 + 200)
    assert (found.kept_bytes, found.slot_bytes) == (60, 100 - 60 + 200)
    of_state = make_costs(1, shard={**heads, "head_of_state": True})
    here = kept((), (0,), (0,))
    program = spilled_step(1, lookahead=0, weights=(0,))
    found = check(program, of_state, start=here, end=here)
    assert (found.up_bytes, found.down_bytes) == (200 - 60, 200 - 60)
    assert (found.kept_bytes, found.slot_bytes) == (100 + 60, 200 - 60)


def test_a_unit_needs_its_shards_head(make_costs):
    with pytest.raises(ProgramError, match="needs the head of s0 on the device"):
        check(spilled_step(1), make_costs(1, shard={"head_bytes": 60}))


def test_a_stale_host_copy_is_not_loaded(refusal_of):
    text = "device 0\nLOAD s0 param+state\nB s0 m0\nSTEP s0\ndevice 1\nLOAD s0 param"
    message = refusal_of(text, 1)
    assert "the host copy of the parameters of s0 is stale" in message
    assert "device 1, action 1 of 1" in message


def test_gradients_on_the_host_must_be_stepped(refusal_of):
    text = "LOAD s0 param\nB s0 m0\nSTORE s0 grad\nDROP s0 param+grad"
    assert "the gradients of s0 on the host are never used. Add its STEP" in refusal_of(text, 1)


def test_gradients_on_the_device_must_be_stepped(refusal_of):
    message = refusal_of("B s0 m0", 1, start=RESIDENT, end=RESIDENT)
    assert "the gradients of s0 are still on the device at the end. Add the STEP" in message


def test_a_resident_shard_must_still_be_there_at_the_end(refusal_of):
    message = refusal_of(str(departure()), 1, start=RESIDENT, end=RESIDENT)
    assert "must be on the device at the end" in message


def test_a_resident_shard_is_dirty_from_the_start(refusal_of):
    assert "are dirty" in refusal_of("DROP s0 param+state", 1, start=RESIDENT)


def test_a_version_that_does_not_exist_yet_is_refused(refusal_of):
    message = refusal_of("B s0 m0 v1\nSTEP s0", 1, start=RESIDENT, end=RESIDENT)
    assert "version 1 of s0 does not exist yet: it has been stepped 0 times" in message


def test_forward_and_backward_use_the_same_version(refusal_of):
    text = (
        "LOAD s0 param+state\nLOAD s1 param+state\nF s0 m0\nF s0 m1\nB s1 m0\nB s0 m0\nSTEP s0\n"
        "B s0 m1 v1"
    )
    assert "B uses version 1 but F s0 m1 used version 0" in refusal_of(text)


def test_the_version_before_a_step_is_gone_after_it(refusal_of):
    text = f"{spilled_step(2)}\nLOAD s0 param\nF s0 m1"
    message = refusal_of(text)
    assert (
        "version 0 of s0 is gone: it has been stepped 1 times and 1 versions are kept" in message
    )


# Several devices


def test_a_receive_that_nobody_serves_is_named(refusal_of):
    message = refusal_of(PIPELINE.replace("SEND s1 m0 grad d0\n", ""))
    assert "device 1 never sends the carry out of s1 of m0 here. Add its SEND" in message
    assert "  RECV s1 m0 grad d1 <-- here" in message


def test_a_send_that_nobody_receives_is_named(refusal_of):
    text = PIPELINE.replace("RECV s1 m0 grad d1\nB s0 m0\nSTEP s0\nSTORE s0 param+state\n", "")
    assert "is sent to device 0, which never receives it" in refusal_of(text)


def test_a_send_of_what_is_not_there_is_refused(refusal_of):
    assert "is not on this device" in refusal_of(PIPELINE.replace("F s0 m0\n", ""))


def test_messages_are_received_in_the_order_in_which_they_were_sent(refusal_of):
    text = (
        "device 0\nLOAD s0 param\nF s0 m0\nF s0 m1\nSEND s1 m0 d1\nSEND s1 m1 d1\nDROP s0 param\n"
        "device 1\nRECV s1 m1 d0\nRECV s1 m0 d0"
    )
    assert "device 0 sent the boundary into s1 of m0 first" in refusal_of(text)


def test_a_deadlock_names_the_actions_that_wait(refusal_of):
    text = """
    device 0
    LOAD s0 param
    RECV s1 m0 grad d1
    F s0 m0
    SEND s1 m0 d1
    device 1
    LOAD s1 param
    RECV s1 m0 d0
    B s1 m0
    SEND s1 m0 grad d0
    """
    message = refusal_of(text)
    assert (
        "deadlock: device 0 waits at RECV s1 m0 grad d1 for device 1; "
        "device 1 waits at RECV s1 m0 d0 for device 0"
    ) in message


def test_a_host_step_is_refused_while_another_device_holds_the_shard(refusal_of):
    text = (
        "device 0\nLOAD s0 param\ndevice 1\nLOAD s0 param\nB s0 m0\nSTORE s0 grad\n"
        "DROP s0 param+grad\nSTEP@host s0"
    )
    assert "device 0 still holds param of s0" in refusal_of(text, 1)


# Steps in several programs


def joined(*programs):
    return single(action for program in programs for action in program)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("clip", [False, True])
def test_batches_and_their_finish_are_one_legal_step_when_joined(make_costs, clip, place):
    micros = [Route(3).micro(micro) for micro in range(3)]
    check(joined(*micros, Route(3, optimizer=place).finish(clip)), make_costs(3))


def test_resident_batches_and_a_step_are_one_legal_step_when_joined(make_costs):
    micros = [resident_micro(micro) for micro in range(3)]
    step = joined(*micros, parse_program("STEP s0"))
    check(step, make_costs(1), start=RESIDENT, end=RESIDENT)
