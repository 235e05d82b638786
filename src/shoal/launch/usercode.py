"""The code of the user's modules, for workers to run; refused where a file has changed since.

What a module ran when it was imported nobody keeps. Its functions are what there is to be compared
with its file.
"""

from __future__ import annotations

import dis
import functools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any
from zipimport import zipimporter

from shoal.core.codes import codes_in
from shoal.core.errors import SpecError
from shoal.launch.mainfile import changed
from shoal.pystate.sentcode import ModuleCode


def codes_of(modules: Iterable[ModuleType]) -> dict[str, ModuleCode]:
    """By name, what their imports ran; of one with a loader of its own nothing: it is asked there.

    Raises:
        SpecError: a file is not what was imported any more.
    """
    codes = {}
    for module in modules:
        if (code := code_of_file(module)) is None:
            continue
        for name, function in _functions_of(module):
            if not _is_in(name, function.__code__, code):
                raise SpecError(
                    f"{name} of the module {module.__name__} is another one in "
                    f"{code.co_filename} than the one that this process has: the file was "
                    "changed after it was imported, and workers would import it as it is now. "
                    f"Reload it (importlib.reload({module.__name__}), and what was imported from "
                    "it), or begin anew."
                )
        codes[module.__name__] = ModuleCode.of(module, code)
    return codes


def code_of_file(module: ModuleType) -> CodeType | None:
    """What a module's import runs; None where its file does not say."""
    loader = vars(module).get("__loader__")
    if type(loader) not in (SourceFileLoader, zipimporter):
        return None
    file = str(vars(module)["__file__"])
    return _read(file, changed(file), module.__name__, loader)


@functools.lru_cache(maxsize=4096)
def _read(file: str, when: int, name: str, loader: Any) -> CodeType | None:
    try:
        code: CodeType | None = loader.get_code(name)
    except (ImportError, OSError, SyntaxError, ValueError):  # it is gone, or being written
        return None
    return code


def _functions_of(home: ModuleType | type) -> Iterator[tuple[str, FunctionType]]:
    """Those that a module has at its top level and in its classes there, by their names."""
    module = home.__name__ if isinstance(home, ModuleType) else home.__module__
    for name, value in list(vars(home).items()):
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        if type(value) is FunctionType:
            yield _name_in(home, name), value
        elif isinstance(value, type) and (value.__module__, value.__qualname__) == (
            module,
            _name_in(home, name),
        ):
            yield from _functions_of(value)


def _name_in(home: ModuleType | type, name: str) -> str:
    return name if isinstance(home, ModuleType) else f"{home.__qualname__}.{name}"


def _is_in(name: str, own: CodeType, code: CodeType) -> bool:
    """Whether a function's code is in that of its file, by whatever lines; or it is of no file's.

    One whose name is not there is nobody's who is imported anew: a reload has left it over.
    """
    if own.co_filename != code.co_filename:
        return True
    names = {name, own.co_qualname}  # IPython's reload makes functions of other ones
    alike = [one for one in _codes_in(code) if one.co_qualname in names]
    return not alike or any(_are_same(own, one) for one in alike)


@functools.lru_cache(maxsize=4096)
def _codes_in(code: CodeType) -> tuple[CodeType, ...]:
    return tuple(codes_in(code))


def _are_same(some: CodeType, other: CodeType) -> bool:
    return some == other or _does(some) == _does(other)


def _does(code: CodeType) -> tuple[object, ...]:
    """What it does, wherever it stands.

    How an attribute of a global is called depends on whether its file imports it by that name,
    which who compiles a function alone (IPython's reload) does not know.
    """
    steps = [one for one in dis.get_instructions(code) if one.opname not in _FOR_CALLS]
    at = {one.offset: number for number, one in enumerate(steps)}
    after = sorted(at)

    def argument(one: dis.Instruction) -> object:
        if one.opcode in _JUMPS:
            return at.get(after[bisect_left(after, one.argval)] if after[-1] >= one.argval else -1)
        if isinstance(one.argval, CodeType):
            return _does(one.argval)
        if one.opname == "KW_NAMES" and one.arg is not None:
            return code.co_consts[one.arg]
        return type(one.argval), repr(one.argval)

    said = [(_ONE_NAME.get(one.opname, one.opname), argument(one)) for one in steps]
    return (code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, *said)


_FOR_CALLS = frozenset(("PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP", "RESUME"))
_ONE_NAME = {"LOAD_METHOD": "LOAD_ATTR"}
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
