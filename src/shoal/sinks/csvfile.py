"""Metrics as CSV: a row per evaluation, and if asked for a row per step.

[Note: a step that is done twice]
A trial that goes on from its last saved state does some steps again, after a worker's death
or in a study that is resumed. When a step comes that a file has already, the rows of that
trial from there on are taken out of it first: every step is there once.
"""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from shoal.core.errors import SpecError
from shoal.core.event import (
    Evaluated,
    Event,
    StepFinished,
    StudyFinished,
    TrialFailed,
    TrialFinished,
    TrialPruned,
    TrialStopped,
)

KEYS = ("trial", "step", "epoch", "time")
METRICS = (*KEYS, "train_loss")
STEPS = (*KEYS, "loss", "seconds", "device")
_MAX_LINE = 2**16  # bytes


class CsvSink:
    """A callback that writes ``metrics.csv``, and with ``steps=True`` ``steps.csv``.

    ``metrics.csv`` has a row per evaluation: trial, step, epoch, time (Unix seconds),
    ``train_loss`` (the mean since the evaluation before; empty where a resumed study did not
    see all of it) and every validation metric. Each row is handed to the operating system
    at once. Give each study files of its own; in the study's own directory they go with it.

    Args:
        place: A directory for both files, or the ``.csv`` file of the metrics; the steps
            are then in NAME-steps.csv beside it. Nothing is made before the first row.
        steps: Also write a row per optimizer step.

    Raises:
        SpecError: a file is there that holds something else.
    """

    def __init__(self, place: str | os.PathLike[str], *, steps: bool = False) -> None:
        path = Path(place)
        if path.suffix == ".csv":
            metrics, every_step = path, path.with_stem(f"{path.stem}-steps")
        else:
            metrics, every_step = path / "metrics.csv", path / "steps.csv"
        self._metrics = CsvFile(metrics, METRICS)
        self._steps = CsvFile(every_step, STEPS) if steps else None
        self._losses: dict[int, _Losses] = {}

    def __call__(self, event: Event) -> None:
        """Write what the event says, if it says a metric."""
        match event:
            case StepFinished():
                self._step(event)
            case Evaluated():
                self._evaluation(event)
            case TrialFinished() | TrialFailed() | TrialStopped() | TrialPruned():
                self._losses.pop(event.trial, None)
            case StudyFinished():
                self.close()

    def close(self) -> None:
        """Let go of the files; the next row opens them again."""
        self._metrics.close()
        if self._steps is not None:
            self._steps.close()

    def _step(self, event: StepFinished) -> None:
        self._losses.setdefault(event.trial, _Losses()).add(event.step, event.loss)
        self._metrics.rewind(event.trial, event.step)
        if self._steps is not None:
            self._steps.append({name: getattr(event, name) for name in STEPS})

    def _evaluation(self, event: Evaluated) -> None:
        self._metrics.rewind(event.trial, event.step)
        losses = self._losses.get(event.trial, _Losses())
        row = {name: getattr(event, name) for name in KEYS}
        row["train_loss"] = losses.mean(self._metrics.last(event.trial), event.step)
        self._metrics.append(row | dict(event.metrics))


class CsvFile:
    """Rows that have a trial and a step, each of these once. Opened by its first row."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self._columns = path, list(columns)
        self._last: dict[int, int] | None = None  # steps by trial; None: nobody looked yet
        self._file: IO[str] | None = None
        self._check()

    def last(self, trial: int) -> int:
        """The last step of a trial that has a row, or 0."""
        if self._last is None:
            self._last = self._look()
        return self._last.get(trial, 0)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row; a name that is new becomes a column."""
        trial, step = int(row["trial"]), int(row["step"])
        self.rewind(trial, step)
        columns = list(dict.fromkeys([*self._columns, *row]))
        if columns != self._columns:
            self._columns = columns
            self._rewrite(lambda kept: True)
        self._write([row.get(name, "") for name in self._columns])
        assert self._last is not None
        self._last[trial] = step

    def rewind(self, trial: int, step: int) -> None:
        """Take out the trial's rows from ``step`` on: they are to come again."""
        if step <= self.last(trial):
            self._rewrite(lambda row: int(row["trial"]) != trial or int(row["step"]) < step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check(self) -> None:
        """Whatever is at ``path`` has to be of this sink; only the first line is read."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        found = _columns_of(self.path)
        if found[:2] != list(KEYS[:2]):
            raise SpecError(
                f"{self.path} begins with {','.join(found)[:60]!r} and is not of a CsvSink, whose "
                "files begin with 'trial,step'. Choose another path, or move that file away."
            )

    def _look(self) -> dict[int, int]:
        """What an earlier run left: its columns, and the last step of each trial.

        A torn last line, of a process that was killed, is cut off.
        """
        if not self.path.exists():
            return {}
        _cut_torn_line(self.path)
        self._columns = _columns_of(self.path) or self._columns
        last: dict[int, int] = {}
        for row in _rows_of(self.path):
            last[int(row["trial"])] = max(last.get(int(row["trial"]), 0), int(row["step"]))
        return last

    def _rewrite(self, keeps: Callable[[Mapping[str, str]], bool]) -> None:
        """The file again, in one piece: the rows that ``keeps`` keeps, under all columns."""
        self.close()
        if not self.path.exists():
            return
        scratch = self.path.with_name(f".{self.path.name}.tmp")
        with open(scratch, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row for row in _rows_of(self.path) if keeps(row))
        scratch.replace(self.path)
        self._last = self._look()

    def _write(self, values: Sequence[Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115  # close()
            if self._file.tell() == 0:
                csv.writer(self._file).writerow(self._columns)
        csv.writer(self._file).writerow(values)
        self._file.flush()


class _Losses:
    """The losses of a trial's steps, from the first one that was seen."""

    def __init__(self) -> None:
        self._first, self._values = 1, array("d")

    def add(self, step: int, loss: float) -> None:
        index = step - self._first
        if 0 <= index <= len(self._values):
            del self._values[index:]
        else:
            self._first, self._values = step, array("d")
        self._values.append(loss)

    def mean(self, after: int, upto: int) -> float | str:
        """The mean of the steps after ``after`` up to ``upto``; empty if one was not seen."""
        first, stop = after + 1 - self._first, upto + 1 - self._first
        if not 0 <= first < stop <= len(self._values):
            return ""
        losses = self._values[first:stop]
        return sum(losses) / len(losses)


def _columns_of(path: Path) -> list[str]:
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        return next(csv.reader(file), [])


def _rows_of(path: Path) -> Iterator[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _cut_torn_line(path: Path) -> None:
    with open(path, "rb+") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _MAX_LINE)
        file.seek(start)
        tail = file.read()
        if not tail.endswith(b"\n"):
            file.truncate(start + tail.rfind(b"\n") + 1)
