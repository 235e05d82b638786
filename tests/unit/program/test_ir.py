"""Actions and programs as text."""

import pytest

from shoal.core.errors import ProgramError
from shoal.program.ir import Action, Op, Part, Program, parse_action, parse_program, single

LINES = {
    "F s1 m0": Action(Op.F, 1, 0),
    "B s0 m2 v1": Action(Op.B, 0, 2, 1),
    "LOAD s2 param+state": Action(Op.LOAD, 2, parts=(Part.PARAM, Part.STATE)),
    "STEP s0": Action(Op.STEP),
    "STEP@host s3": Action(Op.STEP, 3, place="host"),
    "SEND s1 m0 grad d2": Action(Op.SEND, 1, 0, parts=(Part.GRAD,), peer=2),
    "RECV s1 m0 d0": Action(Op.RECV, 1, 0, peer=0),
    "SYNC s0 t4": Action(Op.SYNC, trial=4),
    "CKPT s0": Action(Op.CKPT),
}


@pytest.mark.parametrize(("line", "action"), LINES.items())
def test_an_action_and_its_text_are_the_same_thing(line, action):
    assert str(action) == line
    assert parse_action(line) == action


def test_a_program_of_one_device_is_one_action_a_line():
    program = single([Action(Op.F, 0, 0), Action(Op.F, 1, 0)])
    assert str(program) == "F s0 m0\nF s1 m0"
    assert parse_program(str(program)) == program


def test_a_program_of_several_devices_has_a_header_for_each():
    program = Program(((Action(Op.F, 0, 0),), (Action(Op.B, 1, 0),)))
    assert str(program) == "device 0\nF s0 m0\ndevice 1\nB s1 m0"
    assert parse_program(str(program)) == program


def test_comments_and_blank_lines_are_skipped():
    text = "# a step\n\nF s0 m0  # the first unit\n"
    assert parse_program(text) == single([Action(Op.F, 0, 0)])


def test_iterating_goes_through_all_devices():
    program = parse_program("device 0\nF s0 m0\ndevice 1\nB s1 m0\nSTEP s1")
    assert [action.op for action in program] == [Op.F, Op.B, Op.STEP]


def test_an_unknown_operation_names_the_known_ones():
    with pytest.raises(
        ProgramError, match=r"'JUMP' in 'JUMP s0' is no action; known are LOAD, STORE"
    ):
        parse_action("JUMP s0")


def test_an_unknown_place_is_no_action():
    with pytest.raises(ProgramError, match="'STEP@disk'"):
        parse_action("STEP@disk s0")


def test_an_unreadable_word_is_named():
    with pytest.raises(
        ProgramError, match=r"cannot read 'param\+x' in the action 'LOAD s0 param\+x'"
    ):
        parse_action("LOAD s0 param+x")
