"""Recipes in files of their own, and the records of small studies."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from shoal.resume import RecipeRecord, describe_recipe
from shoal.source import MODULE_NAME

HEADER = """
from dataclasses import make_dataclass

def Recipe(**fields):
    return make_dataclass("Recipe", fields)(**fields)

"""
Describe = Callable[..., RecipeRecord]


def load(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a file, under a name of one's choice, until the test ends."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Describe:
    """A function from a file's text to the record of its ``recipe``."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    versions = itertools.count()

    def describe_file(
        text: str, *, file: str = "sweep.py", module: str = MODULE_NAME, **neighbours: str
    ) -> RecipeRecord:
        folder = tmp_path / str(next(versions))
        folder.mkdir()
        for name, source in neighbours.items():
            (folder / f"{name}.py").write_text(source)
            load(folder / f"{name}.py", name, monkeypatch)
        (folder / file).write_text(HEADER + text)
        return describe_recipe(load(folder / file, module, monkeypatch).recipe)

    return describe_file
