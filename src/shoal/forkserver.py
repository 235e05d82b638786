"""Worker processes forked from one that has imported what they need: milliseconds, not seconds.

A process that imports torch, and what an optimizer makes torch import, is seconds of a core away
from its first step. A server pays for that once, while the study's process imports torch itself;
then workers are forked from it: for every device, and in the place of one that died. Pages that
nobody writes to are in memory once.

The idea is that of Python's own ``multiprocessing.forkserver``. This one has no part in what a
user's code does with that one, gives a worker the descriptors, the environment, the directory and
the standard error that its study's process has now, imports nothing of the user's, and tells how
each worker ended (docs/design/0025).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol

from shoal.workerenv import die_with_parent, ignore_interrupts, start_worker, warm_up

HOW = "SHOAL_WORKERS"
"""``spawn`` in this variable has every worker start for itself, as beside a GPU."""
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""A process that has spoken to one of them cannot be forked from."""
AT_LOADING = (
    *("ATEN_", "BLIS_", "CUBLAS", "CUDA", "CUDNN", "DNNL_", "GLIBC_", "GOMP_", "KMP_", "LD_"),
    *("MALLOC_", "MKL_", "NCCL_", "NPY_", "NUMEXPR_", "NUMPY_", "NVIDIA_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH"),
)
"""How variables begin that libraries read once, when they are loaded."""
ANY_TIME = ("MALLOC_TRIM_THRESHOLD_", "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
"""Those of them that may differ: a worker takes the server's, its own path, and reads it later."""
LOOKS_S = 1.0
PR_SET_NAME = 15
NAME = b"shoal-worker"  # no more than 15 bytes


class WorkerProcess(Protocol):
    """What is used of a worker's process, whether it is a child or a child's child.

    Attributes:
        pid: 0 as long as it has not begun.
    """

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, sig: int) -> None: ...


class ForkServer:
    """Starts workers. The server begins with the first one, and once more should it die.

    Beside a GPU, and with ``SHOAL_WORKERS=spawn``, it only runs ``start_worker``.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def start(
        self, module: str, inherited: Iterable[int], environment: Mapping[str, str]
    ) -> WorkerProcess:
        """``python -m module DESCRIPTORS``, as ``start_worker`` runs it; returns at once."""
        if not forks():
            return start_worker(module, inherited, environment)
        with self._lock:
            if self._server is None or self._server.is_over:
                self._server = _Server(self._modules, environment)
            return self._server.start(module, inherited, environment)

    def close(self) -> None:
        """End the server, and all workers that it started."""
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server = None


def forks() -> bool:
    """Whether workers are forked here."""
    return os.environ.get(HOW) != "spawn" and not any(map(os.path.exists, DRIVERS))


class _Forked:
    """A worker that the server forks when it can, as ``subprocess.Popen`` would be of a child."""

    def __init__(self, server: _Server) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._server = server
        self._ended = threading.Event()

    def begun(self, pid: int) -> None:
        self.pid = pid
        if self._ended.is_set():  # before it began
            self._send(signal.SIGKILL)

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        if not self.pid:
            self.ended(-signal.SIGKILL)
            self._server.give_up()

    def send_signal(self, sig: int) -> None:
        if self.pid and self.returncode is None:
            self._send(sig)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class _Server:
    """One process that forks, as the one that started it sees it."""

    def __init__(self, modules: Iterable[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment, self._socket = dict(environment), ours
        self._process = start_worker(__name__, [theirs.fileno()], environment)
        theirs.close()
        self._lock = threading.Lock()
        self._asked: list[_Forked] = []  # that have not begun
        self._live: dict[int, _Forked] = {}
        self._is_ready = self.is_over = False
        ours.sendall(pickle.dumps(tuple(modules)))
        threading.Thread(target=self._hear, name="forks", daemon=True).start()

    def start(
        self, module: str, inherited: Iterable[int], environment: Mapping[str, str]
    ) -> WorkerProcess:
        known = self._environment
        changed: dict[str, str | None] = {
            name: environment.get(name)
            for name in known.keys() | environment.keys()
            if known.get(name) != environment.get(name)
        }
        rights = array.array("i", [2, *inherited])  # standard error is that of now
        request = pickle.dumps((module, changed, os.getcwd()))
        with self._lock:
            forked = _Forked(self)
            if self.is_over:
                forked.ended(-signal.SIGKILL)
                return forked
            self._asked.append(forked)
            with contextlib.suppress(OSError):  # it is gone: ``_hear`` says so
                self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        return forked

    def give_up(self) -> None:
        """One that waits is wanted no more: a server that only imports has nothing to keep."""
        if not self._is_ready:
            self.is_over = True
            self._process.kill()

    def close(self) -> None:
        if self._is_ready:
            with self._lock:
                workers = [*self._asked, *self._live.values()]
            for worker in workers:
                worker.kill()
            for worker in workers:  # all of them are gone by then, not only told
                worker.wait()
        self._process.kill()
        self._process.wait()

    def _hear(self) -> None:
        while message := self._next():
            what, pid, code = pickle.loads(message)
            with self._lock:
                if what == "ready":
                    self._is_ready = True
                elif what == "began":
                    forked = self._live[pid] = self._asked.pop(0)
                    forked.begun(pid)
                else:
                    self._live.pop(pid).ended(code)
        self._process.wait()
        with self._lock:  # the system ends those that live with it
            self.is_over = True
            for worker in (*self._asked, *self._live.values()):
                worker.ended(-signal.SIGKILL)
        self._socket.close()

    def _next(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._socket.recv(4096)
        return b""


# -- the process that forks -------------------------------------------------------------------


def main() -> None:
    """Fork workers until the other end of the inherited socket is closed."""
    parent = os.getppid()
    ignore_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which may be sent to all: the study answers
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    for name in pickle.loads(requests.recv(4096)):
        importlib.import_module(name)
    warm_up()
    Forks(requests, parent).serve()


class Forks:
    """Answers a study's process: who began, and who ended how."""

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self._requests, self._parent = requests, parent
        self._wakes, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_safe = _is_safe()
        self._started: list[subprocess.Popen[bytes]] = []  # their ends are seen here

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)
        self._answer("ready", 0, 0)
        while os.getppid() == self._parent:  # whoever has inherited the socket's other end
            heard: list[Any] = [self._requests, self._wakes]
            ready, _, _ = select.select(heard, [], [], LOOKS_S)
            if self._wakes in ready:
                os.read(self._wakes, 4096)
            for pid, code in _reaped():
                self._answer("ended", pid, code)
            if self._requests in ready:
                self._take()

    def _take(self) -> None:
        message, rights, _, _ = socket.recv_fds(self._requests, 2**20, 16)
        if not message:
            os._exit(0)  # the kernel ends the workers
        module, changed, folder = pickle.loads(message)
        environment = {**os.environ, **changed}
        given = {name: value for name, value in environment.items() if value is not None}
        if self._is_safe and not any(map(_is_read_at_loading, changed)):
            pid = self._fork(rights, module, given, folder)
        else:
            pid = self._spawn(rights, module, given, folder)
        for number in rights:
            os.close(number)
        self._answer("began", pid, 0)

    def _fork(self, rights: list[int], module: str, given: dict[str, str], folder: str) -> int:
        server = os.getpid()
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            for number in (self._requests.detach(), self._wakes, self._wake):
                os.close(number)
            die_with_parent(server)
            _become(rights, module, given, folder)
        return pid

    def _spawn(self, rights: list[int], module: str, given: dict[str, str], folder: str) -> int:
        errors, *inherited = rights
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, inherited)],
            pass_fds=inherited,
            env=given,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
        )
        self._started.append(process)
        return process.pid

    def _answer(self, what: str, pid: int, code: int) -> None:
        try:
            self._requests.send(pickle.dumps((what, pid, code)))
        except OSError:
            os._exit(0)


def _is_safe() -> bool:
    """Whether a fork of this process is a process like it: one thread, and no GPU known to it."""
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and (torch.cuda.is_available() or torch.xpu.is_available())
    return not has_gpu and len(os.listdir("/proc/self/task")) == 1


def _is_read_at_loading(name: str) -> bool:
    return name.startswith(AT_LOADING) and name not in ANY_TIME


def _reaped() -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def _become(rights: list[int], module: str, given: dict[str, str], folder: str) -> NoReturn:
    """What ``python -m module`` would be."""
    code: Any = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_NAME, NAME)
        errors, *inherited = rights
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.close(errors)
        os.environ.clear()
        os.environ.update(given)
        os.chdir(folder)
        begins = given.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = dict.fromkeys([*begins, *sys.path])
        sys.argv = [module, *map(str, inherited)]
        sys.modules["__main__"] = main = importlib.import_module(module)
        main.main()
        code = 0
    except SystemExit as left:
        code = (left.code or 0) if isinstance(left.code, int | None) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    gc.disable()  # until all is imported: nothing of that is garbage, and looking costs 0.3 s
    main()
