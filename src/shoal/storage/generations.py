"""One trial's checkpoints: directories that are whole or not there, and which of them counts.

    trials/0003/step-00000800.tmp/    files, then manifest.json, then fsync of the directory
    -> rename to step-00000800        then fsync of trials/0003: committed, and only now
    -> collect                        older ones go, until ``keep`` that verify remain

A reader believes no directory whose manifest does not verify, and falls back to the one before
it. Nothing that may be good is replaced in place: a step that is written twice gets a second
name, ``step-00000800.1``. What has another kind of name, or is a link, is not ours: ignored.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.core.errors import StorageError
from shoal.storage import files, manifest
from shoal.storage.documents import MAX_BYTES
from shoal.storage.failures import Damaged, FileError, damaged, reported
from shoal.storage.files import SecondName
from shoal.storage.manifest import Manifest
from shoal.storage.reading import read_file, size_of
from shoal.storage.tensors import FileRecord, TensorFile, write_tensors

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-([0-9]{8,18})(?:\.([1-9][0-9]{0,8}))?")
_LEFTOVER = re.compile(_NAME.pattern + r"(?:\.old)?\.tmp")

OnDamage = Callable[[Path, str], None]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Generation:
    """One committed checkpoint; later steps, and later revisions of a step, are greater."""

    step: int
    revision: int
    path: Path

    @property
    def manifest(self) -> Manifest:
        """What it says of itself, read and verified now.

        Raises:
            StorageError: it is damaged, or of a newer format.
        """
        path = self.path / MANIFEST
        found = manifest.parse(read_file(path, MAX_BYTES + 1024), path)
        if found.step != self.step:
            raise damaged(path, f"it is of step {found.step}")
        return found

    @property
    def bytes(self) -> int:
        """What its files of tensors hold; of some another generation may have the same bytes."""
        return sum(record.bytes for record in self.manifest.files.values())

    def open(self, file_name: str) -> TensorFile:
        """A reader of one file, bound to the digests of the manifest. Close it.

        Raises:
            StorageError: the file is damaged, or the generation has none of that name.
        """
        records = self.manifest.files
        if file_name not in records:
            raise StorageError(f"{self.path} has no {file_name!r}; it has {', '.join(records)}.")
        return TensorFile(self.path / file_name, records[file_name])

    def verify(self, *, quick: bool = False) -> None:
        """Compare every byte with its digest; ``quick``: the manifest, and the files' sizes.

        Raises:
            StorageError: something differs; says which file and which tensor.
        """
        for name, record in self.manifest.files.items():
            path = self.path / name
            if quick and size_of(path) != record.bytes:
                raise damaged(path, f"it has {size_of(path)} bytes, {record.bytes} were written")
            if not quick:
                with TensorFile(path, record) as file:
                    file.verify()


class Generations:
    """The generations of one trial, in a directory of its own that one process writes.

    Belongs to one thread; readers may come at any time, from anywhere. ``inside`` is the
    directory above it that must be there: it is never made again once it is gone. ``rank`` says
    of a generation that verifies how good it is: the one of the least, of equals the earliest,
    stays whatever is collected; infinite is none.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 2,
        inside: str | os.PathLike[str] | None = None,
        rank: Callable[[Generation], float] | None = None,
    ) -> None:
        assert keep >= 1, f"a trial keeps at least one generation, not {keep}"
        self.directory = Path(directory)
        self.keep = keep
        self._inside = None if inside is None else Path(inside)
        self._rank = rank

    def begin(self, step: int) -> Draft:
        """A generation to fill; removes what a crash left of earlier ones."""
        assert step >= 0, f"there is no step {step}"
        files.make_directory(self.directory, inside=self._inside)
        names = list(_names(self.directory))
        for name in filter(_LEFTOVER.fullmatch, names):
            files.remove_tree(self.directory, name)
        revisions = [revision for found, revision in map(_parsed, names) if found == step]
        return Draft(self.directory, step, max(revisions, default=-1) + 1)

    def all(self) -> list[Generation]:
        """All that have the name of a generation, oldest first; none is verified."""
        found = []
        for name in _names(self.directory, directories=True):
            step, revision = _parsed(name)
            if step >= 0:
                found.append(Generation(step=step, revision=revision, path=self.directory / name))
        return sorted(found)

    def newest(
        self,
        on_damage: OnDamage | None = None,
        *,
        quick: bool = False,
        among: Callable[[Generation], bool] = lambda generation: True,
    ) -> Generation | None:
        """The newest that verifies, byte for byte; None when there is none.

        ``quick`` looks at manifests and sizes only. ``on_damage`` is told the path and the
        reason of each one that was passed over. ``among`` says which count at all. Changes
        nothing.

        Raises:
            NewerFormat: a later version of shoal wrote the newest.
            FileError: this process cannot read now, which says nothing about the disk.
        """
        for generation in reversed(list(filter(among, self.all()))):
            reason = _damage(generation, quick=quick)
            if reason is None:
                return generation
            if not os.path.lexists(generation.path):  # collected meanwhile, so there are newer
                return self.newest(on_damage, quick=quick, among=among)
            if on_damage is not None:
                on_damage(generation.path, reason)
        return None

    def best(self) -> Generation | None:
        """The one of the least ``rank`` that verifies by manifest and size, if there is one."""
        if self._rank is None:
            return None
        ranked = [(_rank(found, self._rank), found) for found in self.all()]
        least = min((rank for rank, _ in ranked), default=math.inf)
        return next((found for rank, found in ranked if rank == least < math.inf), None)

    def collect(self, unrecorded: Collection[str] = ()) -> list[Path]:
        """Remove the oldest, until ``keep`` remain that verify by manifest and size.

        Returns what was removed. Damaged ones do not count, and go when they are older than
        those that stay. Of those that verify, the newest one whose name is not ``unrecorded``
        stays in any case, and the best one.

        Raises:
            StorageError: one has a newer format, and nothing was removed; or the disk refuses.
        """
        found = self.all()
        if len(found) <= self.keep:
            return []
        files.sync_directory(self.directory)  # who published the newest may have died too early
        verified, old, has_recorded, best = 0, [], False, self.best()
        for generation in reversed(found):
            is_whole = _damage(generation, quick=True) is None
            is_recorded = is_whole and generation.path.name not in unrecorded
            is_spare = verified >= self.keep and (has_recorded or not is_recorded)
            if is_spare and generation != best:
                old.append(generation.path)
            verified += is_whole
            has_recorded |= is_recorded
        for path in reversed(old):
            self._remove(path)
        return old

    def remove(self, generation: Generation) -> None:
        """Remove one for good, whether or not another is left.

        Raises:
            StorageError: the disk refuses.
        """
        assert generation.path.parent == self.directory
        self._remove(generation.path)

    def _remove(self, path: Path) -> None:
        """Take a generation's name first: no reader finds half of it."""
        doomed = path.with_name(path.name + ".old.tmp")
        files.remove_tree(self.directory, doomed.name)
        files.rename(path, doomed)
        files.remove_tree(self.directory, doomed.name)


class Draft:
    """A generation that is being written, where no reader looks.

    Leaving the ``with`` block without ``commit`` abandons it. After an error of any method it
    can only be abandoned: a sync that failed is never tried again.

    Attributes:
        shared_bytes: Of files that another generation has too, by ``share``.
    """

    def __init__(self, directory: Path, step: int, revision: int) -> None:
        name = f"step-{step:08d}" + (f".{revision}" if revision else "")
        self._target = Generation(step=step, revision=revision, path=directory / name)
        self._scratch = directory / f"{name}.tmp"
        self._files: dict[str, FileRecord] = {}
        self._is_open = True
        self.shared_bytes = 0
        files.make_new_directory(self._scratch)

    def tensors(
        self, file_name: str, tensors: Iterable[tuple[str, str, Sequence[int], Any]]
    ) -> FileRecord:
        """Write a file of (name, dtype, shape, buffer); see ``write_tensors``."""
        manifest.check_file_name(file_name)
        with self._attempt():
            record = write_tensors(self._scratch / file_name, tensors)
        self._files[file_name] = record
        return record

    def link(self, source: Generation, file_name: str) -> None:
        """Have a file of another generation in this one too; its bytes are shared, not copied."""
        record = source.manifest.files[file_name]
        with self._attempt():
            files.link(source.path / file_name, self._scratch / file_name)
        self._files[file_name] = record

    def share(
        self,
        source: Path,
        file_name: str,
        record: FileRecord,
        is_whole: Callable[[Path, FileRecord], bool],
    ) -> SecondName:
        """Have a file of another generation here, unless it can have no name here.

        ``record`` is what that one's manifest says of it. ``is_whole`` is asked of the file by
        its new name, which nobody takes away; one that is not gets none.
        """
        manifest.check_file_name(file_name)
        path = self.path(file_name)
        with self._attempt():
            given = files.second_name(source, path)
            if given is SecondName.GIVEN and not is_whole(path, record):
                files.remove_file(path)
                given = SecondName.NOT_THIS
        if given is SecondName.GIVEN:
            self._files[file_name] = record
            self.shared_bytes += record.bytes
        return given

    def path(self, file_name: str) -> Path:
        """Where a file of it is until it is committed."""
        return self._scratch / file_name

    def commit(self, **meta: Any) -> Generation:
        """Make it a generation; it survives a power failure when this returns.

        After an error it is no generation.
        """
        with self._attempt():
            path = self._scratch / MANIFEST
            record = Manifest(step=self._target.step, meta=meta, files=self._files)
            files.write_file(path, manifest.encode(record, path))
            files.publish(self._scratch, self._target.path)
        self._is_open = False
        return self._target

    def abandon(self) -> None:
        """Remove what was written; after ``commit`` this does nothing."""
        self._is_open = False
        files.remove_tree(self._scratch.parent, self._scratch.name)

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        if not self._is_open:
            raise StorageError(
                f"{self._target.path} is committed or given up. Begin another generation."
            )
        self._is_open = False
        yield
        self._is_open = True

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.abandon()
        else:
            with suppress(StorageError):  # the first error counts; the next begin sweeps
                self.abandon()


def bytes_on_disk(generations: Iterable[Generation], seen: set[tuple[int, int]]) -> int:
    """What generations take on the disk now; what goes meanwhile counts as nothing.

    A file that several of them have counts once, and not at all where it was ``seen`` before: to
    that are added those that are seen now.
    """
    total = 0
    for generation in generations:
        with suppress(OSError):
            for file in generation.path.iterdir():
                status = file.stat()
                inode = status.st_dev, status.st_ino
                total += 0 if inode in seen else status.st_size
                seen.add(inode)
    return total


def _names(directory: Path, *, directories: bool = False) -> list[str]:
    """What is in ``directory``, which may be missing."""
    with reported("list", directory):
        try:
            entries = os.scandir(directory)
        except FileNotFoundError:
            return []
        with entries:
            return [e.name for e in entries if not directories or e.is_dir(follow_symlinks=False)]


def _parsed(name: str) -> tuple[int, int]:
    """Step and revision of a generation's name; step -1 when it is none."""
    found = _NAME.fullmatch(name)
    if not found or (found[1] != f"{int(found[1]):08d}"):
        return -1, 0
    return int(found[1]), int(found[2] or 0)


def _rank(generation: Generation, rank: Callable[[Generation], float]) -> float:
    """Infinite of one that does not verify, or is collected meanwhile: that is not the best."""
    if _damage(generation, quick=True) is not None:
        return math.inf
    try:
        return rank(generation)
    except StorageError:
        if os.path.lexists(generation.path):
            raise
        return math.inf


def _damage(generation: Generation, *, quick: bool) -> str | None:
    """Why a generation does not verify; None when it does."""
    try:
        generation.verify(quick=quick)
    except Damaged as error:
        return str(error)
    except FileError as error:
        if not error.is_damage:
            raise
        return str(error)
    return None
