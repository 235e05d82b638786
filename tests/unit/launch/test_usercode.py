"""Workers run the code of the user's modules that the study's process has."""

from __future__ import annotations

import importlib
import sys

import cloudpickle
import pytest

import shoal
from shoal.launch.packing import pack_recipe
from shoal.launch.usercode import _are_same

pytestmark = pytest.mark.usefixtures("look_at_modules")

NET = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x * 3

def model(hp):
    return Net()
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A module's file, and an interpreter that is afterwards as it was."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "edited_net.py"
    file.write_text(NET)
    yield file
    sys.modules.pop("edited_net", None)


def recipe():
    model = importlib.import_module("edited_net").model
    return shoal.Recipe(model=model, data=len, loss=max)


def arrived(packed):
    """What its model computes of 1 in a process that imports the module only then."""
    importlib.invalidate_caches()
    return cloudpickle.loads(packed).model({})(1)


@pytest.mark.parametrize("later", [NET.replace("3", "-5"), "no Python", None])
def test_a_file_may_change_while_its_study_runs(file, later):
    packed = pack_recipe(recipe())
    del sys.modules["edited_net"]
    file.unlink() if later is None else file.write_text(later)
    assert arrived(packed) == 3


def test_a_process_that_has_other_code_imports_it_anew(file):
    first = pack_recipe(recipe())
    del sys.modules["edited_net"]
    file.write_text(NET.replace("3", "-5"))
    second = pack_recipe(recipe())
    del sys.modules["edited_net"]
    assert [arrived(first), arrived(second), arrived(second), arrived(first)] == [3, -5, -5, 3]


def test_a_file_that_changed_since_its_import_is_refused_with_the_function(file):
    known = recipe()
    file.write_text(f"# The same, a line lower.\n{NET}")
    pack_recipe(known)
    file.write_text(NET.replace("3", "-5"))
    words = r"Net\.forward of the module edited_net is another one in .*edited_net\.py than"
    with pytest.raises(shoal.SpecError, match=words):
        pack_recipe(known)
    importlib.reload(sys.modules["edited_net"])
    pack_recipe(recipe())


def test_what_a_notebook_has_reloaded_by_parts_is_compared_by_its_name(file):
    """IPython's reload compiles methods by themselves, and puts them into the module's class."""
    known, made = recipe(), {}
    text = "class Made:\n    def forward(self, x):\n        return (lambda: torch.abs(x * -5))()"
    exec(compile(text, str(file), "exec", dont_inherit=True), made)
    sys.modules["edited_net"].Net.forward = made["Made"].forward
    with pytest.raises(shoal.SpecError, match=r"Net\.forward of the module edited_net"):
        pack_recipe(known)
    file.write_text(NET.replace("x * 3", "(lambda: torch.abs(x * -5))()"))
    pack_recipe(known)


@pytest.mark.parametrize(
    ("some", "other"),
    [
        ("if x: x += 1\n        ;x += 1", "if x: x += 1; x += 1"),
        ("x += 1", "x += 1.0"),
        ("x += 0.0", "x += -0.0"),
        ("x = f(x=1)", "x = f(y=1)"),
        ("x = (lambda: 1)()", "x = (lambda: 2)()"),
    ],
)
def test_code_that_does_something_else_is_not_the_same(some, other):
    def compiled(body):
        body = body.replace("        ;", "    ")
        return compile(f"def f(x):\n    {body}\n    return x", "f", "exec").co_consts[0]

    assert _are_same(compiled(some), compiled(some))
    assert not _are_same(compiled(some), compiled(other))
