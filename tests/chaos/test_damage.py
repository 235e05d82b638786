"""Whatever happened to a study's files, no bad byte is used, and what is left is told."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import studies
import xxhash
from processes import until

import shoal
from shoal.core.errors import ShoalError, SpecError, StorageError
from shoal.core.event import CheckpointDamaged, StepFinished, StudyFinished, TrialRestarted
from shoal.observe import read_events
from shoal.runtime import checkpoint
from shoal.ui.failures import ExitCode, exit_code

pytestmark = pytest.mark.slow

NO_SOCKETS = shutil.ignore_patterns("*.sock")

_OTHER_PROCESS = """
import sys
from shoal.observe.lock import StudyLock
lock = StudyLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def run(study, workers, **options):
    shown = {"progress": False, "timeline": False, "workers": workers}
    return study.run(hardware=studies.hardware(1), **(shown | options))


def make(folder: Path):
    return studies.make(folder, kinds=["resident"], checkpoint_every=0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, warm_workers):
    """A folder with a study that was interrupted, with two generations of its trial."""
    folder = tmp_path_factory.mktemp("recorded")

    def interrupt(event) -> None:
        if isinstance(event, StepFinished) and event.step == 12:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(make(folder), warm_workers, callbacks=[interrupt])
    return folder


@pytest.fixture
def study(recorded, tmp_path):
    """A copy of it, for the test to damage."""
    shutil.copytree(recorded / "k", tmp_path / "k", ignore=NO_SOCKETS)
    return make(tmp_path)


def saved(study):
    """The generations of its trial, oldest first."""
    return checkpoint.generations(study.directory, 0).all()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def written(study, kind) -> list:
    return [event for event in read_events(study.directory) if isinstance(event, kind)]


def content(study) -> dict[str, bytes]:
    """Every file but SQLite's and the lock's."""
    files = (path for path in study.directory.rglob("*") if path.is_file())
    return {str(p): p.read_bytes() for p in files if not p.name.startswith(("study.db", "lock"))}


# -- generations ------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink], ids=["flipped bit", "cut", "removed"])
@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors", "manifest.json"])
def test_a_damaged_generation_costs_the_steps_since_the_one_before(
    study, warm_workers, name, harm
):
    before, newest = saved(study)
    harm(newest.path / name)

    run(study, warm_workers)

    studies.check_alone(study.directory)
    (told,) = written(study, CheckpointDamaged)
    assert (told.trial, told.path) == (0, f"trials/0000/{newest.path.name}")
    assert name in told.reason
    assert [event.step for event in written(study, TrialRestarted)] == [before.step]


def test_with_both_generations_damaged_the_trial_begins_anew(study, warm_workers):
    for generation in saved(study):
        flip(generation.path / "weights.safetensors")

    run(study, warm_workers)

    studies.check_alone(study.directory)
    assert len(written(study, CheckpointDamaged)) == 2
    assert [event.step for event in written(study, TrialRestarted)] == [0]


def test_a_generation_that_is_gone_costs_the_steps_since_the_one_before(study, warm_workers):
    before, newest = saved(study)
    shutil.rmtree(newest.path)

    run(study, warm_workers)

    studies.check_alone(study.directory)
    assert [event.step for event in written(study, TrialRestarted)] == [before.step]


def test_with_all_trials_gone_they_begin_anew(study, warm_workers):
    shutil.rmtree(study.directory / "trials")

    run(study, warm_workers)

    studies.check_alone(study.directory)


def test_what_is_not_shoals_is_left_alone(study, warm_workers):
    mine = [study.directory / "trials" / name / "a.txt" for name in ("notes", "0000/step-mine")]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("mine")

    run(study, warm_workers)

    studies.check_alone(study.directory)
    assert [path.read_text() for path in mine] == ["mine", "mine"]


def test_a_generation_of_a_newer_format_is_not_touched(study, warm_workers):
    path = saved(study)[-1].path / "manifest.json"
    text = path.read_bytes().replace(b'"format": 1', b'"format": 99')[
        : -len(',"digest":""}\n') - 32
    ]
    digest = xxhash.xxh3_128_hexdigest(text)
    path.write_bytes(text + f',"digest":"{digest}"}}\n'.encode())
    before = content(study)

    with pytest.raises(StorageError, match="has format 99"):
        run(study, warm_workers)

    assert content(study) == before


def test_without_its_database_a_study_goes_on_from_its_generations(study, warm_workers):
    newest = saved(study)[-1]
    (study.directory / "study.db").unlink()

    report = run(study, warm_workers)

    assert [event.step for event in written(study, TrialRestarted)] == [newest.step]
    plain = studies.alone("resident", 3e-3, 0, 3)
    assert shoal.testing.compare(plain, report.trials[0].load_state()).equal


# -- the record and the database --------------------------------------------------------------


def newer_record(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


def torn_record(path: Path) -> None:
    path.write_text(path.read_text()[:100])


def foreign_record(path: Path) -> None:
    path.write_text('{"name": "mine"}')


def binary_record(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (newer_record, "format 99.*newer"),
        (torn_record, "Nothing was changed|nothing was changed"),
        (foreign_record, "Nothing was changed"),
        (binary_record, "cannot be read"),
    ],
)
def test_a_record_that_cannot_be_believed_stops_everything(study, warm_workers, harm, words):
    harm(study.directory / "study.json")
    before = content(study)

    with pytest.raises(ShoalError, match=words) as error:
        run(study, warm_workers)

    assert "study.json" in str(error.value)
    assert content(study) == before


def cut_database(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def foreign_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()


def newer_database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def no_database(path: Path) -> None:
    path.write_text("this is a letter to my mother " * 300)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut_database, "checkpoints under trials/ are files of their own"),
        (foreign_database, "another program.*Nothing was changed"),
        (newer_database, "format 99.*Nothing was changed"),
        (no_database, "checkpoints under trials/ are files of their own"),
    ],
)
def test_a_database_that_cannot_be_believed_stops_everything(study, warm_workers, harm, words):
    path = study.directory / "study.db"
    harm(path)
    before, damaged = content(study), path.read_bytes()

    with pytest.raises(StorageError, match=words):
        run(study, warm_workers)

    assert content(study) == before
    assert path.read_bytes() == damaged


# -- the directory ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "named"),
    [("/proc/shoal", "/proc/shoal"), ("/dev/null/a", "/dev/null"), ("file",) * 2],
)
def test_a_directory_that_cannot_be_made_is_a_clear_error(place, named, tmp_path, warm_workers):
    (tmp_path / "file").write_text("mine")
    study = make(tmp_path / place)

    with pytest.raises(StorageError, match=r"cannot (make the directory|look at)") as error:
        run(study, warm_workers)

    assert named in str(error.value)


@pytest.mark.parametrize("what", ["nothing", "another"])
def test_a_directory_that_vanishes_ends_the_run_and_can_be_put_back(
    what, study, tmp_path, warm_workers
):
    away, copy = tmp_path / "away", tmp_path / "copy"
    shutil.copytree(study.directory, copy)

    def move(event) -> None:
        if isinstance(event, StepFinished):
            study.directory.rename(away)
            if what == "another":
                copy.rename(study.directory)

    with pytest.raises(StorageError, match="moved, removed or replaced") as error:
        run(study, warm_workers, callbacks=[move])

    assert exit_code(error.value) == ExitCode.STORAGE
    if what == "another":  # a worker may be writing there for a moment
        until(lambda: is_removed(study.directory), "it came back")
    assert not study.directory.exists(), "nobody made it anew"
    away.rename(study.directory)
    run(study, warm_workers)
    studies.check_alone(study.directory)


def is_removed(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def test_a_second_process_is_refused_by_the_first_ones_number(study, warm_workers):
    command = [sys.executable, "-c", _OTHER_PROCESS, str(study.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(SpecError, match=f"process {other.pid}"):
            run(study, warm_workers)
        assert other.poll() is None
        other.kill()

    run(study, warm_workers)  # a crash has freed it

    studies.check_alone(study.directory)


def test_a_study_that_runs_is_refused_to_its_own_process(study, warm_workers):
    refused = []

    def again(event) -> None:
        if isinstance(event, StepFinished) and not refused:
            with pytest.raises(SpecError, match="running already"):
                run(make(study.directory.parent), None)
            refused.append(event)

    run(study, warm_workers, callbacks=[again])

    assert refused
    studies.check_alone(study.directory)


def test_a_clock_that_jumps_back_a_year_changes_no_order(study, warm_workers, monkeypatch):
    now = time.time
    steps = []

    def jump(event) -> None:
        if isinstance(event, StepFinished):
            steps.append(event.step)
            if event.step == 20:
                monkeypatch.setattr(time, "time", lambda: now() - 365 * 86400)

    report = run(study, warm_workers, callbacks=[jump])

    studies.check_alone(study.directory)
    assert steps == sorted(steps)
    recorded = [event.step for event in written(study, StepFinished)]
    assert recorded[-len(steps) :] == steps
    assert report.wall_seconds >= 0
    last = list(read_events(study.directory))[-1]
    assert isinstance(last, StudyFinished)
    assert last.seconds >= 0
