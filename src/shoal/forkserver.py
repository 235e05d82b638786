"""Worker processes forked from one that has imported what they need: milliseconds, not seconds.

A process that imports torch, and what an optimizer makes torch import, is seconds of a core away
from its first step. A server pays for that once, while the study's process imports torch itself;
then workers are forked from it: for every device, and in the place of one that died. Pages that
nobody writes to are in memory once.

The idea is that of Python's own ``multiprocessing.forkserver``. This one has no part in what a
user's code does with that one, imports nothing of the user's, tells how each worker ended, and
gives a worker what a child of the study's process would have now (docs/design/0025).
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from shoal.workerenv import LIBC, die_with_parent, ignore_interrupts, start_worker, warm_up

HOW = "SHOAL_WORKERS"
"""``spawn`` in this variable has every worker start for itself, as beside a GPU."""
DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
"""A process that has spoken to one of them cannot be forked from."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
"""More than one, and NumPy's library has threads as soon as it is imported."""
AT_LOADING = (
    *("AOT", "ATEN_", "BLIS_", "CUBLAS", "CUDA", "CUDNN", "CXX", "DNNL_", "GLIBC_", "GOMP_"),
    *("GOTO_", "INDUCTOR_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "NPY_", "NUMEXPR_"),
    *("NUMPY_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "SYMPY_"),
    "TORCH",
)
"""How variables begin that libraries read once, when they are loaded."""
ANY_TIME = (
    *("CUBLAS_WORKSPACE_CONFIG", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
    *("MALLOC_TRIM_THRESHOLD_", "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR"),
)
"""Those of them that may differ: they are read later, or are of no account."""
SENT_TO_ALL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to a process group, which the study answers, or workers do."""
LOOKS_S = 1.0
OOM_SCORE = "/proc/self/oom_score_adj"
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

    Beside a GPU, and with ``SHOAL_WORKERS=spawn``, it only runs ``start_worker``; so it does
    where it turns out that nothing can be forked.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def start(
        self, module: str, inherited: Iterable[int], environment: Mapping[str, str]
    ) -> WorkerProcess:
        """``python -m module DESCRIPTORS``, as ``start_worker`` runs it; returns at once."""
        if not forks(environment):
            return start_worker(module, inherited, environment)
        with self._lock:
            if self._server is None or self._server.is_over:
                self._server = _Server(self._modules, environment)
            return self._server.start(module, list(inherited), environment)

    def close(self) -> None:
        """End the server, and all workers that it started."""
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server = None


def forks(environment: Mapping[str, str]) -> bool:
    """Whether workers with this environment are forked here."""
    is_asked = os.environ.get(HOW) != "spawn"
    has_one_thread = all(environment.get(name, "1") == "1" for name in THREADS)
    return is_asked and has_one_thread and not any(map(os.path.exists, DRIVERS))


@dataclass(frozen=True)
class _Request:
    """What a worker is to be; ``now`` is what a child of the study's process would have."""

    module: str
    changed: Mapping[str, str | None]  # of the server's environment
    now: _Now


@dataclass(frozen=True)
class _Now:
    affinity: frozenset[int]
    niceness: int
    umask: int | None
    limits: tuple[tuple[int, tuple[int, int]], ...]
    oom_score: str

    @classmethod
    def of_this_process(cls) -> _Now:
        status = _read("/proc/self/status").splitlines()
        lines = dict(line.split(":", 1) for line in status if ":" in line)
        kinds = {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}
        return cls(
            affinity=frozenset(os.sched_getaffinity(0)),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            umask=int(lines["Umask"], 8) if "Umask" in lines else None,
            limits=tuple((kind, resource.getrlimit(kind)) for kind in sorted(kinds)),
            oom_score=_read(OOM_SCORE),
        )

    def take(self) -> None:
        """Have them too, as far as the system allows it."""
        if self.umask is not None:
            os.umask(self.umask)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self.affinity)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        for kind, limit in self.limits:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(kind, limit)
        with contextlib.suppress(OSError):
            Path(OOM_SCORE).write_text(self.oom_score)


def _read(path: str) -> str:
    """A file of the kernel's, which not every sandbox has."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


class _Forked:
    """A worker that the server forks when it can, as ``subprocess.Popen`` would be of a child.

    ``kept``: what ``start_worker`` needs, should the server fork nothing; closed when it began.
    """

    def __init__(self, server: _Server, kept: _Kept) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.kept = kept
        self._server, self._is_wanted = server, True
        self._ended = threading.Event()

    def begun(self, pid: int) -> None:
        self.pid = pid
        if not self._is_wanted:  # whoever ended it has seen no pid
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
        self._is_wanted = False
        if self.pid:
            self.send_signal(signal.SIGKILL)
        else:
            self.ended(-signal.SIGKILL)
            self._server.give_up(self)

    def send_signal(self, sig: int) -> None:
        if self.pid and self.returncode is None:
            self._send(sig)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class _Kept:
    """A request's own copies of its descriptors."""

    def __init__(
        self, module: str, descriptors: list[int], environment: Mapping[str, str]
    ) -> None:
        self._module, self._environment = module, environment
        self._copies = [os.dup(number) for number in descriptors]

    def start(self) -> subprocess.Popen[bytes]:
        """In this process, and its thread."""
        return start_worker(self._module, self._copies, self._environment)

    def close(self) -> None:
        while self._copies:
            os.close(self._copies.pop())


class _Server:
    """One process that forks, as the one that started it sees it."""

    def __init__(self, modules: Iterable[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment, self._socket = dict(environment), ours
        self._process = start_worker(__name__, [theirs.fileno()], environment)
        theirs.close()
        self._lock = threading.RLock()
        self._number = 0
        self._asked: dict[int, _Forked] = {}  # that have not begun
        self._live: dict[int, _Forked] = {}
        self._is_ready = self.is_over = False
        self._forks = True
        self._closes = threading.Event()
        ours.sendall(pickle.dumps((tuple(modules), os.getpid())))
        threading.Thread(target=self._listen, name="forks", daemon=True).start()

    def _changed(self, environment: Mapping[str, str]) -> dict[str, str | None]:
        known = self._environment
        return {
            name: environment.get(name)
            for name in known.keys() | environment.keys()
            if known.get(name) != environment.get(name)
        }

    def start(
        self, module: str, descriptors: list[int], environment: Mapping[str, str]
    ) -> WorkerProcess:
        """Ask for one; what cannot be forked starts here.

        Raises:
            OSError: no request could be made; nobody was asked for.
        """
        changed = self._changed(environment)
        request = _Request(module, changed, _Now.of_this_process())
        with self._lock:
            if self.is_over or not self._forks or any(map(_is_read_at_loading, changed)):
                return start_worker(module, descriptors, environment)
            forked = _Forked(self, _Kept(module, descriptors, environment))
            self._number += 1
            self._asked[self._number] = forked
            try:
                self._send(self._number, request, descriptors)
            except (BrokenPipeError, ConnectionResetError):
                pass  # it is gone: ``_listen`` says so
            except BaseException:
                self._forget(self._number)
                raise
        return forked

    def _send(self, number: int, request: _Request, descriptors: list[int]) -> None:
        """The request travels as a file, for it may be long; standard error is that of now."""
        text = os.memfd_create("shoal-request")
        try:
            with open(text, "wb", closefd=False) as file:
                pickle.dump(request, file)
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
            try:
                rights = array.array("i", [text, folder, 2, *descriptors])
                passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                self._socket.sendmsg([str(number).encode()], passed)
            finally:
                os.close(folder)
        finally:
            os.close(text)

    def _forget(self, number: int) -> _Forked | None:
        """One that was asked for, and does not wait any more."""
        forked = self._asked.pop(number, None)
        if forked is not None:
            forked.kept.close()
        return forked

    def give_up(self, forked: _Forked) -> None:
        """One that waits is wanted no more: a server that only imports may have nobody to keep."""
        with self._lock:
            others = [
                one for one in self._asked.values() if one is not forked and one.poll() is None
            ]
            if not (self._is_ready or others):
                self.is_over = True
                self._process.kill()

    def close(self) -> None:
        with self._lock:
            live = list(self._live.values())
        for worker in live:
            worker.kill()
        for worker in live:  # all of them are gone then, not only told
            worker.wait()
        self._process.kill()
        self._process.wait()
        self._closes.set()

    # -- its thread -------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while message := self._next():
                with self._lock:
                    self._hear(*pickle.loads(message))
                if not self._forks:
                    self._start_them()
                    break
        finally:
            self._process.kill()
            code = self._process.wait()
            with self._lock:  # the system ends those that live with it
                self.is_over = True
                for worker in self._asked.values():
                    worker.ended(code if code < 0 else code or 1)
                for number in list(self._asked):
                    self._forget(number)
                for worker in self._live.values():
                    worker.ended(-signal.SIGKILL)
            self._socket.close()

    def _next(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._socket.recv(4096)
        return b""

    def _hear(self, what: str, number: int, value: int) -> None:
        if what == "ready":
            self._is_ready, self._forks = True, bool(value)
        elif what == "ended":
            if (worker := self._live.pop(number, None)) is not None:
                worker.ended(value)
        elif what == "began":
            if (forked := self._forget(number)) is None:  # an interrupted request came through
                os.kill(value, signal.SIGKILL)
                return
            self._live[value] = forked
            forked.begun(value)
        elif (forked := self._forget(number)) is not None:
            forked.ended(1)

    def _start_them(self) -> None:
        """Start what was asked for in this process: the server cannot be forked from.

        They end with this thread, which waits for ``close``.
        """
        with self._lock:
            for forked in self._asked.values():
                try:
                    process = forked.kept.start()
                except OSError:
                    forked.ended(1)
                    continue
                self._live[process.pid] = forked
                forked.begun(process.pid)
                threading.Thread(
                    target=_tell_end, args=(process, forked), name="worker's end", daemon=True
                ).start()
            for number in list(self._asked):
                self._forget(number)
        self._process.kill()
        self._closes.wait()


def _tell_end(process: subprocess.Popen[bytes], forked: _Forked) -> None:
    forked.ended(process.wait())


# -- the process that forks -------------------------------------------------------------------


def main() -> None:
    """Fork workers until the other end of the inherited socket is closed."""
    ignore_interrupts()
    for number in SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    modules, parent = pickle.loads(requests.recv(4096))
    for name in modules:
        importlib.import_module(name)
    warm_up()
    Forks(requests, parent).serve()


class Forks:
    """Answers a study's process: who began, and who ended how."""

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self._requests, self._parent = requests, parent
        self._wakes, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._children: set[int] = set()  # others may be of what was imported

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)
        poll = select.poll()
        for file in (self._requests.fileno(), self._wakes):
            poll.register(file, select.POLLIN)
        can_fork = _can_fork()
        self._answer("ready", 0, int(can_fork))
        # Whoever has inherited the socket's other end keeps it open, and is not the parent.
        while can_fork and os.getppid() == self._parent:
            ready = {file for file, _ in poll.poll(LOOKS_S * 1000)}
            if self._wakes in ready:
                os.read(self._wakes, 4096)
            for pid, code in _reaped():
                if pid in self._children:
                    self._children.remove(pid)
                    self._answer("ended", pid, code)
            if self._requests.fileno() in ready:
                self._take()

    def _take(self) -> None:
        try:
            message, rights, _, _ = socket.recv_fds(self._requests, 64, 32)
        except ConnectionResetError:
            message = b""
        if not message:
            os._exit(0)  # the kernel ends the workers
        number, server = int(message), os.getpid()
        text, folder, errors, *inherited = rights
        try:
            with open(text, "rb", closefd=False) as file:
                file.seek(0)
                request = pickle.load(file)
            pid = os.fork()
        except OSError as error:
            os.write(errors, f"shoal: no worker can be forked: {error}\n".encode())
            self._answer("failed", number, error.errno or errno.EIO)
        else:
            if not pid:
                signal.set_wakeup_fd(-1)
                for one in (self._requests.detach(), self._wakes, self._wake, text):
                    os.close(one)
                die_with_parent(server)
                _become(request, folder, errors, inherited)
            self._children.add(pid)
            self._answer("began", number, pid)
        finally:
            for one in rights:
                os.close(one)

    def _answer(self, what: str, number: int, value: int) -> None:
        try:
            self._requests.send(pickle.dumps((what, number, value)))
        except OSError:
            os._exit(0)


def _can_fork() -> bool:
    """Whether a fork of this process is a process like it: one thread, and no GPU known to it."""
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and (torch.cuda.is_available() or torch.xpu.is_available())
    return not has_gpu and len(os.listdir("/proc/self/task")) == 1


def _is_read_at_loading(name: str) -> bool:
    return name.startswith(AT_LOADING) and name not in ANY_TIME


def _reaped() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _become(request: _Request, folder: int, errors: int, inherited: list[int]) -> NoReturn:
    """What ``python -m module`` would be, as a child of the study's process."""
    code: Any = 1
    try:
        for sent in (signal.SIGCHLD, *SENT_TO_ALL):
            signal.signal(sent, signal.SIG_DFL)
        LIBC.prctl(PR_SET_NAME, NAME)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        os.fchdir(folder)
        for number in (errors, folder):
            os.close(number)
        request.now.take()
        for name, value in request.changed.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        time.tzset()
        tempfile.tempdir = None
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()
        begins = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = dict.fromkeys([*begins, *sys.path])
        sys.argv = [request.module, *map(str, inherited)]
        sys.modules["__main__"] = main = importlib.import_module(request.module)
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
