"""How a process that trains begins and ends, and what it finds in its environment: one thread, and
memory that it keeps.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping

from shoal.hardware import available_cores, free_memory

MIB = 2**20
MAPPED_BYTES = 32 * MIB
"""From here on an allocation is a mapping of its own; glibc takes no larger limit."""
LEAST_BYTES, KEPT_BYTES, KEPT_SHARE = 64 * MIB, 1024 * MIB, 16
HUGE_PAGES = "glibc.malloc.hugetlb"
FILES = 2**16
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def worker_environment(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``given`` with this process's import path, and what it does not say itself.

    One compute thread, until told otherwise. And memory that glibc keeps, and asks for in huge
    pages: by default it gives what a step has freed back to the system, to have it faulted in
    page by page in the next one, which takes 5 to 30 % of a step on a CPU (docs/lab.md). It keeps
    a core's share of a sixteenth of what is free, but no less than 64 MiB and no more than 1 GiB.
    """
    kept = min(KEPT_BYTES, free_memory() // KEPT_SHARE // available_cores())
    tunables = given.get("GLIBC_TUNABLES", "")
    if HUGE_PAGES not in tunables:
        tunables = ":".join(filter(None, (tunables, f"{HUGE_PAGES}=1")))
    return {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(MAPPED_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(max(LEAST_BYTES, kept)),
        **given,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path)),
        "GLIBC_TUNABLES": tunables,
    }


def raise_file_limit() -> None:
    """Let this process, and those that it starts from now on, have ``FILES`` open at a time.

    Each trial that has begun holds one here, and one at its worker; where trials wait for each
    other that may be all of a study, and the usual limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def start_worker(
    module: str, inherited: Iterable[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Run a module of shoal's in a process of its own, with some descriptors as its arguments.

    Ctrl-C in a terminal is sent to it too: it hears nothing of that before ``ignore_interrupts``.
    """
    descriptors = tuple(inherited)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, descriptors)],
            pass_fds=descriptors,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a model prints goes to standard error: --json owns the other
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """In a process that ``start_worker`` began: Ctrl-C is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when its parent's thread ends, however it does."""
    parent = os.getppid() if parent is None else parent
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def warm_up() -> None:
    """Pay once for what torch imports at its first optimizer.

    What is imported by now stays for good: the garbage collector need not look at it.
    """
    import torch

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    gc.freeze()
    gc.enable()
