"""No study waits for an MLflow that is away or slow, and what is lost is counted."""

from __future__ import annotations

import threading
import warnings
from collections import Counter

import pytest
from inmemory import (
    Away,
    Refused,
    Server,
    begun,
    finished,
    give,
    over,
    planned,
    started,
    step,
    steps,
)

from shoal.sinks import MLflowSink


@pytest.mark.parametrize("request_name", ["client", "search_runs", "create_run", "log_batch"])
def test_what_fails_is_tried_again_and_nothing_is_there_twice(
    server: Server, request_name: str
) -> None:
    left = 3

    def fails(name: str) -> None:
        nonlocal left
        if name == request_name and left:
            left -= 1
            raise Away("no route to host")

    server.trouble = fails
    sink = MLflowSink("http://there", every=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it depends on the threads whether one is said
        give(sink, [started(), planned(0), begun(0), *steps(0, 1, 4), finished(0, 4), over()])

    (run,) = server.runs.values()
    assert Counter(metric.step for metric in run.values if metric.key == "train_loss") == {
        number: 1 for number in range(1, 5)
    }
    assert run.info.status == "FINISHED"
    assert sink.dropped == 0
    assert left < 3


def test_what_came_while_a_request_failed_comes_after_it(server: Server) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def fails_once(name: str) -> None:
        if name == "log_batch" and not asked.is_set():
            asked.set()
            goes_on.wait(60)
            raise Away("no route to host")

    server.trouble = fails_once
    sink = give(MLflowSink("http://there", every=1), [started(), step(0, 1), step(0, 2)])
    assert asked.wait(60)
    give(sink, [planned(0, lr=0.5), step(0, 3), planned(0, lr=0.75), finished(0, 3)])
    goes_on.set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it depends on the threads whether one is said
        sink(over())

    (run,) = server.runs.values()
    assert [metric.step for metric in run.values] == [1, 2, 3]
    assert run.params == {"lr": "0.5"}
    assert sink.dropped == 0


def test_a_server_that_is_away_is_told_of_once_and_what_is_lost_is_counted(
    server: Server,
) -> None:
    def fails(name: str) -> None:
        raise Away("no route to host")

    server.trouble = fails
    sink = MLflowSink("postgresql://me:secret@there/runs", every=1, wait_s=0.1)

    def to_the_end() -> None:
        give(sink, [started(), planned(0), step(0, 1)])
        while not told.list:
            sink(step(0, 2))  # the thread notes the error at some moment after it was tried
        give(sink, [step(0, 3), over()])

    with pytest.warns(UserWarning, match="MLflowSink") as told:
        to_the_end()

    cannot, left = (str(warning.message) for warning in told)
    assert cannot == (
        "MLflowSink cannot log to postgresql://there/runs (Away: no route to host). The study "
        "goes on; up to 100000 values wait here until MLflow takes them."
    )
    assert f"(Away: no route to host): {sink.dropped} values dropped, 1 run not up to" in left
    assert sink.dropped >= 2  # steps 1 and 3, and those while nothing was known


def test_no_study_waits_long_for_a_server_that_hangs(server: Server) -> None:
    hangs, test_is_over = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        hangs.set()
        test_is_over.wait(60)

    server.trouble = hang
    sink = MLflowSink("http://there", every=1, wait_s=0.05)
    give(sink, [started(), step(0, 1)])
    assert hangs.wait(60)

    with pytest.warns(
        UserWarning, match=r"more than the 0\.05 s of wait_s\): 3 values dropped, 1"
    ):
        give(sink, [step(0, 2), step(0, 3), over()])

    assert sink.dropped == 3
    test_is_over.set()


def test_values_have_room_for_so_many_and_states_always(server: Server) -> None:
    waits, goes_on = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        waits.set()
        goes_on.wait(60)

    server.trouble = hang
    sink = MLflowSink("http://there", every=1, room=5)
    give(sink, [started(), begun(0)])
    assert waits.wait(60)
    give(sink, [*(step(0, number) for number in range(1, 9)), finished(0, 8)])
    goes_on.set()

    with pytest.warns(UserWarning, match="3 values dropped, 0 runs not up to date"):
        sink(over())

    (run,) = server.runs.values()
    assert [metric.step for metric in run.values] == [1, 2, 3, 4, 5]
    assert run.info.status == "FINISHED"


def test_what_mlflow_refuses_is_counted_and_holds_up_nothing(server: Server) -> None:
    deleted: list[str] = []

    def refuses(name: str) -> None:
        if name == "log_batch" and not deleted:
            deleted.append(name)
            raise Refused("the run is deleted")

    server.trouble = refuses
    sink = MLflowSink("http://there", every=1)

    with pytest.warns(
        UserWarning, match=r"Refused: the run is deleted\): 1 value dropped, 0 runs"
    ):
        give(sink, [started(), step(0, 1), step(1, 1), over()])

    assert [len(run.values) for run in server.runs.values()] == [0, 1]
