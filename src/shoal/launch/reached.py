"""The modules of the user's that a worker may import, as far as their code says."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from shoal.core.codes import codes_in
from shoal.launch.assigning import found_at, found_first
from shoal.launch.mainfile import changed, main_files, main_modules
from shoal.launch.maintext import is_all_known
from shoal.launch.replaced import LEFT_OUT
from shoal.pystate.ambient import is_users
from shoal.pystate.standins import DECLARED, declared_in
from shoal.recipes.libraries import LIBRARIES, module_of
from shoal.source import MAINS

Users = Mapping[str, ModuleType]
"""The user's modules by name, in the order in which they were imported."""


def reached(seeds: Iterable[str], users: Users) -> list[ModuleType]:
    """Those of ``users`` that code of ``seeds``, or the main file, may import sooner or later.

    Told by names alone: whoever has the name of a module, or its last part, in its code may
    import it; and whoever makes such names, or goes through directories, any.
    """
    found: set[str] = set()
    called = defaultdict[str, list[str]](list)  # users' modules by what code may call them
    for name in users:
        for word in {name, name.rpartition(".")[2]}:
            called[word].append(name)
    waiting = deque([*seeds, *MAINS])
    while waiting:
        module = waiting.popleft()
        if module in found or not (module in users or module in MAINS):
            continue
        found.add(module)
        names = _names_of(sys.modules.get(module))
        if names is None:
            return list(users.values())
        for word in called.keys() & names:
            waiting += called[word]
        waiting += [parent for parent in _parents(module) if parent in users]
    return [module for name, module in users.items() if name in found]


def imported_for_itself(users: Users) -> list[str]:
    """Those that the main file imports, and has no use for: they register what they have."""
    if not all(map(is_all_known, main_modules())):  # it may have imported any for that
        return list(users)
    unused = dict.fromkeys(name for _, said in main_files() for name in said.unused)
    return [name for name in unused if name in users]


def named_objects() -> Iterator[tuple[ModuleType, str]]:
    """Objects of installed packages that lines of a main file name, with where they are.

    ``from package.config import cfg``, ``package.config.cfg.width = 128``: it may have changed
    them. Behind ``DECLARED`` what a module holds whose function a line calls for what it does.
    """
    for main, said in main_files():
        held = vars(main)
        for module, name, bound in said.imported:
            home = sys.modules.get(module)
            if home is not None and vars(home).get(name, home) is held.get(bound):
                yield from _in_package(home, name)
        for path in said.paths:
            home, names = found_first(held, path), deque(path[1:])
            while names and isinstance(home, ModuleType):
                name = names.popleft()
                yield from _in_package(home, name)
                home = vars(home).get(name)
        for path in said.called:
            home = module_of(found_at(held, path))
            if home is not None and not _is_left_out(home):
                yield from ((home, f"{DECLARED}{name}") for name in declared_in(home))


def _in_package(home: ModuleType, name: str) -> Iterator[tuple[ModuleType, str]]:
    if name not in vars(home) or sys.modules.get(home.__name__) is not home:
        return
    if _is_left_out(home):
        return
    if not isinstance(vars(home)[name], ModuleType | type | FunctionType):
        yield home, name


def _is_left_out(home: ModuleType) -> bool:
    return home.__name__.partition(".")[0] in LEFT_OUT | LIBRARIES or is_users(home)


def _parents(module: str) -> Iterator[str]:
    while module := module.rpartition(".")[0]:
        yield module


def _names_of(module: ModuleType | None) -> frozenset[str] | None:
    """What the code of a module names; None where nobody knows."""
    if module is None:
        return frozenset()
    known: Mapping[str, Any] = vars(module)
    file = str(known.get("__file__") or "")
    if not file:  # typed in: whoever defines something there may have imported it from anywhere
        own = (one for one in known.values() if isinstance(one, FunctionType | type))
        return None if any(one.__module__ in MAINS for one in own) else frozenset()
    return _names_in(file, changed(file), str(known.get("__name__")), known.get("__loader__"))


@functools.lru_cache(maxsize=4096)
def _names_in(file: str, when: int, name: str, loader: Any) -> frozenset[str] | None:
    try:
        if name in MAINS:  # its loader would write what it has compiled beside the file
            code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
        else:
            code = loader.get_code(name)
    except Exception:  # no loader, a file that is gone
        return None
    names = frozenset(_names(code)) if isinstance(code, CodeType) else _ANY
    return None if not _ANY.isdisjoint(names) else names


_ANY = frozenset(("import_module", "__import__", "iter_modules", "walk_packages"))


def _names(code: CodeType) -> Iterator[str]:
    for one in codes_in(code):
        yield from one.co_names
        texts = (constant for constant in one.co_consts if isinstance(constant, str))
        # importlib.import_module("models.net")
        yield from (text for text in texts if text.replace(".", "").isidentifier())
