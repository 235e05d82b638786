"""Tensors in a file: the safetensors format, with a digest of every tensor, and no pickle.

Plain ``safetensors`` loads what is written here. The reader is stricter than that library:
it takes only what the writer makes, and gives out no tensor whose digest differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from xxhash import xxh3_128

from shoal.core.errors import StorageError
from shoal.storage import header
from shoal.storage.failures import damaged
from shoal.storage.files import NewFile
from shoal.storage.reading import OpenFile

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file of tensors was when it was written; digests are xxh3-128 in hexadecimal."""

    bytes: int
    digest: str  # of the whole file
    header: str  # the digest of its header
    tensors: Mapping[str, str]  # the digest of each tensor, by name


def write_tensors(
    path: Path, tensors: Iterable[tuple[str, str, Sequence[int], Any]]
) -> FileRecord:
    """Make a file of (name, dtype, shape, buffer); its bytes are on disk when this returns.

    Buffers are read in place, once, and must be C-contiguous; dtypes are those of
    ``header.ITEM_BYTES``. After an error the file may be there in part.

    Raises:
        StorageError: the disk refuses, or a tensor cannot be in such a file.
    """
    try:
        views, entries = _arranged(tensors)
        start = header.encode(entries)
    except ValueError as error:
        raise StorageError(f"cannot write {path}: {error}.") from error
    whole = xxh3_128(start)
    digests = {}
    with NewFile(path, len(start) + sum(view.nbytes for view in views.values())) as file:
        file.write(start)
        for name in entries:
            digests[name] = _append(file, views[name], whole)
    digest, first = whole.hexdigest(), xxh3_128(start).hexdigest()
    return FileRecord(bytes=file.size, digest=digest, header=first, tensors=digests)


def digest_of(buffer: Any) -> str:
    """The digest that a record has of a tensor with these bytes."""
    view, digest = byte_view(buffer), xxh3_128()
    for start in range(0, len(view), CHUNK_BYTES):
        digest.update(view[start : start + CHUNK_BYTES])
    return digest.hexdigest()


def header_of(tensors: Iterable[tuple[str, str, Sequence[int], Any]]) -> str:
    """The digest that a record has of the header of a file of these tensors.

    Raises:
        StorageError: a tensor cannot be in such a file.
    """
    try:
        _, entries = _arranged(tensors)
        return xxh3_128(header.encode(entries)).hexdigest()
    except ValueError as error:
        raise StorageError(f"cannot make a file of tensors: {error}.") from error


def _arranged(
    tensors: Iterable[tuple[str, str, Sequence[int], Any]],
) -> tuple[dict[str, memoryview], dict[str, header.Entry]]:
    views: dict[str, memoryview] = {}
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, dtype, shape, buffer in tensors:
        if name in views:
            raise ValueError(f"tensor {name!r} is given twice")
        views[name] = byte_view(buffer)
        described[name] = (dtype, tuple(map(int, shape)))
    entries = header.arrange(described)
    for name, entry in entries.items():
        if views[name].nbytes != entry.end - entry.begin:
            raise ValueError(
                f"tensor {name!r} has {views[name].nbytes} bytes, {entry.dtype} of "
                f"{entry.shape} has {entry.end - entry.begin}"
            )
    return views, entries


def byte_view(buffer: Any) -> memoryview:
    """The bytes of a contiguous buffer, not copied.

    Raises:
        ValueError: it has gaps.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("a buffer is not contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _append(file: NewFile, view: memoryview, whole: xxh3_128) -> str:
    digest = xxh3_128()
    for start in range(0, len(view), CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        whole.update(chunk)
        digest.update(chunk)
        file.write(chunk)
    return digest.hexdigest()


class TensorFile:
    """A file of tensors, open for reading; with its record, every byte that is read is checked.

    Close it, or use it in a ``with`` block.
    """

    def __init__(self, path: Path, record: FileRecord | None = None) -> None:
        """Read the header.

        Raises:
            StorageError: it is no such file, or not the one that was recorded.
        """
        self.path, self.record = path, record
        self._file = OpenFile(path)
        try:
            self._start = self._read_start()
            self.entries = self._read_entries()
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> bytearray:
        """The bytes of one tensor, in memory of their own."""
        entry = self._entry(name)
        try:
            data = bytearray(entry.end - entry.begin)
        except (MemoryError, OverflowError) as error:
            raise StorageError(
                f"cannot read tensor {name!r} of {self.path}: its {entry.end - entry.begin} "
                "bytes do not fit in this machine's memory."
            ) from error
        self.read_into(name, memoryview(data))
        return data

    def read_into(self, name: str, destination: memoryview) -> None:
        """Fill ``destination``, which has the tensor's size; after an error it is undefined.

        Raises:
            StorageError: the bytes are not those that were written.
        """
        entry = self._entry(name)
        view = byte_view(destination)
        if view.nbytes != entry.end - entry.begin:
            raise StorageError(
                f"cannot read tensor {name!r} of {self.path} into {view.nbytes} bytes: it has "
                f"{entry.end - entry.begin}. Give it a place of that size."
            )
        digest = xxh3_128()
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._file.read_into(chunk, len(self._start) + entry.begin + start)
            digest.update(chunk)
        self._check_tensor(name, digest.hexdigest())

    def verify(self) -> None:
        """Read everything once and compare all digests; takes a few MiB of memory.

        Raises:
            StorageError: a byte is not the one that was written.
        """
        assert self.record is not None, f"{self.path} was opened without its record"
        whole = xxh3_128(self._start)
        for name in self.entries:
            digest = xxh3_128()
            for chunk in self._chunks(name):
                digest.update(chunk)
                whole.update(chunk)
            self._check_tensor(name, digest.hexdigest())
        if whole.hexdigest() != self.record.digest:
            raise damaged(self.path, _differ(whole.hexdigest(), self.record.digest))

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read_start(self) -> bytes:
        if self.record is not None and self._file.size != self.record.bytes:
            raise damaged(
                self.path, f"it has {self._file.size} bytes, {self.record.bytes} were written"
            )
        start = bytearray(8)
        self._file.read_into(memoryview(start), 0)
        try:
            start = bytearray(header.length(bytes(start), self._file.size))
        except ValueError as error:
            raise damaged(self.path, str(error)) from error
        self._file.read_into(memoryview(start), 0)
        return bytes(start)

    def _read_entries(self) -> dict[str, header.Entry]:
        if self.record is not None:
            found = xxh3_128(self._start).hexdigest()
            if found != self.record.header:
                raise damaged(self.path, "header: " + _differ(found, self.record.header))
        try:
            entries = header.parse(self._start[8:], self._file.size - len(self._start))
        except ValueError as error:
            raise damaged(self.path, str(error)) from error
        if self.record is not None and entries.keys() != self.record.tensors.keys():
            raise damaged(self.path, "it has other tensors than its manifest says")
        return entries

    def _entry(self, name: str) -> header.Entry:
        if name not in self.entries:
            raise StorageError(
                f"{self.path} has no tensor {name!r}. It has {len(self.entries)}: "
                f"{', '.join(map(repr, list(self.entries)[:10]))}."
            )
        return self.entries[name]

    def _chunks(self, name: str) -> Iterator[memoryview]:
        entry = self.entries[name]
        room = memoryview(bytearray(min(CHUNK_BYTES, entry.end - entry.begin)))
        for start in range(entry.begin, entry.end, CHUNK_BYTES):
            chunk = room[: entry.end - start]
            self._file.read_into(chunk, len(self._start) + start)
            yield chunk

    def _check_tensor(self, name: str, found: str) -> None:
        if self.record is not None and found != self.record.tensors[name]:
            expected = self.record.tensors[name]
            raise damaged(self.path, f"tensor {name!r}: " + _differ(found, expected))


def _differ(found: str, expected: str) -> str:
    return f"its digest is {found}, {expected} was written"
