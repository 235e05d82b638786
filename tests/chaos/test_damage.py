"""Whatever happened to a study's files, no bad byte is used, and what is left is told."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import studies
import xxhash
from studies import run, written

from shoal.core.errors import ShoalError, SpecError, StorageError
from shoal.core.event import (
    CheckpointDamaged,
    TrialRestarted,
)
from shoal.runtime.saving import checkpoint
from shoal.testing import compare


def saved(study):
    """The generations of its trial, oldest first."""
    return checkpoint.generations(study.directory, 0).all()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def content(study) -> dict[str, bytes]:
    """Every file but SQLite's and the lock's."""
    files = (path for path in study.directory.rglob("*") if path.is_file())
    return {str(p): p.read_bytes() for p in files if not p.name.startswith(("study.db", "lock"))}


# -- generations ------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink], ids=["flipped bit", "cut", "removed"])
@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors", "manifest.json"])
def test_a_damaged_generation_costs_the_steps_since_the_one_before(
    interrupted, warm_workers, name, harm
):
    before, newest = saved(interrupted)
    harm(newest.path / name)

    run(interrupted, warm_workers)

    studies.check_alone(interrupted.directory)
    (told,) = written(interrupted, CheckpointDamaged)
    assert (told.trial, told.path) == (0, f"trials/0000/{newest.path.name}")
    assert name in told.reason
    assert [event.step for event in written(interrupted, TrialRestarted)] == [before.step]


def test_with_both_generations_damaged_the_trial_begins_anew(interrupted, warm_workers):
    for generation in saved(interrupted):
        flip(generation.path / "weights.safetensors")

    run(interrupted, warm_workers)

    studies.check_alone(interrupted.directory)
    assert len(written(interrupted, CheckpointDamaged)) == 2
    assert [event.step for event in written(interrupted, TrialRestarted)] == [0]


def test_a_generation_that_is_gone_costs_the_steps_since_the_one_before(interrupted, warm_workers):
    before, newest = saved(interrupted)
    shutil.rmtree(newest.path)

    run(interrupted, warm_workers)

    studies.check_alone(interrupted.directory)
    assert [event.step for event in written(interrupted, TrialRestarted)] == [before.step]


def test_with_all_trials_gone_they_begin_anew(interrupted, warm_workers):
    shutil.rmtree(interrupted.directory / "trials")

    run(interrupted, warm_workers)

    studies.check_alone(interrupted.directory)


def test_what_is_not_shoals_is_left_alone(interrupted, warm_workers):
    mine = [
        interrupted.directory / "trials" / name / "a.txt" for name in ("notes", "0000/step-mine")
    ]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("mine")

    run(interrupted, warm_workers)

    studies.check_alone(interrupted.directory)
    assert [path.read_text() for path in mine] == ["mine", "mine"]


def test_a_generation_of_a_newer_format_is_not_touched(interrupted, warm_workers):
    path = saved(interrupted)[-1].path / "manifest.json"
    text = path.read_bytes().replace(b'"format": 1', b'"format": 99')[
        : -len(',"digest":""}\n') - 32
    ]
    digest = xxhash.xxh3_128_hexdigest(text)
    path.write_bytes(text + f',"digest":"{digest}"}}\n'.encode())
    before = content(interrupted)

    with pytest.raises(StorageError, match="has format 99"):
        run(interrupted, warm_workers)

    assert content(interrupted) == before


def test_without_its_database_a_study_goes_on_from_its_generations(interrupted, warm_workers):
    newest = saved(interrupted)[-1]
    (interrupted.directory / "study.db").unlink()

    report = run(interrupted, warm_workers)

    assert [event.step for event in written(interrupted, TrialRestarted)] == [newest.step]
    plain = studies.alone("resident", 3e-3, 0, 3)
    assert compare(plain, report.trials[0].load_state()).equal


def test_without_its_database_a_study_goes_on_with_no_other_recipe(interrupted, warm_workers):
    before = content(interrupted)
    (interrupted.directory / "study.db").unlink()
    interrupted.recipe = replace(interrupted.recipe, clip_grad_norm=0.25)

    with pytest.raises(SpecError, match="trial 0 trained with another recipe"):
        run(interrupted, warm_workers)

    assert content(interrupted) == before


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
def test_a_record_that_cannot_be_believed_stops_everything(interrupted, warm_workers, harm, words):
    harm(interrupted.directory / "study.json")
    before = content(interrupted)

    with pytest.raises(ShoalError, match=words) as error:
        run(interrupted, warm_workers)

    assert "study.json" in str(error.value)
    assert content(interrupted) == before


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
def test_a_database_that_cannot_be_believed_stops_everything(
    interrupted, warm_workers, harm, words
):
    path = interrupted.directory / "study.db"
    harm(path)
    before, damaged = content(interrupted), path.read_bytes()

    with pytest.raises(StorageError, match=words):
        run(interrupted, warm_workers)

    assert content(interrupted) == before
    assert path.read_bytes() == damaged
