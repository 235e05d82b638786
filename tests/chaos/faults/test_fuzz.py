"""Good files, changed at random: the right data or a StorageError, and nothing else."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from faults.hostile import sealed
from faults.injector import listing
from faults.power import materialize, snapshot
from faults.scenarios import TRIAL, commit, content

from shoal.core.errors import StorageError
from shoal.storage.documents import decode
from shoal.storage.generations import Generation, Generations
from shoal.storage.tensors import TensorFile

TOKENS = [
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"0", b"-1", b"1e999", b"NaN", b"null",
    b"true", b'"dtype"', b'"shape"', b'"data_offsets"', b'"digest"', b'"tensors"', b'"format":2',
    b"../", b"\0", b"\xff", b"\xc3\xbc", b"F32", b"BOOL", b"9" * 20, b"4294967296", b" " * 9,
]  # fmt: skip
CASES = [300, pytest.param(20_000, marks=pytest.mark.full)]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one to four changes of the sort that disks and people make."""
    for _ in range(chance.randint(1, 4)):
        at, size = chance.randrange(len(data) + 1), chance.choice((1, 1, 2, 8, 40))
        piece = chance.choice(
            (
                b"",
                chance.choice(TOKENS),
                chance.randbytes(size),
                data[chance.randrange(len(data) + 1) :][:size],
                bytes(size),
            )
        )
        data = data[:at] + piece + data[at + chance.choice((0, size, len(piece))) :]
    return data[: chance.choice((None, None, None, chance.randrange(len(data) + 1)))] or b"\0"


def read_all(generation: Generation) -> None:
    """Whatever tensor can be read must be the one that was written."""
    good = content(generation.step)
    for name in generation.manifest.files:
        with generation.open(name) as file:
            for tensor in file.entries:
                assert bytes(file.read(tensor)) == good[name][tensor]


@pytest.mark.parametrize("count", CASES)
def test_a_changed_generation_gives_the_right_data_or_an_error(folder, count):
    root = folder / "study"
    for step in (400, 800):
        commit(Generations(root / TRIAL), step)
    good, before = snapshot(root), listing(folder)
    files = sorted((root / TRIAL / "step-00000800").iterdir())
    chance = random.Random(11)
    for case in range(count):
        path = chance.choice(files)
        data = path.read_bytes()
        is_sealed = path.suffix == ".json" and chance.random() < 0.7
        path.write_bytes(_resealed(data, chance) if is_sealed else mutated(data, chance))
        _use(root, case)
        path.write_bytes(data)
    assert listing(folder) == before
    assert snapshot(root) == good


def _resealed(data: bytes, chance: random.Random) -> bytes:
    """A changed manifest whose digest is right, so that what is inside gets read."""
    record = json.loads(data)
    del record["digest"]
    return sealed(mutated(json.dumps(record).encode(), chance))


def _use(root: Path, case: int) -> None:
    reports: list[str] = []
    try:
        newest = Generations(root / TRIAL).newest(lambda path, _: reports.append(path.name))
        assert newest is not None, case
        assert newest.step == 800 or reports == ["step-00000800"], case
        read_all(newest)
    except StorageError:
        pass
    for generation in Generations(root / TRIAL).all():
        try:
            read_all(generation)
        except StorageError:
            continue


@pytest.mark.parametrize("count", CASES)
def test_a_changed_file_of_tensors_is_read_as_it_stands_or_refused(folder, count):
    good = commit(Generations(folder / "trials"), 400).path / "weights.safetensors"
    data, path = good.read_bytes(), folder / "x.safetensors"
    chance = random.Random(12)
    accepted = 0
    for _ in range(count):
        path.write_bytes(mutated(data, chance))
        try:
            with TensorFile(path) as file:
                found = [file.read(name) for name in file.entries]
        except StorageError:
            continue
        accepted += 1
        assert b"".join(found) == path.read_bytes()[-sum(map(len, found)) :]
    assert 0 < accepted < count


@pytest.mark.parametrize("count", CASES)
def test_changed_json_is_decoded_or_a_value_error(count):
    good = json.dumps({"a": [1, -2.5, None, True, {"b": "NaN", "c": "\\NaN"}], "ü": {}}).encode()
    chance = random.Random(13)
    for _ in range(count):
        try:
            decode(mutated(good, chance))
        except ValueError:
            continue


def test_materializing_a_snapshot_gives_it_back(folder):
    commit(Generations(folder / "a" / TRIAL), 400)
    materialize(snapshot(folder / "a"), folder / "b")

    assert snapshot(folder / "b") == snapshot(folder / "a")
