"""What code has within: of functions, lambdas, comprehensions and classes that it defines."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code itself, and all code within, however deep."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> Iterator[str]:
    """Of the globals and attributes that code reads, and code within."""
    for one in codes_in(code):
        yield from one.co_names


def found_by_name(function: FunctionType) -> dict[str, Any]:
    """Globals of which code may make the names as it runs: ``globals()[hp["model"]]``.

    Functions and classes, numbers and strings; modules where an ``eval`` or ``exec`` may spell
    them. Nothing where code has no such call.
    """
    asked = _asked_for(function.__code__) & {"globals", "eval", "exec"}
    if not asked:
        return {}
    kinds = (FunctionType, type, *_PLAIN, *([ModuleType] if asked != {"globals"} else []))
    known = function.__globals__.items()
    return {k: v for k, v in known if isinstance(v, kinds) and not k.startswith("__")}


_PLAIN = (int, float, complex, str, type(None))


def _asked_for(code: CodeType) -> set[str]:
    """Globals and builtins that code within reads."""
    every = (step for one in codes_in(code) for step in dis.get_instructions(one))
    return {step.argval for step in every if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
