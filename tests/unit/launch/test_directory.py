"""A study's directory: made, taken up, replaced, or refused."""

from __future__ import annotations

import os
import signal
import socket
import warnings

import pytest
import studies

from shoal.core.errors import SpecError, StorageError
from shoal.launch.directory import RECORD, StudyDirectory
from shoal.observe.lock import StudyLock
from shoal.resume import describe_study


@pytest.fixture
def place(tmp_path):
    return tmp_path / "runs" / "k"


@pytest.fixture
def record(place):
    return describe_study(studies.make(place.parent))


@pytest.fixture
def settled(place, record):
    """A study that stands, with a file of its own."""
    with StudyDirectory(place, overwrite=False) as directory:
        directory.settle(record)
    (place / "trials").mkdir()
    return place


def die_in(work) -> None:
    """Do it in a process that is killed then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: it takes no lock
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_new_study_that_never_stood_leaves_no_trace(place):
    with StudyDirectory(place, overwrite=False) as directory:
        assert directory.recorded is None

    assert not place.exists()


def test_a_study_that_stands_is_taken_up_again(settled, record):
    with StudyDirectory(settled, overwrite=False) as directory:
        assert directory.recorded == record

    assert (settled / RECORD).exists()


def test_what_a_process_left_that_died_while_planning_is_taken(place):
    die_in(lambda: StudyDirectory(place, overwrite=False))
    assert {path.name for path in place.iterdir()} >= {"lock", "study.db"}

    with StudyDirectory(place, overwrite=False) as directory:
        assert directory.recorded is None

    assert not place.exists()


@pytest.mark.parametrize("name", ["notes.txt", "trials", ".hidden"])
def test_a_directory_with_something_of_somebody_elses_is_refused(place, name):
    place.mkdir(parents=True)
    (place / name).touch()

    for overwrite in (False, True):
        with pytest.raises(SpecError, match="deletes nothing that it did not write"):
            StudyDirectory(place, overwrite=overwrite)

    assert [path.name for path in place.iterdir()] == [name]


def test_a_study_that_lost_its_record_is_not_taken_for_somebody_elses(settled):
    (settled / RECORD).unlink()

    for overwrite in (False, True):
        with pytest.raises(StorageError, match=r"has no study.json, .* and has what one trained"):
            StudyDirectory(settled, overwrite=overwrite)

    assert (settled / "trials").exists()


def test_a_file_in_the_place_is_refused(place):
    place.parent.mkdir()
    place.touch()

    with pytest.raises(SpecError, match="is no directory"):
        StudyDirectory(place, overwrite=True)


def test_overwrite_sets_aside_and_gives_back_when_the_new_one_never_stood(settled, record):
    with StudyDirectory(settled, overwrite=True) as directory:
        assert directory.recorded is None
        assert not (settled / "trials").exists()

    with StudyDirectory(settled, overwrite=False) as directory:
        assert directory.recorded == record
    assert (settled / "trials").exists()


def test_overwrite_deletes_what_was_there_when_the_new_one_stands(settled, record):
    with StudyDirectory(settled, overwrite=True) as directory:
        directory.settle(record)

    assert not (settled / "trials").exists()
    assert [path.name for path in settled.parent.iterdir()] == ["k"]


def test_a_process_that_dies_while_it_replaces_a_study_has_not_replaced_it(settled, record):
    die_in(lambda: StudyDirectory(settled, overwrite=True))

    with StudyDirectory(settled, overwrite=False) as directory:
        assert directory.recorded == record
    assert (settled / "trials").exists()
    assert [path.name for path in settled.parent.iterdir()] == ["k"]


def test_a_process_that_dies_while_it_replaces_a_study_can_be_run_again(settled, record):
    die_in(lambda: StudyDirectory(settled, overwrite=True))

    with StudyDirectory(settled, overwrite=True) as directory:
        directory.settle(record)

    assert not (settled / "trials").exists()
    assert [path.name for path in settled.parent.iterdir()] == ["k"]


def test_what_a_killed_process_had_for_itself_is_swept(settled):
    (settled / "reserve").write_bytes(bytes(9))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(settled / "control.sock"))

    with StudyDirectory(settled, overwrite=False):
        pass

    assert not {"reserve", "control.sock"} & {path.name for path in settled.iterdir()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_study_that_another_holds_is_refused_and_left_alone(settled, overwrite):
    with (
        StudyLock(settled),
        pytest.raises(SpecError, match=rf"running already \(process {os.getpid()}\)"),
    ):
        StudyDirectory(settled, overwrite=overwrite)

    assert (settled / "trials").exists()


def test_a_study_that_was_moved_leaves_what_its_successor_replaces(settled, record):
    moved = StudyDirectory(settled, overwrite=False)
    moved.settle(record)
    settled.rename(settled.with_name("away"))
    with StudyDirectory(settled, overwrite=False) as later:
        later.settle(record)
        (settled / "precious").touch()
    with StudyDirectory(settled, overwrite=True):  # is planned
        moved.close()
    assert (settled / "precious").exists()  # its plan was refused


def test_a_directory_that_was_moved_away_is_noticed(settled):
    with StudyDirectory(settled, overwrite=False) as directory:
        directory.check()
        settled.rename(settled.with_name("away"))
        with pytest.raises(StorageError, match="moved, removed or replaced"):
            directory.check()


def test_a_run_whose_directory_was_moved_away_leaves_the_one_that_took_its_place(place, record):
    with StudyDirectory(place, overwrite=False) as moved:
        place.rename(place.with_name("elsewhere"))
        with StudyDirectory(place, overwrite=False) as directory:
            directory.settle(record)
            with pytest.raises(StorageError, match="moved"):
                moved.settle(record)
            moved.close()
            directory.check()
    assert (place / RECORD).exists()


def test_a_record_that_cannot_be_read_says_where_it_is_and_frees_the_lock(settled):
    (settled / RECORD).write_text("{")

    with pytest.raises(SpecError, match=str(settled / RECORD)):
        StudyDirectory(settled, overwrite=False)

    StudyLock(settled).close()


@pytest.mark.parametrize("name", ["trials", "trials/0000"])
def test_a_study_writes_nothing_through_a_link(name, tmp_path):
    place, outside = tmp_path / "study", tmp_path / "outside"
    outside.mkdir()
    (place / "trials").mkdir(parents=True)
    if name == "trials":
        (place / "trials").rmdir()
    (place / name).symlink_to(outside)
    (place / "study.json").write_text("{}")

    with pytest.raises(StorageError, match=r"is a symbolic link.*nothing outside"):
        StudyDirectory(place, overwrite=False)

    assert list(outside.iterdir()) == []
