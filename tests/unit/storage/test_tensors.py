"""Tensors in files: plain safetensors reads ours, we read plain safetensors', bit for bit."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shoal.core.errors import StorageError
from shoal.storage import header, tensors
from shoal.storage.failures import Damaged, FileError
from shoal.storage.reading import OpenFile
from shoal.storage.tensors import TensorFile, write_tensors

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
SHAPES = [(), (1,), (5,), (2, 3, 4), (0,), (3, 0, 2)]


def of(dtype, shape):
    """A tensor of any type with bytes that say which."""
    size = int(np.prod(shape)) * header.ITEM_BYTES[dtype]
    data = bytes((i * 7 + len(shape)) % (2 if dtype == "BOOL" else 251) for i in range(size))
    return torch.frombuffer(bytearray(data or b"\0" * 8), dtype=torch.uint8)[:size].view(
        TYPES[dtype]
    ).reshape(shape)  # fmt: skip


def buffer(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""


@pytest.fixture
def state():
    return {f"{dtype} of {shape} ü✓": of(dtype, shape) for dtype in TYPES for shape in SHAPES}


@pytest.fixture
def written(tmp_path, state):
    rows = [(n, n.split()[0], tuple(t.shape), buffer(t)) for n, t in state.items()]
    return tmp_path / "x.safetensors", write_tensors(tmp_path / "x.safetensors", rows)


def is_same(found, expected):
    same_type = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return same_type and bytes(buffer(found)) == bytes(buffer(expected))


def test_plain_safetensors_loads_every_type_and_shape(written, state):
    path, record = written
    found = load_file(path)

    assert found.keys() == state.keys()
    assert all(is_same(found[name], state[name]) for name in state)
    assert record.bytes == path.stat().st_size


def test_what_plain_safetensors_saves_is_read(tmp_path, state):
    path = tmp_path / "x.safetensors"
    save_file(state, path)

    with TensorFile(path) as file:
        assert file.entries.keys() == state.keys()
        assert all(bytes(file.read(n)) == bytes(buffer(t)) for n, t in state.items())


def test_a_record_binds_the_reader(written, state):
    path, record = written

    with TensorFile(path, record) as file:
        file.verify()
        for name, tensor in state.items():
            place = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
            file.read_into(name, memoryview(place.numpy()) if len(place) else memoryview(b""))
            assert bytes(place.numpy()) == bytes(buffer(tensor))
            assert tuple(file.entries[name].shape) == tuple(tensor.shape)


def test_data_is_aligned_to_the_size_of_its_type(written):
    with TensorFile(written[0]) as file:
        start = int.from_bytes(written[0].read_bytes()[:8], "little") + 8
        assert start % 8 == 0
        for entry in file.entries.values():
            assert (start + entry.begin) % header.ITEM_BYTES[entry.dtype] == 0


def test_large_tensors_go_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK_BYTES", 100)
    data = np.arange(1000, dtype=np.int16)
    record = write_tensors(tmp_path / "x", [("a", "I16", (1000,), data)])

    with TensorFile(tmp_path / "x", record) as file:
        file.verify()
        assert bytes(file.read("a")) == data.tobytes()


def test_the_same_tensors_give_the_same_file(tmp_path):
    rows = [("b", "U8", (1,), b"1"), ("a", "F32", (1,), b"1234"), ("c", "U8", (1,), b"3")]
    records = [
        write_tensors(tmp_path / "x", rows),
        write_tensors(tmp_path / "y", iter(rows[::-1])),
    ]

    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    assert records[0] == records[1]


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda name: name != "__metadata__"  # the format's own
)


@given(st.dictionaries(NAMES, st.binary(max_size=9), max_size=5))
def test_any_names_survive(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("names") / "x"
    write_tensors(path, [(n, "U8", (len(d),), d) for n, d in names.items()])

    with TensorFile(path) as file:
        assert {name: bytes(file.read(name)) for name in file.entries} == names
    assert load_file(path).keys() == names.keys()


def test_no_tensors_are_a_file_too(tmp_path):
    record = write_tensors(tmp_path / "x", [])

    with TensorFile(tmp_path / "x", record) as file:
        file.verify()
        assert file.entries == {}
    assert load_file(tmp_path / "x") == {}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("a", "F32", (2,), b"1234"), "has 4 bytes, F32 of \\(2,\\) has 8"),
        (("a", "F128", (1,), b"1234"), "'a' of dtype 'F128'"),
        (("a", "U8", (-1,), b""), "impossible shape"),
        (("a", "U8", (1,) * 65, b"1"), "impossible shape"),
        (("__metadata__", "U8", (1,), b"1"), "no tensor that a file may hold"),
        (("\ud800", "U8", (1,), b"1"), "surrogates not allowed"),
        (("a" * 5000, "U8", (1,), b"1"), "a tensor's name has 5000 letters, 4096"),
        (("a", "U8", (2,), np.zeros(4, np.uint8)[::2]), "a buffer is not contiguous"),
        (("b", "U8", (1,), b"1"), "tensor 'b' is given twice"),
    ],
)
def test_a_tensor_that_no_file_may_hold_is_refused_before_anything_is_there(tmp_path, row, reason):
    with pytest.raises(StorageError, match=rf"^cannot write .*x: .*{reason}"):
        write_tensors(tmp_path / "x", [("b", "U8", (1,), b"1"), row])
    assert not (tmp_path / "x").exists()


def test_a_header_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    rows = [(f"{number}", "U8", (0,), b"") for number in range(5)]
    monkeypatch.setattr(header, "MAX_TENSORS", 4)
    with pytest.raises(StorageError, match=r"5 tensors with a header of .*\. Store them in s"):
        write_tensors(tmp_path / "x", rows)
    monkeypatch.setattr(header, "MAX_BYTES", 100)
    with pytest.raises(StorageError, match="4 tensors with a header of"):
        write_tensors(tmp_path / "x", rows[:4])


def test_a_changed_tensor_is_named_with_both_digests(written):
    path, record = written
    with TensorFile(path) as file:
        name = "F32 of (5,) ü✓"
        place = file.entries[name].begin - list(file.entries.values())[-1].end
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)

    with TensorFile(path, record) as file:
        expected = record.tensors[name]
        pattern = rf"x\.safetensors is damaged.* tensor '{name[:3]}.*its digest is .*, {expected}"
        with pytest.raises(Damaged, match=pattern):
            file.read(name)
        with pytest.raises(Damaged, match=pattern):
            file.verify()
        file.read("F64 of (5,) ü✓")


def test_a_changed_header_is_found_when_the_file_is_opened(written):
    path, record = written
    path.write_bytes(path.read_bytes().replace(b'"F16"', b'"I16"', 1))

    with pytest.raises(Damaged, match="header: its digest is"):
        TensorFile(path, record)


def test_another_size_is_found_when_the_file_is_opened(written):
    path, record = written
    path.write_bytes(path.read_bytes() + b"\0")

    with pytest.raises(Damaged, match=rf"it has {record.bytes + 1} bytes, {record.bytes} were"):
        TensorFile(path, record)


def test_a_file_that_shrinks_while_it_is_read_is_damaged(written):
    path, record = written
    with TensorFile(path, record) as file:
        os.truncate(path, record.bytes - 1)
        with pytest.raises(Damaged, match=r"it ends at byte \d+, \d+ bytes early"):
            file.verify()


def test_a_tensor_that_is_not_there_is_answered_with_those_that_are(written):
    with (
        TensorFile(written[0]) as file,
        pytest.raises(StorageError, match=r"has no tensor 'x'\. It has 96: '"),
    ):
        file.read("x")


def test_a_place_of_another_size_is_refused(written):
    with (
        TensorFile(written[0]) as file,
        pytest.raises(StorageError, match=r"into 3 bytes: it has 20\. Give it a place"),
    ):
        file.read_into("F32 of (5,) ü✓", memoryview(bytearray(3)))


def test_a_file_can_be_closed_twice_and_leaks_no_descriptor(written):
    before = len(os.listdir("/proc/self/fd"))
    file = TensorFile(written[0])
    file.close()
    file.close()
    written[0].write_bytes(b"x" * 100)
    with pytest.raises(Damaged):
        TensorFile(written[0])

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_that_cannot_read_is_an_error_with_its_number(written, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "no")

    with OpenFile(written[0]) as file:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(FileError, match="cannot read") as caught:
            file.read_into(memoryview(bytearray(1)), 0)
    assert caught.value.errno == errno.EIO
