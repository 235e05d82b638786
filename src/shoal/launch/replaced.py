"""What a user's files put into other modules, which a worker imports without: it goes along.

``nn.Linear.forward = mine``, ``F.gelu = lambda x: ...``, ``@library.register`` over a class of the
file: alone a model trains with these. Looked for are functions and classes that the file itself
defines, and in installed packages those of the user's other modules (``import patches``): no
package imports them by itself. Other values there nobody can tell from what packages have of
themselves, but where a line of the file assigns one by its name, or files it under a key.
"""

from __future__ import annotations

import builtins
import gc
import sys
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

from shoal.launch.assigning import found_at
from shoal.launch.enclosed import made_within, metaclasses, replaced_in
from shoal.launch.mainfile import main_files
from shoal.pystate.ambient import is_users
from shoal.pystate.changes import Change, Gone, Named
from shoal.pystate.sendable import home_of
from shoal.recipes.libraries import is_installed
from shoal.source import MAINS

_OF_NUMBERS = {"math", "cmath", "operator", "random", "statistics"}
"""Of the standard library, whose other modules have much of a file's code by its being used."""
LEFT_OUT = frozenset((*(sys.stdlib_module_names - _OF_NUMBERS), "shoal", "__mp_main__", *MAINS))


def find_changes() -> tuple[Change, ...]:
    """All of them, in modules that are imported in this process."""
    of_file = _code_of_file()
    anywhere = of_file | _code_of_modules()
    found = [*_changes_in("builtins", builtins, anywhere)]
    for name, module in _modules():
        code = anywhere if _is_installed(module) else of_file
        found += _changes_in(name, module, code)
    return tuple([*found, *_assigned_by_name(found), *_filed_by_key(found), *_put_by_calls()])


def _put_by_calls() -> Iterator[Change]:
    """What functions of the user's modules made within, and put somewhere: see ``enclosed``."""
    users = users_modules()
    within = made_within(users)
    for name, module in _modules() if within else ():
        if _is_installed(module):
            found = _changes_in(name, module, within)
            yield from (one._replace(is_sure=False) for one in found if not one.is_item)
        elif name in users:
            for path, attribute, value in replaced_in(module, lambda one: id(one) in within):
                yield Change(name, path, attribute, value, is_sure=False)


def _assigned_by_name(known: Iterable[Change]) -> Iterator[Change]:
    """What a line of the main file assigns in an installed package: ``F.relu = torch.tanh``."""
    names = {change.full_name for change in known}
    for main, said in main_files():
        within = {name: sys.modules.get(module) for name, module in said.modules}
        here = {**within, **vars(main)}  # names of functions' own too
        for path, name in said.assigned:
            if (change := _change_of(found_at(here, path), name)) is not None:
                yield from _first(change, names)
        for path in said.by_words:
            home, told = found_at(here, path), list[Change]()
            for name in said.words & vars(home).keys() if _is_others(home) else ():
                if (change := _change_of(home, name)) is not None and _may_be_set(change):
                    told.append(change)
            for change in sorted(told, key=lambda change: change.full_name):
                yield from _first(change, names)
            if not told and _is_others(home):
                _warn_of_names(home)
        for path, name in said.deleted:
            if (change := _change_of(found_at(here, path), name, gone=True)) is not None:
                yield from _first(change, names)


def _is_others(home: Any) -> bool:
    """Whether it is an installed package's, which a file may change."""
    if not isinstance(home, ModuleType | type):
        return False
    module = home.__name__ if isinstance(home, ModuleType) else home.__module__
    known = sys.modules.get(module)
    return known is not None and module.partition(".")[0] not in LEFT_OUT and not is_users(known)


def _warn_of_names(home: Any) -> None:
    warnings.warn(
        f"your file sets attributes of {home.__name__} by names that do not stand in it, so what "
        "it set there is not sent to workers, which have of it what its import makes. Set each by "
        f"its name (setattr({home.__name__.rpartition('.')[2]}, 'name', value)), or do it inside "
        "Recipe(model=...), which workers call.",
        stacklevel=2,
    )


def _first(change: Change, names: set[str]) -> Iterator[Change]:
    if change.full_name not in names:
        names.add(change.full_name)
        yield change


def _may_be_set(change: Change) -> bool:
    """Whether a loop over names may have set it: a plain value, or code that is not defined there.

    An object of the package's own, which it may share, is none: it would become a copy.
    """
    value = change.value
    if not isinstance(value, FunctionType | type):
        return type(value) in _PLAIN
    return (value.__module__, value.__name__) != (change.module, change.name)


_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))


def _filed_by_key(known: Iterable[Change]) -> Iterator[Change]:
    """The same in a dictionary there: ``collate.default_collate_fn_map[complex] = mine``."""
    names = {change.full_name for change in known}
    for main, said in main_files():
        held = vars(builtins) | vars(main)
        bound = {one.bound: (one.module, one.name) for one in said.imported}
        for path, key, spelled in said.filed:
            table = found_at(held, path)
            owner = found_at(held, path[:-1]) if path[1:] else None
            if path[0] in bound and not path[1:]:
                module, name = bound[path[0]]
                owner, path = sys.modules.get(module), (name,)
            key = found_at(held, spelled) if spelled else key
            place = _change_of(owner, path[-1])
            if place is None or place.value is not table or not issubclass(type(table), dict):
                continue
            change = place._replace(
                path=".".join(filter(None, (place.path, place.name))), name=key, is_item=True
            )
            if isinstance(key, Hashable) and change.full_name not in names:
                with suppress(KeyError, TypeError):  # it is gone again, or no such key
                    yield change._replace(value=dict.__getitem__(table, key))


def _change_of(home: Any, name: str, *, gone: bool = False) -> Change | None:
    if not isinstance(home, ModuleType | type) or (name in vars(home)) == gone:
        return None
    if not _is_others(home):
        return None
    module = home.__name__ if isinstance(home, ModuleType) else home.__module__
    path = home.__qualname__ if isinstance(home, type) else ""
    return Change(module, path, name, Gone() if gone else vars(home)[name])


def _modules() -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        is_itself = isinstance(module, ModuleType) and vars(module).get("__name__") == name
        if is_itself and name.partition(".")[0] not in LEFT_OUT:
            yield name, module


def _file_of(module: ModuleType) -> str:
    return str(vars(module).get("__file__") or "")


def _is_installed(module: ModuleType) -> bool:
    return is_installed(_file_of(module))


def _code_of_file() -> dict[int, Any]:
    """Functions and classes of the user's file, by ``id``.

    By types alone: what libraries have that is made when it is asked for is not asked.
    """
    kinds = {FunctionType, staticmethod, classmethod, property, *metaclasses()}
    code = [one for one in gc.get_objects() if type(one) in kinds]
    return {id(one): one for one in code if _home_of(one) in MAINS}


def _code_of_modules() -> dict[int, Named]:
    """Those that stand at the top level of the user's other modules, where workers find them."""
    return {
        id(one): Named(module, name)
        for module, known in users_modules().items()
        for name, one in list(vars(known).items())
        if (type(one) is FunctionType or issubclass(type(one), type)) and _home_of(one) == module
    }


def users_modules() -> dict[str, ModuleType]:
    """The user's modules but for the main file, by name, as they were imported.

    A module that an installed package has written and loaded under its own name is not among
    these, whatever file it is in: the package makes it in a worker too, where it is needed.
    """
    return {
        name: module
        for name, module in _modules()
        if _file_of(module) and is_users(module) and not _is_of_package(name)
    }


def _is_of_package(module: str) -> bool:
    package = sys.modules.get(module.partition(".")[0])
    return package is not None and _is_installed(package)


def _home_of(value: Any) -> str:
    """The name of the module whose code it is, of what a class has too."""
    if type(value) is FunctionType:
        return home_of(value)
    if isinstance(value, staticmethod | classmethod):
        return _home_of(value.__func__) if type(value.__func__) is FunctionType else ""
    if isinstance(value, property):
        return _home_of(value.fget) if type(value.fget) is FunctionType else ""
    return str(vars(value).get("__module__"))


def _changes_in(module: str, of: ModuleType, code: Mapping[int, Any]) -> Iterator[Change]:
    known = {name: value for name, value in vars(of).items() if value is not vars(builtins)}
    yield from _among(known, code, Change(module, "", "", None))
    for name, value in known.items():
        if issubclass(type(value), dict):  # by what it has: a registry's own methods may make it
            where = Change(module, name, "", None, is_item=True)
            held = value if type(value) is dict else dict(dict.items(value))
            yield from _among(held, code, where)
        elif issubclass(type(value), type) and vars(value).get("__module__") == module:
            yield from _among(vars(value), code, Change(module, value.__qualname__, "", None))


def _among(values: Mapping[Any, Any], code: Mapping[int, Any], where: Change) -> Iterator[Change]:
    if code.keys().isdisjoint(map(id, values.values())):  # nearly always
        return
    for name, key in [(name, id(one)) for name, one in values.items() if id(one) in code]:
        if type(name) is str:
            yield where._replace(name=name, value=code[key])
