"""What a generation says of itself: its step, its files with their digests, the caller's data.

The text ends with a digest of all bytes before it, in every format there will ever be, so
that a newer format can be told from damage. It guards against accidents, not against people:
whoever can write the file can write a digest, so nothing in it is trusted to be sane.

[Note: format 2]
A generation some of whose weights lie in a file of their own, ``APART``, has format 2: a version
that knows format 1 alone would find a model that lacks them, and says instead that a later one
wrote it. All others have format 1, as ever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from shoal.core.errors import StorageError
from shoal.storage import documents
from shoal.storage.failures import damaged
from shoal.storage.tensors import FileRecord

FORMAT = 2
APART = "frozen.safetensors"
"""Weights that nothing changes; the others are elsewhere."""
_SEAL = re.compile(rb',"digest":"([0-9a-f]{32})"}\n')
_SEAL_BYTES = len(',"digest":""}\n') + 32
_DIGEST = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\.safetensors")


class NewerFormat(StorageError):
    """A later version of shoal wrote this; it is whole, and left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of ``manifest.json``; ``meta`` is the caller's."""

    step: int
    meta: Mapping[str, Any]
    files: Mapping[str, FileRecord]


def check_file_name(name: str) -> None:
    """Raise for a name that no generation may hold.

    Raises:
        StorageError: it is not letters, digits, ``_`` or ``-``, and ``.safetensors``.
    """
    if not _FILE_NAME.fullmatch(name):
        raise StorageError(
            f"{name!r} cannot be a file of a checkpoint. Name it with letters, digits, '_' and "
            "'-', and the ending '.safetensors'."
        )


def encode(manifest: Manifest, path: Path) -> bytes:
    """The text of ``manifest``, for the file ``path``.

    Raises:
        StorageError: the caller's data cannot be written as JSON.
    """
    record = {
        "format": FORMAT if APART in manifest.files else 1,
        "step": manifest.step,
        "meta": manifest.meta,
        "files": {name: asdict(file) for name, file in manifest.files.items()},
    }
    text = documents.encode(record, path)[:-1]
    return text + b',"digest":"%s"}\n' % xxh3_128_hexdigest(text).encode()


def parse(data: bytes, path: Path) -> Manifest:
    """The manifest that ``data`` is, read from ``path``.

    Raises:
        Damaged: it is not what was written.
        NewerFormat: a later version of shoal wrote it.
    """
    try:
        record = documents.decode(_unsealed(data))
        _check_format(record, path)
        return _manifest(record)
    except ValueError as error:
        raise damaged(path, str(error)) from error


def _unsealed(data: bytes) -> bytes:
    text, seal = data[:-_SEAL_BYTES], _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if not seal:
        raise ValueError("it has no digest at its end")
    found = xxh3_128_hexdigest(text)
    if found != seal[1].decode():
        raise ValueError(f"its digest is {found}, {seal[1].decode()} was written")
    return text + b"}"


def _check_format(record: Any, path: Path) -> None:
    found = record.get("format") if isinstance(record, dict) else None
    if type(found) is not int or found < 1:
        raise ValueError(f"{found!r} is no format")
    if found > FORMAT:
        raise NewerFormat(
            f"{path} has format {found}; this version of shoal reads format {FORMAT} and has "
            "changed nothing. Open the study with the version that wrote it."
        )


def _manifest(record: Mapping[str, Any]) -> Manifest:
    step, meta, files = (record.get(key) for key in ("step", "meta", "files"))
    keys = {"format", "step", "meta", "files"}
    if record.keys() != keys or type(step) is not int or not isinstance(meta, dict):
        raise ValueError("it lacks a step, meta or files, or has more than these")
    if not isinstance(files, dict) or not all(map(_FILE_NAME.fullmatch, files)):
        raise ValueError("it names files that no checkpoint has")
    return Manifest(
        step=step, meta=meta, files={name: _record(name, files[name]) for name in files}
    )


def _record(name: str, found: Any) -> FileRecord:
    fields = {"bytes": int, "digest": str, "header": str, "tensors": dict}
    if not isinstance(found, dict) or {k: type(v) for k, v in found.items()} != fields:
        raise ValueError(f"its record of {name} is incomplete")
    digests = [found["digest"], found["header"], *found["tensors"].values()]
    if not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests):
        raise ValueError(f"its record of {name} has a digest that is none")
    return FileRecord(**found)
