"""Finding studies on disk, for the verbs that read them."""

from __future__ import annotations

import time
from pathlib import Path

from shoal.core.errors import SpecError
from shoal.core.studyfiles import DATABASE, RECORD
from shoal.observe import is_running, read_outline
from shoal.observe.connect import EARLIER

POLL_S = 0.25


def study_directories(directory: Path) -> list[Path]:
    """The studies kept in ``directory``, the one written to last first."""
    found = {
        path.parent
        for name in (DATABASE, EARLIER)
        for path in directory.glob(f"*/{name}")
        if path.is_file() and not path.parent.name.startswith(".")  # one that is being replaced
    }
    return sorted(found, key=last_written, reverse=True)


def last_written(place: Path) -> float:
    """When a study's process last wrote to its database, in Unix seconds."""
    return max(_modified(place / name) for name in (DATABASE, f"{DATABASE}-wal", EARLIER))


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # a WAL goes when its study ends
        return 0.0


def find_study(name: str | None, directory: Path) -> Path:
    """The directory of a study: by name, by path, or the newest.

    Raises:
        SpecError: there is none; names those there are.
    """
    if name is not None and _is_study(Path(name)):
        return Path(name)
    known = study_directories(directory)
    if name is None:
        if known:
            return known[0]
        raise SpecError(
            f"there is no study in {directory.resolve()}. Run one: shoal demo, or shoal run "
            "FILE.py; or say where studies are: --directory DIR."
        )
    place = directory / name
    if place in known:
        return place
    others = ", ".join(path.name for path in known[:8]) or "none"
    others += f" and {len(known) - 8} more" if len(known) > 8 else ""
    raise SpecError(
        f"there is no study {name!r} in {directory.resolve()}; the studies there: {others}."
        f"{_what_it_is(name)}"
    )


def _what_it_is(name: str) -> str:
    """What stands under a name that is no study's, from here."""
    if Path(name).is_dir():
        return f" The directory {name} is none: it has no {DATABASE}."
    if name.endswith(".py") or Path(name).is_file():
        return f" A study is called what its file calls it, in Study(NAME), and not {name}."
    return ""


def find_recorded(name: str | None, directory: Path) -> Path:
    """The same, of which there is something to read.

    Raises:
        SpecError: there is none, or nothing of it is on record.
    """
    place = find_study(name, directory)
    refuse_unrecorded(place)
    return place


def refuse_unrecorded(place: Path) -> None:
    """Say so where a study's process has written nothing yet, or ended before it did.

    Raises:
        SpecError: it has not.
    """
    if (place / RECORD).is_file() or next(read_outline(place), None) is not None:
        return
    if is_running(place):
        raise SpecError(
            f"the study in {place} is being planned, and nothing of it is on record yet. Look "
            "again in a moment."
        )
    raise SpecError(
        f"the study in {place} ended before anything of it was on record: it was killed while it "
        f"was planned. Run its file again (shoal run FILE.py), or remove it: shoal rm {place}."
    )


def _is_study(place: Path) -> bool:
    return any((place / name).is_file() for name in (DATABASE, EARLIER))


def wait_while_running(place: Path) -> bool:
    """Wait a moment for what a study writes; whether it ran before that."""
    running = is_running(place)
    time.sleep(POLL_S if running else 0)
    return running
