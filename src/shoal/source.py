"""Where a study comes from: a Python file, or a module, that defines it.

A study is recorded as text, ``FILE.py:attribute`` or ``package.module:attribute``, and
imported again when it is needed; what was pickled is never read back from a file.

[Note: files that run their study] A script need not hide its ``study.run()`` under
``if __name__ == "__main__"``. Where it is imported for a study that is on record, it is
imported up to the point where it would run that one: what made the study stands above. Another
study that it runs before is not trained, but read: what comes after may need its report. Where
it is imported for a study that is asked for (``shoal plan FILE.py``), it is imported up to the
point where it would run that one, or the first one if none is named.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from shoal.core.commandline import arguments_of_main
from shoal.core.errors import ShoalError, SpecError
from shoal.core.studyfiles import DATABASE
from shoal.frames import own_traceback

# The name under which a user's file is imported. Workers do not have such a module, so
# what it defines travels to them by value.
MODULE_NAME = "__shoal_main__"
MAINS = ("__main__", MODULE_NAME)


def lasting_name(name: str) -> str:
    """A dotted name, the same whether Python runs the user's file or shoal imports it."""
    return name.replace(MODULE_NAME, "__main__")


class LoadedStudy(NamedTuple):
    """A study, and the text that loads it again from any directory."""

    study: Any  # a shoal.Study; that class lives above this module
    source: str
    argv: Sequence[str]  # what its file left in sys.argv


class _Reached(BaseException):
    """A file that is read for a study has come to where it runs it."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A study that is on record by its name."""

    name: str

    def __call__(self, study: Any) -> bool:
        return bool(study.name == self.name)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A study that is asked for by its attribute, or not by that either."""

    module: str
    attribute: str

    def __call__(self, study: Any) -> bool:
        if not self.attribute:
            return True
        module = sys.modules.get(self.module)
        return module is not None and vars(module).get(self.attribute) is study


_reading: list[_Recorded | _Asked] = []  # which studies files are being read for


@contextmanager
def reading_for(study: str) -> Iterator[None]:
    """Files that are imported inside are read for the study of that name."""
    with _reading_for(_Recorded(study)):
        yield


@contextmanager
def _reading_for(wanted: _Recorded | _Asked) -> Iterator[None]:
    _reading.append(wanted)
    try:
        yield
    finally:
        _reading.pop()


def stop_reading(study: Any) -> bool:
    """What a ``shoal.Study`` says first that is to run. See [Note: files that run their study].

    Returns:
        Whether a file is being read for another one that is on record: nothing is to be trained.
    """
    if not _reading:
        return False
    if _reading[-1](study):
        raise _Reached(study.name)
    return isinstance(_reading[-1], _Recorded)


def load_study(source: str, arguments: Sequence[str] = ()) -> LoadedStudy:
    """Import the study that ``FILE.py[:attribute]`` or ``module:attribute`` names.

    The file's directory goes to the front of ``sys.path``, as if Python ran the file;
    what stands under ``if __name__ == "__main__"`` does not run, nor what comes after the point
    where it would run the study. Meanwhile ``sys.argv`` is the file and ``arguments``.

    Raises:
        SpecError: no such file or attribute, several studies to choose from, or the
            file itself failed; its traceback is in the message.
    """
    place, attribute = _split(source)
    asked = _Asked(MODULE_NAME if _is_file(place) else place, attribute)
    with nullcontext() if _reading else _reading_for(asked):
        module, argv = _import(place, arguments)
    studies = {name: value for name, value in vars(module).items() if is_study(value)}
    name = _choose(place, attribute, studies, module)
    return LoadedStudy(studies[name], f"{_lasting(place)}:{name}", argv)


def is_study(value: object) -> bool:
    """Whether ``value`` is a ``shoal.Study``, told without importing that class."""
    homes = ((kind.__module__, kind.__name__) for kind in type(value).__mro__)
    return ("shoal.study", "Study") in homes


def _split(source: str) -> tuple[str, str]:
    place, colon, attribute = source.rpartition(":")
    if colon and attribute.isidentifier() and not place.rpartition(":")[0].endswith(".py"):
        return place, attribute
    file, colon, attribute = source.partition(".py:")
    if colon and not Path(source).exists():
        raise SpecError(
            f"cannot load a study from {source!r}: after {file}.py: comes the name of a "
            f"shoal.Study at the top level of that file, got {attribute!r}. Write "
            f"{file}.py:study, if it is called so, or {file}.py alone if it defines one."
        )
    return source, ""


def load_recorded(
    source: str, study_dir: str | os.PathLike[str], study: str, arguments: Sequence[str] = ()
) -> LoadedStudy:
    """The study of the file that a study's directory names: it is run, as ``shoal run`` does.

    A directory may come from somebody else, and name what it brought along.

    Raises:
        SpecError: the file lies in the directory itself, or is another user's.
    """
    _check_recorded(source.rpartition(":")[0] or source, study_dir)
    with reading_for(study):
        return load_study(source, arguments)


def import_recorded(
    place: str, study_dir: str | os.PathLike[str], study: str, arguments: Sequence[str] = ()
) -> ModuleType:
    """The file or module that a study's directory names, imported.

    Raises:
        SpecError: as ``load_recorded``.
    """
    _check_recorded(place, study_dir)
    with reading_for(study):
        return _import(place, arguments, is_known=True)[0]


def _check_recorded(place: str, study_dir: str | os.PathLike[str]) -> None:
    if not _is_file(place):
        return
    path = Path(place).resolve()
    inside = path.is_relative_to(Path(study_dir).resolve())
    strange = path.exists() and path.stat().st_uid not in (os.getuid(), 0)
    if inside or strange or not Path(place).is_absolute():
        why = "in that directory itself" if inside else "not a file of your own"
        raise SpecError(
            f"the study in {study_dir} says that it was defined in {place}, which is {why}. "
            "It is not run on the word of a directory. If you trust it, name it: --file "
            "FILE.py[:STUDY], or shoal.open(path, recipe=...)."
        )


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place or Path(place).exists()


def _lasting(place: str) -> str:
    return str(Path(place).resolve()) if _is_file(place) else place


_given: list[Sequence[str]] = []  # to files that are being imported


def given_arguments() -> tuple[str, ...]:
    """What a study's file was given; it may have taken some out of ``sys.argv`` by now."""
    return tuple(_given[-1] if _given else arguments_of_main())


_keeping: list[bool] = []  # for each ``keeping_arguments``, whether a file was imported yet


@contextmanager
def keeping_arguments() -> Iterator[None]:
    """What the first file that is imported inside leaves in ``sys.argv`` is there to the end.

    What it defines may read it only when it is called.
    """
    before = sys.argv
    _keeping.append(False)
    try:
        yield
    finally:
        _keeping.pop()
        sys.argv = before


def argv_of(place: str, arguments: Sequence[str]) -> list[str]:
    """What a file or module finds in ``sys.argv`` where Python runs it with these."""
    return [_lasting(place) if place else "", *arguments]


def _import(
    place: str, arguments: Sequence[str], *, is_known: bool = False
) -> tuple[ModuleType, list[str]]:
    """A file or module that may read the arguments as it is imported; what it leaves of them."""
    before = sys.argv
    if not (_keeping and _keeping[-1]):
        sys.argv = argv_of(place, arguments)
    _given.append(arguments)
    try:
        if _is_file(place):
            return _import_file(place, is_known=is_known), sys.argv
        return _import_module(place), sys.argv
    except SystemExit as ending:  # as argparse does where it finds others than it knows
        given = shlex.join(arguments) or "none"
        raise SpecError(
            f"cannot load a study from {place!r}: running it ended in sys.exit({ending.code!r}), "
            f"before there was a study. The arguments that it was given: {given}. 'shoal run' and "
            f"'shoal plan' give it those that stand after --: shoal run {place} -- --width 128."
        ) from ending
    finally:
        _given.pop()
        if _keeping:
            _keeping[-1] = True
        else:
            sys.argv = before


def _import_file(place: str, *, is_known: bool = False) -> ModuleType:
    """``is_known``: that it is Python, whatever its name, as a console script is."""
    path = Path(place).resolve()
    if not place or not path.is_file():
        raise SpecError(f"cannot load a study from {place!r}: {_no_file(place, path)}")
    if path.suffix == ".ipynb":
        raise SpecError(
            f"cannot load a study from {place!r}: it is a notebook. Call study.run() in it, or "
            f"make a file of it: jupyter nbconvert --to script {place}."
        )
    loader = SourceFileLoader(MODULE_NAME, str(path)) if is_known else None
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path, loader=loader)
    if spec is None or spec.loader is None:
        raise SpecError(
            f"cannot load a study from {place!r}: its name does not end in .py. "
            "Give the path of a Python file that defines a shoal.Study."
        )
    module = importlib.util.module_from_spec(spec)
    homes = [path.parent]
    if package := _package_of(path):  # as python -m has it
        module.__package__, module.__spec__ = package, None
        homes.append(path.parents[package.count(".") + 1])
    for home in homes:
        if str(home) not in sys.path:
            sys.path.insert(0, str(home))
    sys.modules[MODULE_NAME] = module  # dataclasses and pickling look their module up
    try:
        spec.loader.exec_module(module)
    except _Reached:
        pass
    except ShoalError:
        raise
    except Exception as error:
        raise SpecError(
            f"cannot load a study from {place!r}: running the file failed.\n"
            f"{own_traceback(error).rstrip()}"
        ) from error
    return module


def _package_of(path: Path) -> str:
    """The package of a file that imports relatively; nothing of another one."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return ""
    levels = max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)
    folders = list(path.parents)
    while levels and (folders[levels] / "__init__.py").exists():
        levels += 1
    return ".".join(folder.name for folder in reversed(folders[:levels]))


def _no_file(place: str, path: Path) -> str:
    """What stands where a file is looked for, and what to give instead."""
    advice = "Give the path of a Python file that defines a shoal.Study."
    if not place:
        return f"it names no file. {advice}"
    if (path / DATABASE).exists():
        return f"it is the directory of a study that ran. {_onward(place)}"
    what = "is a directory" if path.is_dir() else "does not exist"
    return f"it {what} (looked in {Path.cwd()}). {advice}"


def _onward(study: str) -> str:
    return f"Look at it with shoal show {study}, go on with shoal resume {study}."


def _no_module(place: str) -> str:
    """What a name that is no module may have meant."""
    if Path(f"{place}.py").is_file():
        return f"There is a file of that name here: {place}.py."
    if (Path("runs") / place / DATABASE).exists():
        return f"There is a study of that name in runs. {_onward(place)}"
    return (
        "Give the path of a Python file that ends in .py, or the name of a module that can be "
        "imported."
    )


def _import_module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except _Reached as reached:  # nothing is left of a module that did not come to its end
        raise SpecError(
            f"cannot load a study from {place!r}: the module runs study {str(reached)!r} where it "
            'is imported. Put that under if __name__ == "__main__".'
        ) from None
    except ImportError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise SpecError(
                f"cannot load a study from {place!r}: importing the module failed.\n"
                f"{own_traceback(error).rstrip()}"
            ) from error
        raise SpecError(
            f"cannot load a study from {place!r}: {error}. {_no_module(place)}"
        ) from error


def _choose(place: str, attribute: str, studies: dict[str, Any], module: ModuleType) -> str:
    found = ", ".join(sorted(studies)) or "none"
    if attribute:
        if attribute not in studies:
            raise SpecError(
                f"{place} defines no study named {attribute!r}; the studies there: "
                f"{found}{_what_it_is(module, attribute)}. One that a function makes has no name: "
                "make it at the file's top level."
            )
        return attribute
    distinct = {id(study): name for name, study in reversed(studies.items())}
    if not distinct:
        raise SpecError(
            f"{place} defines no study{_inside(module)}. Make one at its top level: study = "
            "shoal.Study(...)."
        )
    if len(distinct) > 1:
        raise SpecError(
            f"{place} defines several studies: {found}. Choose one: {place}:{min(studies)}"
        )
    return next(iter(distinct.values()))


def _what_it_is(module: ModuleType, attribute: str) -> str:
    """In words, where a name stands for something else than a study."""
    if attribute not in vars(module):
        return ""
    value = vars(module)[attribute]
    kind = (
        f"the class {value.__name__}"
        if isinstance(value, type)
        else f"of the type {type(value).__name__}"
    )
    return f", and {attribute} is {kind}"


def _inside(module: ModuleType) -> str:
    """In words, where the file makes a study that nobody comes to who imports it."""
    try:
        parsed = ast.parse(Path(str(module.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    for statement in parsed.body:
        is_guard = isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)
        is_function = isinstance(statement, ast.FunctionDef)
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        made = [call for call in calls if _last_name(call.func) == "Study"]
        if made and (is_guard or is_function):
            name = getattr(statement, "name", "")
            where = f"in the function {name}" if name else 'under if __name__ == "__main__"'
            return f" where it is imported: the one of line {made[0].lineno} is made {where}"
    return ""


def _last_name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))
