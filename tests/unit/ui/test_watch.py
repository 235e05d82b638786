"""``shoal watch``: a study of another process, followed by what it writes."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.core.errors import SpecError
from shoal.core.event import Event, StudyChanged
from shoal.observe import Database, StudyLock
from shoal.ui import watch
from shoal.ui.cli import app
from shoal.ui.dashboard import LiveTable
from shoal.ui.failures import ExitCode
from shoal.ui.lines import PlainLines
from shoal.ui.watch import follow, watch_study

Events = Callable[..., Iterator[Event]]


def _being_planned(place: Path) -> StudyLock:
    """A study's directory as it is before anything is on record; the lock is held."""
    place.mkdir()
    lock = StudyLock(place)
    lock.__enter__()
    with Database(place, lock=lock):
        pass
    return lock


def _write(place: Path, events: Iterator[Event]) -> None:
    with Database(place) as database:
        database.write(events)


def test_lines_begin_where_the_study_is_and_go_on_to_what_came_last(
    study_events: Events,
) -> None:
    stream, events = io.StringIO(), study_events(2)
    more = iter([True, False])

    follow(lambda: islice(events, 60), PlainLines(stream), wait=lambda: next(more))

    first, *others = stream.getvalue().splitlines()
    assert first.startswith("sweep: step ")
    assert any(line.startswith("trial 0 step") for line in others)
    assert next(more, None) is None  # it looked as long as the study ran, and once more


def test_a_table_is_drawn_after_each_look_though_events_came_at_once(
    study_events: Events,
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=20)
    events, more = study_events(2), iter([False])
    screen = LiveTable(console, clock=lambda: 0.0)

    with screen:
        follow(lambda: islice(events, 400), screen, wait=lambda: next(more))

    assert "2 finished" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("failing", "code"), [((), ExitCode.DONE), ((1,), ExitCode.TRIALS_FAILED)]
)
def test_one_that_has_ended_is_told_with_the_exit_code_of_its_run(
    tmp_path: Path, study_events: Events, failing: tuple[int, ...], code: ExitCode
) -> None:
    _write(tmp_path / "sweep", study_events(4, failing=failing))

    result = CliRunner().invoke(app, ["watch", "--directory", str(tmp_path)])

    assert result.exit_code == code
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"sweep: {4 - len(failing)} trials finished, {len(failing)} failed")


def test_one_whose_process_is_gone_is_told_how_to_go_on(
    tmp_path: Path, study_events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "sweep", study_events(4, upto=9))

    assert watch_study("sweep", tmp_path) == ExitCode.PAUSED

    said = capsys.readouterr()
    assert said.out.startswith("sweep: step ")
    assert f"shoal resume {tmp_path / 'sweep'}" in said.err


def test_one_that_is_being_planned_is_waited_for(
    tmp_path: Path,
    study_events: Events,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lock = _being_planned(tmp_path / "sweep")

    def plans_and_ends(place: Path) -> bool:
        lock.__exit__(None, None, None)
        _write(place, study_events(4))
        monkeypatch.setattr(watch, "wait_while_running", lambda place: False)
        return True

    monkeypatch.setattr(watch, "wait_while_running", plans_and_ends)

    assert watch_study("sweep", tmp_path) == ExitCode.DONE
    assert "4 trials finished" in capsys.readouterr().out


def test_ctrl_c_leaves_the_study_alone(
    tmp_path: Path,
    study_events: Events,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(place: Path) -> bool:
        raise KeyboardInterrupt

    _write(tmp_path / "sweep", study_events(4, upto=9))
    monkeypatch.setattr(watch, "wait_while_running", interrupt)

    with StudyLock(tmp_path / "sweep"):
        assert watch_study("sweep", tmp_path) == ExitCode.PAUSED
    assert capsys.readouterr().err == "the study goes on\n"


def test_one_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, study_events: Events
) -> None:
    _write(tmp_path / "sweep", study_events(1))

    with pytest.raises(SpecError, match=r"no study 'other' .*: sweep"):
        watch_study("other", tmp_path)


def test_what_is_written_after_the_end_does_not_hide_how_it_ended(
    tmp_path: Path, study_events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = StudyChanged(time=1e9, changes=("keep is 3, was 2",))
    _write(tmp_path / "sweep", chain(study_events(2), [changed]))

    watch_study("sweep", tmp_path)

    assert capsys.readouterr().out.startswith("sweep: 2 trials finished")


def test_one_that_is_planned_again_is_said_to_be(
    tmp_path: Path,
    study_events: Events,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _write(tmp_path / "sweep", study_events(1))
    monkeypatch.setattr(watch, "wait_while_running", lambda place: False)

    with StudyLock(tmp_path / "sweep"):
        watch_study("sweep", tmp_path)

    assert "planned again" in capsys.readouterr().err


def test_one_whose_run_was_refused_leaves_nothing_to_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = _being_planned(tmp_path / "sweep")

    def refused(place: Path) -> bool:
        lock.__exit__(None, None, None)
        shutil.rmtree(place)
        return False

    monkeypatch.setattr(watch, "wait_while_running", refused)
    with pytest.raises(SpecError, match="was refused, and nothing is left"):
        watch_study("sweep", tmp_path)


def test_a_reader_that_has_read_enough_ends_it(tmp_path: Path, study_events: Events) -> None:
    _write(tmp_path / "sweep", study_events(1, upto=9))
    program = (
        "import sys; from pathlib import Path; from shoal.ui import watch\n"
        f"sys.exit(watch.watch_study('sweep', Path({str(tmp_path)!r})))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with StudyLock(tmp_path / "sweep"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    os.close(writer)

    assert (done.returncode, done.stderr) == (ExitCode.PAUSED, "")
