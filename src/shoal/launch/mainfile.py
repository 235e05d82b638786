"""What the text of the main file says: whom it imports for nothing else, and where it assigns.

Also that of a notebook, of ``python -c`` and of standard input, as far as it is there to be read.
"""

from __future__ import annotations

import ast
import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from shoal.launch.maintext import codes_under_way, is_all_known, texts_of
from shoal.pystate.ambient import is_users
from shoal.source import MAINS


class Assigned(NamedTuple):
    """``F.relu = ...``, as ``("F",)`` and ``"relu"``."""

    path: tuple[str, ...]
    name: str


class Filed(NamedTuple):
    """``lib.TABLE["x"] = ...``, as ``("lib", "TABLE")`` and ``"x"``.

    ``names``: of what the key is, where it is no constant (``lib.TABLE[torch.float]``).
    """

    path: tuple[str, ...]
    key: Any
    names: tuple[str, ...] = ()


class Imported(NamedTuple):
    """``from module import name as bound``."""

    module: str
    name: str
    bound: str


class Said(NamedTuple):
    """What is of interest of it, in functions too but for ``imported`` and ``paths``."""

    unused: tuple[str, ...] = ()  # modules that are imported, and whose names nothing reads
    assigned: tuple[Assigned, ...] = ()
    filed: tuple[Filed, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()  # what ``import module as bound`` binds, to which
    imported: tuple[Imported, ...] = ()
    paths: tuple[tuple[str, ...], ...] = ()  # of attributes, in lines that run when the file does


def main_files() -> Iterator[tuple[ModuleType, Said]]:
    """The main files of this process that are the user's; of a notebook, each of its cells."""
    for module in main_modules():
        package = str(vars(module).get("__package__") or "")
        for text in texts_of(module):
            yield module, _parse(text, package)
        if not is_all_known(module):
            yield module, Said(assigned=tuple(_assigned_by(codes_under_way(module))))


def main_modules() -> list[ModuleType]:
    """Those that such files are."""
    modules = [sys.modules.get(name) for name in MAINS]
    return [module for module in modules if module is not None and is_users(module)]


def changed(file: str) -> int:
    """When a file was last written; 0 where it is gone."""
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1024)
def _parse(text: str, package: str) -> Said:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return Said()
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    everywhere, nodes = list(ast.walk(tree)), list(_statements(tree))
    unused = [name for node in everywhere for name in _unused(node, used, package)]
    assigned = dict.fromkeys(one for node in (*nodes, *everywhere) for one in _assigned(node))
    filed = dict.fromkeys(one for node in nodes for one in _filed(node))
    modules = dict.fromkeys(
        _bound(name) for node in everywhere if isinstance(node, ast.Import) for name in node.names
    )
    imported = dict.fromkeys(one for node in nodes for one in _imported(node, package))
    paths = dict.fromkeys(_path(node) for node in nodes if isinstance(node, ast.Attribute))
    return Said(
        tuple(unused),
        tuple(assigned),
        tuple(filed),
        tuple(modules),
        tuple(imported),
        tuple(filter(None, paths)),
    )


def _unused(node: ast.AST, used: set[str], package: str) -> list[str]:
    if isinstance(node, ast.Import):
        bound = [(one.name, one.asname or one.name.partition(".")[0]) for one in node.names]
        return [module for module, name in bound if name not in used]
    if not isinstance(node, ast.ImportFrom):
        return []
    if used.isdisjoint(one.asname or one.name for one in node.names):
        module = _absolute(node, package)
        return [module, *(f"{module}.{one.name}" for one in node.names)]
    return []


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The name of the module that it imports from, in a file of that package."""
    if not node.level:
        return node.module or ""
    home = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*home, *([node.module] if node.module else [])])


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Those that run when the file does."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        ):
            yield node
            yield from _statements(node)


def _bound(name: ast.alias) -> tuple[str, str]:
    """What ``import`` of it binds, and to which module."""
    if name.asname:
        return name.asname, name.name
    first = name.name.partition(".")[0]
    return first, first


def _imported(node: ast.AST, package: str) -> Iterator[Imported]:
    if isinstance(node, ast.ImportFrom):
        for one in node.names:
            yield Imported(_absolute(node, package), one.name, one.asname or one.name)


def _assigned(node: ast.AST) -> Iterator[Assigned]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        path, name = _path(node.value), node.attr
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
        if len(node.args) != 3 or not isinstance(node.args[1], ast.Constant):
            return
        path, name = _path(node.args[0]), str(node.args[1].value)
    else:
        return
    if path:
        yield Assigned(path, name)


def _filed(node: ast.AST) -> Iterator[Filed]:
    if not (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)):
        return
    path, names = _path(node.value), _path(node.slice)
    if path and isinstance(node.slice, ast.Constant):
        yield Filed(path, node.slice.value)
    elif path and names:
        yield Filed(path, None, names)


def _assigned_by(codes: Iterable[CodeType]) -> Iterator[Assigned]:
    """The same of code whose text is not there."""
    for code in codes:
        path: list[str] = []
        for one in dis.get_instructions(code):
            if one.opname == "STORE_ATTR" and path:
                yield Assigned(tuple(path), one.argval)
            if one.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                path = [one.argval]
            else:
                path = [*path, one.argval] if one.opname == "LOAD_ATTR" and path else []


def _path(node: ast.expr) -> tuple[str, ...]:
    """``torch.nn.functional`` by its names; nothing of what is computed."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (path := _path(node.value)):
        return (*path, node.attr)
    return ()
