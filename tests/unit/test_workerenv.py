"""How a process that trains begins, and what it finds in its environment."""

import os
import queue
import resource
import signal
import time
from pathlib import Path

from shoal.forkserver import ForkServer
from shoal.runtime.pool import MODULE, Worker, WorkerPool
from shoal.workerenv import KEPT_BYTES, LEAST_BYTES, MAPPED_BYTES, worker_environment


def test_a_worker_keeps_memory_and_asks_for_huge_pages():
    made = worker_environment({"HOME": "/somewhere"})

    assert made["HOME"] == "/somewhere"
    assert made["OMP_NUM_THREADS"] == "1"
    assert made["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert made["MALLOC_MMAP_THRESHOLD_"] == str(MAPPED_BYTES)
    assert LEAST_BYTES <= int(made["MALLOC_TRIM_THRESHOLD_"]) <= KEPT_BYTES


def test_a_study_may_have_more_files_open_than_the_usual_thousand():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        WorkerPool().close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_keeps_little_where_little_is_free_or_there_are_many_cores(monkeypatch):
    monkeypatch.setattr("shoal.workerenv.free_memory", lambda: 16 * 2**30)
    monkeypatch.setattr("shoal.workerenv.available_cores", lambda: 8)
    assert worker_environment({})["MALLOC_TRIM_THRESHOLD_"] == str(128 * 2**20)

    monkeypatch.setattr("shoal.workerenv.available_cores", lambda: 64)
    assert worker_environment({})["MALLOC_TRIM_THRESHOLD_"] == str(64 * 2**20)


def test_what_the_user_has_set_stays():
    given = {
        "OMP_NUM_THREADS": "4",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0",
    }

    assert given.items() <= worker_environment(given).items()


def test_other_tunables_are_kept_beside_it():
    made = worker_environment({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})

    assert made["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"


def masks_of(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":\t") for line in lines if line.startswith("Sig"))
    return {name: int(mask, 16) for name, mask in pairs if name != "SigQ"}


def test_a_worker_that_is_only_starting_hears_nothing_of_ctrl_c(monkeypatch):
    monkeypatch.setenv("SHOAL_WORKERS", "spawn")  # as a server starts too
    interrupt = 1 << (signal.SIGINT - 1)
    worker = Worker(ForkServer(MODULE), queue.SimpleQueue())
    try:
        os.kill(worker.pid, signal.SIGINT)
        while not masks_of(worker.pid)["SigIgn"] & interrupt:
            assert worker.alive
            time.sleep(0.01)
        # No more: what it starts would be kept from it as well.
        while worker.alive and masks_of(worker.pid)["SigBlk"] & interrupt:
            time.sleep(0.01)
        assert worker.alive
    finally:
        worker.kill()


def test_only_workers_are_kept_from_ctrl_c():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    server = ForkServer(MODULE)
    worker = Worker(server, queue.SimpleQueue())
    worker.kill()
    server.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
