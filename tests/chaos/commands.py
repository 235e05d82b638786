"""``shoal``, or a script, in a process of its own that is forked with all that it imports.

A command spends seconds of a core on importing torch, and its workers' server as many again. Here
the command is a worker of a ``ForkServer`` that has imported both, and forks its own server from
itself. It leads a session, as one that a shell has started.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shoal import forkserver
from shoal.workerenv import worker_environment

WORDS = "SHOAL_TEST_WORDS"
SERVER = forkserver.ForkServer(
    "shoal.ui.cli", "shoal.ui.train", "shoal.runtime.worker", "shoal.pipeline.worker", "commands"
)


def start(
    words: Sequence[str], printed: int, errors: int, environment: Mapping[str, str], cwd: Path
):
    """Start ``shoal WORDS``, or a script whose path is the first word, and ends with ``.py``.

    A process that is like a ``subprocess.Popen``.
    """
    given = worker_environment(environment) | {WORDS: json.dumps([str(cwd), *words])}
    command = SERVER.start("commands", [printed, errors], given)
    while command.poll() is None and not _leads(command.pid):
        time.sleep(0.005)
    return command


def run(*words: str | Path, cwd: Path, timeout_s: float = 180.0, **environment: str):
    """The same to its end: what ``subprocess.run`` says of it, with what it printed."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        told, given = [str(word) for word in words], os.environ | environment
        process = start(told, printed.fileno(), errors.fileno(), given, cwd)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        for file in (printed, errors):
            file.seek(0)
        said = [file.read().decode() for file in (printed, errors)]
        return subprocess.CompletedProcess(told, code, *said)


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
    forkserver.start_worker = _Reserve() if words[0].endswith(".py") else _fork_server
    try:
        _do(words)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def _do(words: Sequence[str]) -> None:
    if words[0].endswith(".py"):
        sys.argv, sys.path[:0] = list(words), [str(Path(words[0]).resolve().parent)]
        runpy.run_path(words[0], run_name="__main__")
    else:
        import shoal.ui.cli

        sys.argv = ["shoal", *words]
        shoal.ui.cli.main()


class _fork_server:
    """Of a command: forked from it before it has a second thread."""

    _code = -signal.SIGKILL

    def __init__(self, module: str, inherited: Sequence[int], environment) -> None:
        assert module == forkserver.__name__
        assert len(os.listdir("/proc/self/task")) == 1
        (requests,) = inherited
        self.pid = _fork(lambda: (requests, environment))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        with suppress(ChildProcessError):  # another thread has waited
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


class _Reserve(_fork_server):
    """Of a script, which may have threads when its study begins: forked before, and waits."""

    def __init__(self) -> None:
        self._word, heard = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def wait():
            self._word.close()
            environment, (requests,), _, _ = socket.recv_fds(heard, 2**20, 1)
            return requests, json.loads(environment)

        self.pid = _fork(wait)
        heard.close()
        self._another = forkserver.start_worker

    def __call__(self, module: str, inherited: Sequence[int], environment):
        if self._word.fileno() < 0:  # it was a server already
            return self._another(module, inherited, environment)
        assert module == forkserver.__name__
        socket.send_fds(self._word, [json.dumps(dict(environment)).encode()], list(inherited))
        self._word.close()
        return self


def _fork(begin: Callable[[], tuple[int, Mapping[str, str]]]) -> int:
    """A child that is a server for the requests, and with the environment, that it begins with."""
    before = os.getpid()
    if pid := os.fork():
        return pid
    try:
        requests, environment = begin()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if int(entry) > 2 and int(entry) != requests:
                    os.close(int(entry))
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [forkserver.__name__, str(requests)]
        assert os.getppid() == before
        forkserver.main()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
