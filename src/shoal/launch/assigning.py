"""Where the text of a file assigns in what others have made: modules, classes, dictionaries."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple

from shoal.recipes.libraries import found_along

Path = tuple[str, ...]
"""``torch.nn.functional`` by its names. The first may be a module's full name, behind ``=``."""


class Assigned(NamedTuple):
    """``F.relu = ...``, as ``("F",)`` and ``"relu"``."""

    path: Path
    name: str


class Filed(NamedTuple):
    """``lib.TABLE["x"] = ...``, as ``("lib", "TABLE")`` and ``"x"``.

    ``names``: of what the key is, where it is no constant (``lib.TABLE[torch.float]``).
    """

    path: Path
    key: Any
    names: Path = ()


def assigned_in(node: ast.AST) -> Iterator[Assigned]:
    """``X.name = ...``, and what says the same by ``setattr``, ``vars(X)`` or ``X.__dict__``."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield from _at(path_of(node.value), [node.attr])
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        yield from _at(_space(node.value), _constants([node.slice]))
    elif isinstance(node, ast.Call):
        if getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
            yield from _at(path_of(node.args[0]), _constants(node.args[1:2]))
        elif (space := _written(node)) and (names := _names_of_update(node)):
            yield from _at(space, names)


def assigned_by_words(node: ast.AST) -> Iterator[Path]:
    """Whom it assigns in by names that do not stand there: ``setattr(X, name, 0)``."""
    path: Path = ()
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        path = () if _constants([node.slice]) else _space(node.value)
    elif isinstance(node, ast.Call):
        if getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
            path = () if _constants(node.args[1:2]) else path_of(node.args[0])
        elif not _names_of_update(node):
            path = _written(node)
    if path:
        yield path


def deleted_in(node: ast.AST) -> Iterator[Assigned]:
    """``del X.name``, and ``delattr(X, "name")``."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Del):
        yield from _at(path_of(node.value), [node.attr])
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Del):
        yield from _at(_space(node.value), _constants([node.slice]))
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "delattr" and node.args:
        yield from _at(path_of(node.args[0]), _constants(node.args[1:2]))


def filed_in(node: ast.AST) -> Iterator[Filed]:
    """``X[key] = ...``."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)):
        return
    path, names = path_of(node.value), path_of(node.slice)
    if path and isinstance(node.slice, ast.Constant):
        yield Filed(path, node.slice.value)
    elif path and names:
        yield Filed(path, None, names)


def called_in(node: ast.AST) -> Iterator[Path]:
    """Whom it calls, and drops what they return: ``package.configure(...)``."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from filter(None, [path_of(node.value.func)])


def words_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What may be a name that code makes: texts, and the names of arguments."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg


def assigned_by(codes: Iterable[CodeType]) -> Iterator[Assigned]:
    """``X.name = ...`` in code whose text is not there."""
    for code in codes:
        path: list[str] = []
        for one in dis.get_instructions(code):
            if one.opname == "STORE_ATTR" and path:
                yield Assigned(tuple(path), one.argval)
            if one.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                path = [one.argval]
            else:
                path = [*path, one.argval] if one.opname == "LOAD_ATTR" and path else []


def path_of(node: ast.expr) -> Path:
    """By names where something is; nothing of what is computed otherwise."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (path := path_of(node.value)):
        return (*path, node.attr)
    if isinstance(node, ast.Subscript) and (names := _constants([node.slice])):
        if path_of(node.value)[-2:] == ("sys", "modules"):
            return (f"={names[0]}",)
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "globals":
            return (names[0],)
    if isinstance(node, ast.Call) and (names := _constants(node.args[:1])):
        called = path_of(node.func)[-1:]
        if called == ("import_module",):
            return (f"={names[0]}",)
        if called == ("__import__",):
            return (f"={names[0].partition('.')[0]}",)
    return ()


def found_first(held: Mapping[str, Any], path: Path) -> Any:
    """What the first name of a path is in a file that has ``held``."""
    first = path[0]
    return sys.modules.get(first[1:]) if first.startswith("=") else held.get(first)


def found_at(held: Mapping[str, Any], path: Path) -> Any:
    """What there is at a path, None where there is nothing."""
    return found_along(found_first(held, path), path[1:])


def _at(path: Path, names: Iterable[str]) -> Iterator[Assigned]:
    if path:
        yield from (Assigned(path, name) for name in names)


def _constants(nodes: Iterable[ast.expr]) -> list[str]:
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _space(node: ast.expr) -> Path:
    """Of ``vars(X)`` and ``X.__dict__`` where X is."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return path_of(node.value)
    is_vars = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars"
    if is_vars and isinstance(node, ast.Call) and len(node.args) == 1:
        return path_of(node.args[0])
    return ()


def _written(call: ast.Call) -> Path:
    """Of ``vars(X).update(...)`` where X is."""
    is_update = isinstance(call.func, ast.Attribute) and call.func.attr in ("update", "setdefault")
    return _space(call.func.value) if is_update and isinstance(call.func, ast.Attribute) else ()


def _names_of_update(call: ast.Call) -> list[str]:
    """Those that it gives, where all of them stand there."""
    names = [one.arg for one in call.keywords if one.arg is not None]
    if len(names) < len(call.keywords):
        return []
    for one in call.args:
        keys = one.keys if isinstance(one, ast.Dict) else [None]
        some = _constants(filter(None, keys))
        if len(some) < len(keys):
            return []
        names += some
    return names
