"""Orders to a study that runs: typed commands, a socket in its directory, and a client."""

from shoal.control.client import NotRunning, send
from shoal.control.commands import (
    CloneTrial,
    Command,
    Continue,
    ExtendTrials,
    Pause,
    Status,
    StopStudy,
    StopTrial,
)
from shoal.control.server import Answer, ControlServer
from shoal.core.studyfiles import SOCKET

__all__ = [
    "SOCKET",
    "Answer",
    "CloneTrial",
    "Command",
    "Continue",
    "ControlServer",
    "ExtendTrials",
    "NotRunning",
    "Pause",
    "Status",
    "StopStudy",
    "StopTrial",
    "send",
]
