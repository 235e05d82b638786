"""Deleting studies: only studies, only those at rest, and never half of one."""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.core.errors import SpecError, StorageError
from shoal.core.event import Event
from shoal.observe import Database, StudyLock
from shoal.ui.cli import app
from shoal.ui.failures import ExitCode
from shoal.ui.rm import inspect, measure, remove, remove_studies
from shoal.ui.studies import study_directories

Events = Callable[..., Iterator[Event]]


class Terminal(io.StringIO):
    """Somebody who can be asked."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def runs(tmp_path: Path, study_events: Events) -> Path:
    """A directory with two studies, the first with a checkpoint of 1000 bytes."""
    for name in ("first", "second"):
        with Database(tmp_path / name) as log:
            log.write(study_events(4))
    weights = tmp_path / "first" / "trials" / "0000" / "weights"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(1000))
    return tmp_path


def _remove(*names: str, runs: Path, yes: bool = True, as_json: bool = False) -> int:
    return remove_studies(names, runs, yes=yes, as_json=as_json)


def test_a_study_is_deleted_and_its_neighbour_stays(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = measure(runs / "first")

    code = _remove("first", runs=runs)

    assert code == ExitCode.DONE
    assert [path.name for path in runs.iterdir()] == ["second"]
    assert size > 1000
    assert capsys.readouterr().out.startswith(f"deleted sweep ({runs / 'first'}): 4 trials, ")


def test_several_are_deleted_at_once_each_once(runs: Path) -> None:
    _remove("first", "second", str(runs / "first"), runs=runs)

    assert list(runs.iterdir()) == []


def test_of_several_none_is_touched_when_one_cannot_go(runs: Path) -> None:
    with pytest.raises(SpecError, match="there is no study 'third'"):
        _remove("first", "third", runs=runs)

    assert (runs / "first").exists()


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("YES\n", True), ("\n", False)])
def test_on_a_terminal_it_asks_and_shows_what_goes(
    runs: Path,
    answer: str,
    gone: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))

    code = _remove("first", runs=runs, yes=False)

    assert (runs / "first").exists() != gone
    assert code == (ExitCode.DONE if gone else ExitCode.USAGE)
    asked = capsys.readouterr().err
    assert "4 trials, " in asked
    assert "delete all of it, checkpoints too? [y/N]" in asked


def test_without_a_terminal_it_wants_yes(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))

    with pytest.raises(SpecError, match=r"needs a yes, .* no terminal to ask on. Pass --yes"):
        _remove("first", runs=runs, yes=False)

    assert (runs / "first").exists()


def test_a_running_study_is_refused(runs: Path) -> None:
    with (
        StudyLock(runs / "first"),
        pytest.raises(
            SpecError, match=r"first is running and is not deleted. Wait for it or stop"
        ),
    ):
        _remove("first", runs=runs)

    assert (runs / "first" / "trials").exists()


def test_a_study_that_starts_in_between_is_refused(runs: Path) -> None:
    inspect(runs / "first")

    with StudyLock(runs / "first"), pytest.raises(SpecError, match="running"):
        remove(runs / "first")

    assert (runs / "first").exists()


def test_a_directory_without_a_study_is_refused(runs: Path) -> None:
    (runs / "notes").mkdir()
    with Database(runs / "empty"):
        pass
    (runs / "empty" / "thesis.tex").write_text("precious")

    with pytest.raises(SpecError, match="there is no study 'notes'"):
        _remove("notes", runs=runs)
    with pytest.raises(SpecError, match="empty holds nothing that a study wrote, so it is not"):
        _remove("empty", runs=runs)

    assert (runs / "notes").exists()
    assert (runs / "empty").exists()


def test_a_database_of_another_program_is_refused(runs: Path) -> None:
    (runs / "optuna").mkdir()
    with sqlite3.connect(runs / "optuna" / "study.db") as connection:
        connection.execute("CREATE TABLE trials (number INTEGER)")
    connection.close()

    with pytest.raises(StorageError, match="optuna is not deleted: nothing in it says"):
        _remove("optuna", runs=runs)

    assert (runs / "optuna" / "study.db").exists()


def test_a_link_to_a_study_is_refused(runs: Path) -> None:
    (runs / "link").symlink_to(runs / "first")

    with pytest.raises(SpecError, match=r"is a link to .*first, and links are not followed"):
        _remove(str(runs / "link"), runs=runs)

    assert (runs / "first").exists()


def test_links_inside_are_deleted_and_not_followed(runs: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "mine").write_bytes(bytes(10**6))
    (runs / "first" / "data").symlink_to(data)
    assert measure(runs / "first") < 10**6

    _remove("first", runs=runs)

    assert (data / "mine").exists()


def test_a_file_that_several_checkpoints_have_counts_once(runs: Path) -> None:
    before = measure(runs / "first")
    (runs / "first" / "base").write_bytes(bytes(1000))
    os.link(runs / "first" / "base", runs / "first" / "again")
    assert measure(runs / "first") == before + 1000


def test_an_interrupted_removal_leaves_nothing_that_looks_like_a_study(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def interrupted(path: Path, **options: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _remove("first", runs=runs)
    monkeypatch.setattr(shutil, "rmtree", rmtree)

    assert [place.name for place in study_directories(runs)] == ["second"]
    assert (runs / ".first.removing").exists()


def test_what_an_interrupted_removal_left_goes_with_the_next(runs: Path) -> None:
    (runs / ".first.removing" / "trials").mkdir(parents=True)

    _remove("first", runs=runs)

    assert [path.name for path in runs.iterdir()] == ["second"]


def test_files_that_cannot_be_deleted_are_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", "weights")

    monkeypatch.setattr(shutil, "rmtree", refuse)

    with pytest.raises(StorageError, match=r"first is gone, but not all .*\.first\.removing"):
        _remove("first", runs=runs)


def test_a_study_is_deleted_from_inside_itself(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs / "first")

    _remove(".", runs=runs)

    assert not (runs / "first").exists()


def test_the_verb_says_what_it_deleted_as_json(runs: Path) -> None:
    words = ["rm", "second", "--yes", "--json", "--directory", str(runs)]

    result = CliRunner().invoke(app, words, catch_exceptions=False)

    (record,) = json.loads(result.stdout)
    assert record["study"] == "sweep"
    assert record["directory"] == str(runs / "second")
    assert record["trials"] == 4
    assert not (runs / "second").exists()
