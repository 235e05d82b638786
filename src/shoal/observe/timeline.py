"""The actions of a study as the trace and the chart need them.

Seconds count from the first action. The time between two runs of a study (after a kill
and before the resume) is left out, so that a chart shows work and not the night between.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from shoal.core.errors import SpecError
from shoal.core.event import ActionFinished, PeakMeasured, StudyStarted, TrialPlanned
from shoal.core.seats import ALONE, epochs_of
from shoal.core.studyfiles import TIMELINE
from shoal.observe.actions import read_timeline
from shoal.observe.reader import read_outline

STREAMS = ("compute", "up", "down", "host")


@dataclass(frozen=True, slots=True)
class Slice:
    """One action on one stream; times are seconds since the study's first action."""

    start: float
    end: float
    trial: int
    step: int
    action: str
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All slices of a study by device and stream, each list in order of time.

    ``resumes`` are the seconds at which a later run began to work. ``peaks`` are, by device,
    pairs of seconds and measured bytes. ``planned`` are the trials that there are, and ``widths``
    those that stand for an array, with its slots; an action of an array is the first one's.
    """

    study: str
    rows: Mapping[tuple[str, str], Sequence[Slice]]
    seconds: float
    resumes: tuple[float, ...] = ()
    peaks: Mapping[str, Sequence[tuple[float, int]]]
    planned: frozenset[int] = frozenset()
    widths: Mapping[int, int] = field(default_factory=dict)

    @property
    def trials(self) -> tuple[int, ...]:
        """Those that have slices: one of each array."""
        return tuple(sorted({piece.trial for row in self.rows.values() for piece in row}))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices' names, in natural order."""
        return tuple(sorted({device for device, _ in self.rows}, key=natural_key))

    def streams(self, device: str) -> tuple[str, ...]:
        """The streams of a device that have slices, compute first."""
        known = [stream for name, stream in self.rows if name == device]
        return tuple(sorted(known, key=lambda s: (STREAMS.index(s) if s in STREAMS else 9, s)))


def natural_key(name: str) -> tuple[str, tuple[int, ...]]:
    """``cpu:10`` after ``cpu:9``, ``cuda:0/1`` before ``cuda:1/0``."""
    kind, _, number = name.rpartition(":")
    numbers = number.split("/")
    return (kind, tuple(map(int, numbers))) if all(map(str.isdecimal, numbers)) else (name, ())


def read_study_timeline(study_dir: str | os.PathLike[str]) -> Timeline:
    """The timeline of a study's directory.

    Raises:
        SpecError: no action was recorded there.
    """
    actions = list(read_timeline(study_dir))
    if not actions:
        raise SpecError(
            f"no actions are recorded in {Path(study_dir) / TIMELINE}. Is this the directory of a "
            "study (runs/NAME) that has taken a step? A run with timeline=False records none."
        )
    name, starts, peaks = Path(study_dir).name, [], []
    widths: dict[int, int] = {}
    for event in read_outline(study_dir):
        if isinstance(event, StudyStarted):
            name = event.study
            starts.append(event.time)
        elif isinstance(event, PeakMeasured):
            peaks.append(event)
        elif isinstance(event, TrialPlanned):
            epochs = epochs_of(event.numerics)
            widths[event.trial] = epochs[0].width if epochs else ALONE
    found = build_timeline(name, actions, starts[1:], peaks)
    arrays = {trial: widths.get(trial, ALONE) for trial in found.trials}
    return replace(
        found,
        planned=frozenset(widths),
        widths={trial: width for trial, width in arrays.items() if width != ALONE},
    )


def build_timeline(
    study: str,
    actions: Sequence[ActionFinished],
    resumes: Sequence[float] = (),
    peaks: Iterable[PeakMeasured] = (),
) -> Timeline:
    """The timeline of some actions; ``resumes`` are Unix times at which later runs began."""
    clock = _Clock(actions, resumes)
    rows: dict[tuple[str, str], list[Slice]] = {}
    for a in actions:
        piece = Slice(clock(a.start), clock(a.end), a.trial, a.step, a.action, a.bytes)
        rows.setdefault((a.device, a.stream), []).append(piece)
    for row in rows.values():
        row.sort(key=lambda piece: piece.start)
    measured: dict[str, list[tuple[float, int]]] = {}
    for peak in peaks:
        measured.setdefault(peak.device, []).append((max(0.0, clock(peak.time)), peak.peak_bytes))
    return Timeline(
        study=study,
        rows=rows,
        seconds=max(clock(a.end) for a in actions),
        resumes=tuple(clock(time) for time in clock.resumes),
        peaks=measured,
    )


class _Clock:
    """Unix seconds to seconds of work: what lies between runs counts nothing.

    A run is from its first action to its last.
    """

    def __init__(self, actions: Sequence[ActionFinished], resumes: Sequence[float]) -> None:
        starts, ends = sorted(a.start for a in actions), sorted(a.end for a in actions)
        later = (bisect_left(starts, time) for time in resumes if time > starts[0])
        self.resumes = sorted({starts[index] for index in later if index < len(starts)})
        self._offsets = [starts[0]]
        previous = starts[0]
        for time in self.resumes:
            index = bisect_right(ends, time)
            idle_since = max(ends[index - 1], previous) if index else previous
            self._offsets.append(self._offsets[-1] + time - idle_since)
            previous = time

    def __call__(self, time: float) -> float:
        return time - self._offsets[bisect_right(self.resumes, time)]


def busy_fractions(timeline: Timeline) -> dict[str, float]:
    """Per device, the share of the study's time in compute, first to last action."""
    seconds = max(timeline.seconds, 1e-12)
    return {
        device: covered(timeline.rows.get((device, "compute"), ())) / seconds
        for device in timeline.devices
    }


def covered(row: Sequence[Slice]) -> float:
    """Seconds with at least one slice; ``row`` is in order of start."""
    total, reached = 0.0, float("-inf")
    for piece in row:
        total += max(0.0, piece.end - max(piece.start, reached))
        reached = max(reached, piece.end)
    return total


def typical_seconds(row: Sequence[Slice]) -> float:
    """The median time from one slice's start to the next one's."""
    gaps = sorted(second.start - first.start for first, second in pairwise(row))
    return gaps[len(gaps) // 2] if gaps else (row[0].end - row[0].start if row else 0.0)
