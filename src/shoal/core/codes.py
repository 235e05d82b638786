"""What code has within: of functions, lambdas, comprehensions and classes that it defines."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from itertools import pairwise, takewhile
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


_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


def loaded_by(code: CodeType) -> Iterator[str]:
    """Globals and builtins that code reads, and code within, by name."""
    for one in codes_in(code):
        loads = (step for step in dis.get_instructions(one) if step.opname in _LOADS)
        yield from (str(step.argval) for step in loads)


def found_by_name(function: FunctionType) -> dict[str, Any]:
    """Globals of which code may make the names as it runs: ``globals()[hp["model"]]``.

    Functions and classes, numbers and strings; modules where an ``eval`` or ``exec`` may spell
    them. Nothing where code has no such call.
    """
    own = function.__globals__.keys()  # an ``eval`` of its own is none
    asked = ({"globals", "eval", "exec"} & set(loaded_by(function.__code__))) - own
    if not asked:
        return {}
    kinds = (FunctionType, type, *_PLAIN, *([ModuleType] if asked != {"globals"} else []))
    known = function.__globals__.items()
    return {k: v for k, v in known if isinstance(v, kinds) and not k.startswith("__")}


_PLAIN = (int, float, complex, str, type(None))


def called_for_effect(code: CodeType) -> Iterator[tuple[str, ...]]:
    """By names the functions that code calls and drops what they return: ``gin.parse(...)``."""
    for one in codes_in(code):
        steps = list(dis.get_instructions(one))
        for called, after in pairwise(steps):
            if not (called.opname.startswith("CALL") and after.opname == "POP_TOP"):
                continue
            first = next((at for at, step in enumerate(steps) if _begins(step, called)), None)
            if first is None:
                continue
            attributes = takewhile(lambda step: step.opname in _ATTRIBUTES, steps[first + 1 :])
            yield tuple(str(step.argval) for step in (steps[first], *attributes))


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def _begins(step: dis.Instruction, called: dis.Instruction) -> bool:
    """Whether what is called is found by the name that a step loads."""
    here, there = step.positions, called.positions
    if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or here is None or there is None:
        return False
    return (here.lineno, here.col_offset) == (there.lineno, there.col_offset)


_SETTING = ("STORE_ATTR", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR")
_SETTERS = frozenset(("setattr", "delattr", "vars", "__dict__", "update", "setdefault", "pop"))


def modules_it_may_set(code: CodeType) -> Iterator[str]:
    """Names of globals and modules that code has to do with, where it sets anything at all.

    ``import lib; lib.rate += 1``, ``setattr(lib, name, 1)``, ``vars(lib).update(rate=1)``.
    """
    for one in codes_in(code):
        steps = list(dis.get_instructions(one))
        if _SETTERS.isdisjoint(one.co_names) and not any(s.opname in _SETTING for s in steps):
            continue
        for step in steps:
            if step.opname in _LOADS or step.opname == "IMPORT_NAME":
                yield str(step.argval)


def set_by(code: CodeType) -> Iterator[tuple[str, ...]]:
    """By names what code assigns in what it has not made: ``F.gelu = f``, ``lib.TABLE[key] = f``.

    Of an entry where the whole is.
    """
    for one in codes_in(code):
        path, key = list[str](), False
        for step in dis.get_instructions(one):
            if step.opname == "STORE_ATTR" and path and not key:
                yield (*path, str(step.argval))
            elif step.opname == "STORE_SUBSCR" and path[1:] and key:
                yield tuple(path)
            if step.opname == "LOAD_GLOBAL":
                path, key = [str(step.argval)], False
            elif step.opname == "LOAD_ATTR" and path and not key:
                path = [*path, str(step.argval)]
            elif step.opname in ("LOAD_CONST", "LOAD_FAST") and path and not key:
                key = True
            else:
                path, key = [], False
