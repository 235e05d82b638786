"""What a page shows of the studies in a directory: plain values, ready for JSON."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from shoal.core.errors import SpecError, StorageError
from shoal.core.spec import varying_names
from shoal.core.studyfiles import TIMELINE
from shoal.core.units import format_seconds, format_value
from shoal.observe import DatabaseReader, TimelineReader
from shoal.observe.gantt import draw_gantt
from shoal.observe.rows import DeviceRow, TrialRow
from shoal.observe.snapshot import Folder, Snapshot
from shoal.observe.states import study_state, trial_state
from shoal.observe.timeline import read_study_timeline
from shoal.runtime.printing.triallog import log_path
from shoal.ui.lines import total_steps
from shoal.ui.logs import visible
from shoal.ui.show import (
    DEVICE_HEADER,
    describe_trial,
    device_cells,
    device_record,
    ranking,
    read_summary,
    remarks,
    study_record,
    taken_from,
    trial_record,
)
from shoal.ui.studies import last_written, study_directories
from shoal.ui.text import DASH, format_metric, format_steps, how

POINTS = 300  # of a curve, at most
CURVES = 64  # of the leaderboard's first trials, and those that run
LOG_LINES = 200


class Studies:
    """The studies of a directory, each followed from the first time that it is asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: dict[str, _Followed] = {}
        self._summaries: dict[Path, tuple[float, Snapshot]] = {}  # each as of its last change
        self._lock = threading.Lock()

    def all(self) -> list[dict[str, Any]]:
        """A record of each, the newest first; of one that cannot be read what is wrong."""
        return [self._summary(place) for place in study_directories(self.directory)]

    def study(self, name: str) -> dict[str, Any]:
        """One of them with its trials, devices and curves.

        Raises:
            SpecError: there is none of this name.
            StorageError: it cannot be read.
        """
        place = self._place(name)
        snapshot = self._follow(name, place)
        rows, state = ranking(snapshot), study_state(snapshot, place)
        return study_record(place, snapshot) | {
            "eta_seconds": snapshot.eta_seconds,
            "time": _time(snapshot),
            "steps_done": snapshot.steps_done,
            "total_steps": total_steps(snapshot),
            "settings": varying_names(row.hp for row in snapshot.trials),
            "trials": [_trial(row, state, snapshot.metric) for row in rows],
            "device_header": DEVICE_HEADER,
            "devices": [_device(row) for row in snapshot.devices],
            "remarks": remarks(snapshot, place),
            "curves": _curves(snapshot, rows),
        }

    def trial(self, name: str, number: int) -> dict[str, Any]:
        """All there is of one trial: as ``shoal show --trial`` tells it, and its log's end.

        Raises:
            SpecError: there is no such study or trial.
            StorageError: it cannot be read.
        """
        place = self._place(name)
        snapshot = self._follow(name, place)
        row = next((row for row in snapshot.trials if row.number == number), None)
        if row is None:
            raise SpecError(f"study {name} has no trial {number}.")
        return _trial(row, study_state(snapshot, place), snapshot.metric) | {
            "text": describe_trial(snapshot, row, place),
            "log": _log_end(log_path(place, number)),
        }

    def chart(self, name: str) -> str:
        """The timeline of a study as SVG.

        Raises:
            SpecError: there is no such study, or no action was recorded there.
            StorageError: it cannot be read.
        """
        return draw_gantt(read_study_timeline(self._place(name)))

    def _summary(self, place: Path) -> dict[str, Any]:
        written = last_written(place)
        known = {"name": place.name, "written": written}
        try:
            as_of, snapshot = self._summaries.get(place, (None, None))
            if snapshot is None or as_of != written:
                snapshot = read_summary(place)
                self._summaries[place] = written, snapshot
            found = study_record(place, snapshot)
            return known | found | {"best_value": format_metric(found["best_value"])}
        except StorageError as error:
            return known | {"state": "unreadable", "error": str(error)}

    def _place(self, name: str) -> Path:
        """Its directory: one of those that are there. A name is never made a path."""
        for place in study_directories(self.directory):
            if place.name == name:
                return place
        raise SpecError(f"there is no study {name!r} in {self.directory}.")

    def _follow(self, name: str, place: Path) -> Snapshot:
        with self._lock:
            known = self._known.get(name)
            if known is None or not known.is_of(place):
                known = self._known[name] = _Followed(place)
        return known.snapshot()


class _Followed:
    """A study whose database and timeline are read on from where they were.

    It holds the directory: the number of one that was removed may be the next one's.
    """

    def __init__(self, place: Path) -> None:
        self._directory = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._directory)
        self._reader, self._folder = DatabaseReader(place), Folder()
        self._actions = TimelineReader(place / TIMELINE)
        self._lock = threading.Lock()

    def is_of(self, place: Path) -> bool:
        """Whether it is the study that is there now: one may have taken its place."""
        return os.path.samestat(os.fstat(self._directory), place.stat())

    def snapshot(self) -> Snapshot:
        with self._lock:
            self._folder.add_all(self._reader.poll())
            self._folder.add_all(self._actions.poll())
            return self._folder.snapshot()


def _time(snapshot: Snapshot) -> str:
    """How long the study took so far, and how much longer it may."""
    elapsed = f"{format_seconds(snapshot.seconds)} elapsed" if snapshot.seconds else ""
    left = f", about {format_seconds(snapshot.eta_seconds)} left" if snapshot.eta_seconds else ""
    return elapsed + left


def _device(row: DeviceRow) -> dict[str, Any]:
    return dict(device_record(row)) | {"cells": device_cells(row)}


def _trial(row: TrialRow, study: str, metric: str) -> dict[str, Any]:
    """``cells``: what the terminal's tables say of it, in the same digits."""
    cells = {
        "step": format_steps(row.step, row.steps),
        "loss": format_metric(row.smooth_loss),
        "metric": format_metric(row.metrics.get(metric)),
        "took": format_seconds(row.seconds) if row.step else DASH,
    }
    return trial_record(row) | {
        "cells": cells,
        "settings": {name: format_value(value) for name, value in row.hp.items()},
        "state": trial_state(row, study),
        "from": taken_from(row),
        "how": how(row),
        "error": row.error_line,
        "best": row.best,
    }


def _curves(snapshot: Snapshot, rows: list[TrialRow]) -> list[dict[str, Any]]:
    """The metric over steps, of the first trials and those that run; else the training loss."""
    shown = [row for index, row in enumerate(rows) if index < CURVES or not row.is_done]
    curves = []
    for row in shown[: 2 * CURVES]:
        found = [
            (point.step, value)
            for point in row.history
            if (value := point.metrics.get(snapshot.metric)) is not None
        ]
        curves.append({"trial": row.number, "points": _thinned(found)})
    return curves


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """No more points than a screen shows, the last one among them."""
    every = -(-len(points) // POINTS) if points else 1
    return points[::-every][::-1] if every > 1 else points


def _log_end(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            return [visible(line.decode("utf-8", "replace")) for line in deque(file, LOG_LINES)]
    except OSError:
        return []
