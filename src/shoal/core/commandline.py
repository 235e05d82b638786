"""What a program was given on its command line, whatever it has made of ``sys.argv`` since."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_WITH_A_VALUE = "WX"  # of Python's options, in the same word or in the next one


def arguments_of_main() -> list[str]:
    """Those of the file or module that Python was started with, if that is the main program.

    Else what stands in ``sys.argv`` now: in a notebook, or where a profiler runs the file.
    """
    program, arguments = split_command(sys.orig_argv)
    is_main = program is not None and _is_run_as(sys.modules["__main__"], program)
    return list(arguments) if is_main else sys.argv[1:]


def split_command(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The file of a command ``python [OPTIONS] FILE``, or the module after -m; and what follows.

    None: neither is there.
    """
    at = 1
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-"):
            return word, words[at:]
        if word.startswith("--"):
            at += word == "--check-hash-based-pycs"
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter == "m":
                rest = [word[place:], *words[at:]] if word[place:] else words[at:]
                return (rest[0], rest[1:]) if rest else (None, [])
            if letter == "c":
                return None, []
            if letter in _WITH_A_VALUE:
                at += not word[place:]
                break
        if word == "-":
            break
    return None, []


def _is_run_as(main: ModuleType, program: str) -> bool:
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name in (program, f"{program}.__main__")
    file = getattr(main, "__file__", None)
    return bool(file) and Path(str(file)).name == Path(program).name
