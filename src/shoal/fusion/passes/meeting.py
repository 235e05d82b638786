"""Several runs of Python code in turns, which wait for each other where they ask for something.

[Note: turns]
Each run has a thread, so that its code can be left in the middle of a call and gone on with later.
Only one runs at a time, in the order of the slots, until it asks for something or is through:

    slot 0   |code|ask            |code|ask        ...
    slot 1         |code|ask           |code|ask   ...
    driver               |answer both|      |answer both|

So nothing happens at the same time, and what a run does depends on no other's speed. Those that
ask for the same, after having asked for the same all along, are answered together.

Whose turn it is, one attribute says; locks only wake up who waits for it to change. So Ctrl-C,
which may come between any two instructions of the driver, cannot bring the two out of phase.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import Any


class Abandoned(BaseException):
    """Raised in a run that is given up, to leave its code."""


class Lanes:
    """Threads for runs, kept from step to step: to start one may take longer than a step.

    They end with this object.
    """

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = []
        self._end = weakref.finalize(self, _end, self._queues)

    def submit(self, index: int, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread that is free."""
        while len(self._queues) <= index:
            queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            name = f"slot {len(self._queues)}"
            threading.Thread(target=_serve, args=(queue,), name=name, daemon=True).start()
            self._queues.append(queue)
        self._queues[index].put(work)


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        with suppress(BaseException):  # a run keeps its own; the next one needs the thread
            work()
        del work  # what it holds is not to be held until the next one comes


def _end(queues: list[SimpleQueue[Callable[[], None] | None]]) -> None:
    for queue in queues:
        queue.put(None)


class Run:
    """One slot's code, in a thread of its own.

    ``inside``: a context of the thread. Attributes are the driver's to read between two turns.
    """

    def __init__(
        self,
        slot: int,
        work: Callable[[], Any],
        inside: Callable[[], AbstractContextManager[Any]],
        lanes: Lanes,
    ) -> None:
        self.slot, self._work, self._inside, self._lanes = slot, work, inside, lanes
        self._go, self._there = threading.Lock(), threading.Lock()  # each released by the other
        self._has_turn = self._is_submitted = False
        self._answer: Any = None
        self._error: BaseException | None = None
        self.key: Hashable = None
        self.asked: Any = None
        self.history = 0  # of all keys, as a hash
        self.is_over = False
        self.result: Any = None
        self.failure: BaseException | None = None

    def _run(self) -> None:
        if self.is_over:  # submitted twice
            return
        _CURRENT.run = self
        try:
            self._wait_for_turn()
            self._raise_if_told()
            with self._inside():
                self.result = self._work()
        except BaseException as error:
            self.failure = error
        finally:
            _CURRENT.run = None
            self.is_over = True
            self._end_turn()

    def _wait_for_turn(self) -> None:
        while not self._has_turn:
            self._go.acquire()

    def _end_turn(self) -> None:
        self._has_turn = False
        _wake(self._there)

    def ask(self, key: Hashable, asked: Any) -> Any:
        """From within the run's code: wait for the answer."""
        self.key, self.asked = key, asked
        self._end_turn()
        self._wait_for_turn()
        self._raise_if_told()
        answer, self._answer, self.asked = self._answer, None, None
        return answer

    def _raise_if_told(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def answer(self, answer: Any) -> None:
        """What its question came to; it sees it at its next turn."""
        self._answer = answer

    def fail(self, error: BaseException) -> None:
        """Have the question raise at its next turn."""
        self._error = error

    def take_turn(self) -> None:
        """Let its code run until it asks again, or is through."""
        self._has_turn = True
        self._finish_turn()
        self.history = hash((self.history, self.key))

    def _finish_turn(self) -> None:
        """Wait until its turn has ended; may be called again where it was interrupted."""
        if not self._is_submitted:
            self._lanes.submit(self.slot, self._run)
            self._is_submitted = True
        _wake(self._go)
        while self._has_turn:
            self._there.acquire()

    def close(self) -> None:
        """Give up a run that is in the middle, once the turn that it may have has ended."""
        if self._has_turn:
            self._finish_turn()
        while self._is_submitted and not self.is_over:
            self.fail(Abandoned())
            self.take_turn()
        self.is_over = True


def _wake(lock: threading.Lock) -> None:
    """Release it; a second time is none too many, since who waits looks why it was woken."""
    with suppress(RuntimeError):
        lock.release()


_CURRENT = threading.local()


def current_run() -> Run | None:
    """The run whose code calls this; None outside of any."""
    return getattr(_CURRENT, "run", None)


Answer = Callable[[Sequence[Run], bool], None]
"""Answers or fails runs that ask for the same; the second says whether they are all there are."""


def in_turns(
    runs: Sequence[Run], answer: Answer, turn: Callable[[int], AbstractContextManager[Any]]
) -> None:
    """Let all go on until they are through; ``turn`` is entered around each turn of a slot."""
    going = list(runs)
    try:
        while going:
            for run in going:
                with turn(run.slot):
                    run.take_turn()
            going = [run for run in going if not run.is_over]
            groups: dict[Hashable, list[Run]] = {}
            for run in going:
                groups.setdefault((run.history, run.key), []).append(run)
            for group in groups.values():
                answer(group, len(group) == len(going))
    finally:
        for run in runs:
            run.close()
