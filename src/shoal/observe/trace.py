"""A study's timeline as a trace for ui.perfetto.dev or chrome://tracing.

The format is the Trace Event Format's JSON: a process is a device, a thread a stream, a
complete event ("X") an action. Times are microseconds since the first action.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.observe.timeline import Slice, Timeline, read_study_timeline

# Names of the viewer's own palette; perfetto colours by the action's name instead.
_COLORS = (
    "thread_state_running",
    "rail_response",
    "rail_animation",
    "rail_idle",
    "rail_load",
    "startup",
    "heap_dump_stack_frame",
    "generic_work",
    "thread_state_iowait",
    "cq_build_attempt_passed",
)


def write_trace(study_dir: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write the trace of a study's directory to ``out``, a JSON file.

    Raises:
        SpecError: no action was recorded there.
    """
    timeline = read_study_timeline(study_dir)
    with open(Path(out), "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for index, record in enumerate(trace_events(timeline)):
            file.write((",\n" if index else "") + json.dumps(record))
        file.write("\n]}\n")


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The trace's records: names first, then slices, then the measured bytes."""
    for pid, device in enumerate(timeline.devices, start=1):
        yield _named("process_name", pid, 0, f"{timeline.study} {device}")
        for tid, stream in enumerate(timeline.streams(device), start=1):
            yield _named("thread_name", pid, tid, stream)
            yield {**_named("thread_sort_index", pid, tid, ""), "args": {"sort_index": tid}}
            for piece in timeline.rows[device, stream]:
                yield _slice(piece, pid, tid)
        for seconds, peak in timeline.peaks.get(device, ()):
            args = {"peak bytes": peak}
            yield {"ph": "C", "name": "memory", "pid": pid, "ts": _us(seconds), "args": args}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(piece: Slice, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": piece.action,
        "cat": f"trial {piece.trial}",
        "cname": _COLORS[piece.trial % len(_COLORS)],
        "pid": pid,
        "tid": tid,
        "ts": _us(piece.start),
        "dur": _us(piece.end - piece.start),
        "args": {"trial": piece.trial, "step": piece.step, "bytes": piece.bytes},
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
