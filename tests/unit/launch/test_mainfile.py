"""What the text of a main file says of its imports and assignments."""

from __future__ import annotations

import sys
import threading
import types

import pytest
from torch.nn import functional

from shoal.launch.mainfile import Said, main_files
from shoal.launch.reached import imported_for_itself, named_objects, reached
from shoal.launch.replaced import find_changes
from shoal.pystate.changes import Change, Gone
from shoal.source import MODULE_NAME

TEXT = """
import colorsys as colors, registered, json, pkg.nets
from registering import *
from used import one, two
import torch.nn.functional as F
if True:
    F.silu = one
    colors.hue, unknown.name = 3, 4
setattr(F, "celu", colors)
json.one, colors[0].deep = 1, 2

def model(hp):
    F.never = 3
"""


@pytest.fixture
def main(tmp_path, monkeypatch):
    module = types.ModuleType(MODULE_NAME)
    module.__file__ = str(tmp_path / "main.py")
    (tmp_path / "main.py").write_text(TEXT)
    monkeypatch.setitem(sys.modules, MODULE_NAME, module)
    monkeypatch.delitem(sys.modules, "__main__", raising=False)  # that of the tests
    monkeypatch.setattr(sys, "argv", ["main.py"])
    return module


def test_imports_whose_names_nothing_reads_and_lines_that_assign_in_modules(main):
    ((module, said),) = main_files()
    assert module is main
    assert said.unused[:3] == ("registered", "pkg.nets", "registering")
    assert [(".".join(one.path), one.name) for one in said.assigned] == [
        *(("F", "silu"), ("colors", "hue"), ("unknown", "name"), ("F", "celu"), ("json", "one")),
        ("F", "never"),
    ]
    users = {name: types.ModuleType(name) for name in ("registering", "pkg.nets", "other")}
    assert imported_for_itself(users) == ["pkg.nets", "registering"]
    assert [one.__name__ for one in reached((), users)] == ["registering", "pkg.nets"]


def test_what_is_no_installed_package_or_is_not_there_is_no_change(main):
    """``json`` is of the standard library, which workers have as it is."""
    import json

    main.F, main.json, main.colors = functional, json, None
    assert [c.full_name for c in find_changes()] == [
        f"torch.nn.functional.{n}" for n in ("silu", "celu")
    ]


FILED = """
import torch
from torch.utils.data._utils import collate
from torch.utils.data._utils.collate import default_collate_fn_map as table
collate.default_collate_fn_map[complex] = torch.stack
table["text"] = torch.stack
table[unknown] = table["gone"] = own["x"] = None
"""


def test_what_a_line_files_in_a_packages_dictionary_is_a_change_there(main, monkeypatch, tmp_path):
    import torch
    from torch.utils.data._utils import collate

    (tmp_path / "main.py").write_text(FILED)
    table = dict(collate.default_collate_fn_map) | {complex: torch.stack, "text": torch.stack}
    monkeypatch.setattr(collate, "default_collate_fn_map", table)
    main.collate, main.table, main.own, main.torch = collate, table, {"x": 1}, torch
    changes = find_changes()
    assert [(c.path, c.name, c.is_item) for c in changes] == [
        ("default_collate_fn_map", complex, True),
        ("default_collate_fn_map", "text", True),
    ]
    del table[complex]
    undo = changes[0].make()
    assert table[complex] is torch.stack
    undo()
    assert complex not in table


def assigned(module):
    return [(".".join(one.path), one.name) for _, said in main_files() for one in said.assigned]


GELU = "import torch.nn.functional as F\nF.gelu = 1\ndef model(hp): pass"


def test_the_text_of_a_main_program_that_is_no_file(main, monkeypatch):
    del main.__file__
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", GELU])
    assert assigned(main) == [("F", "gelu")]
    users = {"other": types.ModuleType("other")}
    assert imported_for_itself(users) == []
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "exec(text)"])
    assert imported_for_itself(users) == ["other"]  # nobody knows what that has imported


def test_the_text_of_what_runs_without_one(main, monkeypatch):
    main.__file__ = "<stdin>"
    monkeypatch.setattr(sys, "argv", ["-"])
    look = "\nfound = look(None)"
    main.look = assigned
    monkeypatch.setattr(functional, "gelu", functional.gelu)  # and back afterwards
    exec(compile(GELU + look, "<stdin>", "exec"), vars(main))
    assert main.found == [("F", "gelu")]


def test_the_cells_of_a_notebook(main, monkeypatch):
    del main.__file__
    cells = [
        "",
        "import torch.nn.functional as F",
        "F.gelu = 1",
        "%magic that is none",
        "F.silu = 2",
    ]
    history = types.SimpleNamespace(input_hist_parsed=cells)
    shell = types.SimpleNamespace(user_module=main, history_manager=history)
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert assigned(main) == [("F", "gelu"), ("F", "silu")]


def test_what_a_function_imports_by_a_name_of_its_own(main, tmp_path):
    text = "def main():\n    import torch.nn.functional as own\n    own.gelu = 1"
    (tmp_path / "main.py").write_text(text)
    assert [change.full_name for change in find_changes()] == ["torch.nn.functional.gelu"]


def test_a_file_that_cannot_be_read_says_nothing(main, tmp_path):
    (tmp_path / "main.py").write_text("def")
    assert [said for _, said in main_files()] == [Said()]


OTHER_WAYS = """
import importlib, sys, package, package as other, plain
names = ("low", "high")
for name in names:
    setattr(package, name, 3)
vars(package).update(updated=1, **{})
vars(package).update({"filled": 2})
other.__dict__["spelled"] = 3
globals()["package"].found = 4
sys.modules["package"].looked = 5
importlib.import_module("package").imported = 6
del package.gone
delattr(package.Kind, "also")
for name in dir(plain):
    setattr(plain, name, 0)
SAID = "unchanged", "function", "sys", "table", "lock"
"""


def test_every_way_to_set_and_to_delete_is_found_and_what_is_not_is_told(
    main, tmp_path, monkeypatch
):
    """``unchanged`` is in the text, so it goes as it is; objects of its own do not."""
    (tmp_path / "main.py").write_text(OTHER_WAYS)
    package, plain = types.ModuleType("package"), types.ModuleType("plain")
    held = ["low", "high", "updated", "filled", "spelled", "found", "looked", "imported"]
    held.append("unchanged")
    vars(package).update(dict.fromkeys(held, 1), sys=sys, table={}, lock=threading.Lock())
    for module in (package, plain):
        module.__file__ = f"/x/site-packages/{module.__name__}.py"
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("def function(): pass\nclass Kind: pass", vars(package))
    main.package = main.other = package
    main.plain = plain
    with pytest.warns(UserWarning, match="sets attributes of plain by names that do not stand"):
        changes = [one for one in find_changes() if one.module == "package"]
    gone = [one.full_name for one in changes if isinstance(one.value, Gone)]
    assert sorted(one.name for one in changes if one.full_name not in gone) == sorted(held)
    assert gone == ["package.gone", "package.Kind.also"]


def test_what_was_deleted_is_gone_where_it_arrives_and_is_put_back(monkeypatch):
    package = types.ModuleType("package")
    package.width = 3
    monkeypatch.setitem(sys.modules, "package", package)
    undo = Change("package", "", "width", Gone()).make()
    assert not hasattr(package, "width")
    undo()
    assert package.width == 3
    assert Change("package", "", "depth", Gone()).make() is None


def test_of_a_package_whose_function_a_line_calls_for_what_it_does_all_is_compared(
    main, tmp_path, monkeypatch
):
    """What the function has changed nobody can tell: ``gin.parse_config(...)``."""
    (tmp_path / "main.py").write_text("import package\npackage.configure(3)\nx = other.read()\n")
    for name in ("package", "other"):
        module = types.ModuleType(name)
        module.__file__ = f"/x/site-packages/{name}.py"
        exec("CONFIG, read, width = {}, object(), 3\ndef configure(x): pass", vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        setattr(main, name, module)
    found = [(home.__name__, name) for home, name in named_objects() if name.startswith("(")]
    assert found == [("package", "(values)CONFIG"), ("package", "(values)width")]
