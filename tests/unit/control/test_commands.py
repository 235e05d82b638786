"""Commands as JSON: what is read is what was sent, and nothing else is believed."""

from __future__ import annotations

import json
import sys
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.control import (
    CloneTrial,
    Continue,
    ExtendTrials,
    Pause,
    Status,
    StopStudy,
    StopTrial,
)
from shoal.control.commands import MAX_LINE_BYTES, command_from_json, command_to_json
from shoal.core.errors import SpecError

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers() | FINITE | st.text(max_size=9)
COMMANDS = (
    st.builds(StopStudy, reason=st.text(max_size=99), grace_s=FINITE.map(abs))
    | st.builds(StopTrial, trial=st.integers(0))
    | st.sampled_from([Pause(), Continue(), Status()])
    | st.builds(ExtendTrials, trials=st.integers(1), again=st.booleans())
    | st.builds(ExtendTrials, to=st.integers(1))
    | st.builds(
        CloneTrial,
        trial=st.integers(0),
        changes=st.dictionaries(st.text(max_size=9), SCALARS, max_size=3),
        warm=st.booleans(),
        again=st.booleans(),
    )
)


@settings(deadline=None)
@given(COMMANDS)
def test_a_command_survives_its_line(command: object) -> None:
    line = command_to_json(command)

    assert "\n" not in line
    assert command_from_json(line) == command


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "one JSON object on one line"),
        ("{", "one JSON object on one line"),
        ("[" * 60000, "one JSON object on one line"),
        ('{"command": "StopTrial", "trial": 1, "trial": 2}', "the same name twice"),
        ('{"command": "StopStudy", "grace_s": NaN}', "NaN is no JSON"),
        ("[]", "a command is a JSON object, got list"),
        ("{}", "a command's kind is one of StopStudy, StopTrial, Pause"),
        ('{"command": "__init__"}', "a command's kind is one of"),
        ('{"command": ["Pause"]}', "a command's kind is one of"),
        ('{"command": "Pause", "now": true}', "Pause has no 'now'; it has nothing"),
        ('{"command": "StopTrial", "trail": 3}', "StopTrial has no 'trail'; it has trial"),
        ('{"command": "StopTrial"}', "StopTrial needs 'trial', which is missing"),
        ('{"command": "StopTrial", "trial": true}', "trial is a trial's number, from 0, got True"),
        ('{"command": "StopTrial", "trial": -1}', "trial is a trial's number, from 0, got -1"),
        ('{"command": "StopTrial", "trial": 1.0}', "trial is a trial's number, from 0, got 1.0"),
        ('{"command": "ExtendTrials", "trials": 0}', "how many more trials, from 1, got 0"),
        ('{"command": "ExtendTrials", "to": 0}', "how many trials in all, from 1, got 0"),
        ('{"command": "ExtendTrials", "trials": 1, "again": 1}', "again is true or false, got 1"),
        ('{"command": "ExtendTrials"}', "got trials=None and to=None. Give one of them"),
        (
            '{"command": "ExtendTrials", "trials": 3, "to": 8}',
            "a study is extended by trials=N (--trials N), so many more, or by to=N (--to N), so "
            "many in all, got trials=3 and to=8. Give one of them: --to where the number in all "
            "counts.",
        ),
        (
            '{"command": "ExtendTrials", "to": 8, "again": true}',
            "again=True (--again) adds so many trials once more, and to=8 (--to) only what is "
            "missing",
        ),
        ('{"command": "StopStudy", "grace_s": -1}', "grace_s is seconds from 0, got -1"),
        ('{"command": "StopStudy", "grace_s": 1e999}', "grace_s is seconds from 0, got inf"),
        ('{"command": "StopStudy", "reason": 3}', "reason is a text of at most 1000 characters"),
        (
            '{"command": "CloneTrial", "trial": 0, "changes": {"lr": [1]}}',
            "changes is hyperparameters by name",
        ),
        ('{"command": "CloneTrial", "trial": 0, "warm": 1}', "warm is true or false, got 1"),
    ],
)
def test_what_is_no_command_is_refused_with_the_key_and_what_was_found(
    text: str, said: str
) -> None:
    with pytest.raises(SpecError) as refused:
        command_from_json(text)

    assert said in str(refused.value)


def test_a_wrong_value_is_refused_before_it_is_sent() -> None:
    with pytest.raises(SpecError, match="how many more trials, from 1, got -2"):
        command_to_json(ExtendTrials(trials=-2))


def test_an_order_of_a_version_that_could_not_repeat_is_understood() -> None:
    assert command_from_json('{"command": "ExtendTrials", "trials": 2}') == ExtendTrials(trials=2)
    assert command_from_json('{"command": "CloneTrial", "trial": 1}') == CloneTrial(trial=1)


def test_a_line_that_would_not_be_read_is_not_sent() -> None:
    changes = {"text": "x" * MAX_LINE_BYTES}

    with pytest.raises(SpecError, match=f"at most {MAX_LINE_BYTES} are read"):
        command_to_json(CloneTrial(trial=0, changes=changes))


def test_any_mapping_can_hold_changes() -> None:
    changes = MappingProxyType({"lr": 0.1})

    assert json.loads(command_to_json(CloneTrial(trial=1, changes=changes)))["changes"] == {
        "lr": 0.1
    }


def test_a_huge_number_is_refused_and_not_computed() -> None:
    digits = "9" * (sys.get_int_max_str_digits() + 1)

    with pytest.raises(SpecError, match="one JSON object"):
        command_from_json('{"command": "StopTrial", "trial": ' + digits + "}")
