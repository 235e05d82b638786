"""``shoal logs``: what a trial printed, and never what a terminal would obey."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.core.errors import SpecError
from shoal.core.event import Event
from shoal.observe import Database
from shoal.runtime.printing.triallog import log_path
from shoal.ui import logs
from shoal.ui.cli import app
from shoal.ui.logs import print_log, visible

Events = Callable[..., Iterator[Event]]


@pytest.fixture
def runs(tmp_path: Path, study_events: Events) -> Path:
    """A directory with a study of four trials, of which the first printed three lines."""
    with Database(tmp_path / "sweep") as database:
        database.write(study_events(4, failing=(2,)))
    path = log_path(tmp_path / "sweep", 0)
    path.parent.mkdir(parents=True)
    path.write_text("09:00 one\n09:01 \x1b[31mtwo\x07\n09:02 three\n")
    return tmp_path


def _invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["logs", *words], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_a_log_is_printed_with_its_escapes_to_be_seen(runs: Path) -> None:
    code, text, _ = _invoke("sweep", "0", "--directory", str(runs))

    assert code == 0
    assert text == "09:00 one\n09:01 \\x1b[31mtwo\\x07\n09:02 three\n"


def test_the_last_lines_alone(runs: Path) -> None:
    words = ("sweep", "0", "--directory", str(runs))

    assert _invoke(*words, "--tail", "1")[1] == "09:02 three\n"
    assert _invoke(*words, "--tail", "0")[1] == ""
    assert _invoke(*words, "--tail", "99")[1].count("\n") == 3
    with pytest.raises(SpecError, match="--tail is a number of lines from 0, got -1"):
        _invoke(*words, "--tail", "-1")


def test_a_trial_that_printed_nothing_is_told_apart_from_one_that_is_not_there(
    runs: Path,
) -> None:
    words = ("--directory", str(runs))

    code, text, said = _invoke("sweep", "2", *words)

    assert (code, text) == (0, "")
    assert said == "trial 2 of sweep is failed and has printed nothing\n"
    with pytest.raises(SpecError, match="sweep has no trial 9; it has 4, numbered from 0"):
        _invoke("sweep", "9", *words)


def test_following_prints_what_comes_and_once_more_after_the_end(tmp_path: Path) -> None:
    path, stream = tmp_path / "log.txt", io.StringIO()
    to_come = iter(["", "a\n", "b\n", "c\n"])
    printed: list[str] = []

    def wait() -> bool:
        printed.append(stream.getvalue())
        text = next(to_come)
        if text:
            with open(path, "a") as file:
                file.write(text)
        return text != "c\n"

    print_log(path, stream, wait=wait)

    assert printed == ["", "", "a\n", "a\nb\n"]
    assert stream.getvalue() == "a\nb\nc\n"


def test_following_a_study_that_does_not_run_ends_at_once(runs: Path) -> None:
    words = ("--directory", str(runs), "--follow")

    assert _invoke("sweep", "0", *words)[1].count("\n") == 3
    assert "printed nothing" in _invoke("sweep", "1", *words)[2]


def test_ctrl_c_is_the_way_to_end_following(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(place: Path) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "wait_while_running", interrupt)

    assert _invoke("sweep", "0", "--directory", str(runs), "-f")[0] == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢\tx\n", "plain é 漢\tx\n"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("left\u202eright", "left\\u202eright"),
        ("over\rwritten\n", "over\\rwritten\n"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_what_cannot_be_seen_is_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
