"""Processes of workers for tests, forked from one that has imported what they import.

A worker that starts as a user's does takes nearly three seconds of a core to import torch and
shoal. Where tests run one after another (``SHOAL_TEST_STARTS=fork``) those of studies that they
run in their own process are forked instead, by a process that has imported it all and has one
thread. What a test starts as a command starts its workers as ever, and who asks for another
environment gets a process of its own.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.workerenv import start_worker

STARTS_S = 120.0
MODULES = ("shoal.runtime.worker", "shoal.pipeline.worker")
OWN = frozenset(
    (
        *("PYTHONPATH", "PYTEST_CURRENT_TEST", "GLOO_SOCKET_IFNAME"),
        *("MALLOC_TRIM_THRESHOLD_", "TORCHINDUCTOR_CACHE_DIR"),
    )
)
"""Variables in which an environment may differ from that of the process that forks."""


class Forked:
    """What of ``subprocess.Popen`` is used of a worker, for one that is no child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._ended = threading.Event()

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked worker", timeout)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Zygote:
    """Starts workers; begins itself at the first one. ``start`` is what ``start_worker`` is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._workers: dict[int, Forked] = {}
        self._begun: Forked | None = None
        self._answered = threading.Event()

    def start(
        self, module: str, inherited: Iterable[int], environment: Mapping[str, str]
    ) -> Forked | subprocess.Popen[bytes]:
        with self._lock:
            if self._socket is None:
                self._begin(environment)
            if _shared(environment) != _shared(self._environment):
                return start_worker(module, inherited, environment)
            return self._fork(module, list(inherited), dict(environment))

    def close(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()

    def _begin(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment, self._socket = dict(environment), ours
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=self._environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        threading.Thread(target=self._hear, daemon=True).start()

    def _fork(self, module: str, inherited: list[int], environment: dict[str, str]) -> Forked:
        request = pickle.dumps((module, environment, os.getcwd()))
        self._answered.clear()
        rights = array.array("i", [2, *inherited])
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        self._socket.sendmsg([request], passed)
        if not self._answered.wait(STARTS_S):
            raise TimeoutError("the process that forks workers does not answer")
        return self._begun

    def _hear(self) -> None:
        while True:
            try:
                message = self._socket.recv(4096)
            except OSError:
                return
            if not message:
                return
            what, pid, code = pickle.loads(message)
            if what == "began":
                self._begun = self._workers[pid] = Forked(pid)
                self._answered.set()
            else:  # of a process that began before, whose answer came first
                self._workers.pop(pid).ended(code)


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OWN}


# -- the process that forks -------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Fork workers until the test process is gone, which closes its end."""
    for module in MODULES:
        importlib.import_module(module)
    sys.modules["shoal.runtime.worker"]._warm_up()
    assert len(os.listdir("/proc/self/task")) == 1
    requests = socket.socket(fileno=descriptor)
    requests.set_inheritable(False)
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready, _, _ = select.select([requests, wakes], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
        for pid, code in _reaped():
            requests.send(pickle.dumps(("ended", pid, code)))
        if requests in ready:
            message, rights, _, _ = socket.recv_fds(requests, 2**20, 16)
            if not message:
                os._exit(0)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (requests.detach(), wakes, wake):
                    os.close(number)
                _become(rights, *pickle.loads(message))
            for number in rights:
                os.close(number)
            requests.send(pickle.dumps(("began", pid, 0)))


def _reaped() -> list[tuple[int, int]]:
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def _become(rights: list[int], module: str, environment: dict[str, str], folder: str) -> None:
    """What ``python -m module`` would be; it does not return."""
    code: Any = 1
    try:
        errors, *inherited = rights
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        begins = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = dict.fromkeys([*begins, *sys.path])
        random.seed()
        sys.argv = [module, *map(str, inherited)]
        sys.modules["__main__"] = sys.modules[module]
        sys.modules[module].main()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
