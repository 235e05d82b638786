"""A checkpoint from somebody else: it is refused in words, and touches nothing."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest
from faults.hostile import HEADERS, entry, header_of, kinds, manifests, sealed, tensor_file
from faults.injector import listing

from shoal.core.errors import StorageError
from shoal.storage.generations import Generations
from shoal.storage.manifest import NewerFormat
from shoal.storage.reading import read_file
from shoal.storage.tensors import TensorFile

DATA = bytes(range(16))


@pytest.fixture
def generations(folder):
    found = Generations(folder / "trials")
    for step in (400, 800):
        with found.begin(step) as draft:
            draft.tensors("weights.safetensors", [("w", "U8", (16,), DATA)])
            draft.commit(trial=3)
    return found


@pytest.fixture
def new(generations):
    return generations.newest().path


def used(generations) -> tuple[int, list[str]]:
    """The step that is used, and the names that were reported as damaged."""
    reports: list[str] = []
    found = generations.newest(lambda path, _: reports.append(path.name))
    assert found is not None
    with found.open("weights.safetensors") as file:
        assert bytes(file.read("w")) == DATA
    return found.step, reports


@pytest.mark.parametrize("name", HEADERS)
def test_a_file_of_tensors_is_refused_that_has(folder, name):
    path = folder / "x.safetensors"
    path.write_bytes(HEADERS[name])

    with pytest.raises(StorageError, match="is damaged or not shoal's: "):
        TensorFile(path)


def test_the_good_file_among_them_is_read(folder):
    path = folder / "x.safetensors"
    path.write_bytes(tensor_file(header_of(entry(), entry('"b"', at="4,8")) + b"  ", DATA[:8]))

    with TensorFile(path) as file:
        assert bytes(file.read("b")) == DATA[4:8]


def test_hostile_manifests_with_a_right_digest_are_damage(generations, new, folder):
    path = new / "manifest.json"
    good = path.read_bytes()
    record = json.loads(good)
    del record["digest"]
    before = listing(folder)
    for name, text in manifests(record):
        path.write_bytes(sealed(text))
        assert used(generations) == (400, ["step-00000800"]), name
        step = generations.newest(quick=True).step  # compares no digest of a tensor
        assert step == 400 or name.startswith(("digest", "header", "tensors")), name
    path.write_bytes(sealed(json.dumps(record).encode()))

    assert used(generations) == (800, [])
    assert listing(folder) == before


def test_a_newer_format_is_not_damage_and_is_never_removed(generations, new):
    path = new / "manifest.json"
    record = json.loads(path.read_bytes())
    del record["digest"]
    path.write_bytes(sealed(json.dumps({"format": 3, "unknown": record}).encode()))

    for use in (generations.newest, Generations(new.parent, 1).collect):
        with pytest.raises(NewerFormat, match=r"has format 3; .* reads format 2 and has changed"):
            use()
    assert [generation.step for generation in generations.all()] == [400, 800]


@pytest.mark.parametrize("file", ["manifest.json", "weights.safetensors"])
@pytest.mark.parametrize("kind", kinds(Path()))
def test_a_file_of_another_kind_is_damage(generations, new, folder, kind, file):
    outside = folder / "outside"
    (new / file).rename(outside)
    kinds(outside)[kind](new / file)

    assert used(generations) == (400, ["step-00000800"])
    assert generations.newest(quick=True).step == 400
    assert outside.exists()


@pytest.mark.parametrize("kind", kinds(Path()))
def test_a_generation_of_another_kind_is_none(generations, new, folder, kind):
    new.rename(folder / "outside")
    kinds(folder / "outside")[kind](new)

    expected = ["step-00000800"] if kind == "a directory" else []
    assert used(generations) == (400, expected)
    assert generations.begin(800)._scratch.name == "step-00000800.1.tmp"


@pytest.mark.parametrize(
    "name",
    ["step-800", "step-000000800", "step-00000800.0", "step-00000800.01", "step-00000900.x",
     "step-00000900.tmp", "step--0000900", "step-0000090\u0660", "STEP-00000900",
     "step-00000900\n", " step-00000900", "step-00000900.old", "step-" + "9" * 19],
)  # fmt: skip
def test_a_directory_of_another_name_is_none(generations, new, name):
    new.rename(new.with_name(name))

    assert [generation.step for generation in generations.all()] == [400]


def test_leftovers_that_lead_elsewhere_are_removed_where_they_are(generations, folder):
    outside = folder / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "file").write_bytes(b"mine")
    before = listing(outside)
    trial = generations.directory
    (trial / "step-00000001.tmp").symlink_to(outside)
    (trial / "step-00000002.tmp").mkdir()
    (trial / "step-00000002.tmp" / "link").symlink_to(outside)
    (trial / "step-00000002.tmp" / "file").symlink_to(outside / "deep" / "file")
    (trial / "step-00000003.tmp").write_bytes(b"a file")
    os.mkfifo(trial / "step-00000004.old.tmp")
    (trial / "step-00000400" / "more").symlink_to(outside)
    with generations.begin(900) as draft:
        draft.commit()
    Generations(trial, keep=1).collect()

    assert listing(outside) == before
    assert [path.name for path in trial.iterdir()] == ["step-00000900"]


def test_a_leftover_of_many_levels_is_removed(generations):
    deep = generations.directory / "step-00000001.tmp"
    for _ in range(1200):
        deep.mkdir()
        deep = deep / "d"

    generations.begin(900).abandon()

    assert not list(generations.directory.glob("*.tmp"))


def test_a_sparse_file_of_a_tebibyte_costs_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    for start in (b"", (1 << 39).to_bytes(8, "little"), (15 << 20).to_bytes(8, "little")):
        path.write_bytes(start)
        os.truncate(path, 1 << 40)
        begun = time.process_time()
        with pytest.raises(StorageError, match="is damaged"):
            TensorFile(path)
        with pytest.raises(StorageError, match="at most 1000 are expected"):
            read_file(path, 1000)
        assert time.process_time() - begun < 1


def test_a_tensor_of_a_tebibyte_is_taken_only_by_a_place_of_its_size(tmp_path):
    path = tmp_path / "x.safetensors"
    text = header_of(entry(shape=str(1 << 40), at=f"0,{1 << 40}"))
    path.write_bytes(tensor_file(text))
    os.truncate(path, 8 + len(text) + (1 << 40))

    with (
        TensorFile(path) as file,
        pytest.raises(StorageError, match="into 10 bytes: it has 10995"),
    ):
        file.read_into("a", memoryview(bytearray(10)))


@pytest.mark.parametrize(
    "filler",
    ["[],", "1,", '{},', '"",', "\\\\", "1" * 15, " ", '"a":{"dtype":"U8","shape":[0],'
     '"data_offsets":[0,0]},'],
)  # fmt: skip
@pytest.mark.parametrize("where", ["shape", "name", "top"])
def test_a_header_of_16_mib_takes_memory_like_the_file(folder, filler, where):
    room = (16 << 20) - 100
    text = filler * (room // len(filler))
    texts = {"shape": entry(shape=text), "name": '"' + text, "top": text}
    path = folder / "x.safetensors"
    path.write_bytes(tensor_file(("{" + texts[where] + "}").encode()))
    tracemalloc.start()
    begun = time.process_time()
    with pytest.raises(StorageError):
        TensorFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 2 * path.stat().st_size + (64 << 20)
    assert time.process_time() - begun < 5
