"""A disk that changes bits: each is seen, and the generation before is used."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from faults.mutants import mutated

from shoal.core.errors import StorageError
from shoal.storage import manifest
from shoal.storage.generations import Generation, Generations
from shoal.storage.tensors import TensorFile

LARGE_BYTES = 3 << 20


def commit(folder: Path, step: int, size: int) -> Generation:
    data = random.Random(step).randbytes(size)
    with Generations(folder).begin(step) as draft:
        draft.tensors("weights.safetensors", [("w", "F32", (size // 4,), data)])
        draft.tensors("state.safetensors", [("m", "BF16", (2, 2), data[:8])])
        return draft.commit(trial=3)


def flip(path: Path, bit: int) -> None:
    """Change one bit; a second time changes it back."""
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def bits(generation: Generation) -> list[tuple[Path, int]]:
    files = sorted(generation.path.iterdir())
    return [(path, bit) for path in files for bit in range(8 * path.stat().st_size)]


def unseen(generations: Generations, old: Generation, flips: list[tuple[Path, int]]) -> list[str]:
    """The flips after which something else than ``old`` is used, or nobody is told."""
    found = []
    for path, bit in flips:
        reports: list[tuple[Path, str]] = []
        flip(path, bit)
        newest = generations.newest(lambda where, why: reports.append((where, why)))  # noqa: B023
        flip(path, bit)
        if newest != old or [where for where, _ in reports] != [path.parent]:
            found.append(f"bit {bit} of {path.name}")
    return found


@pytest.fixture
def small(folder):
    return Generations(folder), commit(folder, 400, 8), commit(folder, 800, 64)


@pytest.mark.parametrize("size", [256, pytest.param(6000, marks=pytest.mark.full)])
def test_every_bit_of_a_small_checkpoint_is_watched(folder, size):
    generations = Generations(folder)
    old, new = commit(folder, 400, 8), commit(folder, 800, size)

    assert len(bits(new)) > 8 * size + 4000
    assert unseen(generations, old, bits(new)) == []
    assert generations.newest() == new


def test_a_reader_of_one_tensor_sees_each_of_its_bits(small):
    _, _, new = small
    path = new.path / "weights.safetensors"
    accepted = []
    for bit in range(8 * path.stat().st_size):
        flip(path, bit)
        try:
            with new.open("weights.safetensors") as file:
                file.read("w")
            accepted.append(bit)
        except StorageError:
            continue
        finally:
            flip(path, bit)

    assert accepted == []


@pytest.mark.parametrize(
    "count", [500, pytest.param(10_000, marks=pytest.mark.full)], ids=lambda n: f"{n} flips"
)
def test_random_bits_of_a_large_checkpoint_are_watched(folder, count):
    old, new = commit(folder, 400, 8), commit(folder, 800, LARGE_BYTES)
    random_bits = random.Random(7).sample(bits_of_large(new), count)

    assert unseen(Generations(folder), old, random_bits) == []


def bits_of_large(generation: Generation) -> list[tuple[Path, int]]:
    path = generation.path / "weights.safetensors"
    picked = random.Random(1).sample(range(8 * path.stat().st_size), 20_000)
    return [(path, bit) for bit in picked]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 60, -1])
@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors", "manifest.json"])
def test_a_file_that_is_cut_short_is_seen(small, name, size):
    generations, old, new = small
    data = (new.path / name).read_bytes()
    (new.path / name).write_bytes(data[:size])

    assert generations.newest() == generations.newest(quick=True) == old


def test_a_file_that_has_grown_is_seen(small):
    generations, old, new = small
    with (new.path / "state.safetensors").open("ab") as file:
        file.write(b"\0")

    assert generations.newest() == generations.newest(quick=True) == old


def test_without_the_digests_flips_would_go_unseen(small):
    generations, old, new = small
    tensor_bits = [(path, bit) for path, bit in bits(new) if path.name.startswith("weights")]
    nothing = [(TensorFile, "_check_tensor", lambda *_: None), (TensorFile, "verify", read_all)]
    with mutated(nothing):
        assert unseen(generations, old, tensor_bits[-64:])


def test_without_its_seal_a_manifest_would_be_believed(small):
    generations, old, new = small
    path = new.path / "manifest.json"
    at = path.read_bytes().index(b'"trial": 3') + len(b'"trial": 3') - 1
    without_seal = [(manifest, "_unsealed", lambda data: data[: -manifest._SEAL_BYTES] + b"}")]
    with mutated(without_seal):
        assert unseen(generations, old, [(path, 8 * at)])  # trial 2


def read_all(file: TensorFile) -> None:
    for name in file.entries:
        file.read(name)
