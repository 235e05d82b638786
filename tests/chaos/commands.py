"""``shoal`` in a process of its own that is forked with all that it and its workers import.

A command spends seconds of a core on importing torch, and its workers' server as many again. Here
the command is a worker of a ``ForkServer`` that has imported both, and forks its own server from
itself. It leads a session, as one that a shell has started.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoal import forkserver
from shoal.workerenv import worker_environment

WORDS = "SHOAL_TEST_WORDS"
SERVER = forkserver.ForkServer(
    "shoal.ui.cli", "shoal.ui.train", "shoal.runtime.worker", "shoal.pipeline.worker", "commands"
)


def start(words: Sequence[str], printed: int, errors: int, environment: dict[str, str], cwd: Path):
    """Start ``shoal WORDS``; a process that is like a ``subprocess.Popen``."""
    given = worker_environment(environment) | {WORDS: json.dumps([str(cwd), *words])}
    command = SERVER.start("commands", [printed, errors], given)
    while command.poll() is None and not _leads(command.pid):
        time.sleep(0.005)
    return command


def _leads(pid: int) -> bool:
    with suppress(ProcessLookupError):
        return pid != 0 and os.getsid(pid) == pid
    return False


# -- in the command's process -----------------------------------------------------------------


def main() -> None:
    """What the command's script does, and what Python does at its end."""
    os.setsid()
    printed, errors = map(int, sys.argv[1:])
    for number, one in enumerate((printed, errors), start=1):
        os.dup2(one, number)
        os.close(one)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=False)
    folder, *words = json.loads(os.environ.pop(WORDS))
    os.chdir(folder)
    sys.argv = ["shoal", *words]
    forkserver.start_worker = _fork_server
    try:
        import shoal.ui.cli

        shoal.ui.cli.main()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


class _fork_server:
    """Of a command: forked from it before it has a second thread."""

    def __init__(self, module: str, inherited: Sequence[int], environment) -> None:
        assert module == forkserver.__name__
        assert len(os.listdir("/proc/self/task")) == 1
        (requests,) = inherited
        before = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            try:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 0)
                os.dup2(2, 1)
                for entry in os.listdir("/proc/self/fd"):
                    with suppress(OSError):
                        if int(entry) > 2 and int(entry) != requests:
                            os.close(int(entry))
                os.environ.clear()
                os.environ.update(environment)
                sys.argv = [module, str(requests)]
                assert os.getppid() == before
                forkserver.main()
            finally:
                os._exit(1)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


if __name__ == "__main__":
    main()
