"""What a sampler or pruner was made with, as text that lasts: what a study's record keeps of it.

Optuna's samplers and pruners do not say what they were given, so their attributes are read, one
name each. Another version of the library may have others: whoever compares looks at those that
are in both.

[Note: what is inside]
A value with parts has an entry of its own, which says what it is, beside those of its parts:
``wrapped_pruner`` is ``None`` or ``MedianPruner``, ``x0`` is ``None`` or ``dict of lr``. Classes
that a library keeps to itself have none, since it may rename them. Of a user's own class the text
is a part too, but for comments and how it is laid out: another rule is another pruner.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.recipes.libraries import is_installed, is_library

_DEPTH = 3  # samplers hold samplers, which hold generators
CODE = "the code of "
"""Before a class, the name of what is on record of its text."""
_PLAIN = (bool, int, float, str, type(None))


def parameters_of(value: object) -> str:
    """The parameters of a sampler or pruner by name, as JSON; equal where they were made alike."""
    return json.dumps(dict(sorted(_walk("", value, _DEPTH))))


def first_difference(was: str, now: str) -> tuple[str, str, str] | None:
    """The first parameter that both texts name and that differs: its name, before and now."""
    before, after = json.loads(was or "{}"), json.loads(now or "{}")
    name = next(_differing(before, after), None)
    return None if name is None else (name, before[name], after[name])


def is_seeded_otherwise(was: str, now: str) -> bool:
    """Whether all that differs is the state of NumPy's generators, and what one has shuffled."""
    differing = list(_differing(json.loads(was or "{}"), json.loads(now or "{}")))
    return bool(differing) and all(
        name.rpartition(".")[2] == "rng" or name.startswith("all_grids.") for name in differing
    )


def _differing(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    return (n for n in sorted(before.keys() & after.keys()) if before[n] != after[n])


def _walk(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, _PLAIN):
        yield name, repr(value)
    elif type(value).__name__ == "RandomState":  # of NumPy's: what it was seeded with
        _, keys, *rest = value.get_state()
        yield name, hashlib.sha256(keys.tobytes() + repr(rest).encode()).hexdigest()[:12]
    elif callable(value) and hasattr(value, "__qualname__"):
        yield name, value.__qualname__
    else:
        if name and (kind := _kind(value)):
            yield name, kind
        for own_kind in type(value).__mro__:
            if text := _text_of(own_kind):
                digest = hashlib.sha256(text.encode()).hexdigest()[:12]
                yield f"{name}.{CODE}{own_kind.__qualname__}".strip("."), digest
        for part, own in (_inside(value) or {}).items() if depth else ():
            yield from _walk(f"{name}.{part}".strip("."), own, depth - 1)


def _text_of(kind: type) -> str:
    """The definition of a class; nothing of a library's, or where it cannot be read."""
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    if is_library(kind) or is_installed(file) or kind.__module__.startswith("shoal."):
        return ""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    except (OSError, TypeError, SyntaxError):  # defined where no file is
        return ""


def _kind(value: Any) -> str:
    """What a value with parts is; nothing of a class that its library does not export."""
    kind = type(value)
    if isinstance(value, Mapping):
        return f"{kind.__name__} of {', '.join(sorted(map(str, value))) or 'nothing'}"
    if kind in (list, tuple):
        return f"{kind.__name__} of {len(value)}"
    public, *private = kind.__module__.split("._")
    is_known = not private or getattr(sys.modules.get(public), kind.__name__, None) is kind
    return kind.__qualname__ if is_known else ""


def _inside(value: Any) -> Mapping[str, Any] | None:
    """The parts of a value by name; None of one that has none."""
    if isinstance(value, Mapping):
        return {str(key): own for key, own in value.items()}
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, list | tuple):
        return {str(index): own for index, own in enumerate(value)}
    attributes = getattr(value, "__dict__", None)
    if attributes is None:
        return None
    return {key.lstrip("_"): own for key, own in attributes.items()}
