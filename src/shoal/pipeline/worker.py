"""The process of one stage: ``python -m shoal.pipeline.worker SOCKET RECORDER STACKS``.

Takes a function from its parent, runs it in a process group with the other stages, answers with
what it returned or raised, and waits for the next. Ends with its parent, whatever it does then.
"""

from __future__ import annotations

import datetime
import faulthandler
import mmap
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch.distributed as dist

from shoal.pipeline.orders import RECORDER, Done, StageJob, StagePlace
from shoal.workerenv import ignore_interrupts

_PATIENCE = datetime.timedelta(days=1)  # the parent looks after stages that hang


def main() -> None:
    """Serve the parent at the descriptors of the command line."""
    sockets, recorder, stacks = map(int, sys.argv[1:4])
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # A form may hold the structure of arguments; torch 2.13 warns when that is unpickled.
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
    ignore_interrupts()
    parent = Connection(sockets)
    jobs: queue.SimpleQueue[StageJob] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(parent, jobs), daemon=True).start()
    shared = mmap.mmap(recorder, RECORDER.size)
    while True:
        job = jobs.get()
        parent.send(_serve(StagePlace(job, parent, shared), job))


def _listen(parent: Connection, jobs: queue.SimpleQueue[StageJob]) -> None:
    """Hand jobs on; a parent that is gone takes this process along."""
    while True:
        try:
            jobs.put(parent.recv())
        except (EOFError, OSError):
            os._exit(1)


def _serve(place: StagePlace, job: StageJob) -> Done:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.meeting}",
            rank=job.rank,
            world_size=job.world,
            timeout=_PATIENCE,
        )
        function: Callable[[StagePlace], Any] = cloudpickle.loads(job.function)
        value = cloudpickle.dumps(function(place))
        dist.barrier()  # nobody leaves while another still reads
        dist.destroy_process_group()
    except BaseException as error:
        return Done(error=_pickled(error), traceback=traceback.format_exc())
    return Done(value=value)


def _pickled(error: BaseException) -> bytes:
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception:
        return bytes(cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")))


if __name__ == "__main__":
    main()
