"""Files: what is there when a call returned, and what is said when it did not."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.storage import files
from shoal.storage.files import DiskFull, FileError, NewFile, Reserve


class Failing:
    """``os``, of which one function raises; it counts how often."""

    def __init__(self, name, number, *, times=99):
        self.name, self.number, self.left, self.calls = name, number, times, 0

    def __getattr__(self, name):
        return self._fail if name == self.name else getattr(os, name)

    def _fail(self, *arguments, **more):
        self.calls += 1
        if self.calls > self.left:
            return getattr(os, self.name)(*arguments, **more)
        raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def failing(monkeypatch):
    def install(name, number, **more):
        found = Failing(name, number, **more)
        monkeypatch.setattr(files, "os", found)
        return found

    return install


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_is_this_users_alone_and_has_all_bytes(tmp_path):
    files.write_file(tmp_path / "a", b"hello")

    assert (tmp_path / "a").read_bytes() == b"hello"
    assert mode(tmp_path / "a") == 0o600


def test_an_empty_file_can_be_written(tmp_path):
    files.write_file(tmp_path / "a", b"")

    assert (tmp_path / "a").read_bytes() == b""


@pytest.mark.parametrize("make", ["touch", "mkdir"])
def test_what_is_there_is_never_written_over(tmp_path, make):
    getattr(tmp_path / "a", make)()

    with pytest.raises(FileError, match=r"^cannot create .*a: File exists \(EEXIST\)\. Check"):
        files.write_file(tmp_path / "a", b"new")


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "target")

    with pytest.raises(FileError):
        files.write_file(tmp_path / "a", b"new")
    assert not (tmp_path / "target").exists()


def test_a_full_disk_is_reported_with_its_numbers(tmp_path, failing):
    failing("posix_fallocate", errno.ENOSPC)

    with pytest.raises(DiskFull, match=r"2\.0 KiB are needed, .* are free\. Free space") as caught:
        NewFile(tmp_path / "a", 2048)
    assert caught.value.errno == errno.ENOSPC


def test_a_quota_is_a_full_disk(tmp_path, failing):
    failing("write", errno.EDQUOT)

    with pytest.raises(DiskFull, match=r"cannot write .*EDQUOT"):
        files.write_file(tmp_path / "a", b"hello")


def test_an_error_of_the_disk_keeps_its_number_and_says_what_to_do(tmp_path, failing):
    failing("write", errno.EIO)

    with pytest.raises(FileError, match=r"Input/output error \(EIO\)\. The disk may be") as caught:
        files.write_file(tmp_path / "a", b"hello")
    assert (caught.value.errno, type(caught.value)) == (errno.EIO, FileError)
    assert caught.value.is_damage


def test_errors_survive_a_pickle(tmp_path, failing):
    failing("write", errno.ENOSPC)
    with pytest.raises(DiskFull) as caught:
        files.write_file(tmp_path / "a", b"hello")

    found = pickle.loads(pickle.dumps(caught.value))

    assert (str(found), found.errno) == (str(caught.value), errno.ENOSPC)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_cannot_allocate_is_good_enough(tmp_path, failing, number):
    failing("posix_fallocate", number)
    files.write_file(tmp_path / "a", b"hello")

    assert (tmp_path / "a").read_bytes() == b"hello"


def test_a_failed_sync_is_not_tried_again(tmp_path, failing):
    failed = failing("fsync", errno.EIO)

    with pytest.raises(FileError, match="cannot sync"):
        files.write_file(tmp_path / "a", b"hello")
    assert failed.calls == 1


def test_a_file_system_that_syncs_no_directories_is_good_enough(tmp_path, failing):
    failing("fsync", errno.EINVAL)

    files.sync_directory(tmp_path)


def test_a_disk_that_takes_nothing_is_an_error_and_no_endless_loop(tmp_path, monkeypatch):
    class Stuck(Failing):
        def _fail(self, *_):
            return 0

    monkeypatch.setattr(files, "os", Stuck("write", 0))

    with pytest.raises(FileError, match="takes no more bytes"):
        files.write_file(tmp_path / "a", b"hello")


def test_a_descriptor_is_closed_whatever_happens(tmp_path, failing):
    before = len(os.listdir("/proc/self/fd"))
    for name in ("posix_fallocate", "write", "fsync"):
        failing(name, errno.EIO)
        with pytest.raises(FileError):
            files.write_file(tmp_path / name, b"hello")
    with pytest.raises(FileError):
        files.sync_directory(tmp_path)
    failing("write", errno.EIO)
    with pytest.raises(FileError):
        files.replace_file(tmp_path / "replaced", b"hello")
    failing("posix_fallocate", errno.EIO)
    with pytest.raises(FileError):
        Reserve(tmp_path / "reserve", 10).take()

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_replaced_file_is_the_old_one_until_it_is_the_new_one(tmp_path, failing):
    files.replace_file(tmp_path / "a", b"old")
    failing("rename", errno.EIO)

    with pytest.raises(FileError, match="cannot put in place"):
        files.replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_an_earlier_replacement_left_does_not_hinder(tmp_path):
    (tmp_path / ".a.tmp").write_bytes(b"half")
    files.replace_file(tmp_path / "a", b"new")

    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new")]


def test_a_directory_that_cannot_be_made_durable_gets_its_name_back(tmp_path, monkeypatch):
    class SecondSync(Failing):
        def _fail(self, descriptor):
            self.calls += 1
            if self.calls == 2:
                raise OSError(errno.EIO, "no")

    (tmp_path / "x.tmp").mkdir()
    monkeypatch.setattr(files, "os", SecondSync("fsync", 0))

    with pytest.raises(FileError, match="cannot sync"):
        files.publish(tmp_path / "x.tmp", tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x.tmp"]


def test_directories_are_made_with_their_parents_for_this_user_alone(tmp_path):
    files.make_directory(tmp_path / "a" / "b")
    files.make_directory(tmp_path / "a" / "b")

    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o700, 0o700)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_the_directory_it_is_made_inside_is_never_made_again(when, tmp_path, monkeypatch):
    study = tmp_path / "study"
    study.mkdir()
    missing = files._missing

    def looked(path):
        found = missing(path)
        if when == "meanwhile":
            study.rename(tmp_path / "away")
        return found

    monkeypatch.setattr(files, "_missing", looked)
    if when == "before":
        study.rename(tmp_path / "away")

    with pytest.raises(FileError, match="trials"):
        files.make_directory(study / "trials" / "0000", inside=study)

    assert not study.exists()


def test_a_file_where_a_directory_should_be_is_an_error(tmp_path):
    (tmp_path / "a").write_bytes(b"")

    with pytest.raises(FileError, match="cannot make the directory"):
        files.make_directory(tmp_path / "a")


def test_removing_follows_no_links_and_knows_what_is_gone(tmp_path):
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").write_bytes(b"mine")
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "link").symlink_to(tmp_path / "keep")
    (tmp_path / "link").symlink_to(tmp_path / "keep")

    for name in ("tree", "link", "gone"):
        files.remove_tree(tmp_path, name)

    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    assert (tmp_path / "keep" / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc"])
def test_removing_stays_in_the_directory_it_is_given(tmp_path, name):
    with pytest.raises(AssertionError):
        files.remove_tree(tmp_path, name)


def test_removing_a_file_says_whether_it_was_there(tmp_path):
    (tmp_path / "a").write_bytes(b"")

    assert files.remove_file(tmp_path / "a") is True
    assert files.remove_file(tmp_path / "a") is False


def test_free_space_is_that_of_the_file_system(tmp_path):
    assert files.free_bytes(tmp_path) > 0
    with pytest.raises(FileError, match="cannot ask for the free space of"):
        files.free_bytes(tmp_path / "nothing")


def test_a_reserve_is_real_space_that_can_be_given_back_and_taken_again(tmp_path):
    reserve = Reserve(tmp_path / "reserve", 1 << 20)
    reserve.take()
    reserve.take()

    assert reserve.held
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= 1 << 20
    assert mode(tmp_path / "reserve") == 0o600
    assert (reserve.release(), reserve.release(), reserve.held) == (True, False, False)
    reserve.take()
    assert reserve.held


def test_a_reserve_is_written_where_it_cannot_be_allocated(tmp_path, failing):
    failing("posix_fallocate", errno.EOPNOTSUPP)
    Reserve(tmp_path / "reserve", 3_000_000).take()

    assert (tmp_path / "reserve").stat().st_size == 3_000_000
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= 3_000_000


def test_half_a_reserve_is_none(tmp_path):
    (tmp_path / "reserve").write_bytes(b"half")
    reserve = Reserve(tmp_path / "reserve", 100)

    assert not reserve.held
    reserve.take()
    assert reserve.held


def test_a_reserve_for_which_there_is_no_room_leaves_nothing(tmp_path, failing):
    failing("posix_fallocate", errno.ENOSPC)
    reserve = Reserve(tmp_path / "reserve", 100)

    with pytest.raises(DiskFull, match="cannot set space aside in"):
        reserve.take()
    assert not (tmp_path / "reserve").exists()


def test_where_no_directory_can_be_made_another_place_is_to_be_chosen(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="A file of that name is there: move it away"):
        files.make_directory(tmp_path / "file")
    with pytest.raises(FileError, match="No directory can be made there: choose another place"):
        files.make_new_directory(tmp_path / "missing" / "deeper")


def test_whether_there_are_links_is_found_by_several_who_ask_at_once(tmp_path):
    """Two runs begin in one directory: neither takes away what the other one tries with."""
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(files.has_links, [tmp_path] * 200)]
    assert all(found)
    assert list(tmp_path.iterdir()) == []
