"""Values in words that are the same in every run: no address, no build, no secret."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_MAX_CHARACTERS = 1000
_SECRET = re.compile(r"(?i)token|secret|password|passwd|api_?key|credential")
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def is_plain(value: Any) -> bool:
    """Whether a value is a scalar, or a tuple of scalars: nothing that changes under way."""
    if isinstance(value, tuple):
        return all(isinstance(item, PLAIN) for item in value)
    return isinstance(value, PLAIN)


def qualname(value: Any) -> str:
    """``module.name`` of a function or class."""
    name = str(getattr(value, "__qualname__", None) or getattr(value, "__name__", "?"))
    module = str(getattr(value, "__module__", None) or "builtins")
    module = module.replace("shoal.recipes.", "shoal.")  # as studies have it on record
    return name if module == "builtins" else f"{module}.{name}"


def version_of(value: Any) -> str:
    """``" of torch 2.10.0"``; nothing for Python's own. The build is in the numerics key."""
    top = str(getattr(value, "__module__", None) or "builtins").split(".")[0]
    if top in sys.stdlib_module_names:
        return ""
    try:
        version = importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(sys.modules.get(top), "__version__", "?"))
    return f" of {top} {version.split('+')[0]}"


def attributes_of(value: Any, *, with_all: bool) -> dict[str, Any]:
    """An object's attributes by name; of a library's object the plain public ones, and of its
    records functions too."""
    is_record = is_dataclass(value) and not isinstance(value, type)
    if is_record:
        found = {field.name: getattr(value, field.name, None) for field in fields(value)}
    else:
        found = dict(getattr(value, "__dict__", {}))
    if not with_all:
        found = {
            name: item
            for name, item in found.items()
            if _is_telling(name, item) or (is_record and callable(item))
        }
    return dict(sorted(found.items()))


def _is_telling(name: str, item: Any) -> bool:
    is_public = not name.startswith("_") and isinstance(item, PLAIN)
    return is_public or (name == "_buffers" and isinstance(item, Mapping) and bool(item))


def stable_repr(value: Any, name: str) -> str:
    """The object's own words, where they say more than where it lies in memory."""
    try:
        text = repr(value)
    except Exception:  # a library's object, in whatever state
        text = ""
    return f"{name} object" if not text or _ADDRESS.search(text) else shorten(text)


def is_secret(name: str) -> bool:
    """Whether a name says that its value is nobody else's business."""
    return bool(_SECRET.search(name))


def hide(value: str) -> str:
    """A secret as a digest."""
    return f"a text of digest {_digest(value)}"


def shorten(text: str) -> str:
    """A long text by its beginning and a digest of the whole."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:200]}... ({len(text)} characters, digest {_digest(text)})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
