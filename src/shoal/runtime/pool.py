"""The worker processes of a study, as its process sees them."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.errors import WorkerError
from shoal.core.spec import NO_BYTES, DeviceSpec
from shoal.core.units import Bytes
from shoal.forkserver import ForkServer
from shoal.runtime.wire.channel import Channel
from shoal.runtime.wire.messages import (
    RECORDER,
    Broken,
    Configure,
    Happened,
    Opened,
    Order,
    Ready,
    Settings,
    Shutdown,
)
from shoal.workerenv import raise_file_limit, worker_environment

if TYPE_CHECKING:  # this module is read before torch is: a worker starts while it loads
    from shoal.kernels.kernelchoice import KernelChoice

MODULE = "shoal.runtime.worker"
_STACK_BYTES = 64 * 2**10
_OPENS_S = 60.0  # in which a worker opens a GPU; one that takes longer is left to the watchdog


class Gone:
    """A worker's end, as a message: it was killed, or it crashed.

    ``error``: the traceback of what was raised in it, where that ended it.
    """

    def __init__(self, reason: str, error: str = "") -> None:
        self.reason, self.error = reason, error


class Worker:
    """One worker process. Replies are put, with the worker, into the pool's inbox."""

    def __init__(
        self, starts: ForkServer, inbox: queue.SimpleQueue[tuple[Worker | None, int, Any]]
    ) -> None:
        ours, theirs = socket.socketpair()
        recorder = os.memfd_create("shoal-recorder")
        os.truncate(recorder, RECORDER.size)
        self._recorder = mmap.mmap(recorder, RECORDER.size)
        RECORDER.pack_into(self._recorder, 0, -1, -1, 0, 0)
        stacks = os.memfd_create("shoal-stacks")
        self._stacks = stacks
        inherited = [theirs.fileno(), recorder, stacks]
        self._process = starts.start(MODULE, inherited, worker_environment())
        theirs.close()
        os.close(recorder)
        self.device: DeviceSpec | None = None
        self.last_words = ""
        self.has_begun = False  # to work for the study: it could load the recipe
        self.library_bytes = NO_BYTES  # of its GPU, as soon as ``opened``
        self.opened = threading.Event()  # or the process is gone
        self._channel = Channel(ours)
        self._inbox = inbox
        self.serial = 0  # of the study it serves
        self.heard = 0  # Happened that were received, since the process began
        self._reader = threading.Thread(target=self._read, name="worker", daemon=True)
        self._reader.start()
        threading.Thread(target=self._await_end, name="worker's end", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of its process; 0 as long as there is none."""
        return self._process.pid

    @property
    def name(self) -> str:
        """The device this worker drives."""
        return self.device.name if self.device else f"worker {self.pid}"

    @property
    def running(self) -> set[int]:
        """The trials whose code runs, or ran when the process ended."""
        return {trial for trial in RECORDER.unpack_from(self._recorder)[:2] if trial >= 0}

    @property
    def work_done(self) -> int:
        """A count that grows while the worker gets anything done."""
        return int(RECORDER.unpack_from(self._recorder)[2])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def acknowledge(self) -> None:
        """Tell the worker that a kill can no longer take what was heard of it so far."""
        struct.pack_into("q", self._recorder, RECORDER.size - 8, self.heard)

    def send(self, order: Order, descriptors: tuple[int, ...] = ()) -> None:
        """Send an order; a worker that is gone says so through the inbox."""
        with contextlib.suppress(OSError):
            self._channel.send(order, descriptors)

    def stacks(self, wait_s: float = 1.0) -> str:
        """Where the process's threads stand now, if it still answers signals."""
        before = os.fstat(self._stacks).st_size
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + wait_s
        while os.fstat(self._stacks).st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)
        answered = os.fstat(self._stacks).st_size > before
        time.sleep(0.05 if answered else 0.0)  # the rest of it
        text = os.pread(self._stacks, _STACK_BYTES, before)
        return text.decode(errors="replace") or "(no answer)"

    def end(self) -> None:
        """End the process; its end arrives as ``Gone``."""
        self._process.kill()

    def kill(self) -> None:
        """End the process at once, and wait until it has."""
        self._process.kill()
        self._reader.join()
        if self._stacks >= 0:
            os.close(self._stacks)
            self._stacks = -1

    def _await_end(self) -> None:
        """The process's end counts, and not that of whoever inherited its socket."""
        self._process.wait()
        self._channel.shut()

    def _read(self) -> None:
        error = ""
        while True:
            try:
                (serial, message), _ = self._channel.receive()
            except (EOFError, OSError):
                break
            error = message.error if isinstance(message, Broken) else error
            if isinstance(message, Opened):
                self._note_opened(message, serial)
            elif not isinstance(message, Ready):
                self._inbox.put((self, serial, message))
        self.opened.set()
        self._channel.close()
        code = self._process.wait()
        how = f"with signal {-code}" if code < 0 else f"with exit code {code}"
        how = "by an exception" if error else how  # by its own decision: the code says nothing
        who = f"process {self.pid}" if self.pid else "its process, which had not begun yet,"
        self._inbox.put((self, self.serial, Gone(f"{who} ended {how}", error)))

    def _note_opened(self, message: Opened, serial: int) -> None:
        """It may have said so to an earlier study."""
        if serial == self.serial:
            self.library_bytes = message.library_bytes
            self.opened.set()


class WorkerPool:
    """Warm worker processes: started early, kept between studies, ended with ``close``.

    Use as a context manager. ``configure`` gives each device a worker; workers that are
    not needed stay idle. This process may have more files open from then on.
    """

    def __init__(self) -> None:
        raise_file_limit()
        self._starts = ForkServer(MODULE)
        self._inbox: queue.SimpleQueue[tuple[Worker | None, int, Any]] = queue.SimpleQueue()
        self._serial = 0
        self._study: tuple[bytes, Settings, KernelChoice] | None = None  # as configured
        self._idle: list[Worker] = []
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm(self, count: int) -> None:
        """Have at least ``count`` processes starting or idle."""
        while len(self._idle) + len(self._workers) < count:
            self._idle.append(Worker(self._starts, self._inbox))

    def configure(
        self,
        devices: Sequence[DeviceSpec],
        recipe: bytes,
        settings: Settings,
        kernels: KernelChoice,
    ) -> None:
        """Start serving a study: one worker for each device, with the kernels of its process."""
        self._forget_dead()
        self.warm(len(devices))
        self._study = recipe, settings, kernels
        for device in devices:
            self._open(device)

    def replace(self, device: DeviceSpec) -> Worker:
        """A new process for a device whose worker is gone; it serves the same study."""
        self.drop(device.name)
        self._forget_dead()
        return self._open(device)

    def _forget_dead(self) -> None:
        for worker in self._idle:
            if not worker.alive:
                worker.kill()
        self._idle = [worker for worker in self._idle if worker.alive]

    def _open(self, device: DeviceSpec) -> Worker:
        assert self._study is not None
        recipe, settings, kernels = self._study
        worker = self._idle.pop() if self._idle else Worker(self._starts, self._inbox)
        self._serial += 1
        worker.device, worker.serial, worker.has_begun = device, self._serial, False
        worker.library_bytes = NO_BYTES
        worker.opened.clear()
        self._workers[device.name] = worker
        worker.send(
            Configure(
                serial=self._serial,
                device=device,
                recipe=recipe,
                settings=settings,
                path=tuple(path or os.getcwd() for path in sys.path),
                kernels=kernels,
            )
        )
        return worker

    def drop(self, device: str) -> None:
        """Its worker is gone; what it may still have said is dropped."""
        worker = self._workers.pop(device, None)
        if worker is not None:
            worker.kill()

    def post(self, message: Callable[[], None]) -> None:
        """Have ``receive`` return (None, message); from any thread, and from a signal handler."""
        self._inbox.put((None, 0, message))

    def library_bytes(self) -> dict[str, Bytes]:
        """What libraries keep of each GPU for good, by name; waits until their workers know."""
        found, deadline = {}, time.monotonic() + _OPENS_S
        for name, worker in self._workers.items():
            is_gpu = worker.device is not None and worker.device.kind == "cuda"
            if is_gpu and worker.opened.wait(max(0.0, deadline - time.monotonic())):
                found[name] = worker.library_bytes
        return found

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The workers by device name."""
        return self._workers

    def receive(self, timeout: float | None = None) -> tuple[Worker | None, Any] | None:
        """The next reply of a worker of this study, or what was posted; None: none came in time.

        What replaced workers say, or others about an earlier study, is dropped.
        """
        while True:
            try:
                worker, serial, reply = self._inbox.get(timeout=timeout)
            except queue.Empty:
                return None
            if worker is None:
                return None, reply
            worker.heard += isinstance(reply, Happened)
            if worker not in self._workers.values():
                continue
            # one that ended as it was taken over from an earlier study is gone for this one
            if serial == worker.serial or isinstance(reply, Gone):
                worker.has_begun |= isinstance(reply, Happened)
                return worker, reply

    def release(self) -> None:
        """End the study on all workers, whatever they do; they stay warm for the next one."""
        for worker in self._workers.values():
            worker.send(Shutdown())
            worker.device = None
            self._idle.append(worker)
        self._forget_dead()
        self._workers = {}

    def close(self) -> None:
        """End all processes."""
        for worker in [*self._workers.values(), *self._idle]:
            worker.kill()
        self._workers, self._idle = {}, []
        self._starts.close()

    def check_alive(self) -> None:
        """Raise when no worker of the study is left."""
        if self._workers and not any(worker.alive for worker in self._workers.values()):
            raise WorkerError(
                f"all {len(self._workers)} workers are gone. Look at their messages above; run "
                "`shoal doctor` to check this machine."
            )
