"""The texts that the main program of this process is made of, however it is run."""

from __future__ import annotations

import inspect
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from shoal.source import MAINS

_STANDARD_INPUT = "/proc/self/fd/0"
_NO_FILES = frozenset(("<string>", "<stdin>"))


def texts_of(main: ModuleType) -> list[str]:
    """Its file's, or a notebook's cells, ``-c``, standard input; and those of files it has run."""
    own = _file_of(main)
    texts = [_of_file(own, main)] if own else [*_cells(main), _given()]
    texts += [_read(file) for file in _files_of_functions(main) if file != own]
    return [text for text in dict.fromkeys(texts) if text]


def is_all_known(main: ModuleType) -> bool:
    """Whether ``texts_of`` has all of it that has functions.

    Nobody keeps what is typed at Python's own prompt, comes through a pipe, or goes to ``exec``.
    """
    texts, files = texts_of(main), _files_of_functions(main)
    if not texts:
        return not files
    if _cells(main) or _file_of(main):
        return files.isdisjoint(_NO_FILES)
    return not any("exec" in text for text in texts)


def codes_under_way(main: ModuleType) -> Iterator[CodeType]:
    """What of it is being run by this thread: all of a script, the last line of a prompt."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals is vars(main):
            yield frame.f_code
        frame = frame.f_back


def _file_of(main: ModuleType) -> str:
    file = str(vars(main).get("__file__") or "")
    return "" if file == "<stdin>" else file


def _of_file(file: str, main: ModuleType) -> str:
    """Also where it is in an archive."""
    if text := _read(file):
        return text
    try:
        loader: Any = vars(main).get("__loader__")
        return str(loader.get_source(vars(main)["__name__"]) or "")
    except Exception:  # no loader, one that has no texts, an archive that is gone
        return ""


def _read(file: str) -> str:
    try:
        return Path(file).read_bytes().decode() if not file.startswith("<") else ""
    except (OSError, ValueError):
        return ""


def _cells(main: ModuleType) -> list[str]:
    """What was run in IPython, which has it as Python, whatever magic was in it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or shell.user_module is not main:
        return []
    return [str(text) for text in shell.history_manager.input_hist_parsed]


def _given() -> str:
    """What Python was given at its start instead of a file."""
    if sys.argv[:1] == ["-c"] and "-c" in sys.orig_argv[:-1]:
        return sys.orig_argv[sys.orig_argv.index("-c") + 1]
    is_input = sys.argv[:1] in (["-"], [""]) and not hasattr(sys, "ps1")
    try:
        is_file = is_input and stat.S_ISREG(os.fstat(0).st_mode)
    except OSError:  # it is closed
        return ""
    return _read(_STANDARD_INPUT) if is_file else ""


def _files_of_functions(main: ModuleType) -> set[str]:
    """Where the functions come from that it defines; those of a file that was ``%run`` too."""
    return {
        one.__code__.co_filename
        for one in list(vars(main).values())
        if isinstance(one, FunctionType)
        and one.__globals__.get("__name__", one.__module__) in MAINS  # %run takes its name away
    }
