"""Events: the study's database, the folded snapshot and the timeline."""

from shoal.observe.actions import TimelineReader, read_timeline
from shoal.observe.db import Database
from shoal.observe.gantt import write_gantt
from shoal.observe.lock import StudyLock, is_running
from shoal.observe.reader import DatabaseReader, read_events, read_outline, read_trial
from shoal.observe.snapshot import Snapshot
from shoal.observe.trace import write_trace

__all__ = [
    "Database",
    "DatabaseReader",
    "Snapshot",
    "StudyLock",
    "TimelineReader",
    "is_running",
    "read_events",
    "read_outline",
    "read_timeline",
    "read_trial",
    "write_gantt",
    "write_trace",
]
