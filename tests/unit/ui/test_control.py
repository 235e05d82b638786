"""Orders to a study from the command line: what is sent, what is printed, what is refused."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.control import (
    CloneTrial,
    Command,
    Continue,
    ControlServer,
    ExtendTrials,
    NotRunning,
    Pause,
    Status,
    StopStudy,
    StopTrial,
)
from shoal.core.errors import SpecError
from shoal.core.event import Event, TrialPlanned
from shoal.core.spec import Scalar
from shoal.observe import Database, is_running
from shoal.observe.lock import StudyLock
from shoal.ui.cli import app

Events = Callable[..., Iterator[Event]]
POINTS: list[dict[str, Scalar]] = [
    {"lr": 0.1, "width": 8, "clip": None, "tied": True, "kind": "gpt"},
    {"lr": 0.2, "width": 8, "clip": 1.0, "tied": False, "kind": "gpt"},
]


@pytest.fixture
def runs(tmp_path: Path, study_events: Events) -> Path:
    """A directory with a study, ``sweep``, of two trials; no process runs it."""
    planned = [
        TrialPlanned(
            time=0.0,
            trial=number,
            hp=hp,
            seed=number,
            technique="Resident",
            shards=1,
            steps=9,
            peak_bytes=1,
            numerics={},
        )
        for number, hp in enumerate(POINTS)
    ]
    with Database(tmp_path / "sweep") as database:
        database.write([next(study_events(2)), *planned])
    (tmp_path / "sweep" / "study.json").write_text("{}")
    return tmp_path


@pytest.fixture
def running(runs: Path) -> Iterator[SimpleNamespace]:
    """The study as if a process ran it: ``orders`` it got; ``answers`` by kind of order."""
    fake = SimpleNamespace(runs=runs, orders=[], answers={})

    def deliver(command: Command, answer: Callable[[Mapping[str, Any]], None]) -> None:
        fake.orders.append(command)
        answer(fake.answers.get(type(command), {}))

    with ControlServer(runs / "sweep", deliver):
        yield fake


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, dict[str, Any]]]:
    """What would have been run in this process, instead of it."""
    calls: list[tuple[Path, dict[str, Any]]] = []

    def resume_study(place: Path, flags: Any, **options: Any) -> int:
        calls.append((place, {"flags": flags, **options}))
        return 1

    monkeypatch.setattr("shoal.ui.cli._warm_workers", contextlib.nullcontext)
    monkeypatch.setattr("shoal.ui.train.resume_study", resume_study)
    return calls


def _invoke(runs: Path, *words: str) -> tuple[int, str]:
    command = [*words, "--directory", str(runs)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    return result.exit_code, result.stdout


# ---------------------------------------------------------------- a study that runs


def test_a_study_that_was_stopped_is_let_go(running: SimpleNamespace) -> None:
    lock = StudyLock(running.runs / "sweep")
    threading.Timer(0.3, lock.close).start()
    assert _invoke(running.runs, "stop", "sweep")[0] == 0
    assert not is_running(running.runs / "sweep")  # so that rm has it


@pytest.mark.parametrize(
    ("words", "order", "said"),
    [
        (("stop", "sweep"), StopStudy(), "stopped; go on with it: shoal resume {}/sweep"),
        (
            ("stop", "sweep", "--grace", "5", "--reason", "enough"),
            StopStudy(reason="enough", grace_s=5.0),
            "stopped; go on with it: shoal resume {}/sweep",
        ),
        (("stop", "sweep", "1"), StopTrial(trial=1), "trial 1 stops; its state is kept"),
        (
            ("stop", "sweep", "1", "--reason", "seen enough"),
            StopTrial(trial=1, reason="seen enough"),
            "trial 1 stops; its state is kept",
        ),
        (("pause", "sweep"), Pause(), "paused; go on with it: shoal resume {}/sweep"),
        (("extend", "sweep", "--trials", "3"), ExtendTrials(trials=3), "3 more to train"),
        (
            ("extend", "sweep", "--trials", "3", "--again"),
            ExtendTrials(trials=3, again=True),
            "3 more to train",
        ),
        (("extend", "sweep", "--to", "5"), ExtendTrials(to=5), "5 trials in all"),
        (
            ("clone", "sweep", "1", "--set", "lr=1", "--set", "kind=bert", "--cold"),
            CloneTrial(trial=1, changes={"lr": 1.0, "kind": "bert"}, warm=False),
            "a clone of trial 1",
        ),
        (("clone", "sweep", "0"), CloneTrial(trial=0), "a clone of trial 0"),
        (
            ("clone", "sweep", "0", "--again"),
            CloneTrial(trial=0, again=True),
            "a clone of trial 0",
        ),
    ],
)
def test_an_order_is_sent_and_what_came_of_it_is_printed(
    running: SimpleNamespace, words: tuple[str, ...], order: Command, said: str
) -> None:
    assert _invoke(running.runs, *words) == (0, said.format(running.runs) + "\n")
    assert running.orders == [order]


def test_the_studys_own_words_are_printed(running: SimpleNamespace) -> None:
    running.answers[ExtendTrials] = {"text": "trials 2 and 3 wait for a device", "trials": [2, 3]}

    assert _invoke(running.runs, "extend", "sweep", "--trials", "2")[1] == (
        "trials 2 and 3 wait for a device\n"
    )


def test_a_script_reads_the_answer_as_json(running: SimpleNamespace) -> None:
    running.answers[CloneTrial] = {"text": "trial 2", "trial": 2}

    text = _invoke(running.runs, "clone", "sweep", "1", "--set", "lr=0.5", "--json")[1]

    assert json.loads(text) == {"text": "trial 2", "trial": 2}


def test_a_paused_study_goes_on(running: SimpleNamespace) -> None:
    running.answers[Status] = {"state": "paused"}

    code, text = _invoke(running.runs, "resume", "sweep")

    assert (code, running.orders) == (0, [Status(), Continue()])
    assert text == f"the study in {running.runs}/sweep goes on\n"


def test_a_study_that_runs_is_not_resumed(running: SimpleNamespace) -> None:
    running.answers[Status] = {"state": "running", "pid": 17}

    with pytest.raises(SpecError, match=r"sweep is running already \(process 17\). Look at it:"):
        _invoke(running.runs, "resume", "sweep")
    assert running.orders == [Status()]


@pytest.mark.parametrize(
    "words",
    [
        ("resume", "sweep"),
        ("extend", "sweep", "--trials", "1"),
        ("clone", "sweep", "0"),
    ],
)
def test_a_running_study_keeps_its_devices(
    running: SimpleNamespace, words: tuple[str, ...]
) -> None:
    running.answers[Status] = {"state": "paused"}

    with pytest.raises(SpecError) as refused:
        _invoke(running.runs, *words, "--devices", "cpu:2", "--host-memory", "1GiB")

    assert "is running, and --devices, --host-memory cannot be changed under way" in str(
        refused.value
    )
    assert "Stop it first (shoal stop " in str(refused.value)
    assert running.orders == [Status()]


def test_a_refusal_is_an_error(running: SimpleNamespace) -> None:
    running.answers[StopTrial] = {"error": "there is no trial 9; there are 2, numbered from 0."}

    with pytest.raises(SpecError, match="there is no trial 9; there are 2"):
        _invoke(running.runs, "stop", "sweep", "9")


# ---------------------------------------------------------------- a study that does not run


@pytest.mark.parametrize("words", [("stop", "sweep"), ("stop", "sweep", "1"), ("pause", "sweep")])
def test_what_does_not_run_cannot_be_stopped(runs: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(NotRunning, match=r"sweep is not running. Go on with it: shoal resume "):
        _invoke(runs, *words)


@pytest.mark.parametrize(
    "words", [("stop", "other"), ("resume", "other"), ("clone", "other", "0")]
)
def test_a_study_that_is_not_there_is_named(runs: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError, match=r"no study 'other' in .*; the studies there: sweep"):
        _invoke(runs, *words)


@pytest.mark.parametrize(
    ("words", "extend", "clones"),
    [
        (("resume", "sweep"), None, []),
        (("extend", "sweep", "--trials", "3"), ExtendTrials(trials=3), []),
        (("extend", "sweep", "--to", "3"), ExtendTrials(to=3), []),
        (
            ("clone", "sweep", "1", "--set", "width=16", "--again"),
            None,
            [CloneTrial(trial=1, changes={"width": 16}, again=True)],
        ),
    ],
)
def test_what_does_not_run_is_run_again(
    runs: Path,
    started: list[tuple[Path, dict[str, Any]]],
    words: tuple[str, ...],
    extend: ExtendTrials | None,
    clones: list[CloneTrial],
) -> None:
    options = ("--devices", "cpu:2", "--device-memory", "1MiB", "--file", "moved.py", "--json")

    code, _ = _invoke(runs, *words, *options)

    ((place, given),) = started
    assert (code, place) == (1, runs / "sweep")
    assert given["flags"] == ("cpu:2", "1MiB", None, None)
    assert (given["file"], given["as_json"]) == ("moved.py", True)
    assert (given["extend"], list(given["clones"])) == (extend, clones)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lr=1e-3", 0.001),
        ("lr=2", 2.0),
        ("width=16", 16),
        ("clip=none", None),
        ("clip=0.5", 0.5),
        ("tied=false", False),
        ("tied=Yes", True),
        ("kind=a=b", "a=b"),
        ("kind=16", "16"),
        ("kind=", ""),
    ],
)
def test_a_value_has_the_type_that_the_study_has(
    running: SimpleNamespace, text: str, value: Scalar
) -> None:
    _invoke(running.runs, "clone", "sweep", "0", "--set", text)

    (order,) = running.orders
    (found,) = order.changes.values()
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("0", "--set", "lr"), r"--set takes NAME=VALUE, such as --set lr=0.001, got 'lr'"),
        (("0", "--set", "rate=1"), r"trial 0 has no hyperparameter 'rate'; it has 'lr', 'width'"),
        (("0", "--set", "width=0.5"), r"'width' is a whole number in this study, got '0.5'"),
        (("0", "--set", "tied=maybe"), r"'tied' is true or false in this study, got 'maybe'"),
        (("0", "--set", "clip=some"), r"'clip' is None or a number in this study, got 'some'"),
        (("0", "--set", "lr=inf"), r"changes is hyperparameters by name"),
        (("0", "--set", "lr=1", "--set", "lr=2"), r"--set lr=... is given twice"),
        (("7",), r"study sweep has no trial 7; it has 2, numbered from 0"),
    ],
)
def test_a_clone_that_cannot_be_meant_is_refused_before_it_is_sent(
    running: SimpleNamespace, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        _invoke(running.runs, "clone", "sweep", *words)
    assert running.orders == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trials", "0"), "trials is how many more trials, from 1, got 0"),
        (("--to", "-1"), "to is how many trials in all, from 1, got -1"),
        ((), r"got trials=None and to=None\. Give one of them"),
        (("--trials", "3", "--to", "8"), r"got trials=3 and to=8\. Give one of them: --to where"),
        (("--to", "8", "--again"), r"to=8 \(--to\) only what is missing\. Give .*--trials N"),
    ],
)
def test_an_extension_that_cannot_be_meant_is_refused_before_it_is_sent(
    running: SimpleNamespace, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        _invoke(running.runs, "extend", "sweep", *words)
    assert running.orders == []


def test_the_verbs_are_in_the_help() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout

    for verb in ("stop", "pause", "resume", "extend", "clone"):
        assert f"\n  {verb} " in text
