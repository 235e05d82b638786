"""Going on with a study from its directory: which file is loaded, and what it is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.control import CloneTrial, ExtendTrials
from shoal.core.errors import SpecError
from shoal.core.event import Event, StudyChanged
from shoal.observe import Database
from shoal.source import MODULE_NAME
from shoal.study import Study
from shoal.ui.flags import HardwareFlags
from shoal.ui.train import reopen_study, resume_study

Events = Callable[..., Iterator[Event]]
SOURCE = """
import shoal
study = shoal.Study("{}", shoal.Recipe(model=dict, data=dict), space={{"lr": 0.1}}, steps=1)
"""


@pytest.fixture(autouse=True)
def _forgotten_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, MODULE_NAME, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that defines the study ``sweep``."""
    path = tmp_path / "sweep.py"
    path.write_text(SOURCE.format("sweep"))
    return path


@pytest.fixture
def record(tmp_path: Path, study_events: Events) -> Callable[[str], Path]:
    """A function that makes a finished ``sweep`` which came from a source."""

    def make(source: str, arguments: tuple[str, ...] = ()) -> Path:
        first, *others = study_events(2)
        first = replace(first, source=source, arguments=arguments)  # type: ignore[type-var]
        with Database(tmp_path / "runs" / "moved") as database:
            database.write([first, *others])
        return tmp_path / "runs" / "moved"

    return make


def test_a_study_goes_on_in_its_own_directory(file: Path, record: Callable[[str], Path]) -> None:
    place = record(f"{file}:study")

    study = reopen_study(place)

    assert (study.name, study.directory) == ("sweep", place)
    assert study.source == f"{file}:study"


def test_a_file_that_moved_can_be_named(file: Path, record: Callable[[str], Path]) -> None:
    place = record("/nowhere/sweep.py:study")

    with pytest.raises(SpecError, match=r"defined in /nowhere/sweep.py, and that file is not "):
        reopen_study(place)
    assert reopen_study(place, str(file)).source == f"{file}:study"


def test_an_interactive_study_has_no_file(record: Callable[[str], Path]) -> None:
    with pytest.raises(SpecError, match=r"made interactively.*study.run\(resume=True\).*--file"):
        reopen_study(record(""))


def test_a_study_of_which_nothing_is_on_record_is_run_again(tmp_path: Path) -> None:
    with Database(tmp_path / "runs" / "gone"):
        pass
    with pytest.raises(SpecError, match=r"before anything of it was on record\. Run its file"):
        reopen_study(tmp_path / "runs" / "gone")


def test_a_file_of_another_study_is_refused(file: Path, record: Callable[[str], Path]) -> None:
    place = record(f"{file}:study")
    file.write_text(SOURCE.format("other"))

    with pytest.raises(SpecError, match=r"sweep.py:study defines study 'other', and .*moved hold"):
        reopen_study(place)


@pytest.mark.parametrize(
    ("asked", "passed"),
    [
        ({}, {}),
        ({"extend": 2}, {"extend": 2}),
        ({"extend": ExtendTrials(to=2)}, {"extend": ExtendTrials(to=2)}),
        ({"clones": [CloneTrial(trial=1)]}, {"clones": (CloneTrial(trial=1),)}),
    ],
)
def test_it_is_run_with_resume_and_what_else_is_wanted(
    file: Path,
    record: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: dict[str, Any],
    passed: dict[str, Any],
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(Study, "run", lambda self, **options: calls.append(options))
    place = record(f"{file}:study")

    code = resume_study(place, HardwareFlags("cpu:2", "8MiB"), **asked)

    (options,) = calls
    assert code == 0
    assert len(options.pop("hardware").devices) == 2
    assert options == {"resume": True, "workers": None, **passed}
    told = capsys.readouterr()
    first, second = told.err.splitlines()
    assert first == f"going on with study sweep in {place}, from {file}:study"
    assert second.startswith("nothing to train: 2 trials have ended.")
    assert f"shoal show {place}" in told.out


def test_what_was_added_is_said_above_a_live_table(
    file: Path,
    record: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(self: Study, *, callbacks: Any, **options: Any) -> None:
        for callback in callbacks:
            callback(StudyChanged(time=0.0, changes=("added trials 2, 3",)))

    monkeypatch.setattr(Study, "run", run)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    resume_study(record(f"{file}:study"), HardwareFlags("cpu:2"), extend=ExtendTrials(trials=2))

    assert capsys.readouterr().err.splitlines()[1] == "added trials 2, 3"


def test_its_file_finds_the_arguments_that_it_was_run_with(
    file: Path, record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["shoal", "resume", "moved"])
    file.write_text(f"import sys\nassert sys.argv[1:] == ['--width', '5']\n{file.read_text()}")

    reopen_study(record(f"{file}:study", arguments=("--width", "5")))

    assert sys.argv == [str(file), "--width", "5"]
