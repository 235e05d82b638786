"""What a power failure may leave of a recorded run, state by state.

[Note: the model]
A disk is inodes: files with bytes, directories with entries. Changing an entry (create, mkdir,
rename, unlink) is durable once its directory was synced; bytes once their file was. Of the rest

    posix     any subset of the entry changes may be there; of a file's bytes nothing, zeros in
              their place, the first writes, half of the next, all but one, or all
    ordered   as ext4's journal: entry changes in their order, up to some point, and any sync
              makes all earlier ones durable; bytes as above

A rename is one change: it is there or not. Every such state, after every call, is written to
a real directory, and the real reader must find what was promised by then.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Model = Literal["posix", "ordered"]
Tree = tuple[tuple[str, bytes | None], ...]  # path and bytes, None for a directory; sorted
Trace = list[tuple[Any, ...]]
ROOT = 0


@dataclass(frozen=True, slots=True)
class Entries:
    """An atomic change of directories: (directory, name, inode or None) each."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a file, or ``None`` for the promise of ``size`` bytes."""

    inode: int
    offset: int
    size: int
    data: bytes | None


class Disk:
    """A trace as operations on inodes; paths are resolved as they were at each call."""

    def __init__(self, base: Tree, trace: Trace, root: str) -> None:
        self.root = root
        self.directories: dict[int, dict[str, int]] = {ROOT: {}}
        self.contents: dict[int, bytes] = {}
        self._numbers = itertools.count(1)
        for path, data in base:
            self._link(path, data)
        self.start = {inode: dict(names) for inode, names in self.directories.items()}
        self.start_contents = dict(self.contents)
        self.operations = [self._operation(*call) for call in trace]

    def _link(self, path: str, data: bytes | None) -> int:
        inode = next(self._numbers)
        if data is None:
            self.directories[inode] = {}
        else:
            self.contents[inode] = data
        directory, name = self._place(path)
        self.directories[directory][name] = inode
        return inode

    def _inside(self, path: str) -> str:
        return path.removeprefix(self.root).strip("/")

    def _place(self, path: str) -> tuple[int, str]:
        *parents, name = path.split("/")
        directory = ROOT
        for parent in parents:
            directory = self.directories[directory][parent]
        return directory, name

    def _operation(self, kind: str, *details: Any) -> Any:
        """The operation of one call; keeps the namespace as the running system sees it.

        A string is a promise, a number the sync of that inode.
        """
        if kind == "say":
            return details[0]
        path = self._inside(details[0])
        directory, name = self._place(path) if path else (ROOT, "")
        if kind in ("create", "mkdir"):
            inode = self._link(path, b"" if kind == "create" else None)
            return Entries(((directory, name, inode),))
        if kind == "unlink":
            del self.directories[directory][name]
            return Entries(((directory, name, None),))
        inode = self.directories[directory][name] if path else ROOT
        if kind == "link":
            target, new = self._place(self._inside(details[1]))
            self.directories[target][new] = inode
            return Entries(((target, new, inode),))
        if kind == "rename":
            target, new = self._place(self._inside(details[1]))
            del self.directories[directory][name]
            self.directories[target][new] = inode
            return Entries(((directory, name, None), (target, new, inode)))
        if kind == "allocate":
            return Data(inode, 0, details[1], None)
        if kind == "write":
            return Data(inode, details[1], len(details[2]), details[2])
        assert kind == "sync", kind
        return inode


@dataclass(frozen=True, slots=True)
class State:
    """One thing that may be found after a failure, and what had been promised by then."""

    tree: Tree
    promised: tuple[str, ...]


def states(base: Tree, trace: Trace, root: str, model: Model) -> Iterator[State]:
    """Every distinct state that a failure between any two calls may leave."""
    disk = Disk(base, trace, root)
    seen: set[tuple[Tree, tuple[str, ...]]] = set()
    for end in range(len(disk.operations) + 1):
        done = disk.operations[:end]
        promised = tuple(said for said in done if isinstance(said, str))
        entries, contents = _durable(done, model)
        for names in _namespaces(disk, done, entries, model):
            for bytes_of in _byte_choices(disk, done, contents):
                tree = _tree(disk, names, bytes_of)
                if (tree, promised) not in seen:
                    seen.add((tree, promised))
                    yield State(tree, promised)


def _durable(done: list[Any], model: Model) -> tuple[set[int], set[int]]:
    """The numbers of the entry changes, and of the data operations, that are on disk."""
    entries: set[int] = set()
    contents: set[int] = set()
    for number, synced in enumerate(done):
        if not isinstance(synced, int):
            continue
        for earlier, operation in enumerate(done[:number]):
            if isinstance(operation, Entries):
                if model == "ordered" or {d for d, _, _ in operation.changes} == {synced}:
                    entries.add(earlier)
            elif isinstance(operation, Data) and operation.inode == synced:
                contents.add(earlier)
    return entries, contents


def _namespaces(
    disk: Disk, done: list[Any], durable: set[int], model: Model
) -> Iterator[dict[int, dict[str, int]]]:
    numbers = [n for n, operation in enumerate(done) if isinstance(operation, Entries)]
    open_ones = [n for n in numbers if n not in durable]
    for chosen in _subsets(open_ones, model):
        names = {inode: dict(found) for inode, found in disk.start.items()}
        for number in numbers:
            if number in durable or number in chosen:
                for directory, name, inode in done[number].changes:
                    _set(names.setdefault(directory, {}), name, inode)
        yield names


def _subsets(numbers: list[int], model: Model) -> Iterable[set[int]]:
    if model == "ordered":
        return (set(numbers[:size]) for size in range(len(numbers) + 1))
    sizes = range(len(numbers) + 1)
    return (set(c) for size in sizes for c in itertools.combinations(numbers, size))


def _set(names: dict[str, int], name: str, inode: int | None) -> None:
    if inode is None:
        names.pop(name, None)
    else:
        names[name] = inode


def _byte_choices(disk: Disk, done: list[Any], durable: set[int]) -> Iterator[dict[int, bytes]]:
    """The bytes of every file, in each way that what was not synced may have ended."""
    settled = dict(disk.start_contents)
    pending: dict[int, list[Data]] = {}
    for number, operation in enumerate(done):
        if isinstance(operation, Data) and number in durable:
            settled[operation.inode] = _applied(
                settled.get(operation.inode, b""), operation, operation.data
            )
        elif isinstance(operation, Data):
            pending.setdefault(operation.inode, []).append(operation)
    choices = [_endings(settled.get(inode, b""), data) for inode, data in pending.items()]
    for chosen in itertools.product(*choices):
        yield settled | dict(zip(pending, chosen, strict=True))


def _applied(content: bytes, operation: Data, data: bytes | None) -> bytes:
    """``content`` after a write of which ``data`` is there, and zeros for the rest."""
    end = operation.offset + operation.size
    content = content.ljust(end, b"\0")
    if operation.data is None:
        return content
    return content[: operation.offset] + (data or b"").ljust(operation.size, b"\0") + content[end:]


def _endings(content: bytes, pending: list[Data]) -> list[bytes]:
    """Nothing, zeros; the first writes, whole or with half of the next; all but one."""
    count = len(pending)
    found = [content, _after(content, pending, set())]
    for number in range(count):
        before = set(range(number))
        found.append(_after(content, pending, before | {number}))
        found.append(_after(content, pending, before, torn=number))
        found.append(_after(content, pending, set(range(count)) - {number}))
    return list(dict.fromkeys(found))


def _after(content: bytes, pending: list[Data], whole: set[int], torn: int = -1) -> bytes:
    """The bytes when these writes are there, half of one is, and zeros are for the others."""
    for number, operation in enumerate(pending):
        half = operation.size // 2 if number == torn else 0
        there = operation.size if number in whole else half
        content = _applied(content, operation, (operation.data or b"")[:there])
    return content


def _tree(disk: Disk, names: dict[int, dict[str, int]], contents: dict[int, bytes]) -> Tree:
    found: list[tuple[str, bytes | None]] = []
    pending = [("", ROOT)]
    while pending:
        prefix, directory = pending.pop()
        for name, inode in names.get(directory, {}).items():
            is_directory = inode in disk.directories
            found.append((prefix + name, None if is_directory else contents.get(inode, b"")))
            if is_directory:
                pending.append((f"{prefix}{name}/", inode))
    return tuple(sorted(found, key=lambda item: item[0]))


def snapshot(root: Path) -> Tree:
    """What lies under ``root`` now."""
    found = sorted((str(path.relative_to(root)), path) for path in root.rglob("*"))
    return tuple((name, None if path.is_dir() else path.read_bytes()) for name, path in found)


def materialize(tree: Tree, root: Path) -> None:
    """Make ``root`` hold exactly ``tree``."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, data in tree:
        path = root / name
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)


def violations(
    found: Iterable[State],
    root: Path,
    read: Callable[[Path], str],
    order: list[str],
    *,
    first_only: bool = False,
) -> tuple[int, list[str]]:
    """How many states there are, and which of them lose what was promised.

    ``read`` names what a reader finds; it must be in ``order``, at or after all promises.
    """
    count, wrong = 0, []
    known: dict[Tree, str] = {}
    for state in found:
        count += 1
        if state.tree not in known:
            materialize(state.tree, root)
            known[state.tree] = read(root)
        result = known[state.tree]
        least = max((order.index(promise) for promise in state.promised), default=0)
        if result not in order or order.index(result) < least:
            wrong.append(f"{result} was found after {state.promised} in {_names(state.tree)}")
            if first_only:
                break
    return count, wrong


def _names(tree: Tree) -> str:
    return " ".join(name for name, data in tree if data is not None)
