"""Definitions as text: where a function, class or constant is written, and what it names.

[Note: text that two runs agree on] Comments, blank lines, quotes and docstrings are no
change of what a function does, so a definition is read as a syntax tree and written again
from it. Two Pythons may write one tree differently: texts that differ are compared as
trees once more.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import linecache
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from shoal.core.codes import loaded_by
from shoal.resume.home import file_of

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NAMED = (*_FUNCTIONS, ast.ClassDef)


class Definitions:
    """What is defined in files, parsed once each. A file that cannot be read has nothing."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def function(self, function: FunctionType) -> Definition | None:
        """The def or lambda that a function was compiled from."""
        file, code = self._read(file_of(function)), function.__code__
        if code.co_name == "<lambda>":
            return file.lambda_of(code)
        return file.functions.get((code.co_qualname, code.co_firstlineno))

    def class_(self, kind: type, methods: Iterable[FunctionType]) -> ast.ClassDef | None:
        """The class of that name; of several in one file, the last."""
        for path in dict.fromkeys([file_of(kind), *map(file_of, methods)]):
            node = self._read(path).classes.get(kind.__qualname__)
            if node is not None:
                return node
        return None

    def constant(self, owner: Any, name: str) -> ast.Module | None:
        """The assignments to a global of the file of ``owner``, at its top level."""
        found = self._read(file_of(owner)).constants.get(name)
        return ast.Module(body=list(found), type_ignores=[]) if found else None

    def read_at_top(self, owner: Any, name: str) -> set[str]:
        """The attributes of a global that the file of ``owner`` reads outside of definitions."""
        return self._read(file_of(owner)).read_at_top(name)

    def _read(self, path: str) -> _File:
        if path not in self._files:
            self._files[path] = _File(path)
        return self._files[path]


class _File:
    """One file's definitions, by the names that Python gives them."""

    def __init__(self, path: str) -> None:
        linecache.checkcache(path)
        self.functions: dict[tuple[str, int], Definition] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.constants: defaultdict[str, list[ast.stmt]] = defaultdict(list)
        try:
            self._tree = ast.parse("".join(linecache.getlines(path)))
        except (SyntaxError, ValueError):
            self._tree = ast.Module(body=[], type_ignores=[])
        self._add_definitions(self._tree, "")
        self._add_constants(self._tree.body)

    def lambda_of(self, code: CodeType) -> ast.Lambda | None:
        """The smallest lambda of that line whose body has all that ``code`` came from."""
        spans = _spans(code)
        found = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Lambda)
            and node.lineno == code.co_firstlineno
            and all(_covers(node.body, span) for span in spans)
        ]
        return min(found, key=lambda node: len(ast.unparse(node)), default=None)

    def read_at_top(self, name: str) -> set[str]:
        """Attributes of a name that are read outside of definitions."""
        waiting: list[ast.AST] = [self._tree]
        found = set[str]()
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Attribute) and _dotted(node.value) == name:
                found.add(node.attr)
            waiting += [n for n in ast.iter_child_nodes(node) if not isinstance(n, _NAMED)]
        return found

    def _add_definitions(self, parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, _NAMED):
                self._add_definitions(node, prefix)
                continue
            qualname = prefix + node.name
            if isinstance(node, ast.ClassDef):
                self.classes[qualname] = node
                self._add_definitions(node, f"{qualname}.")
            else:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                self.functions[qualname, first] = node
                self._add_definitions(node, f"{qualname}.<locals>.")

    def _add_constants(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            for name in set(_assigned(statement)):
                self.constants[name].append(statement)
            if not isinstance(statement, _NAMED):  # under an `if`, a `with`, a `try`
                inside = (n for n in ast.iter_child_nodes(statement) if isinstance(n, ast.stmt))
                self._add_constants(inside)


def _assigned(statement: ast.stmt) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    for target in targets:
        yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


class _Span(NamedTuple):
    """Where in its file an instruction came from, each a line and a column."""

    begin: tuple[int, int]
    end: tuple[int, int]


def _spans(code: CodeType) -> list[_Span]:
    """Of all instructions that say it; a function's first ones do not."""
    known = (p for p in code.co_positions() if None not in p)
    spans = [_Span((line, column), (end, last)) for line, end, column, last in known]  # type: ignore[arg-type]
    return [span for span in spans if span.begin != span.end]


def _covers(node: ast.expr, span: _Span) -> bool:
    begin = (node.lineno, node.col_offset)
    end = (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
    return begin <= span.begin and span.end <= end


# -- text -----------------------------------------------------------------------------------


def text_of(node: ast.AST) -> str:
    """A definition as text, without comments, blank lines and docstrings."""
    bare = copy.deepcopy(node)
    for inner in ast.walk(bare):
        if isinstance(inner, _NAMED) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(bare)


def is_same(one: str, other: str) -> bool:
    """Whether two texts are one definition, whichever Python wrote them."""
    if one == other:
        return True
    try:
        return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    except (SyntaxError, ValueError):
        return False


def digest_of(code: CodeType) -> str:
    """What a function whose source cannot be had is known by; of this Python version only."""
    version = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    return f"code {_digest(code)} of {version}"


def _digest(code: CodeType) -> str:
    constants = [_digest(c) if isinstance(c, CodeType) else _stable(c) for c in code.co_consts]
    parts = [code.co_code.hex(), *code.co_names, "", *constants]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def _stable(constant: object) -> str:
    is_set = isinstance(constant, frozenset)
    return repr(sorted(map(repr, constant))) if is_set else repr(constant)  # type: ignore[call-overload]


# -- names ----------------------------------------------------------------------------------


def names_of(node: ast.AST) -> list[str]:
    """The global names a definition reads, with the attributes it takes of them: ``a.b``."""
    loaded = set(loaded_by(_compile(node)))
    names = set(loaded)
    for inner in ast.walk(node):
        dotted = _dotted(inner) if isinstance(inner, ast.Attribute) else ""
        if dotted.partition(".")[0] in loaded:
            names.add(dotted)
    return sorted(names)


def is_read_whole(name: str, node: ast.AST) -> bool:
    """Whether a name stands there by itself, and not only as ``name.attribute``."""
    found = [*ast.walk(node)]
    read = sum(isinstance(part, ast.Name) and part.id == name for part in found)
    return read > sum(
        isinstance(part, ast.Attribute) and _dotted(part.value) == name for part in found
    )


def names_of_code(code: CodeType) -> list[str]:
    """The global names that a function without source reads."""
    return sorted(set(loaded_by(code)))


def _compile(node: ast.AST) -> CodeType:
    """The code of a definition by itself; annotations are not evaluated."""
    if isinstance(node, ast.Lambda):
        node = ast.Expr(node, lineno=1, col_offset=0)
    body = node.body if isinstance(node, ast.Module) else [node]
    module = ast.Module(body=body, type_ignores=[])  # type: ignore[arg-type]
    if any(isinstance(inner, ast.Nonlocal) for inner in ast.walk(module)):
        module = _Unbound().visit(copy.deepcopy(module))
    flags = annotations.compiler_flag
    code: CodeType = compile(module, "<definition>", "exec", flags, dont_inherit=True)
    return code


class _Unbound(ast.NodeTransformer):
    """Without ``nonlocal``, whose names a definition by itself has nowhere: no globals anyway."""

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.Pass:
        return ast.copy_location(ast.Pass(), node)


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` of a chain of attributes that begins with a name, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""
