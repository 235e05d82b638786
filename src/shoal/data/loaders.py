"""Loaders with processes of their own: waiting for them that ends, and their end.

[Note: how waiting ends]

torch waits for a batch by reading a pipe that its loader's processes write to. A process that
is killed, stopped or stuck may leave that read waiting: for ever, when half a message is in the
pipe. So a thread watches the processes. When one has died, or when a wait has lasted
``timeout_s``, it writes down why and kills all of them; the pipe's last writer is gone, and the
read ends. torch's own alarm is switched off: its SIGCHLD handler raises in whatever code the
main thread runs, which may be another trial's.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from shoal.core.errors import TrialError
from shoal.data.processes import ProcessWatch, end_processes
from shoal.data.reading import END, PlainReader, Reader
from shoal.data.sources import name_of
from shoal.recipes.recipe import Batch

TIMEOUT_S = 300.0
TORCH_NOTICED = "DataLoader worker (pid"  # so its message on a dead process begins
TORCH_GAVE_UP = "DataLoader timed out"  # so where the user set DataLoader(timeout=...)
CAUGHT = "Caught "  # so torch's message on an error that the dataset raised in a process
TORCH_ALARM = "torch.utils.data._utils.signal_handling"  # the module of its SIGCHLD handler


class LoaderLost(TrialError):
    """A loader's process has died; the loader can be opened again."""


def reader_of(source: Any, timeout_s: float = TIMEOUT_S) -> Reader:
    """What reads ``source``: guarded where processes fetch for it."""
    if isinstance(source, DataLoader) and source.num_workers:
        return LoaderReader(source, timeout_s)
    return PlainReader(source)


class LoaderReader:
    """Reads a DataLoader that has processes, and owns them.

    For one thread. After ``close`` none of the processes is left, and the loader is as it was
    before it was read, generators aside.

    Raises, from ``open`` and ``fetch``:
        LoaderLost: a process has died.
        TrialError: no batch came for ``timeout_s``.
    """

    def __init__(self, loader: DataLoader[Any], timeout_s: float) -> None:
        self._loader, self._timeout_s = loader, timeout_s
        self._iterator: Iterator[Batch] | None = None
        self._watch = ProcessWatch((), timeout_s)

    def open(self) -> Iterator[Batch]:
        self._iterator, started = self._guarded(_start, self._loader)
        if started or not self._loader.persistent_workers:
            self._watch.stop()
            self._watch = ProcessWatch(started, self._timeout_s)
        return self._iterator

    def fetch(self, iterator: Iterator[Batch]) -> Any:
        return self._guarded(next, iterator, END)

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        watch, self._watch = self._watch, ProcessWatch((), self._timeout_s)
        watch.stop()
        end_processes(iterator, watch.processes)
        if getattr(self._loader, "_iterator", None) is not None:  # of persistent workers
            self._loader._iterator = None

    def _guarded(self, work: Callable[..., Any], *arguments: Any) -> Any:
        self._watch.since = time.monotonic()
        try:
            return work(*arguments)
        except Exception as error:
            judged = self._judge(error)
            if judged is None:
                raise
            raise judged from error
        finally:
            self._watch.since = None

    def _judge(self, error: Exception) -> TrialError | None:
        """What an error in a wait means: None if it is the dataset's own."""
        watch, text = self._watch, str(error)
        of_torch = isinstance(error, RuntimeError) and not text.startswith(CAUGHT)
        if of_torch and text.startswith(TORCH_GAVE_UP):
            return self._stuck(self._loader.timeout)
        if watch.is_overdue:
            return self._stuck(self._timeout_s)
        if watch.death:
            return self._lost(watch.death)
        if of_torch and text.startswith(TORCH_NOTICED):
            return self._lost(watch.find_ended() or text.splitlines()[0])
        if isinstance(error, OSError | EOFError) and not text.startswith(CAUGHT):
            ended = watch.find_ended()
            return self._lost(ended) if ended else None
        return None

    def _lost(self, why: str) -> LoaderLost:
        return LoaderLost(f"{name_of(self._loader)}: {why}")

    def _stuck(self, limit_s: float) -> TrialError:
        return TrialError(
            f"the data ({name_of(self._loader)}) gave no batch for {limit_s:g} s; its "
            "processes are stuck. Read it with num_workers=0 to see where."
        )


def _start(loader: DataLoader[Any]) -> tuple[Iterator[Batch], list[BaseProcess]]:
    """An iterator without torch's alarm, and the processes that were started for it."""
    known = set(multiprocessing.active_children())
    handler = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    if threading.current_thread() is threading.main_thread():
        _switch_alarm_off(handler)
    _leave_writing_to_them(iterator)
    started = [p for p in multiprocessing.active_children() if p not in known]
    # One that has died already is no active child: torch's own list has it.
    return iterator, list(getattr(iterator, "_workers", started))


def _switch_alarm_off(handler: Any) -> None:
    """Put back what handled SIGCHLD before torch did, where that is known."""
    if getattr(signal.getsignal(signal.SIGCHLD), "__module__", None) != TORCH_ALARM:
        return
    is_alarm = getattr(handler, "__module__", None) == TORCH_ALARM
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_alarm or handler is None else handler)


def _leave_writing_to_them(iterator: object) -> None:
    """Close this process's own writing end of the pipe of batches; see the note above.

    A loader that pins memory does write there, to end its thread.
    """
    writer = getattr(getattr(iterator, "_worker_result_queue", None), "_writer", None)
    if writer is not None and not getattr(iterator, "_pin_memory", False):
        writer.close()
