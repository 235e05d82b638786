"""Events: the log, the folded snapshot and the timeline."""

from shoal.observe.gantt import write_gantt
from shoal.observe.log import EventLog, LogReader, TimelineReader, read_events, read_timeline
from shoal.observe.rows import DeviceRow, HistoryRow, TrialRow, TrialState
from shoal.observe.snapshot import Folder, Snapshot, fold
from shoal.observe.timeline import busy
from shoal.observe.trace import write_trace

__all__ = [
    "DeviceRow",
    "EventLog",
    "Folder",
    "HistoryRow",
    "LogReader",
    "Snapshot",
    "TimelineReader",
    "TrialRow",
    "TrialState",
    "busy",
    "fold",
    "read_events",
    "read_timeline",
    "write_gantt",
    "write_trace",
]
