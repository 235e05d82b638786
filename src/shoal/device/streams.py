"""Events and streams: work that runs in order, and the completion of one piece of it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from shoal.core.seams import Candidate

Work = Callable[[], Any]
IsOff = Callable[[], bool]
"""Whether nobody wants the work any more: what of it has not begun is left out then."""


def never() -> bool:
    """Of work that is always wanted."""
    return False


class Piece(NamedTuple):
    """A part of work after which others may have their turn; ``seconds`` as of ``submit``."""

    work: Work
    seconds: float | None = None


class Event(Protocol):
    """The completion of one piece of submitted work."""

    error: BaseException | None

    @property
    def done(self) -> bool:
        """Whether the work has completed."""

    @property
    def startable(self) -> bool:
        """Whether work that needs this event may be submitted without blocking the caller."""

    @property
    def ready(self) -> bool:
        """Whether a unit that needs it would not wait on the device: it is complete, or of a unit
        that computes before."""

    def wait(self) -> None:
        """Block the calling thread until the work is complete; raise its error if it failed."""

    def span(self) -> tuple[float, float]:
        """Unix seconds of the work's start and end; only once it is done."""


class ThreadEvent:
    """An event that a thread sets."""

    __slots__ = ("_flag", "end", "error", "start")

    def __init__(self) -> None:
        self._flag = threading.Event()
        self.error: BaseException | None = None
        self.start = self.end = 0.0

    @property
    def done(self) -> bool:
        return self._flag.is_set()

    startable = ready = done

    def run(self, work: Work) -> None:
        """Run ``work`` now, keep its times and its error, and complete."""
        self.start = time.time()
        try:
            work()
        except BaseException as error:
            self.error = error
        self.end = time.time()
        self._flag.set()

    def wait(self) -> None:
        self._flag.wait()
        if self.error is not None:
            raise self.error

    def span(self) -> tuple[float, float]:
        return self.start, self.end


class Ran:
    """The event of work that ran in the calling thread: complete when it is made."""

    __slots__ = ("end", "error", "start")
    done = startable = ready = True

    def __init__(self, work: Work) -> None:
        self.error: BaseException | None = None
        self.start = time.time()
        try:
            work()
        except BaseException as error:
            self.error = error
        self.end = time.time()

    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    def span(self) -> tuple[float, float]:
        return self.start, self.end


class Turns:
    """A resource that some pieces of work may use at a time; who waits is chosen by its claim.

    ``claim`` says how a trial is among others; it is asked when work is submitted, so that work is
    ranked by what its trial had left then and not by how far the trial has come since. ``choose``
    is given the claims that wait, before them that which would go on where there is one, and
    returns one of them: first come, first served until somebody sets another rule. It is called
    from the threads that take turns.

    Args:
        places: Pieces of work at a time.
    """

    def __init__(self, places: int = 1) -> None:
        self.claim: Callable[[int], Candidate] = _nothing_known
        self.choose: Callable[[Sequence[Candidate]], Candidate] = lambda claims: claims[0]
        self._lock = threading.Lock()
        self._free = places
        self._waiting: list[Hold] = []

    @contextlib.contextmanager
    def take(self, claim: Candidate, is_off: IsOff = never) -> Iterator[Hold]:
        """Wait for a turn, and hold it inside.

        Work that ``is_off`` goes on without a turn, if ``let_go`` is called after it came to be.
        """
        hold = Hold(self, claim, is_off)
        with self._lock:
            if self._free:
                self._free -= 1
                hold.has_turn = True
            else:
                self._wait_in_line(hold)
        hold.wait()
        try:
            yield hold
        finally:
            if hold.has_turn:
                self._pass_on()

    def give_way(self, hold: Hold) -> None:
        """Between two pieces: let who waits go first where the rule says so; wait for a turn again
        then.
        """
        with self._lock:
            if not self._waiting or not hold.has_turn:
                return
            claims = [hold.claim, *(waiting.claim for waiting in self._waiting)]
            at = claims.index(self.choose(claims))
            if not at:
                return
            self._waiting.pop(at - 1).begin()
            self._wait_in_line(hold)
        hold.wait()

    def let_go(self) -> None:
        """Have work that is off wait for no turn."""
        with self._lock:
            for hold in [hold for hold in self._waiting if hold.is_off()]:
                self._waiting.remove(hold)
                hold.go_on.set()

    def _wait_in_line(self, hold: Hold) -> None:
        """Under the lock."""
        hold.has_turn = False
        if not hold.is_off():
            hold.go_on.clear()
            self._waiting.append(hold)

    def _pass_on(self) -> None:
        with self._lock:
            if not self._waiting:
                self._free += 1
                return
            claims, at = [waiting.claim for waiting in self._waiting], 0
            try:
                at = claims.index(self.choose(claims))
            finally:  # a rule that raises fails the work that asked, and leaves nobody waiting
                self._waiting.pop(at).begin()


def _nothing_known(trial: int) -> Candidate:
    return Candidate(trial=trial, ticket=0, remaining_s=0.0, warm=False)


class Turn(NamedTuple):
    """What work waits for when all it needs is there, and holds while it runs."""

    turns: Turns
    claim: Candidate
    is_off: IsOff = never


class Hold:
    """Work that has a turn, waits for one, or goes on without."""

    def __init__(self, turns: Turns, claim: Candidate, is_off: IsOff) -> None:
        self._turns, self.claim, self.is_off, self.has_turn = turns, claim, is_off, False
        self.go_on = threading.Event()
        self.go_on.set()
        self.wait = self.go_on.wait

    def begin(self) -> None:
        """It has the turn."""
        self.has_turn = True
        self.go_on.set()

    def give_way(self) -> None:
        """To who goes first by the rule, if somebody does; until it is the turn of this again."""
        if not self.is_off():
            self._turns.give_way(self)


class ThreadStream:
    """Work in order on a thread of its own. Use as a context manager or call ``close``."""

    def __init__(self, name: str, notify: Work) -> None:
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._peeked: list[_Item | None] = []  # the next, where it was looked at
        self._notify = notify
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        work: Work,
        after: Iterable[Event] = (),
        *,
        seconds: float | None = None,
        turn: Turn | None = None,
    ) -> ThreadEvent:
        """Queue ``work``; it runs when all of ``after`` are complete. A failed one fails it.

        ``seconds`` is how long it shall take where the device is emulated; else ignored.
        ``turn`` is taken when it could run, and held until it has.
        """
        return self.submit_pieces([Piece(work, seconds)], after, turn=turn)

    def submit_pieces(
        self, pieces: Sequence[Piece], after: Iterable[Event] = (), *, turn: Turn | None
    ) -> ThreadEvent:
        """As ``submit``, of work in pieces; between two of them others may have the turn.

        One event is of all. Where a piece raises, those behind it do not run; where the work is
        off, those that have not begun. Work that could run when that before it is over keeps the
        turn, but for whom the rule has go first.

        The thread has the caller's context variables meanwhile, as they are now: the decimal
        context and NumPy's error handling are among them.
        """
        event, waits, context = self._event(), tuple(after), contextvars.copy_context()
        works: list[Work] = [
            functools.partial(context.run, self._paced(piece, event, waits)) for piece in pieces
        ]
        self._queue.put(_Item(works, waits, event, turn))
        return event

    def _event(self) -> ThreadEvent:
        return ThreadEvent()

    def _paced(self, piece: Piece, event: Any, waits: tuple[Event, ...]) -> Work:
        """The work of a piece, in the time that it shall take; called when it is submitted."""
        return piece.work

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        broken: BaseException | None = None  # a rule for turns raised: nothing runs any more
        while (item := self._next()) is not None:
            try:
                if broken is not None:
                    raise broken
                item.wait()
            except BaseException as error:
                item.fail(error)
            else:
                try:
                    self._run_from(item)
                except BaseException as error:
                    broken = error
            del item  # what it refers to is free now, not at the next item
            self._notify()

    def _run_from(self, item: _Item) -> None:
        """Run an item in its turn, and those behind it that could run then."""
        if item.turn is None:
            item.run(None)
            return
        turns, claim, is_off = item.turn
        with turns.take(claim, is_off) as hold:
            item.run(hold)
            while hold.has_turn and (turn := self._turn_of_next(turns)) is not None:
                self._notify()
                _, hold.claim, hold.is_off = turn
                self._run_in(hold)

    def _run_in(self, hold: Hold) -> None:
        """The next item, when who goes first by the rule has gone."""
        item = self._next()
        assert item is not None, "looked at before"
        try:
            item.wait()
            hold.give_way()
        except BaseException as error:
            item.fail(error)
        else:
            item.run(hold)

    def _turn_of_next(self, turns: Turns) -> Turn | None:
        """Of the next item, if it is there and could run in a turn of these."""
        if not self._peeked:
            with contextlib.suppress(queue.Empty):
                self._peeked.append(self._queue.get_nowait())
        item = self._peeked[0] if self._peeked else None
        return item.turn if item is not None and item.could_run(turns) else None

    def _next(self) -> _Item | None:
        return self._peeked.pop() if self._peeked else self._queue.get()


class _Item(NamedTuple):
    """What is queued: works that are complete together."""

    works: list[Work]
    after: tuple[Event, ...]
    event: ThreadEvent
    turn: Turn | None

    def wait(self) -> None:
        """Until all that it needs is complete; raise where one of them failed."""
        for needed in self.after:
            needed.wait()

    def could_run(self, turns: Turns) -> bool:
        """Whether it would wait for nothing but these turns."""
        mine = self.turn is not None and self.turn.turns is turns
        return mine and all(needed.done for needed in self.after)

    def run(self, hold: Hold | None) -> None:
        self.event.run(functools.partial(_run_pieces, self.works, hold))
        self.works.clear()  # tensors in their closures are free now, not when the turn is over

    def fail(self, error: BaseException) -> None:
        self.event.run(_raiser(error))


def _run_pieces(works: Sequence[Work], hold: Hold | None) -> None:
    for index, work in enumerate(works):
        if index and hold is not None:
            hold.give_way()
        if hold is not None and hold.is_off():
            return
        work()


def _raiser(error: BaseException) -> Work:
    def work() -> None:
        raise error

    return work


class Lane:
    """The copy and host streams of one trial on a device.

    ``activations`` carries up what comes back for a backward; it waits behind no weights.
    """

    def __init__(self, up: Any, down: Any, activations: Any, host: ThreadStream) -> None:
        self.up, self.down, self.activations, self.host = up, down, activations, host

    def close(self) -> None:
        for stream in (self.up, self.activations, self.down, self.host):
            stream.close()
