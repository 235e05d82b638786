"""The lock of a study's directory: one process at a time, and none that died."""

import os
import subprocess
import sys

import pytest

from shoal.core.errors import SpecError, StorageError
from shoal.observe import StudyLock, is_running

HOLD = """
import sys
from shoal.observe.lock import StudyLock
lock = StudyLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_who_holds_it(tmp_path, holder):
    said = rf"has another writer: is this study running already \(process {holder.pid}\)\? Wait"

    with pytest.raises(SpecError, match=said):
        StudyLock(tmp_path)


def test_a_killed_process_lets_go_of_it(tmp_path, holder):
    assert is_running(tmp_path)

    holder.kill()
    holder.wait()

    assert not is_running(tmp_path)
    StudyLock(tmp_path).close()


def test_a_process_does_not_get_it_twice(tmp_path):
    with StudyLock(tmp_path):
        assert is_running(tmp_path)
        with pytest.raises(SpecError, match="has another writer"):
            StudyLock(tmp_path)

    assert not is_running(tmp_path)


def test_asking_does_not_take_it(tmp_path):
    StudyLock(tmp_path).close()
    descriptor = os.open(tmp_path / "lock", os.O_RDONLY)
    os.close(descriptor)

    assert not is_running(tmp_path)
    with StudyLock(tmp_path):
        pass


@pytest.mark.parametrize("words", [b"", b"process x", b"\xff\xfe", b"process 12345678901234 "])
def test_what_stands_in_it_is_not_trusted(tmp_path, words):
    with StudyLock(tmp_path):
        (tmp_path / "lock").write_bytes(words)

        with pytest.raises(SpecError, match=r"running already\? Wait"):
            StudyLock(tmp_path)


def test_a_link_is_not_followed(tmp_path):
    victim = tmp_path / "thesis.tex"
    victim.write_text("...")
    (tmp_path / "lock").symlink_to(victim)

    assert not is_running(tmp_path)
    with pytest.raises(StorageError, match=r"cannot make the lock .* plain file"):
        StudyLock(tmp_path)
    assert victim.read_text() == "..."


def test_a_pipe_in_its_place_does_not_stop_whoever_asks(tmp_path):
    os.mkfifo(tmp_path / "lock")

    assert not is_running(tmp_path)


def test_a_directory_that_is_not_there_runs_nothing(tmp_path):
    assert not is_running(tmp_path / "none")
    with pytest.raises(StorageError, match="cannot make the lock"):
        StudyLock(tmp_path / "none")


def test_the_lock_of_a_replaced_directory_is_another_one(tmp_path):
    place = tmp_path / "runs"
    place.mkdir()
    with StudyLock(place):
        place.rename(tmp_path / "old")
        place.mkdir()

        assert not is_running(place)
        with StudyLock(place):
            assert is_running(place)
            assert is_running(tmp_path / "old")
