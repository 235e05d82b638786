"""What the text of the main file says: whom it imports for nothing else, and where it assigns.

Also that of a notebook, of ``python -c`` and of standard input, as far as it is there to be read.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from shoal.launch.assigning import (
    Assigned,
    Filed,
    Path,
    assigned_by,
    assigned_by_words,
    assigned_in,
    called_in,
    deleted_in,
    filed_in,
    path_of,
    words_in,
)
from shoal.launch.maintext import codes_under_way, is_all_known, texts_of
from shoal.pystate.ambient import is_users
from shoal.source import MAINS


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
    paths: tuple[Path, ...] = ()  # of attributes, in lines that run when the file does
    deleted: tuple[Assigned, ...] = ()
    by_words: tuple[Path, ...] = ()  # in whom it assigns by names that are made elsewhere
    words: frozenset[str] = frozenset()  # of which such names may be
    called: tuple[Path, ...] = ()  # for what they do, in lines that run when the file does


def main_files() -> Iterator[tuple[ModuleType, Said]]:
    """The main files of this process that are the user's; of a notebook, each of its cells."""
    for module in main_modules():
        package = str(vars(module).get("__package__") or "")
        for text in texts_of(module):
            yield module, _parse(text, package)
        if not is_all_known(module):
            yield module, Said(assigned=tuple(assigned_by(codes_under_way(module))))


def main_modules() -> list[ModuleType]:
    """Those that such files are."""
    modules = [sys.modules.get(name) for name in MAINS]
    return [module for module in modules if module is not None and is_users(module)]


def changed(file: str) -> int:
    """When a file was last written; 0 where it is gone."""
    try:
        return os.stat(file).st_mtime_ns
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
    assigned = dict.fromkeys(one for node in (*nodes, *everywhere) for one in assigned_in(node))
    filed = dict.fromkeys(one for node in nodes for one in filed_in(node))
    modules = dict.fromkeys(
        _bound(name) for node in everywhere if isinstance(node, ast.Import) for name in node.names
    )
    imported = dict.fromkeys(one for node in nodes for one in _imported(node, package))
    paths = dict.fromkeys(path_of(node) for node in nodes if isinstance(node, ast.Attribute))
    deleted = dict.fromkeys(one for node in everywhere for one in deleted_in(node))
    by_words = dict.fromkeys(one for node in everywhere for one in assigned_by_words(node))
    return Said(
        tuple(unused),
        tuple(assigned),
        tuple(filed),
        tuple(modules),
        tuple(imported),
        tuple(filter(None, paths)),
        tuple(deleted),
        tuple(by_words),
        frozenset(words_in(everywhere)) if by_words else frozenset(),
        tuple(dict.fromkeys(one for node in nodes for one in called_in(node))),
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
