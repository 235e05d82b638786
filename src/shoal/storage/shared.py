"""A file of tensors that many generations have: it lies on the disk once or twice, by many names.

[Note: two copies]
What one file holds for all is lost for all with one bad sector, and a trial that falls back to
the generation before would find the same bytes there. So where more than one generation is kept,
no two in a row share a file: a trial alternates between two, and so does every other trial whose
tensors are the same.

    trials/0000   step 10  A    step 20  B    step 30  A
    trials/0001   step 10  A    step 20  B

[Note: what is nearly the same]
peft keeps a copy of the classifier that it replaces, which is drawn anew in each trial and frozen:
a few KiB of a base that is the same in all. Trials whose tensors differ in less than an eighth
share a file of those that they have in common, and the rest is not in it.

[Note: whole or not]
A second name reads nothing, so a file that was damaged would be handed on. Before a process gives
one another name it has written it itself, or read it and compared every digest; afterwards it
looks at its size and its time alone.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_128_hexdigest

from shoal.core.errors import StorageError
from shoal.storage.failures import reported
from shoal.storage.files import SecondName, turn
from shoal.storage.generations import Draft, Generation, Generations
from shoal.storage.tensors import FileRecord, TensorFile, header_of

Row = tuple[str, str, Sequence[int], Any]
LEAST_SHARED_BYTES = 1 << 20
"""Less than that is not worth a file."""
NEARLY = 7 / 8
"""Of a trial's tensors so much, in bytes, is in a file that has a part of them."""
PATIENCE_S = 120.0
"""For so long a process waits while another one writes what may be the same."""


class File(NamedTuple):
    """A file, whichever its names, that nobody has written to since."""

    device: int
    inode: int
    size: int
    modified_ns: int


def likeness(header: str, tensors: Mapping[str, str]) -> str:
    """The same for files of the same tensors, and for no others; by digests as in a record."""
    return xxh3_128_hexdigest(json.dumps([header, sorted(tensors.items())]).encode())


def unchanged(digests: Mapping[str, str], before: Mapping[str, str] | None) -> set[str]:
    """The tensors that are as they were; all of them, where there was nothing ``before``."""
    if before is None:
        return set(digests)
    return {name for name, digest in digests.items() if before.get(name) == digest}


def digests_before(place: Generations, names: Collection[str]) -> dict[str, str] | None:
    """Of the tensors of a trial's newest generation; None where there is none to be read.

    Args:
        names: The files of which a tensor may be in one or the other.
    """
    for generation in reversed(place.all()):
        try:
            records = generation.manifest.files
        except StorageError:  # who goes on from it will say so
            continue
        there = [records[name].tensors for name in names if name in records]
        return {name: digest for tensors in there for name, digest in tensors.items()}
    return None


class Shared:
    """Finds a file of some tensors that is there already. Belongs to one thread.

    Args:
        name: Of the file, in every generation.
        least: Bytes; a part of the tensors is not worth a file of less.
    """

    def __init__(self, name: str, least: int = LEAST_SHARED_BYTES) -> None:
        self.name, self._least = name, least
        self._likes: dict[File, str] = {}  # of the files that were come across
        self._digests: dict[File, Mapping[str, str]] = {}  # of the same
        self._whole: set[File] = set()  # those that were written or read here

    def put(
        self,
        draft: Draft,
        place: Generations,
        rows: Collection[Row],
        digests: Mapping[str, str],
        until_committed: ExitStack,
    ) -> set[str]:
        """Have a file of ``rows`` in ``draft``, by a second name where there is one.

        Returns the names of those that are in it: all, or nearly all where other trials have
        those and not the rest.

        Args:
            place: The trial's generations; those of other trials lie beside it.
            until_committed: Left when ``draft`` is committed or given up. Of several processes
                that look for the same tensors one writes them, and the others find them then.

        Raises:
            StorageError: the disk refuses.
        """
        like = likeness(header_of(rows), digests)
        own = [found for found in self._of(place) if self._likes[found[0]] == like]
        passed = {own[0][0]} if own and place.keep > 1 else set()
        given = self._link(draft, own, passed)
        if given is SecondName.NOT_THIS:
            until_committed.enter_context(turn(place.directory.parent, PATIENCE_S))
            beside = (f for f in self._beside(place) if self._likes[f[0]] == like)
            given = self._link(draft, beside, passed)
            if given is SecondName.NOT_THIS:
                return self._put_part(draft, place, rows, digests, passed)
        if given is not SecondName.GIVEN:
            self._note(draft.path(self.name), draft.tensors(self.name, rows))
        return set(digests)

    def _put_part(
        self,
        draft: Draft,
        place: Generations,
        rows: Collection[Row],
        digests: Mapping[str, str],
        passed: set[File],
    ) -> set[str]:
        """Link a file of nearly all, or write what is in common with another trial's; else all."""
        own = [*self._of(place)]
        passed |= {file for file, _ in own[:1] if place.keep > 1}
        parts = {frozenset(digests): list(rows)}
        for file, generation in chain(own, self._beside(place)):
            common = self._in_common(file, rows, digests)
            of_these = parts.setdefault(common, [one for one in rows if one[0] in common])
            like = likeness(header_of(of_these), {name: digests[name] for name in common})
            if (
                self._likes[file] == like
                and self._link(draft, [(file, generation)], passed) is SecondName.GIVEN
            ):
                return set(common)
        least = min(parts, key=len)  # what trials have in common: those that come find it
        self._note(draft.path(self.name), draft.tensors(self.name, parts[least]))
        return set(least)

    def _in_common(
        self, file: File, rows: Collection[Row], digests: Mapping[str, str]
    ) -> frozenset[str]:
        """The tensors that a file has in the same bits; all, where that is too few for a part."""
        known = self._digests[file]
        sizes = {name: memoryview(data).nbytes for name, _, _, data in rows}
        common = {name for name, digest in digests.items() if known.get(name) == digest}
        most = max(self._least, NEARLY * sum(sizes.values()))
        return frozenset(common if sum(map(sizes.__getitem__, common)) >= most else digests)

    def _link(
        self, draft: Draft, some: Iterable[tuple[File, Generation]], passed: set[File]
    ) -> SecondName:
        """Give the first of ``some`` another name that may have one and is whole."""
        for file, generation in some:
            record = None if file in passed else _record(generation, self.name)
            passed.add(file)
            if record is not None:
                source = generation.path / self.name
                given = draft.share(source, self.name, record, self._is_whole)
                if given is not SecondName.NOT_THIS:
                    return given
        return SecondName.NOT_THIS

    def _of(self, place: Generations) -> Iterator[tuple[File, Generation]]:
        """The files of one trial's generations, the newest first."""
        for generation in reversed(place.all()):
            file = _seen(generation.path / self.name)
            if file is None:
                continue
            if file not in self._likes:
                record = _record(generation, self.name)
                if record is None:
                    continue
                self._know(file, record)
            yield file, generation

    def _beside(self, place: Generations) -> Iterator[tuple[File, Generation]]:
        """Those of the other trials."""
        trials = place.directory.parent
        with reported("list", trials):
            names = sorted(os.listdir(trials))
        for directory in (trials / name for name in names if name != place.directory.name):
            if directory.is_dir() and not directory.is_symlink():
                yield from self._of(Generations(directory))

    def _is_whole(self, path: Path, record: FileRecord) -> bool:
        """Whether a file is what was written; it is read once, and again if it was changed."""
        file, like = _seen(path), likeness(record.header, record.tensors)
        if file not in self._whole or self._likes.get(file) != like:
            try:
                with TensorFile(path, record) as opened:
                    opened.verify()
            except StorageError:  # whoever goes on from it will say so
                return False
            self._note(path, record)
        return True

    def _note(self, path: Path, record: FileRecord) -> None:
        """A file is whole now."""
        if (file := _seen(path)) is not None:
            self._know(file, record)
            self._whole.add(file)

    def _know(self, file: File, record: FileRecord) -> None:
        self._likes[file] = likeness(record.header, record.tensors)
        self._digests[file] = record.tensors


def _seen(path: Path) -> File | None:
    """A regular file as it is now; None where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return File(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _record(generation: Generation, name: str) -> FileRecord | None:
    """What a manifest says of a file; None where it cannot be read, or says nothing."""
    try:
        return generation.manifest.files.get(name)
    except StorageError:  # whoever goes on from it will say so
        return None
