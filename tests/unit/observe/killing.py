"""Kills writers of a database at random moments, and says what was lost: a program.

    python killing.py DIRECTORY KILLS SEED

It has no threads, so that it may fork. A writer tells of each batch in a pipe, once
``write`` has returned. After the kill the pipe holds what was acknowledged.
"""

import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from shoal.core.event import ActionFinished, Evaluated, Event, StepFinished, TrialStarted
from shoal.observe import Database, is_running, read_events, read_timeline

SIZES = (1, 1, 2, 7, 60)


def batch_of(first: int, size: int) -> Sequence[Event]:
    """Events with the numbers from ``first``, of all tables."""
    kinds = (step, step, step, evaluation, transition)
    events = [kinds[number % len(kinds)](number) for number in range(first, first + size)]
    return [*events, action(first)]


def step(number: int) -> Event:
    return StepFinished(
        time=1.0, trial=0, step=number, epoch=0, loss=0.5, seconds=0.1, device="cpu:0"
    )


def evaluation(number: int) -> Event:
    return Evaluated(time=1.0, trial=0, step=number, epoch=0, metrics={"a": 1.0, "b": 2.0})


def transition(number: int) -> Event:
    return TrialStarted(time=1.0, trial=number, device="cpu:0")


def action(number: int) -> Event:
    return ActionFinished(
        device="cpu:0", stream="up", trial=0, step=number, action="F", start=1.0, end=2.0
    )


def number_of(event: Event) -> int:
    return event.trial if isinstance(event, TrialStarted) else event.step  # type: ignore[union-attr]


def write_until_killed(directory: Path, first: int, pipe: int, seed: int) -> None:
    """Open, write some batches, close, and again; each batch is told of."""
    choose = random.Random(seed)
    while True:
        with Database(directory) as database:
            for _ in range(choose.randrange(1, 20)):
                size = choose.choice(SIZES)
                database.write(batch_of(first, size))
                first += size
                os.write(pipe, first.to_bytes(8, "little"))


def kill_one(directory: Path, first: int, choose: random.Random) -> int:
    """Start a writer and kill it after some acknowledgements; the last one's number."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            write_until_killed(directory, first, writing, choose.randrange(1 << 30))
        finally:
            os._exit(3)  # it was not killed: something is wrong
    os.close(writing)
    told = [os.read(reading, 8) for _ in range(choose.randrange(0, 30))]
    until = time.perf_counter() + choose.uniform(0, 0.004)
    while time.perf_counter() < until:
        pass
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
    while word := os.read(reading, 8):
        told.append(word)
    os.close(reading)
    return int.from_bytes(told[-1], "little") if told else first


def check(directory: Path, acknowledged: int) -> int:
    """All that was acknowledged is there, in order and once; the next number."""
    assert not is_running(directory)
    numbers = [number_of(event) for event in read_events(directory)]
    assert numbers == list(range(len(numbers))), "a number is missing or there twice"
    assert len(numbers) >= acknowledged, f"{acknowledged} acknowledged, {len(numbers)} there"
    actions = [event.step for event in read_timeline(directory)]
    assert actions == sorted(actions)  # one whose batch was not committed is there twice
    check_integrity(directory)
    return len(numbers)


def check_integrity(directory: Path) -> None:
    """By SQLite's own measure, of a copy: the next writer has to find it as it was left."""
    with tempfile.TemporaryDirectory() as place:
        for path in directory.glob("study.db*"):
            shutil.copy(path, place)
        with closing(sqlite3.connect(Path(place) / "study.db")) as copy:
            assert copy.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def main() -> None:
    directory, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    choose, following = random.Random(seed), 0
    for _ in range(kills):
        following = check(directory, kill_one(directory, following, choose))
    sys.stdout.write(f"{following} events after {kills} kills\n")


if __name__ == "__main__":
    main()
