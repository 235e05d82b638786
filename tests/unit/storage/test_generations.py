"""Generations: which checkpoint counts, and what becomes of the others."""

from __future__ import annotations

import errno
import os

import pytest

from shoal.core.errors import StorageError
from shoal.storage import files, reading
from shoal.storage.failures import Damaged, FileError
from shoal.storage.generations import Generation, Generations


@pytest.fixture
def generations(tmp_path):
    return Generations(tmp_path / "trials" / "0003")


def commit(generations, step, data=b"data", **meta):
    with generations.begin(step) as draft:
        draft.tensors("weights.safetensors", [("w", "U8", (len(data),), data)])
        return draft.commit(**meta)


def names(generations):
    return sorted(path.name for path in generations.directory.iterdir())


def remove_all_but(generations, step):
    for generation in generations.all():
        if generation.step != step:
            files.remove_tree(generations.directory, generation.path.name)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_trial_without_a_directory_has_none(generations):
    assert generations.all() == []
    assert generations.newest() is None


def test_a_committed_generation_is_the_newest_and_has_all_that_was_written(generations):
    commit(generations, 400, b"old")
    done = commit(generations, 800, b"new!", trial=3, best=float("inf"))

    assert done == generations.newest()
    assert (done.step, done.revision, done.path.name) == (800, 0, "step-00000800")
    assert done.manifest.meta == {"trial": 3, "best": float("inf")}
    assert done.bytes == (done.path / "weights.safetensors").stat().st_size
    with done.open("weights.safetensors") as file:
        assert bytes(file.read("w")) == b"new!"


def test_values_are_the_meta_of_the_manifest(generations):
    with generations.begin(1) as draft:
        done = draft.commit(position=[1, 2], trial=3)

    assert done.manifest.meta == {"position": [1, 2], "trial": 3}


def test_directories_are_this_users_alone(generations):
    done = commit(generations, 400)

    for path in (done.path, done.path.parent, done.path.parent.parent):
        assert path.stat().st_mode & 0o777 == 0o700


def test_they_are_sorted_by_number_and_not_by_name(generations):
    for step in (10**8, 5, 99_999_999, 5):
        commit(generations, step)

    assert [(g.step, g.revision) for g in generations.all()] == [
        (5, 0), (5, 1), (99_999_999, 0), (10**8, 0)
    ]  # fmt: skip
    assert generations.newest().path.name == "step-100000000"


def test_a_step_that_is_written_twice_gets_a_second_name(generations):
    first, second = commit(generations, 800, b"first"), commit(generations, 800, b"second")

    assert [first.path.name, second.path.name] == ["step-00000800", "step-00000800.1"]
    assert generations.newest() == second
    first.verify()


def test_a_damaged_one_is_passed_over_and_reported(generations):
    old, new = commit(generations, 400), commit(generations, 800)
    flip(new.path / "weights.safetensors")
    reports = []

    assert generations.newest(lambda *report: reports.append(report)) == old
    assert generations.newest(quick=True) == new
    ((path, reason),) = reports
    assert path == new.path
    assert "weights.safetensors is damaged or not shoal's: tensor 'w': its digest is" in reason


def test_one_without_a_manifest_is_passed_over_and_reported(generations):
    old, new = commit(generations, 400), commit(generations, 800)
    (new.path / "manifest.json").unlink()
    reports = []

    assert generations.newest(lambda _, reason: reports.append(reason)) == old
    assert "manifest.json: No such file" in reports[0]


def test_a_renamed_one_is_damaged(generations):
    old, new = commit(generations, 400), commit(generations, 800)
    new.path.rename(new.path.with_name("step-00000900"))

    assert generations.newest() == old
    with pytest.raises(Damaged, match=r"manifest\.json is damaged .*: it is of step 800"):
        generations.all()[-1].verify()


def test_one_that_is_collected_while_it_is_looked_at_is_no_damage(generations, monkeypatch):
    commit(generations, 400)
    verify, reports = Generation.verify, []

    def be_late(generation, *, quick):
        if generation.step == 400:
            commit(generations, 800)
            remove_all_but(generations, 800)
        verify(generation, quick=quick)

    monkeypatch.setattr(Generation, "verify", be_late)

    assert generations.newest(lambda *report: reports.append(report)).step == 800
    assert reports == []


def test_with_nothing_but_damage_there_is_none(generations):
    flip(commit(generations, 400).path / "manifest.json")

    assert generations.newest() is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_what_this_process_lacks_is_no_damage(generations, monkeypatch, number):
    commit(generations, 400)
    commit(generations, 800)

    class Poor:
        def __getattr__(self, name):
            return getattr(os, name)

        def open(self, *_):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(reading, "os", Poor())
    for use in (generations.newest, Generations(generations.directory, keep=1).collect):
        with pytest.raises(FileError, match="cannot open"):
            use()
    assert len(generations.all()) == 2


def test_collect_without_a_directory_has_nothing_to_do(generations):
    assert generations.collect() == []


def test_collect_keeps_as_many_as_it_was_told(generations):
    for step in (1, 2, 3, 4):
        commit(generations, step)

    removed = generations.collect()

    assert [path.name for path in removed] == ["step-00000002", "step-00000001"]
    assert names(generations) == ["step-00000003", "step-00000004"]
    assert generations.collect() == []


def test_collect_counts_only_those_that_verify(generations):
    for step in (1, 2, 3, 4):
        commit(generations, step)
    for step in (3, 4):
        flip(generations.directory / f"step-0000000{step}" / "manifest.json")

    assert generations.collect() == []
    Generations(generations.directory, keep=1).collect()
    assert [generation.step for generation in generations.all()] == [2, 3, 4]


def test_collect_never_removes_the_last_that_verifies(generations):
    good = commit(generations, 1)
    for step in (2, 3, 4):
        (commit(generations, step).path / "weights.safetensors").unlink()

    for _ in range(3):
        Generations(generations.directory, keep=1).collect()
    assert generations.newest() == good


def test_collect_spares_the_newest_that_is_on_record(generations):
    for step in range(1, 6):
        commit(generations, step)
    place = Generations(generations.directory, keep=1)

    removed = place.collect(unrecorded={"step-00000003", "step-00000004", "step-00000005"})
    assert [path.name[-1] for path in removed] == ["4", "3", "1"]
    assert [generation.step for generation in place.all()] == [2, 5]

    place.collect(unrecorded={"step-00000005"})
    assert [generation.step for generation in place.all()] == [2, 5]
    place.collect()
    assert [generation.step for generation in place.all()] == [5]


def test_collect_spares_no_damaged_one_because_it_is_on_record(generations):
    for step in (1, 2, 3):
        commit(generations, step)
    flip(generations.directory / "step-00000002" / "manifest.json")
    place = Generations(generations.directory, keep=1)
    place.collect(unrecorded={"step-00000003"})
    assert [generation.step for generation in place.all()] == [1, 3]


def test_begin_removes_what_a_crash_left(generations):
    commit(generations, 400)
    generations.begin(800).tensors("weights.safetensors", [])
    draft = Generations(generations.directory).begin(800)

    assert names(generations) == ["step-00000400", "step-00000800.tmp"]
    assert list((generations.directory / "step-00000800.tmp").iterdir()) == []
    draft.abandon()
    assert names(generations) == ["step-00000400"]


def test_leaving_a_draft_gives_it_up(generations):
    with generations.begin(800) as draft:
        draft.tensors("weights.safetensors", [])

    assert names(generations) == []
    with pytest.raises(StorageError, match=r"is committed or given up\. Begin another"):
        draft.commit()


def test_an_error_inside_gives_a_draft_up_and_is_the_one_that_is_raised(generations):
    def fill() -> None:
        with generations.begin(800) as draft:
            draft.tensors("weights.safetensors", [])
            raise KeyError

    with pytest.raises(KeyError):
        fill()

    assert names(generations) == []


def test_after_a_failed_sync_a_draft_can_only_be_given_up(generations, monkeypatch):
    class NoSync:
        def __getattr__(self, name):
            return getattr(os, name)

        def fsync(self, _):
            raise OSError(errno.EIO, "no")

    draft = generations.begin(800)
    with monkeypatch.context() as patch:
        patch.setattr(files, "os", NoSync())
        with pytest.raises(FileError, match="cannot sync"):
            draft.tensors("weights.safetensors", [])
    for use in (draft.commit, lambda: draft.tensors("state.safetensors", [])):
        with pytest.raises(StorageError, match="is committed or given up"):
            use()
    draft.abandon()
    assert names(generations) == []


def test_a_committed_draft_cannot_be_used_again(generations):
    draft = generations.begin(800)
    done = draft.commit()
    draft.abandon()

    done.verify()
    with pytest.raises(StorageError, match="is committed or given up"):
        draft.commit()


@pytest.mark.parametrize("name", ["../x.safetensors", "manifest.json", "", "a b.safetensors", "x"])
def test_a_file_of_another_name_cannot_be_in_a_generation(generations, name):
    with (
        generations.begin(800) as draft,
        pytest.raises(StorageError, match=r"cannot be a file of a checkpoint\. Name it with"),
    ):
        draft.tensors(name, [])


def test_a_file_that_is_not_in_it_is_answered_with_those_that_are(generations):
    with pytest.raises(StorageError, match=r"has no '\.\./x'; it has weights\.safetensors\."):
        commit(generations, 800).open("../x")


def test_meta_without_a_json_form_gives_the_generation_up(generations):
    old = commit(generations, 400)
    with pytest.raises(StorageError, match=r"cannot write .*manifest\.json: the key 1 is no s"):
        commit(generations, 800, table={1: 2})

    assert generations.newest() == old
    assert names(generations) == ["step-00000400"]


def test_what_cannot_be_listed_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(FileError, match="cannot list"):
        Generations(tmp_path / "file").all()


def loss_of(generation):
    return generation.manifest.meta["loss"]


def ranked(generations, keep=1):
    return Generations(generations.directory, keep, rank=loss_of)


def test_collect_spares_the_best_of_equals_the_earliest(generations):
    for step, loss in enumerate([3.0, 1.0, 1.0, 2.0, float("inf")]):
        commit(generations, step, loss=loss)
    place = ranked(generations)
    assert place.best().step == 1
    place.collect()
    assert [found.step for found in place.all()] == [1, 4]
    commit(place, 5, loss=0.5)
    place.collect()
    assert [found.step for found in place.all()] == [5]


def test_the_best_is_found_while_others_are_collected(generations):
    for step, loss in enumerate([2.0, 1.0, 3.0]):
        commit(generations, step, loss=loss)
    place, collected = ranked(generations), []

    def rank(generation):
        if not collected:  # by the thread that writes, when this one was seen to be whole
            collected.extend(place.collect())
        return loss_of(generation)

    assert Generations(generations.directory, rank=rank).best().step == 1
    assert [path.name for path in collected] == ["step-00000000"]


def test_the_best_is_one_that_verifies_and_has_a_rank(generations):
    assert ranked(generations).best() is None
    commit(generations, 0, loss=float("inf"))
    assert ranked(generations).best() is None
    assert generations.best() is None
    damaged, _ = commit(generations, 1, loss=1.0), commit(generations, 2, loss=2.0)
    (damaged.path / "weights.safetensors").write_bytes(b"")
    assert ranked(generations).best().step == 2
