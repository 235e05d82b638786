"""Whose code a definition is, and a name for it that lasts.

[Note: whose code] The user's own is what ``__main__`` defines, and what lies in the
folders of the recipe's files: a change of it changes the recipe, so it is read. A
library's is known by name and version.

[Note: names that last] The same file is ``__main__`` when Python runs it, another module
when shoal loads it, and a third one when it is imported. So names have no module: those
of the recipe's own file stand alone, those of other files have the file's stem in front.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from shoal.recipes.libraries import INSTALLED
from shoal.source import MAINS


@dataclass(frozen=True, slots=True)
class Home:
    """The recipe's own file, and the folders whose code is the user's."""

    file: str
    folders: tuple[Path, ...]

    @staticmethod
    def of(values: Iterable[Any]) -> Home:
        """The file of what ``__main__`` defines, else of the first value that has one."""
        found = [item for value in values for item in _definitions(value) if _can_be_own(item)]
        mains = [file_of(item) for item in found if module_of(item) in MAINS]
        files = mains + [file_of(item) for item in found if module_of(item) not in MAINS]
        folders = [_folder(file) for file in files if file.endswith(".py")]
        if mains and not hasattr(sys.modules["__main__"], "__file__"):  # an interactive session
            folders.append(Path.cwd())
        return Home(next(iter(files), ""), tuple(dict.fromkeys(folders)))

    def owns(self, value: Any) -> bool:
        """Whether a function, class or module is the user's."""
        if module_of(value) in MAINS:
            return True
        path = Path(file_of(value))
        return _can_be_own(value) and any(path.is_relative_to(f) for f in self.folders)

    def name(self, owner: Any, name: str) -> str:
        """A lasting name of what ``owner`` is, or has among its globals."""
        file = file_of(owner)
        if module_of(owner) in MAINS or file == self.file or not file.endswith(".py"):
            return name
        path = Path(file)
        return f"{path.parent.name if path.stem == '__init__' else path.stem}.{name}"


def module_of(value: Any) -> str:
    """The name of the module that defines a value; a module is its own."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return str(name or "")


def file_of(value: Any) -> str:
    """The file of a function, class or module; nothing where there is none."""
    file = value.__code__.co_filename if isinstance(value, FunctionType) else ""
    is_relative = file.endswith(".py") and not Path(file).is_absolute()  # a script's own
    if is_relative or not isinstance(value, FunctionType):
        file = getattr(sys.modules.get(module_of(value)), "__file__", None) or file
    return str(Path(file).resolve()) if file.endswith(".py") else file


def unwrap(value: Any) -> Any:
    """What is under ``functools.wraps`` and its like; other values as they are."""
    if not callable(value) or isinstance(value, type):
        return value
    try:
        found = inspect.unwrap(value)
    except ValueError:  # round and round
        return value
    return found if isinstance(found, FunctionType | type) else value


def _definitions(value: Any) -> Iterator[Any]:
    """The functions and classes that a recipe's field is made of."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _definitions(item)
    elif isinstance(value, functools.partial):
        yield from _definitions(value.func)
    elif isinstance(value, MethodType):
        yield value.__self__ if isinstance(value.__self__, type) else type(value.__self__)
    elif callable(value):
        bare = unwrap(value)
        yield bare if isinstance(bare, FunctionType | type) else type(value)


def _can_be_own(value: Any) -> bool:
    """Whether this is no library's, nor shoal's, nor Python's own."""
    module, file = module_of(value), file_of(value)
    if module in MAINS:
        return True
    if module.split(".")[0] == "shoal" or not file.endswith(".py"):
        return False
    path = Path(file)
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    is_library = bool(INSTALLED.intersection(path.parts))
    return not is_library and not any(path.is_relative_to(folder) for folder in standard)


def _folder(file: str) -> Path:
    """The folder of a file; of one inside a package, the folder that has the package."""
    folder = Path(file).parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder
