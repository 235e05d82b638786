"""A file that many generations have: written once or twice, never handed on damaged."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import Counter
from contextlib import ExitStack

import pytest

from shoal.storage import files, manifest
from shoal.storage.failures import Damaged, FileError
from shoal.storage.generations import Generations, bytes_on_disk
from shoal.storage.manifest import APART, NewerFormat
from shoal.storage.shared import Shared, digests_before, unchanged
from shoal.storage.tensors import digest_of

WEIGHTS = "weights.safetensors"
BASE = {"a": b"first tensor", "b": b"second one"}


@pytest.fixture
def trials(tmp_path):
    """A function: the generations of a trial."""
    return lambda number=0, keep=2: Generations(tmp_path / "trials" / f"{number:04d}", keep)


@pytest.fixture
def shared():
    return Shared(APART)


def commit(place, step, shared, base=BASE):
    rows = [(name, "U8", (len(data),), data) for name, data in base.items()]
    digests = {name: digest_of(data) for name, data in base.items()}
    with ExitStack() as until_committed, place.begin(step) as draft:
        put = shared.put(draft, place, rows, digests, until_committed)
        draft.tensors(WEIGHTS, [("head", "U8", (1,), b"%d" % (step % 10))])
        made = draft.commit()
    assert made.manifest.files[APART].tensors.keys() == put
    place.collect()
    made.verify()
    return made


def inode(generation):
    return (generation.path / APART).stat().st_ino


def flip(path, *, keeps_time=False):
    """Damage in place: all names of the file have it."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    now = (before.st_atime_ns, before.st_mtime_ns if keeps_time else before.st_mtime_ns + 1)
    os.utime(path, ns=now)


def test_of_a_first_generation_all_is_unchanged_and_of_a_later_one_what_has_the_digest():
    assert unchanged({"a": "1", "b": "2"}, None) == {"a", "b"}
    assert unchanged({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0"}) == {"a"}


def test_the_digests_before_are_of_the_newest_whose_manifest_can_be_read(trials, shared):
    place = trials()
    assert digests_before(place, (WEIGHTS, APART)) is None
    commit(place, 1, shared)
    newest = commit(place, 2, shared)
    found = digests_before(place, (WEIGHTS, APART))
    assert found == {
        **newest.manifest.files[WEIGHTS].tensors,
        **newest.manifest.files[APART].tensors,
    }
    (newest.path / "manifest.json").write_bytes(b"")
    assert digests_before(place, (APART,)).keys() == BASE.keys()


def test_two_generations_in_a_row_have_two_files_and_all_others_are_names_of_them(trials, shared):
    place = trials()
    made = [inode(commit(place, step, shared)) for step in range(1, 7)]
    assert made[0] != made[1]
    assert made == made[:2] * 3
    other = [inode(commit(trials(1), step, Shared(APART))) for step in range(1, 4)]
    assert set(other) == set(made)
    assert all(one != next_ for one, next_ in itertools.pairwise(other))


def test_where_one_generation_is_kept_there_is_one_file(trials, shared):
    made = {inode(commit(trials(n, keep=1), step, shared)) for n in range(3) for step in (1, 2, 3)}
    assert len(made) == 1


def test_what_is_shared_counts_once(trials, shared):
    one, other = trials(0), trials(1)
    for step in (1, 2):
        commit(one, step, shared), commit(other, step, shared)
    places = [path for path in one.directory.parent.rglob("*") if path.is_file()]
    sizes = {path.stat().st_ino: path.stat().st_size for path in places}
    seen = set()
    assert bytes_on_disk([*one.all(), *other.all()], seen) == sum(sizes.values())
    assert len(places) - len(sizes) == 2
    assert bytes_on_disk(other.all(), seen) == 0


def test_other_tensors_are_another_file(trials, shared):
    place = trials()
    first = [commit(place, step, shared) for step in (1, 2)]
    for base in ({**BASE, "b": b"SECOND ONE"}, {"a": BASE["a"]}, {"c": BASE["a"], "b": BASE["b"]}):
        made = commit(trials(1, keep=1), 3, shared, base)
        assert inode(made) not in map(inode, first)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_second_names_gets_copies(trials, shared, number, monkeypatch):
    asked = []

    def link(source, target, **_):
        asked.append(source)
        raise OSError(number, "no")

    monkeypatch.setattr(os, "link", link)
    made = {inode(commit(trials(n), step, shared)) for n in range(2) for step in (1, 2, 3)}
    assert len(made) >= 4  # an inode that was let go of may come again
    assert len(asked) <= 5  # and not one a file that is there


def test_a_file_with_as_many_names_as_it_may_have_is_written_again(trials, shared, monkeypatch):
    real, full = os.link, set()

    def link(source, target, **options):
        if os.stat(source).st_ino in full:
            raise OSError(errno.EMLINK, "too many links")
        real(source, target, **options)

    monkeypatch.setattr(os, "link", link)
    full.add(inode(commit(trials(0, keep=1), 1, shared)))
    second = commit(trials(1, keep=1), 1, shared)
    assert inode(second) not in full
    assert inode(commit(trials(2, keep=1), 1, shared)) == inode(second)


def test_a_file_that_goes_meanwhile_is_written_again(trials, shared, monkeypatch):
    def link(source, target, **_):
        raise FileNotFoundError(errno.ENOENT, "gone")

    first = commit(trials(0), 1, shared)
    monkeypatch.setattr(os, "link", link)
    assert inode(commit(trials(1), 1, shared)) != inode(first)


@pytest.mark.parametrize("keeps_time", [True, False])
def test_a_process_that_did_not_write_a_file_reads_it_first(trials, shared, keeps_time):
    first = commit(trials(0), 1, shared)
    flip(first.path / APART, keeps_time=keeps_time)
    made = commit(trials(1), 1, Shared(APART))  # which verifies it
    assert inode(made) != inode(first)


def test_a_file_that_was_written_to_since_is_read_again(trials, shared):
    first = commit(trials(0), 1, shared)
    assert inode(commit(trials(1), 1, shared)) == inode(first)
    flip(first.path / APART)
    assert inode(commit(trials(2), 1, shared)) != inode(first)


def test_a_study_that_cannot_be_listed_is_a_storage_error(trials, shared, monkeypatch):
    def listdir(path):
        raise FileNotFoundError(errno.ENOENT, "gone", str(path))

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(FileError, match="cannot list"):
        commit(trials(), 1, shared)


def test_a_trial_that_is_a_link_to_elsewhere_shares_nothing(trials, shared, tmp_path):
    first = commit(trials(0, keep=1), 1, shared)
    (tmp_path / "elsewhere").mkdir()
    trials(0).directory.rename(tmp_path / "elsewhere" / "0000")
    trials(0).directory.symlink_to(tmp_path / "elsewhere" / "0000")
    assert not (commit(trials(1), 1, shared).path / APART).samefile(first.path / APART)


def test_what_is_read_once_is_not_read_again(trials, shared, monkeypatch):
    commit(trials(0), 1, shared), commit(trials(0), 2, shared)
    reads, other = [], Shared(APART)
    from shoal.storage import shared as module

    real = module.TensorFile
    monkeypatch.setattr(module, "TensorFile", lambda *a: reads.append(a) or real(*a))
    for number in range(1, 5):
        for step in (1, 2, 3):
            commit(trials(number), step, other)
    assert len(reads) == 2


def test_a_damaged_file_is_damage_in_all_that_have_it_and_the_one_before_is_whole(trials, shared):
    made = [[commit(trials(n), step, shared) for step in (1, 2)] for n in range(2)]
    flip(made[0][1].path / APART)
    hurt = inode(made[0][1])
    reports = []
    for number, generations in enumerate(made):
        newest = trials(number).newest(lambda *report: reports.append(report))
        assert newest == [one for one in generations if inode(one) != hurt][-1]
    assert {path for path, _ in reports} >= {made[0][1].path}
    assert all("tensor 'b': its digest is" in why for _, why in reports)
    for generations in made:
        for one in generations:
            if inode(one) == hurt:
                with pytest.raises(Damaged, match="tensor 'b'"):
                    one.verify()


def test_those_that_come_at_the_same_time_write_one(trials):
    start, made = threading.Barrier(4), []

    def work(number):
        start.wait(10)
        made.append(inode(commit(trials(number, keep=1), 1, Shared(APART))))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 4
    assert len(set(made)) == 1


def is_free(path):
    """Whether a turn can be had at once."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return files._locked(descriptor)
    finally:
        os.close(descriptor)


def test_who_waits_too_long_for_its_turn_goes_on(tmp_path):
    with files.turn(tmp_path, 0.0):
        assert not is_free(tmp_path)
        with files.turn(tmp_path, 0.01):
            pass
    assert is_free(tmp_path)


def test_a_process_that_was_forked_in_a_turn_does_not_hold_it(tmp_path):
    with files.turn(tmp_path, 0.0):
        inherited = os.dup(_descriptor_of(tmp_path))  # as a child has it
    assert is_free(tmp_path)
    os.close(inherited)


def _descriptor_of(path):
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == str(path):
                return int(name)
        except FileNotFoundError:
            continue
    raise AssertionError(path)


def test_with_such_a_file_a_generation_has_format_2_which_an_older_version_refuses(
    trials, shared, monkeypatch
):
    made = commit(trials(), 1, shared)
    with trials().begin(2) as draft:
        draft.tensors(WEIGHTS, [])
        plain = draft.commit()
    monkeypatch.setattr(manifest, "FORMAT", 1)
    assert plain.manifest.step == 2
    with pytest.raises(NewerFormat, match="has format 2; this version of shoal reads format 1"):
        made.manifest  # noqa: B018
    monkeypatch.undo()
    assert made.manifest.files.keys() == {APART, WEIGHTS}


def texts(head):
    """A base of which a sixteenth is a trial's own."""
    return {"a": b"a" * 100, "b": b"b" * 50, "head": head * 10}


def test_trials_that_differ_in_little_share_what_they_have_in_common(trials):
    sizes = Counter()
    for step in (1, 2, 3, 4):
        for number in range(5):
            shared = Shared(APART, least=64)
            made = commit(trials(number), step, shared, texts(b"%d" % number))
            assert made.manifest.files[APART].tensors.keys() >= {"a", "b"}
    found = [*trials().directory.parent.glob(f"*/*/{APART}")]
    for path in found:
        sizes[path.stat().st_ino] = path.stat().st_size
    assert len(found) == 10
    assert len(sizes) == 2


def test_two_generations_in_a_row_have_two_files_of_what_is_in_common_too(trials):
    for number in range(3):
        place = trials(number)
        made = [
            inode(commit(place, step, Shared(APART, least=64), texts(b"%d" % number)))
            for step in range(1, 5)
        ]
        assert all(one != next_ for one, next_ in itertools.pairwise(made))
        assert len(set(made)) == 2


def test_what_was_put_is_told_and_what_differs_in_much_is_a_file_of_its_own(trials):
    bases = [texts(b"0"), texts(b"1"), texts(b"2") | {"b": b"B" * 50}]
    told = []
    for number, base in enumerate(bases):
        made = commit(trials(number), 1, Shared(APART, least=64), base)
        told.append(set(made.manifest.files[APART].tensors))
    assert told == [{"a", "b", "head"}, {"a", "b"}, {"a", "b", "head"}]


def test_a_part_of_less_than_is_worth_a_file_is_not_looked_for(trials):
    for number in range(2):
        made = commit(trials(number), 1, Shared(APART, least=200), texts(b"%d" % number))
        assert made.manifest.files[APART].tensors.keys() == {"a", "b", "head"}
