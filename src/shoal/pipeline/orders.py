"""What a stage's process and its parent say to each other."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection

RECORDER = struct.Struct("qqq")
"""How many actions have begun, which one is next, and whether it only waits."""


@dataclass(frozen=True, kw_only=True)
class StageJob:
    """One function for one rank of a group that meets at a file."""

    rank: int
    world: int
    meeting: str
    function: bytes  # cloudpickle of Callable[[StagePlace], Any]


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The setting up is done; these actions follow."""

    actions: list[str]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What the function returned, by cloudpickle; or what it raised, with the traceback."""

    value: bytes = b""
    error: bytes = b""
    traceback: str = ""


class StagePlace:
    """Which stage this process is, and how its parent sees what it does."""

    def __init__(self, job: StageJob, parent: Connection, recorder: mmap.mmap) -> None:
        self.rank, self.world, self.local = job.rank, job.world, job.rank
        self.host: None = None  # the default group is gloo's
        self._parent, self._recorder, self._count = parent, recorder, 0

    def begin(self, actions: list[str]) -> None:
        """Say what will be run: from now on a stage that stands still is found."""
        self._parent.send(Begun(actions=actions))

    def watch(self, index: int, waits: bool) -> None:
        """Say which action is next."""
        self._count += 1
        RECORDER.pack_into(self._recorder, 0, self._count, index, waits)
