"""The code of the user's modules as a study's process has it: what a worker runs to import them.

A file may be edited, or be another branch's, while its study runs. Alone a model's code stays what
it was when it was imported; so does that of workers which begin, or import a module, later.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType
from typing import NamedTuple

_ran: dict[str, CodeType] = {}  # by the names of modules that this process imported so


class ModuleCode(NamedTuple):
    """What a module's import runs.

    ``folders`` are where a package's modules are; None of one that is no package.
    """

    file: str
    folders: tuple[str, ...] | None
    packed: bytes

    @classmethod
    def of(cls, module: ModuleType, code: CodeType) -> ModuleCode:
        """As it goes to a worker."""
        known = vars(module)
        folders = tuple(known["__path__"]) if "__path__" in known else None
        return cls(str(known["__file__"]), folders, marshal.dumps(code))

    def spec(self, name: str, found: ModuleSpec | None) -> ModuleSpec | None:
        """What was ``found`` here for that name, if it is this file; else this file, gone or not.

        Another one is found where the working directory is another one by now.
        """
        if found is not None and found.origin == self.file:
            return found
        folders = None if self.folders is None else list(self.folders)
        loader = SourceFileLoader(name, self.file)
        return spec_from_file_location(
            name, self.file, loader=loader, submodule_search_locations=folders
        )

    def run(self, module: ModuleType) -> None:
        """Run it, as an import does."""
        code = _ran[module.__name__] = marshal.loads(self.packed)
        exec(code, vars(module))


def forget_others(codes: Mapping[str, ModuleCode]) -> None:
    """Have modules imported anew if one of them ran other code here than it has now."""
    known = {name: _ran[name] for name in codes if name in _ran}
    if any(marshal.loads(codes[name].packed) != code for name, code in known.items()):
        for name in _ran:
            sys.modules.pop(name, None)
        _ran.clear()
