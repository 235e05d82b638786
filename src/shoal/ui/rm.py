"""``shoal rm``: delete studies, and nothing but studies.

A study is first renamed, whole, to ``.NAME.removing``, then what makes it a study is deleted,
then the rest: an interrupted removal leaves all of it, or what no verb takes for a study.
No step needs room on the disk, so that it works on a full one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import SpecError, StorageError
from shoal.core.studyfiles import DATABASE, RECORD
from shoal.core.units import counted, format_bytes
from shoal.launch.directory import holds_no_record, read_record
from shoal.observe import StudyLock, is_running, jsonl, read_outline
from shoal.observe.snapshot import Snapshot
from shoal.ui.failures import ExitCode
from shoal.ui.studies import find_study

MARKS = (DATABASE, RECORD)  # of a study, for those who look for one


@dataclass(frozen=True, slots=True, kw_only=True)
class Doomed:
    """A study that is to go, and what goes with it."""

    place: Path
    study: str
    trials: int
    num_bytes: int


def remove_studies(names: Sequence[str], directory: Path, *, yes: bool, as_json: bool) -> int:
    """Delete studies after asking; all of them are looked at before the first is touched."""
    found = {place.resolve(): place for name in names for place in [find_study(name, directory)]}
    doomed = [inspect(place) for place in found.values()]
    if not yes and not _confirmed(doomed):
        print("nothing was deleted", file=sys.stderr)
        return ExitCode.USAGE
    for study in doomed:
        remove(study.place)
        if not as_json:
            print(f"deleted {describe(study)}")
    if as_json:
        print(jsonl.dumps([_record(study) for study in doomed], indent=2))
    return ExitCode.DONE


def inspect(place: Path) -> Doomed:
    """What a removal would delete.

    Raises:
        SpecError: no study is there, it is a link to one, or a process runs it.
        StorageError: what is there cannot be read, and may be somebody else's.
    """
    if place.is_symlink():
        raise SpecError(
            f"{place} is a link to {place.resolve()}, and links are not followed. Give that "
            "directory to delete the study, or remove the link yourself."
        )
    snapshot = _read(place)
    if not (snapshot.runs or holds_no_record(place) or read_record(place)):
        raise SpecError(
            f"{place} holds nothing that a study wrote, so it is not deleted. Give the directory "
            "of a study, runs/NAME, or remove it yourself."
        )
    if is_running(place):
        raise SpecError(_running(place))
    return Doomed(
        place=place,
        study=snapshot.study or place.name,
        trials=snapshot.total,
        num_bytes=measure(place),
    )


def _read(place: Path) -> Snapshot:
    try:
        return Snapshot.of(read_outline(place))
    except StorageError as error:
        raise StorageError(
            f"{error}\n{place} is not deleted: nothing in it says that it is a study's. If it is, "
            "remove the directory yourself."
        ) from error


def measure(place: Path) -> int:
    """Bytes of all files below ``place``, each once; symbolic links count as themselves."""
    total, seen = 0, set[tuple[int, int]]()
    for folder, _, files in os.walk(place):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(os.path.join(folder, name))
                inode = found.st_dev, found.st_ino
                total += found.st_size if stat.S_ISREG(found.st_mode) and inode not in seen else 0
                seen.add(inode)
    return total


def remove(place: Path) -> None:
    """Delete a study's directory.

    Raises:
        SpecError: a process runs it.
        StorageError: something in it cannot be deleted; the study is gone all the same.
    """
    place = place.resolve()
    target = place.with_name(f".{place.name}.removing")
    shutil.rmtree(target, ignore_errors=True)  # of a removal that was interrupted
    if is_running(place):
        raise SpecError(_running(place))
    with StudyLock(place):
        place.rename(target)
    try:
        for mark in MARKS:
            (target / mark).unlink(missing_ok=True)
        shutil.rmtree(target)
    except OSError as error:
        raise StorageError(
            f"study {place.name} is gone, but not all of its files: {error}. What is left lies in "
            f"{target}; delete it when the reason is mended."
        ) from error


def describe(study: Doomed) -> str:
    """A study in a line: name, place, what it holds."""
    trials = counted(study.trials, "trial")
    return f"{study.study} ({study.place}): {trials}, {format_bytes(study.num_bytes)}"


def _confirmed(doomed: Sequence[Doomed]) -> bool:
    """Ask a person; nobody to ask is no.

    Raises:
        SpecError: standard input is no terminal.
    """
    for study in doomed:
        print(describe(study), file=sys.stderr)
    if not sys.stdin.isatty():
        raise SpecError(
            f"deleting {counted(len(doomed), 'study', 'studies')} needs a yes, and standard input "
            "is no terminal to ask on. Pass --yes."
        )
    print("delete all of it, checkpoints too? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _running(place: Path) -> str:
    return (
        f"study {place.name} is running and is not deleted. Wait for it or stop it (shoal stop "
        f"{place}), then delete it."
    )


def _record(study: Doomed) -> dict[str, object]:
    return {
        "study": study.study,
        "directory": str(study.place),
        "trials": study.trials,
        "bytes": study.num_bytes,
    }
