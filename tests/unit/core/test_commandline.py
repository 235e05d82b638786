"""What the main program was given, whatever it left in sys.argv."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from shoal.core.commandline import arguments_of_main, split_command


@pytest.mark.parametrize(
    ("command", "program", "given"),
    [
        ("python a.py --width 5", "a.py", "--width 5"),
        ("python -uW error -Xdev -X utf8 dir/a.py -m x", "dir/a.py", "-m x"),
        ("python -Wm --check-hash-based-pycs always a.py 1", "a.py", "1"),
        ("python -m pack.mod -c 5", "pack.mod", "-c 5"),
        ("python -um mod 1", "mod", "1"),
        ("python -mmod 1", "mod", "1"),
        ("python -c pass 1", None, ""),
        ("python - 1", None, ""),
        ("python", None, ""),
    ],
)
def test_a_command_is_a_program_and_what_it_is_given(command, program, given) -> None:
    assert split_command(command.split()) == (program, given.split())


@pytest.mark.parametrize(
    ("command", "file", "module", "found"),
    [
        ("python a.py --width 5", "/here/a.py", None, ["--width", "5"]),
        ("python -m a --width 5", "/here/a.py", "a", ["--width", "5"]),
        ("python -m pack --width 5", "/pack/__main__.py", "pack.__main__", ["--width", "5"]),
        ("python -m cProfile -o out a.py --width 5", "/here/a.py", None, ["left"]),
        ("coverage run a.py --width 5", "/here/a.py", None, ["left"]),
        ("python", None, None, ["left"]),
    ],
)
def test_what_the_main_program_took_out_of_argv_was_given_all_the_same(
    command, file, module, found, monkeypatch
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(module, None) if module else None
    main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", command.split())
    monkeypatch.setattr(sys, "argv", ["a.py", "left"])

    assert arguments_of_main() == found
