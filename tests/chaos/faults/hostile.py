"""Files that somebody made to do harm: each has to be refused, and by a StorageError."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from shoal.storage import header


def tensor_file(text: bytes, data: bytes = b"") -> bytes:
    """A file of tensors with any header."""
    return len(text).to_bytes(8, "little") + text + data


def entry(name: str = '"a"', dtype: str = "U8", shape: str = "4", at: str = "0,4") -> str:
    """One tensor of a header; the parts may be anything."""
    return f'{name}:{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{at}]}}'


def header_of(*entries: str) -> bytes:
    return ("{" + ",".join(entries) + "}").encode()


_GOOD = entry()
_FOUR = b"\1\2\3\4"
_HUGE = 1 << 62

HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "a length beyond the file": (100).to_bytes(8, "little") + b"{}",
    "a length of all ones": b"\xff" * 8 + b"{}",
    "a length of half of all": (1 << 63).to_bytes(8, "little") + b"{}",
    "no header": tensor_file(b""),
    "spaces for a header": tensor_file(b"    "),
    "a list": tensor_file(b"[]"),
    "a word": tensor_file(b"null"),
    "an object that does not end": tensor_file(b"{"),
    "a comma at the end": tensor_file(b"{" + _GOOD.encode() + b",}", _FOUR),
    "something after the header": tensor_file(header_of(_GOOD) + b"x", _FOUR),
    "a second object": tensor_file(header_of(_GOOD) + b"{}", _FOUR),
    "a name that is no UTF-8": tensor_file(header_of(_GOOD).replace(b"a", b"\xff", 1), _FOUR),
    "half of a surrogate": tensor_file(header_of(entry('"\\ud800"')), _FOUR),
    "an unknown escape": tensor_file(header_of(entry('"\\x"')), _FOUR),
    "a line break in a name": tensor_file(header_of(entry('"\n"')), _FOUR),
    "a name without its end": tensor_file(b'{"aaaa', _FOUR),
    "a name of 5000 letters": tensor_file(header_of(entry(f'"{"a" * 5000}"')), _FOUR),
    "a name of backslashes": tensor_file(b'{"' + b"\\" * 9999, _FOUR),
    "a key twice": tensor_file(header_of(_GOOD, entry(at="4,8")), _FOUR * 2),
    "a key twice, once escaped": tensor_file(
        header_of(_GOOD, entry('"\\u0061"', at="4,8")), _FOUR * 2
    ),
    "tensors that overlap": tensor_file(header_of(_GOOD, entry('"b"', at="2,6")), _FOUR * 2),
    "the same bytes twice": tensor_file(header_of(_GOOD, entry('"b"')), _FOUR),
    "a gap": tensor_file(header_of(_GOOD, entry('"b"', at="5,9")), _FOUR * 3),
    "another order": tensor_file(header_of(entry('"b"', at="4,8"), _GOOD), _FOUR * 2),
    "an end before the beginning": tensor_file(header_of(entry(at="4,0")), _FOUR),
    "bytes that no tensor has": tensor_file(header_of(_GOOD), _FOUR + b"x"),
    "bytes that are not there": tensor_file(header_of(_GOOD), _FOUR[:3]),
    "an end far away": tensor_file(header_of(entry(shape=str(_HUGE), at=f"0,{_HUGE}")), _FOUR),
    "fewer bytes than the shape": tensor_file(header_of(entry(shape="5")), _FOUR),
    "more bytes than the shape": tensor_file(header_of(entry(shape="3")), _FOUR),
    "a shape that overflows": tensor_file(header_of(entry(shape=f"{_HUGE},4,4")), _FOUR),
    "a product that wraps to four": tensor_file(
        header_of(entry(shape=f"{(1 << 62) + 1},4")), _FOUR
    ),
    "nothing of a huge shape": tensor_file(header_of(entry(shape=f"0,{_HUGE},{_HUGE}", at="0,0"))),
    "a number of 5000 digits": tensor_file(header_of(entry(shape="9" * 5000)), _FOUR),
    "65 dimensions": tensor_file(header_of(entry(shape="1," * 64 + "4")), _FOUR),
    "5000 dimensions": tensor_file(header_of(entry(shape="1," * 4999 + "4")), _FOUR),
    "a negative size": tensor_file(header_of(entry(shape="-4")), _FOUR),
    "two negative sizes": tensor_file(header_of(entry(shape="-2,-2")), _FOUR),
    "a negative place": tensor_file(header_of(entry(at="-4,0")), _FOUR),
    "a size with a point": tensor_file(header_of(entry(shape="4.0")), _FOUR),
    "a size with an exponent": tensor_file(header_of(entry(shape="4e0")), _FOUR),
    "a size that is true": tensor_file(header_of(entry(shape="true")), _FOUR),
    "a size that is NaN": tensor_file(header_of(entry(shape="NaN")), _FOUR),
    "a size that is a string": tensor_file(header_of(entry(shape='"4"')), _FOUR),
    "a size with a zero in front": tensor_file(header_of(entry(shape="04")), _FOUR),
    "a size in other digits": tensor_file(header_of(entry(shape="\u0664")), _FOUR),
    "a place that is infinite": tensor_file(header_of(entry(at="0,Infinity")), _FOUR),
    "a comma too many": tensor_file(header_of(entry(shape="4,")), _FOUR),
    "one place": tensor_file(header_of(entry(at="4")), _FOUR),
    "three places": tensor_file(header_of(entry(at="0,4,4")), _FOUR),
    "an unknown type": tensor_file(header_of(entry(dtype="F128")), _FOUR),
    "a type in small letters": tensor_file(header_of(entry(dtype="u8")), _FOUR),
    "an unknown key": tensor_file(header_of(_GOOD.replace('"shape"', '"x":1,"shape"')), _FOUR),
    "a missing key": tensor_file(b'{"a":{"dtype":"U8","shape":[4]}}', _FOUR),
    "metadata": tensor_file(b'{"__metadata__":{"format":"pt"}}'),
    "metadata as a tensor": tensor_file(header_of(entry('"__metadata__"')), _FOUR),
    "lists in lists": tensor_file(header_of(entry(shape="[" * 50_000)), _FOUR),
    "objects in objects": tensor_file(b'{"a":' * 50_000, _FOUR),
    "a pickle": b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x02os\x94\x93.",
    "a zip archive": b"PK\x03\x04" + b"\0" * 100,
    "more tensors than anyone has": tensor_file(
        header_of(*(entry(f'"{n}"', shape="0", at="0,0") for n in range(header.MAX_TENSORS + 1)))
    ),
}


def sealed(text: bytes) -> bytes:
    """A manifest of any text with a digest that is right: a digest is no signature."""
    return text[:-1] + b',"digest":"%s"}\n' % xxh3_128_hexdigest(text[:-1]).encode()


def changed(record: dict[str, Any], *path: str, to: Any) -> bytes:
    """A manifest as JSON, in which one place is something else."""
    record = json.loads(json.dumps(record))
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return json.dumps(record).encode()


def manifests(record: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """What ``record``, a good manifest, may be turned into; each with a right digest."""
    good = json.dumps(record).encode()
    file = next(iter(record["files"].values()))
    for name in ("../x.safetensors", "/etc/passwd", "a\0.safetensors", "..", "", "a/b.safetensors",
                 "manifest.json", ".safetensors", "x.safetensors\n", "\u00fc.safetensors",
                 "a" * 70 + ".safetensors"):  # fmt: skip
        yield f"a file named {name[:20]!r}", changed(record, "files", to={name: file})
    for value in (-1, True, 1.0, "1", None, 0, [], {}):
        yield f"format {value!r}", changed(record, "format", to=value)
    for value in (-800, True, 800.0, "800", None, 801):
        yield f"step {value!r}", changed(record, "step", to=value)
    for value in (-1, True, 1.5, "1", None, 1 << 80, 0):
        yield (
            f"{value!r} bytes",
            changed(record, "files", "weights.safetensors", "bytes", to=value),
        )
    for value in ("", "0" * 31, "0" * 33, "G" * 32, 7, None, "0" * 32):
        for key in ("digest", "header"):
            path = ("files", "weights.safetensors", key)
            yield f"{key} {value!r}", changed(record, *path, to=value)
    for value in ([], None, 1, {"w": 1}, {"w": "x"}, {"other": "0" * 32}, {}):
        path = ("files", "weights.safetensors", "tensors")
        yield f"tensors {value!r}", changed(record, *path, to=value)
    yield "files that are a list", changed(record, "files", to=[])
    yield "meta that is a list", changed(record, "meta", to=[])
    yield "an unknown key", changed(record, "surprise", to=1)
    yield (
        "an unknown key of a file",
        changed(record, "files", "weights.safetensors", "path", to="/etc/passwd"),
    )
    yield "a missing key", json.dumps({k: v for k, v in record.items() if k != "meta"}).encode()
    yield "a key twice", good[:-1] + b', "step": 800}'
    yield "NaN", good.replace(b'"trial": 3', b'"trial": NaN')
    yield "a float beyond all", good.replace(b'"trial": 3', b'"trial": 1e999')
    yield "5000 digits", good.replace(b'"trial": 3', b'"trial": ' + b"9" * 5000)
    yield "no UTF-8", good.replace(b"trial", b"tri\xffl")
    yield "a deep nest", good.replace(b'"trial": 3', b'"trial": ' + b"[" * 100_000)
    yield "a deep and whole nest", good.replace(b": 3", b": " + b"[" * 9000 + b"]" * 9000)
    yield "a million lists", good.replace(b": 3", b": [" + b"[]," * (1 << 20) + b"1]")
    yield "17 MiB of text", good.replace(b'"trial": 3', b'"trial": "' + b"x" * (17 << 20) + b'"')
    yield "a list", b"[1]"
    yield "a string", b'"{}'
    yield "nothing", b"}"


def kinds(outside: Path) -> dict[str, Callable[[Path], object]]:
    """What may lie where a file should; ``outside`` is a good file of somewhere else."""

    def make_socket(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))

    return {
        "a link to a good file": lambda path: path.symlink_to(outside),
        "a link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
        "a link to itself": lambda path: path.symlink_to(path),
        "a link to a device": lambda path: path.symlink_to("/dev/zero"),
        "a pipe": os.mkfifo,
        "a socket": make_socket,
        "a directory": lambda path: path.mkdir(),
    }
