"""Loading a study from a user's file, and what is said when that cannot be done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.core.errors import PlanError, SpecError
from shoal.source import MODULE_NAME, import_recorded, is_study, load_recorded, load_study

HEADER = """
import types
Study = type("Study", (), {"__module__": "shoal.study"})
"""


@pytest.fixture(autouse=True)
def _forgotten_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, MODULE_NAME, raising=False)


def _write(directory: Path, body: str, name: str = "mine.py") -> str:
    path = directory / name
    path.write_text(HEADER + body)
    return str(path)


def test_the_only_study_of_a_file_needs_no_name(tmp_path: Path) -> None:
    path = _write(tmp_path, "sweep = Study()\n")

    loaded = load_study(path)

    assert is_study(loaded.study)
    assert loaded.source == f"{path}:sweep"


def test_two_names_of_one_study_are_one_study(tmp_path: Path) -> None:
    path = _write(tmp_path, "first = second = Study()\n")

    assert load_study(path).source == f"{path}:first"


def test_the_recorded_source_loads_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, "study = Study()\n")
    monkeypatch.chdir(tmp_path)
    source = load_study("mine.py").source
    monkeypatch.chdir("/")

    assert is_study(load_study(source).study)


def test_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 7\n")
    path = _write(tmp_path, "from neighbour_of_mine import VALUE\nstudy = Study()\n")

    load_study(path)

    assert str(tmp_path) == sys.path[0]


@pytest.mark.parametrize("init", [True, False])
def test_a_file_of_a_package_imports_relatively(tmp_path: Path, init: bool) -> None:
    folder = tmp_path / "packed_up" / "inner"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent) if init else ():
        (place / "__init__.py").write_text("")
    (folder / "near.py").write_text("NAME = 'near'\n")
    (folder.parent / "far.py").write_text("EPOCHS = 3\n")
    body = "from . import near\nfrom ..far import EPOCHS\nstudy = Study()\n"
    load_study(_write(folder, body))
    assert sys.modules["packed_up.inner.near"].NAME == "near"
    for name in [name for name in sys.modules if name.startswith("packed_up")]:
        del sys.modules[name]


def test_a_recorded_script_needs_no_suffix(tmp_path: Path) -> None:
    (tmp_path / "mytrain").write_text("answer = 42\n")
    module = import_recorded(str(tmp_path / "mytrain"), tmp_path / "runs", "s")
    assert module.answer == 42


def test_code_under_the_main_guard_does_not_run(tmp_path: Path) -> None:
    path = _write(tmp_path, "study = Study()\nif __name__ == '__main__':\n    raise OSError\n")

    load_study(path)


def test_a_dataclass_in_the_file_finds_its_module(tmp_path: Path) -> None:
    body = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Config:\n    width: int = 3\nstudy = Study()\n"
    )
    path = tmp_path / "mine.py"
    path.write_text(body.replace("study =", HEADER + "study ="))

    assert is_study(load_study(str(path)).study)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("missing.py", r"'missing.py': it does not exist \(looked in "),
        ("no_such_package.mod:study", "ends in .py, or the name of a module"),
    ],
)
def test_what_cannot_be_found_is_named_with_the_way_out(source: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        load_study(source)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="it is a directory"):
        load_study(str(tmp_path))


def test_a_file_without_a_study_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"defines no study. Make one at its top level"):
        load_study(_write(tmp_path, "x = 1\n"))


def test_several_studies_are_listed_to_choose_from(tmp_path: Path) -> None:
    path = _write(tmp_path, "small = Study()\nlarge = Study()\n")

    with pytest.raises(SpecError, match=r"several studies: large, small. Choose one: .*:large"):
        load_study(path)
    assert load_study(f"{path}:small").source.endswith(":small")


def test_an_unknown_name_lists_the_studies_found(tmp_path: Path) -> None:
    path = _write(tmp_path, "small = Study()\nx = 3\n")

    with pytest.raises(SpecError, match="no study named 'x'; the studies there: small"):
        load_study(f"{path}:x")


def test_a_file_that_fails_shows_the_users_own_traceback(tmp_path: Path) -> None:
    path = _write(tmp_path, "def build():\n    return 1 / 0\nbuild()\n")

    with pytest.raises(SpecError) as caught:
        load_study(path)

    text = str(caught.value)
    assert "ZeroDivisionError: division by zero" in text
    assert "in build" in text
    assert "importlib" not in text


def test_a_syntax_error_points_at_its_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"(?s)mine.py.*line 4.*SyntaxError"):
        load_study(_write(tmp_path, "def broken(:\n"))


def test_an_error_of_the_study_itself_passes_unchanged(tmp_path: Path) -> None:
    path = _write(
        tmp_path, "from shoal.core.errors import PlanError\nraise PlanError('no room')\n"
    )

    with pytest.raises(PlanError, match=r"^no room$"):
        load_study(path)


def test_a_directory_that_brings_its_own_code_is_not_believed(tmp_path: Path) -> None:
    script = tmp_path / "study" / "evil.py"
    script.parent.mkdir()
    script.write_text("raise SystemExit('it was run')")

    for source in (f"{script}:study", "study/evil.py:study"):
        with pytest.raises(SpecError, match="not run on the word of a directory"):
            load_recorded(source, tmp_path / "study", "study")


def test_a_module_that_runs_its_study_where_it_is_imported_says_so(tmp_path, monkeypatch):
    (tmp_path / "runs_itself.py").write_text(
        "import shoal\nstudy = shoal.Study('mine', shoal.Recipe(model=len, data=len, loss=max),"
        " space=shoal.grid(a=[1]), steps=1)\nstudy.run()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SpecError, match=r"the module runs study 'mine' where it is imported"):
        load_recorded("runs_itself:study", tmp_path / "copied", "mine")


TWO = """import shoal
recipe = shoal.Recipe(model=len, data=len, loss=max)
first = shoal.Study('one', recipe, space=shoal.grid(a=[1]), steps=1)
FIRST
second = shoal.Study('two', recipe, space=shoal.grid(a=[1]), steps=1)
SECOND
"""


def test_a_file_that_runs_its_study_is_read_up_to_there(tmp_path: Path) -> None:
    path = _write(tmp_path, TWO.replace("FIRST", "first.run()\nraise SystemExit('it was run')"))
    assert load_study(f"{path}:first").study.name == "one"
    assert load_study(path).study.name == "one"


def test_a_study_that_is_run_before_the_one_that_is_asked_for_is_run(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr("shoal.study.Run.run", lambda self: ran.append(self._study.name))
    monkeypatch.setattr("shoal.study.read_report", lambda place, recipe: None)
    path = _write(tmp_path, TWO.replace("FIRST", "first.run()").replace("SECOND", "second.run()"))
    assert load_study(f"{path}:second").study.name == "two"
    assert ran == ["one"]


def test_a_study_that_nobody_runs_has_to_be_named_among_several(tmp_path: Path) -> None:
    path = _write(tmp_path, TWO.replace("FIRST", "").replace("SECOND", ""))
    with pytest.raises(SpecError, match="several studies: first, second"):
        load_study(path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("mine.py:x", r"named 'x'; the studies there: large, small, and x is of the type int\."),
        ("mine.py:", r"after mine\.py: comes the name of a .* got ''\. Write mine\.py:st"),
        ("mine.py:a:b", r"got 'a:b'"),
        ("only_a_file", r"There is a file of that name here: only_a_file\.py\."),
        ("old", r"There is a study of that name in runs\. Look at it with shoal show old, go on"),
        ("runs/old", r"it is the directory of a study that ran\. .*resume runs/old"),
        ("book.ipynb", r"is a notebook\. Call study\.run\(\) in it, or .* script book\.ipynb"),
        ("", r"from '': it names no file\. Give"),
        ("made.py", r"where it is imported: the one of line 5 is made in the function main\."),
        ("guarded.py", r"the one of line 5 is made under if __name__ == \"__main__\"\."),
        ("pack.age", r"the module failed\.\nTraceback[^$]*No module named 'no_such_thing'"),
    ],
)  # fmt: skip
def test_what_stands_in_place_of_a_study_is_told(source, words, tmp_path, monkeypatch):
    _write(tmp_path, "small = Study()\nlarge = Study()\nx = 3\n")
    _write(tmp_path, "def main():\n    study = Study()\n    study.run()\n", "made.py")
    _write(tmp_path, "if __name__ == '__main__':\n    study = Study()\n", "guarded.py")
    (tmp_path / "only_a_file.py").touch()
    (tmp_path / "book.ipynb").write_text("{}")
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "study.db").touch()
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "age.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    if source == "pack.age":
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setattr(sys, "path", [place for place in sys.path if place])

    with pytest.raises(SpecError, match=words):
        load_study(source)


def test_a_file_finds_its_own_arguments_and_not_those_of_shoal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = (
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--width', type=int, default=8)\n"
        "width = parser.parse_args().width\nstudy = Study()\n"
    )
    path = _write(tmp_path, body)
    monkeypatch.setattr(sys, "argv", ["shoal", "run", path])

    loaded = load_study(path)
    assert (loaded.argv, sys.modules[MODULE_NAME].width) == ([path], 8)
    load_study(path, ["--width", "5"])
    assert sys.modules[MODULE_NAME].width == 5
    _write(tmp_path, f"import sys\nsys.argv = ['notebook']\n{body}")
    assert load_study(path).argv == ["notebook"]
    _write(tmp_path, body)
    with pytest.raises(SpecError, match=r"ended in sys.exit\(2\).* given: --depth 3\. "):
        load_study(path, ["--depth", "3"])
    assert "usage: mine.py" in capsys.readouterr().err
    assert sys.argv == ["shoal", "run", path]


def test_what_a_file_takes_out_of_argv_was_given_to_its_study_all_the_same(tmp_path: Path) -> None:
    body = TWO.replace("FIRST", "import sys; sys.argv = sys.argv[:1]").replace("SECOND", "")
    path = _write(tmp_path, body)

    loaded = load_study(f"{path}:second", ["--width", "5"])

    assert (loaded.argv, loaded.study.arguments) == ([path], ("--width", "5"))
