"""Finding studies on disk, for the verbs that read them."""

from __future__ import annotations

from pathlib import Path

from shoal.core.errors import SpecError
from shoal.observe.log import EVENTS


def study_directories(directory: Path) -> list[Path]:
    """The studies kept in ``directory``, the one written to last first."""
    found = [path.parent for path in directory.glob(f"*/{EVENTS}") if path.is_file()]
    return sorted(found, key=lambda place: (place / EVENTS).stat().st_mtime, reverse=True)


def find_study(name: str | None, directory: Path) -> Path:
    """The directory of a study: by name, by path, or the newest.

    Raises:
        SpecError: there is none; names those there are.
    """
    if name is not None and (Path(name) / EVENTS).is_file():
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
    raise SpecError(
        f"there is no study {name!r} in {directory.resolve()}; the studies there: {others}."
    )
