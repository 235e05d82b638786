"""The control socket: one command and one answer, and what it does with everything else."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.control import (
    SOCKET,
    Answer,
    Command,
    ControlServer,
    NotRunning,
    Pause,
    Status,
    StopTrial,
    send,
)
from shoal.control.commands import MAX_LINE_BYTES
from shoal.core.errors import SpecError, StorageError
from shoal.observe.lock import StudyLock

Serve = Callable[..., ControlServer]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A study's directory."""
    directory = tmp_path / "sweep"
    directory.mkdir()
    (directory / "study.json").write_text("{}")
    return directory


@pytest.fixture
def serve(place: Path) -> Iterator[Serve]:
    """A function that starts a server in ``place``; it is closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(deliver: Any = None, **options: Any) -> ControlServer:
            return stack.enter_context(ControlServer(place, deliver or _repeat, **options))

        yield start


def _repeat(command: Command, answer: Answer) -> None:
    answer({"text": repr(command)})


@contextlib.contextmanager
def _connected(place: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(place / SOCKET))
        yield client


def _said(client: socket.socket) -> str:
    """The reason of a refusal, up to the end of the connection."""
    with client.makefile("rb") as file:
        return str(json.loads(file.readline())["error"])


def test_a_command_gets_its_answer(place: Path, serve: Serve) -> None:
    serve()

    assert send(place, StopTrial(trial=3)) == {"text": str(StopTrial(trial=3))}


def test_the_answer_may_come_later_and_from_another_thread(place: Path, serve: Serve) -> None:
    orders: queue.Queue[tuple[Command, Answer]] = queue.Queue()
    serve(lambda *order: orders.put(order))

    def main_loop() -> None:
        for _ in range(2):
            command, answer = orders.get(timeout=30)
            answer({"text": repr(command)})

    loop = threading.Thread(target=main_loop)
    loop.start()

    answers = [send(place, Pause()), send(place, Status())]

    loop.join()
    assert answers == [{"text": "Pause()"}, {"text": "Status()"}]


def test_a_command_that_waits_does_not_keep_the_next_one(place: Path, serve: Serve) -> None:
    waiting: queue.Queue[Answer] = queue.Queue()

    def deliver(command: Command, answer: Answer) -> None:
        if command == Pause():
            waiting.put(answer)
        else:
            answer({"text": "here"})

    serve(deliver)

    with _connected(place) as slow:
        slow.sendall(b'{"command": "Pause"}\n')
        first = waiting.get(timeout=30)

        assert send(place, Status()) == {"text": "here"}

        first({"text": "paused"})
        assert json.loads(slow.makefile("rb").readline()) == {"text": "paused"}


def test_a_second_answer_is_dropped(place: Path, serve: Serve) -> None:
    def deliver(command: Command, answer: Answer) -> None:
        answer({"text": "first"})
        answer({"text": "second"})

    serve(deliver)

    with _connected(place) as client:
        client.sendall(b'{"command": "Pause"}\n')
        assert client.makefile("rb").read() == b'{"text": "first"}\n'


def test_numbers_that_json_has_no_word_for_arrive(place: Path, serve: Serve) -> None:
    serve(lambda command, answer: answer({"loss": float("inf")}))

    assert send(place, Status()) == {"loss": float("inf")}


def test_a_large_answer_arrives_whole(place: Path, serve: Serve) -> None:
    serve(lambda command, answer: answer({"text": "x" * 3_000_000}))

    assert len(send(place, Status())["text"]) == 3_000_000


def test_a_directory_of_200_characters_can_be_served(tmp_path: Path) -> None:
    place = tmp_path / ("long-" * 40)
    place.mkdir()

    with ControlServer(place, _repeat):
        assert send(place, Pause()) == {"text": "Pause()"}


def test_a_directory_that_is_renamed_is_served_on(place: Path, serve: Serve) -> None:
    server = serve()
    moved = place.rename(place.with_name("moved"))

    assert send(moved, Pause()) == {"text": "Pause()"}

    server.close()
    assert not (moved / SOCKET).exists()


# ---------------------------------------------------------------- the file


def test_the_socket_is_this_users_alone_and_gone_at_the_end(place: Path) -> None:
    with ControlServer(place, _repeat):
        mode = (place / SOCKET).lstat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600

    assert not (place / SOCKET).exists()


def test_closing_twice_is_closing_once(place: Path, serve: Serve) -> None:
    server = serve()

    server.close()
    server.close()

    assert not (place / SOCKET).exists()


def _die_in(place: Path) -> None:
    """What a killed process leaves: a socket's file that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place / SOCKET))


def test_the_socket_of_a_dead_process_is_replaced(place: Path, serve: Serve) -> None:
    _die_in(place)

    serve()

    assert send(place, Pause()) == {"text": "Pause()"}


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("study")])
def test_what_is_no_socket_is_never_removed(
    place: Path, serve: Serve, make: Callable[[Path], object]
) -> None:
    make(place / SOCKET)

    with pytest.raises(SpecError, match=r"control.sock is in the way: it is no socket"):
        serve()

    assert os.path.lexists(place / SOCKET)


def test_a_file_that_took_the_sockets_place_is_not_removed_at_the_end(
    place: Path, serve: Serve
) -> None:
    server = serve()
    (place / SOCKET).unlink()
    (place / SOCKET).write_text("somebody's")

    server.close()

    assert (place / SOCKET).read_text() == "somebody's"


def test_a_file_system_without_sockets_is_a_storage_error(
    place: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", Refusing)

    with pytest.raises(StorageError, match=r"cannot listen .*control.sock: Operation not perm"):
        serve()


# ---------------------------------------------------------------- what is refused


def test_another_user_is_not_even_read(
    place: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.server.peer_uid", lambda connection: os.getuid() + 1)
    delivered: list[Command] = []
    serve(lambda command, answer: delivered.append(command))

    with pytest.raises(SpecError, match="ended before it answered"):
        send(place, Pause())

    assert delivered == []


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"please stop\n", "a command is one JSON object on one line"),
        (b'{"command": "Pause"}\n{"command": "Pause"}\n', "a connection is for one command"),
        (b"\xff\n", "a command is UTF-8"),
        (b" " * (MAX_LINE_BYTES + 1), f"a command has at most {MAX_LINE_BYTES} bytes"),
    ],
)
def test_what_is_no_command_is_answered_with_the_reason(
    place: Path, serve: Serve, sent: bytes, said: str
) -> None:
    serve()

    with _connected(place) as client:
        client.sendall(sent)
        assert said in _said(client)

    assert send(place, Pause()) == {"text": "Pause()"}


def test_a_line_without_its_newline_is_no_command(place: Path, serve: Serve) -> None:
    serve()

    with _connected(place) as client:
        client.sendall(b'{"command": "Pause"}')
        client.shutdown(socket.SHUT_WR)
        assert _said(client) == "a command ends with a newline, and there was none."


def test_a_client_that_says_nothing_is_told_when_its_time_is_over(
    place: Path, serve: Serve
) -> None:
    serve(timeout_s=0.02)

    with _connected(place) as client:
        assert _said(client) == "no command came within 0.02 s."


def test_a_client_that_does_not_read_loses_its_answer(place: Path, serve: Serve) -> None:
    serve(lambda command, answer: answer({"text": "x" * 3_000_000}), timeout_s=0.5)

    with _connected(place) as client:
        client.sendall(b'{"command": "Pause"}\n')
        hung_up = select.poll()
        hung_up.register(client, 0)
        assert hung_up.poll(30_000)
        assert not client.makefile("rb").read().endswith(b"\n")


def test_a_client_that_leaves_makes_room(place: Path, serve: Serve) -> None:
    waiting: queue.Queue[Answer] = queue.Queue()

    def deliver(command: Command, answer: Answer) -> None:
        answer({"text": "here"}) if command == Status() else waiting.put(answer)

    serve(deliver, connections=1)
    with _connected(place) as client:
        client.sendall(b'{"command": "Pause"}\n')
        late = waiting.get(timeout=30)

    answer = {}
    while not answer:  # the server sees the end of the first one in its own time
        with contextlib.suppress(SpecError):
            answer = send(place, Status())

    assert answer == {"text": "here"}
    late({"text": "nobody reads this"})


def test_there_is_room_for_so_many_commands_and_no_more(place: Path, serve: Serve) -> None:
    waiting: queue.Queue[Answer] = queue.Queue()
    serve(lambda command, answer: waiting.put(answer), connections=1)

    with _connected(place) as client:
        client.sendall(b'{"command": "Pause"}\n')
        answer = waiting.get(timeout=30)

        with pytest.raises(SpecError, match="1 commands wait already; try again later"):
            send(place, Status())

        answer({"text": "paused"})
        assert json.loads(client.makefile("rb").readline()) == {"text": "paused"}


def test_a_refusal_by_the_study_is_the_clients_error(place: Path, serve: Serve) -> None:
    def deliver(command: Command, answer: Answer) -> None:
        raise SpecError("there is no trial 3; there are 2, numbered from 0.")

    serve(deliver)

    with pytest.raises(SpecError, match=r"there is no trial 3; there are 2"):
        send(place, StopTrial(trial=3))


def test_a_command_that_breaks_something_leaves_the_server_alive(
    place: Path, serve: Serve
) -> None:
    def deliver(command: Command, answer: Answer) -> None:
        if command == Pause():
            raise ZeroDivisionError("by accident")
        answer({})

    serve(deliver)

    with pytest.raises(SpecError, match="ZeroDivisionError: by accident"):
        send(place, Pause())
    assert send(place, Status()) == {}


def test_who_still_waits_at_the_end_is_told_so(place: Path, serve: Serve) -> None:
    waiting: queue.Queue[Answer] = queue.Queue()
    server = serve(lambda command, answer: waiting.put(answer))

    with _connected(place) as client:
        client.sendall(b'{"command": "Pause"}\n')
        answer = waiting.get(timeout=30)
        server.close()
        answer({"text": "too late"})

        assert "the study's process ended before it answered" in _said(client)


def test_an_answer_just_before_the_end_arrives(place: Path, serve: Serve) -> None:
    waiting: queue.Queue[Answer] = queue.Queue()
    server = serve(lambda command, answer: waiting.put(answer))

    with _connected(place) as client:
        client.sendall(b'{"command": "StopStudy"}\n')
        waiting.get(timeout=30)({"text": "stopped"})
        server.close()

        assert json.loads(client.makefile("rb").readline()) == {"text": "stopped"}


# ---------------------------------------------------------------- the client's errors


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no study in .*/none: there is no such directory"):
        send(tmp_path / "none", Pause())


def test_a_file_is_no_study(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SpecError, match=r"no study in .*/file: it is no directory"):
        send(tmp_path / "file", Pause())


def test_a_directory_without_a_study_is_told_from_one_that_does_not_run(
    place: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=r"no study in .*: it has no study.json") as error:
        send(tmp_path, Pause())
    assert not isinstance(error.value, NotRunning)
    (tmp_path / "trials").mkdir()
    with pytest.raises(StorageError, match=r"has no study.json, .* and has what one trained"):
        send(tmp_path, Pause())

    with pytest.raises(NotRunning, match=r"is not running. Go on with it: shoal resume .*sweep"):
        send(place, Pause())


def test_the_socket_of_a_dead_process_means_not_running(place: Path) -> None:
    _die_in(place)

    with pytest.raises(NotRunning, match="is not running"):
        send(place, Pause())


def test_a_study_that_begins_is_waited_for_until_it_listens(place: Path, serve: Serve) -> None:
    with StudyLock(place):
        later = threading.Timer(0.2, serve)
        later.start()
        answer = send(place, Pause())
        later.join()
    assert answer == {"text": "Pause()"}


def test_a_study_that_ends_is_not_running_once_it_is_let_go(place: Path) -> None:
    lock = StudyLock(place)
    threading.Timer(0.2, lock.close).start()
    with pytest.raises(NotRunning, match="is not running"):
        send(place, Pause())


def test_a_study_that_takes_the_place_of_the_one_that_was_asked_is_found(place: Path) -> None:
    old = StudyLock(place)

    def replace() -> None:
        place.rename(place.with_name(".sweep.replaced"))
        place.mkdir()
        (place / "study.json").write_text("{}")
        with StudyLock(place), ControlServer(place, _repeat):
            old.close()
            is_answered.wait(30)

    is_answered = threading.Event()
    later = threading.Timer(0.2, replace)
    later.start()
    answer = send(place, Pause())
    is_answered.set()
    later.join()
    assert answer == {"text": "Pause()"}


def test_a_study_that_is_held_and_never_listens_is_not_waited_for_for_ever(
    place: Path, tmp_path: Path
) -> None:
    for directory in (place, tmp_path):  # one that has no record yet too
        with StudyLock(directory), pytest.raises(SpecError, match="begins or ends just now"):
            send(directory, Pause(), timeout_s=0.1)


def test_a_study_that_does_not_answer_is_not_waited_for_for_ever(
    place: Path, serve: Serve
) -> None:
    serve(lambda command, answer: None)

    with pytest.raises(SpecError, match=r"did not answer Pause within 0.02 s. It may be busy"):
        send(place, Pause(), timeout_s=0.02)


def test_another_users_study_takes_no_commands(
    place: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve()

    def refuse(connection: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)

    with pytest.raises(SpecError, match=rf"belongs to another user \(uid {os.getuid()}\)"):
        send(place, Pause())


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"", "ended before it answered"),
        (b'{"text"', "ended before it answered"),
        (b"oops\n", "gave an answer that is no JSON"),
        (b"[]\n", "gave an answer that is no JSON object"),
    ],
)
def test_an_answer_that_is_none_is_an_error(place: Path, reply: bytes, said: str) -> None:
    def serve_once(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(MAX_LINE_BYTES)
            connection.sendall(reply)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / SOCKET))
        listener.listen()
        thread = threading.Thread(target=serve_once, args=(listener,))
        thread.start()

        with pytest.raises(SpecError, match=said):
            send(place, Pause())

        thread.join()
