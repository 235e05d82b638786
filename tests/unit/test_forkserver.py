"""Workers that are forked: what they are given, how they end, and what ends with what."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from shoal import forkserver
from shoal.forkserver import ForkServer
from shoal.workerenv import worker_environment

pytestmark = pytest.mark.skipif(
    any(map(os.path.exists, forkserver.DRIVERS)), reason="beside a GPU nothing is forked"
)

WORKER = """
import os, resource, sys
from multiprocessing.connection import Connection

def main():
    here = Connection(int(sys.argv[1]))
    has_torch = "torch" in sys.modules
    while True:
        what = here.recv()
        if what == "tell":
            threads = len(os.listdir("/proc/self/task"))
            here.send((os.getpid(), os.getcwd(), dict(os.environ), sys.path, has_torch, threads))
        elif what == "limits":
            here.send((os.sched_getaffinity(0), os.umask(0), resource.getrlimit(7)[0]))
        elif what == "draw":
            import numpy
            here.send(numpy.random.random())
        elif what == "print":
            print("out"); print("err", file=sys.stderr); here.send(None)
        else:
            sys.exit(what)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("workers")
    (found / "workerforatest.py").write_text(WORKER)
    return found


@pytest.fixture(scope="module")
def server(folder):
    server = ForkServer()
    yield server
    server.close()


class Worker:
    def __init__(self, server, folder, **variables):
        from multiprocessing.connection import Connection

        ours, theirs = socket.socketpair()
        given = worker_environment() | variables
        given["PYTHONPATH"] = os.pathsep.join([str(folder), given["PYTHONPATH"]])
        self.process = server.start("workerforatest", [theirs.fileno()], given)
        theirs.close()
        self._here = Connection(ours.detach())

    def ask(self, what):
        self._here.send(what)
        return self._here.recv()

    def tell(self):
        return self.ask("tell")

    def exit(self, code):
        self._here.send(code)
        return self.process.wait(60)


def test_a_worker_is_forked_with_torch_and_one_thread(server, folder):
    worker = Worker(server, folder)

    pid, where, _, path, has_torch, threads = worker.tell()

    _until(lambda: worker.process.pid)  # it may tell its own before the server does
    assert pid == worker.process.pid
    assert where == os.getcwd()
    assert path[0] == str(folder)
    assert has_torch
    assert threads == 1
    assert worker.process.poll() is None
    worker.process.kill()
    assert worker.process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("code", [0, 3])
def test_it_is_known_how_it_ended(server, folder, code):
    assert Worker(server, folder).exit(code) == code


def test_it_has_the_environment_and_directory_of_now(server, folder, tmp_path, monkeypatch):
    first = Worker(server, folder, SHOAL_OLD="1")
    assert first.tell()[2]["SHOAL_OLD"] == "1"
    monkeypatch.chdir(tmp_path)

    changed = {"SHOAL_NEW": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # of a GPU that is not here
    _, where, environment, _, has_torch, _ = Worker(server, folder, **changed).tell()

    assert has_torch
    assert where == str(tmp_path)
    assert environment["SHOAL_NEW"] == "2"
    assert "SHOAL_OLD" not in environment


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "KMP_AFFINITY"])
def test_what_libraries_read_when_they_are_loaded_has_a_process_start_anew(server, folder, name):
    worker = Worker(server, folder, **{name: "2"})

    pid, _, environment, _, has_torch, _ = worker.tell()

    assert isinstance(worker.process, subprocess.Popen)
    assert pid == worker.process.pid
    assert environment[name] == "2"
    assert not has_torch  # the worker of this test imports none by itself
    assert worker.exit(7) == 7


def test_it_has_the_limits_of_its_study_now(server, folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cores = os.sched_getaffinity(0)
    Worker(server, folder).tell()  # the server is there
    before = os.umask(0o77)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        os.sched_setaffinity(0, {min(cores)})
        worker = Worker(server, folder)
        found = worker.ask("limits")
    finally:
        os.umask(before)
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == ({min(cores)}, 0o77, soft - 1)


def test_workers_draw_other_numbers_of_numpys_own_stream(server, folder):
    assert Worker(server, folder).ask("draw") != Worker(server, folder).ask("draw")


def test_where_nothing_can_be_forked_workers_start_in_this_process(folder, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'shoal.forkserver' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    server = ForkServer()
    first, second = (Worker(server, folder) for _ in range(2))
    assert first.tell()[0] == first.process.pid
    third = Worker(server, folder)
    assert isinstance(third.process, subprocess.Popen)
    assert (second.exit(3), third.exit(4)) == (3, 4)
    first.process.kill()
    assert first.process.wait(60) == -signal.SIGKILL
    server.close()


@pytest.mark.full
def test_a_process_with_many_descriptors_and_variables_has_workers(folder):
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        server = ForkServer()
        worker = Worker(server, folder)
        assert worker.tell()[4]
        assert Worker(server, folder, LONG="x" * 100_000, LONGER="x" * 120_000).tell()[4]
        server.close()
    finally:
        for number in held:
            os.close(number)


def test_a_directory_that_is_gone_is_no_obstacle(server, folder, tmp_path, monkeypatch):
    Worker(server, folder).tell()
    gone = tmp_path / "gone"
    gone.mkdir()
    given = worker_environment()  # which asks where this is
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys.modules[__name__], "worker_environment", lambda: given)
    worker = Worker(server, folder)
    assert worker.ask("print") is None
    assert worker.exit(0) == 0


def test_a_signal_to_all_of_a_group_ends_no_worker(server, folder):
    worker = Worker(server, folder)
    worker.tell()
    for number in forkserver.SENT_TO_ALL:
        os.kill(server._server._process.pid, number)
    assert worker.tell()[0] == worker.process.pid
    assert Worker(server, folder).tell()[4]


def test_what_it_prints_goes_to_standard_error_as_it_is_now(server, folder, capfd):
    worker = Worker(server, folder)
    worker.ask("print")
    assert worker.exit(0) == 0

    found = capfd.readouterr()

    assert found.out == ""
    assert sorted(found.err.split()) == ["err", "out"]


def test_signals_reach_it_only_while_it_lives(server, folder):
    worker = Worker(server, folder)
    worker.tell()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(60) == -signal.SIGTERM
    worker.process.send_signal(signal.SIGTERM)
    worker.process.kill()


@pytest.mark.full
def test_one_that_is_not_wanted_any_more_never_begins(folder):
    server = ForkServer()
    worker = Worker(server, folder)
    worker.process.kill()  # while torch is imported
    assert worker.process.wait(60) == -signal.SIGKILL
    assert worker.process.pid == 0
    assert Worker(server, folder).tell()[4], "another server began"
    server.close()


def test_a_server_that_dies_takes_its_workers_along_and_another_begins(server, folder):
    worker = Worker(server, folder)
    pid = worker.tell()[0]

    os.kill(server._server._process.pid, signal.SIGKILL)

    assert worker.process.wait(60) == -signal.SIGKILL
    _until(lambda: not Path(f"/proc/{pid}").exists() or _state(pid) == "Z")
    assert Worker(server, folder).tell()[4]


@pytest.mark.full
def test_a_server_outlives_the_thread_that_began_it(folder):
    server, found = ForkServer(), []
    thread = threading.Thread(target=lambda: found.append(Worker(server, folder)))
    thread.start()
    thread.join()
    assert found[0].tell()[4]
    time.sleep(2 * forkserver.LOOKS_S)
    assert found[0].process.poll() is None
    server.close()


def test_an_answer_that_nobody_waits_for_ends_only_what_it_names(server, folder, monkeypatch):
    Worker(server, folder).tell()
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    server._server._hear("failed", 10**6, 11)  # an errno is no process
    server._server._hear("ended", 10**6, 0)
    assert killed == []
    server._server._hear("began", 10**6, 4242)  # of a request that was interrupted
    assert killed == [4242]


@pytest.mark.full
def test_one_that_is_asked_for_as_the_server_ends_starts_for_itself(folder):
    server = ForkServer()
    Worker(server, folder).tell()
    ending = server._server
    os.kill(ending._process.pid, signal.SIGKILL)
    _until(lambda: ending.is_over)
    worker = Worker(ending, folder)
    assert isinstance(worker.process, subprocess.Popen)
    assert worker.exit(3) == 3
    server.close()


def test_closing_ends_all_of_them(server, folder):
    workers = [Worker(server, folder) for _ in range(3)]
    pids = [worker.tell()[0] for worker in workers]

    server.close()

    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert [worker.process.poll() for worker in workers] == [-signal.SIGKILL] * 3


def test_a_killed_process_leaves_no_server_and_no_worker(folder):
    code = f"""
        import os, sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_forkserver as here
        from shoal.forkserver import ForkServer
        server = ForkServer()
        worker = here.Worker(server, {str(folder)!r})
        print(worker.tell()[0], server._server._process.pid, flush=True)
        time.sleep(1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pids = process.stdout.readline().split()
        assert len(pids) == 2
        process.kill()
    _until(lambda: not any(Path(f"/proc/{pid}").exists() and _state(pid) != "Z" for pid in pids))


def test_beside_a_gpu_every_worker_starts_for_itself(folder, monkeypatch):
    monkeypatch.setattr(forkserver, "DRIVERS", ("/dev/null",))
    server = ForkServer()
    worker = Worker(server, folder)
    assert isinstance(worker.process, subprocess.Popen)
    assert not worker.tell()[4]
    assert worker.exit(5) == 5
    server.close()


def test_spawn_may_be_asked_for(folder, monkeypatch):
    monkeypatch.setenv("SHOAL_WORKERS", "spawn")
    worker = Worker(ForkServer(), folder)
    assert isinstance(worker.process, subprocess.Popen)
    assert worker.exit(0) == 0


def _state(pid) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _until(is_so, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)
