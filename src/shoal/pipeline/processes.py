"""The processes of a pipeline's stages, as the process that wants the result sees them.

[Note: faults]
A stage that dies is seen at once, by the end of its process. One that hangs is seen when no
stage has begun another action for ``hang_s`` seconds, or SETUP_S before the first: the one whose
action is no RECV is it, and the others wait for it. Either way all processes of the group are
killed before the error is raised: those that are left are in the middle of a group that will
never meet again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from shoal.core.errors import ShoalError, SpecError, WorkerError
from shoal.forkserver import ForkServer
from shoal.pipeline.orders import RECORDER, Begun, Done, StageJob, StagePlace
from shoal.workerenv import worker_environment

MODULE = "shoal.pipeline.worker"
HANG_S = 300.0
SETUP_S = 600.0  # to build and measure the model, before the first action
_GRACE_S = 1.0  # for the cause to be heard, when a stage has lost its neighbour
_LOOK_S = 0.2
_STACK_BYTES = 64 * 2**10


class _Process:
    """One stage's process."""

    def __init__(self, starts: ForkServer) -> None:
        ours, theirs = socket.socketpair()
        recorder = os.memfd_create("shoal-stage")
        os.truncate(recorder, RECORDER.size)
        self._recorder = mmap.mmap(recorder, RECORDER.size)
        self._stacks = os.memfd_create("shoal-stage-stacks")
        inherited = (theirs.fileno(), recorder, self._stacks)
        self._process = starts.start(MODULE, inherited, _environment())
        theirs.close()
        os.close(recorder)
        self.connection = Connection(ours.detach())
        self.actions: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def record(self) -> tuple[int, int, int]:
        """Actions begun, the next one, and whether it only waits."""
        return RECORDER.unpack_from(self._recorder)

    def begin(self, job: StageJob) -> None:
        self.actions = []
        RECORDER.pack_into(self._recorder, 0, 0, 0, 0)
        with contextlib.suppress(OSError):  # its end is seen by whoever listens
            self.connection.send(job)

    def how_it_ended(self) -> str:
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def stacks(self) -> str:
        """Where its threads stand, if it still answers signals."""
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _GRACE_S
        while not os.fstat(self._stacks).st_size and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # the rest of it
        return os.pread(self._stacks, _STACK_BYTES, 0).decode(errors="replace") or "(no answer)"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()
        os.close(self._stacks)


class StageProcesses:
    """Processes for up to ``most`` stages, warm between runs; use as a context manager."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._starts = ForkServer(MODULE)
        self._idle: list[_Process] = []

    def __enter__(self) -> StageProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        while self._idle:
            self._idle.pop().kill()
        self._starts.close()

    def run(
        self,
        function: Callable[[StagePlace], Any],
        world: int,
        *,
        hang_s: float = HANG_S,
        name: Callable[[int], str] = "stage {}".format,
    ) -> list[Any]:
        """Run ``function`` on every rank of a group of ``world``; what each returned.

        ``name`` is what errors call a rank.
        The function goes by cloudpickle, and so does what it returns. After an error no process
        of the group is left.

        Raises:
            SpecError: more ranks than there may be processes.
            WorkerError: a process died or hung; names it, and the action it was at.
            ShoalError: what a rank raised, as it was raised there.
        """
        if world > self.most:
            raise SpecError(
                f"{world} stages were asked for, and there are processes for {self.most}. Open "
                f"StageProcesses({world}), or train in fewer stages."
            )
        self._idle = [process for process in self._idle if self._is_sound(process)]
        while len(self._idle) < world:
            self._idle.append(_Process(self._starts))
        group, self._idle = self._idle[:world], self._idle[world:]
        data = cloudpickle.dumps(function)
        try:
            with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
                for rank, process in enumerate(group):
                    meeting = os.path.join(folder, "meeting")
                    job = StageJob(rank=rank, world=world, meeting=meeting, function=data)
                    process.begin(job)
                values = _Watch(group, hang_s, name).results()
        except BaseException:
            for process in group:
                process.kill()
            raise
        self._idle = group + self._idle
        return values

    def _is_sound(self, process: _Process) -> bool:
        if not process.alive:
            process.kill()
            return False
        return True


class _Watch:
    """Waits for a group's results, and for what may come in their place."""

    def __init__(self, group: list[_Process], hang_s: float, name: Callable[[int], str]) -> None:
        self._group, self._hang_s, self._name = group, hang_s, name
        self._ranks = {process.connection: rank for rank, process in enumerate(group)}
        self._values: dict[int, Any] = {}
        self._errors: dict[int, Done] = {}
        self._gone: list[int] = []
        self._records = [process.record for process in group]
        self._moved_at = time.monotonic()

    def results(self) -> list[Any]:
        while len(self._values) < len(self._group):
            self._listen(_LOOK_S)
            if self._errors or self._gone:
                raise self._explained()
            self._look_for_hangs()
        return [self._values[rank] for rank in range(len(self._group))]

    def _listen(self, timeout_s: float) -> None:
        waiting = [c for c, rank in self._ranks.items() if not self._is_over(rank)]
        for connection in wait(waiting, timeout_s):
            assert isinstance(connection, Connection)
            rank = self._ranks[connection]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                self._gone.append(rank)
                continue
            self._hear(rank, message)

    def _is_over(self, rank: int) -> bool:
        return rank in self._values or rank in self._errors or rank in self._gone

    def _hear(self, rank: int, message: Begun | Done) -> None:
        self._moved_at = time.monotonic()
        if isinstance(message, Begun):
            self._group[rank].actions = message.actions
        elif message.error:
            self._errors[rank] = message
        else:
            self._values[rank] = cloudpickle.loads(message.value)

    def _look_for_hangs(self) -> None:
        records = [process.record for process in self._group]
        now = time.monotonic()
        if records != self._records:
            self._records, self._moved_at = records, now
        has_begun = all(process.actions for process in self._group)
        limit_s = self._hang_s if has_begun else max(self._hang_s, SETUP_S)
        if now - self._moved_at > limit_s:
            raise self._hung(limit_s)

    def _hung(self, limit_s: float) -> WorkerError:
        unsettled = [r for r in range(len(self._group)) if r not in self._values]
        busy = [r for r in unsettled if not self._records[r][2]] or unsettled
        where = "; ".join(f"{self._name(rank)} at {self._action_of(rank)}" for rank in unsettled)
        return WorkerError(
            f"{self._name(busy[0])} has been at {self._action_of(busy[0])} for {limit_s:g} s, and "
            f"no stage has begun anything since ({where}). All of them were ended. Look at what "
            f"it does there, or allow it longer with hang_s=.\n{self._group[busy[0]].stacks()}"
        )

    def _action_of(self, rank: int) -> str:
        _, index, _ = self._group[rank].record
        actions = self._group[rank].actions
        if not actions:
            return "its setting up"
        return repr(actions[index]) if index < len(actions) else "its end"

    def _explained(self) -> ShoalError:
        """The cause, which may be heard later than what came of it."""
        deadline = time.monotonic() + _GRACE_S
        while self._causes() is None and time.monotonic() < deadline:
            self._listen(_LOOK_S)
        cause = self._causes()
        if cause is not None and cause in self._errors:
            return _raised(self._name(cause), self._errors[cause])
        if self._gone:
            rank = self._gone[0]
            how = self._group[rank].how_it_ended()
            return WorkerError(
                f"{self._name(rank)} (process {self._group[rank].pid}) ended with {how} at "
                f"{self._action_of(rank)}. The other {len(self._group) - 1} stages were ended: "
                "nothing of this training is left. Start it again."
            )
        rank = min(self._errors)
        return _raised(self._name(rank), self._errors[rank])

    def _causes(self) -> int | None:
        """A rank that failed by itself, if it is known by now."""
        for rank, done in self._errors.items():
            if not isinstance(cloudpickle.loads(done.error), WorkerError):
                return rank
        return self._gone[0] if self._gone else None


def _raised(name: str, done: Done) -> ShoalError:
    error = cloudpickle.loads(done.error)
    told = WorkerError(f"{name} failed; its traceback:\n{done.traceback}")
    if isinstance(error, ShoalError):
        error.__cause__ = told
        return error
    return told


def _environment() -> Mapping[str, str]:
    """Of a process that trains; messages stay on this machine."""
    return {"GLOO_SOCKET_IFNAME": "lo", **worker_environment()}
