"""Commands to a study that is not trained yet."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from shoal.control import Pause, Status, StopStudy
from shoal.core.errors import SpecError
from shoal.launch.commands import Door


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that this process sends itself."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    return sent


def test_what_is_planned_says_so_and_can_be_stopped(signals: list[int]) -> None:
    door, answers = Door(heeds_signals=True), list[Any]()
    door.deliver(Status(), answers.append)
    assert answers[0]["state"] == "planning"
    with pytest.raises(SpecError, match=r"being planned\. Ask again"):
        door.deliver(Pause(), answers.append)
    assert signals == []
    door.deliver(StopStudy(), answers.append)
    assert "nothing was trained" in answers[1]["text"]
    assert signals == [signal.SIGTERM]


def test_a_program_that_plans_a_study_in_a_thread_is_not_ended(signals: list[int]) -> None:
    with pytest.raises(SpecError, match="in a thread of a program, all of which would end"):
        Door(heeds_signals=False).deliver(StopStudy(), lambda answer: None)
    assert signals == []
