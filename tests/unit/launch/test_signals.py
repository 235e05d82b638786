"""Ctrl-C while a study runs, at its last instant too."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any, cast

import pytest

from shoal.launch.signals import PAUSED, Interrupted, Interrupts
from shoal.runtime.pool import WorkerPool


class Pool:
    """Does at once what it is asked to do later."""

    def post(self, work: Any) -> None:
        work()


@pytest.fixture
def interrupts() -> Interrupts:
    return Interrupts(cast("WorkerPool", Pool()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_there_is_anything_to_save_the_first_signal_leaves(
    interrupts: Interrupts, number: signal.Signals
) -> None:
    with pytest.raises(Interrupted) as left, interrupts:
        signal.raise_signal(number)
    assert left.value.code == PAUSED


def test_one_that_planning_swallowed_leaves_before_anything_trains(interrupts: Interrupts) -> None:
    trained: list[str] = []

    def swallowing() -> None:
        with interrupts:
            with suppress(BaseException):
                signal.raise_signal(signal.SIGINT)
            interrupts.stop_by(lambda reason: None)
            trained.append("a step")

    with pytest.raises(Interrupted):
        swallowing()
    assert not trained


def test_the_first_one_stops_the_study_and_the_second_one_leaves(interrupts: Interrupts) -> None:
    asked: list[str] = []
    interrupts.stop = asked.append

    def twice() -> None:
        with interrupts:
            signal.raise_signal(signal.SIGINT)
            assert asked == ["SIGINT was received"]
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        twice()
    assert asked == ["SIGINT was received"]


def test_one_that_comes_when_nobody_looks_any_more_is_not_lost(interrupts: Interrupts) -> None:
    interrupts.stop = lambda reason: None
    with pytest.raises(Interrupted), interrupts:
        signal.raise_signal(signal.SIGTERM)


def test_an_error_on_the_way_is_what_counts(interrupts: Interrupts) -> None:
    interrupts.stop = lambda reason: None

    def failing() -> None:
        with interrupts:
            signal.raise_signal(signal.SIGINT)
            raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        failing()


def test_handlers_are_what_they_were_before(interrupts: Interrupts) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interrupts:
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
