"""Which of the user's modules a worker may import is told by what their code names."""

from __future__ import annotations

import importlib
import sys

import pytest

from shoal.launch.reached import imported_for_itself, reached
from shoal.source import MODULE_NAME

FILES = {
    "home/__init__.py": "",
    "home/named.py": "",
    "home/other.py": "",
    "home/ops.py": "",
    "home/finding.py": "import importlib, pkgutil\nimportlib.import_module('home.' + 'other')\n",
    "home/main.py": "from . import ops\nfrom .named import one\n\none()\n",
}


@pytest.fixture
def users(tmp_path, monkeypatch):
    """The modules of a package, ``main.py`` of which is the study's file."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = ["home", "home.named", "home.other", "home.ops", "home.finding"]
    found = {name: importlib.import_module(name) for name in names}
    main = type(sys)(MODULE_NAME)
    main.__file__, main.__package__ = str(tmp_path / "home/main.py"), "home"
    monkeypatch.setitem(sys.modules, MODULE_NAME, main)
    monkeypatch.delitem(sys.modules, "__main__", raising=False)  # that of the tests
    monkeypatch.setattr(sys, "argv", ["main.py"])
    yield found
    for name in names:
        del sys.modules[name]


def test_reached_are_those_that_code_names(users):
    assert reached((), users) == [users[name] for name in ("home", "home.named", "home.ops")]


def test_code_that_makes_names_of_modules_may_import_any(users):
    assert reached(["home.finding"], users) == list(users.values())


def test_a_relative_import_of_what_is_not_used_is_for_itself(users):
    assert imported_for_itself(users) == ["home", "home.ops"]
