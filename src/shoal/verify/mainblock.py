"""What a study's file changes only where Python runs it; a command that imports it does not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def main_note(source: str) -> str:
    """What to say of a trial that differs; ``source`` is ``FILE.py[:STUDY]``. Empty: nothing."""
    path = Path(source.rpartition(".py")[0] + ".py")
    try:
        places = sorted(_assigned(ast.parse(path.read_text())), key=lambda place: place[1])
    except (OSError, ValueError, SyntaxError):
        return ""
    if not places:
        return ""
    some = ", ".join(f"{what} (line {line})" for what, line in places[:3])
    some += " and others" * (len(places) > 3)
    return (
        f'under if __name__ == "__main__" {path.name} puts something else into {some}, and shoal '
        "imports the file without that: if the trial trained with it, have it stand above"
    )


def _assigned(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Attributes and items of what the file imports that are assigned there, and in which line."""
    imported = {
        (name.asname or name.name).partition(".")[0]
        for node in ast.walk(module)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    for block in filter(_is_main, module.body):
        for node in ast.walk(block):
            for target in _targets(node):
                root = target
                while isinstance(root, ast.Attribute | ast.Subscript):
                    root = root.value
                if root is not target and isinstance(root, ast.Name) and root.id in imported:
                    yield ast.unparse(target), target.lineno


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) == 3:
        owner, name, _ = node.args
        if isinstance(name, ast.Constant) and str(name.value).isidentifier():
            found = ast.Attribute(owner, str(name.value), ast.Store())
            return [ast.copy_location(found, node)]
    return []


def _is_main(node: ast.stmt) -> bool:
    words = ast.unparse(node.test) if isinstance(node, ast.If) else ""
    return words in ("__name__ == '__main__'", "'__main__' == __name__")
