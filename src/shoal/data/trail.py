"""Recording how a source is read, so that it can be read again from its first batch.

[Note: what a replay needs]

A source that may keep anything is led to a position by reading all of it again. It must find
each random stream as it was whenever it draws. Between two draws of the source, others draw:
dropout, say. So a stream's state before a fetch is the state after the source's draw before
it, and a number of steps on; and that number is all that is kept:

    source   draws 7             draws 7             draws 7
    model            draws 4000          draws 4000
    kept     start               4000                4000        one run: (1, 2, 4000)

Equal numbers in a row are one run, so an epoch costs a few integers as a rule and three a
batch at worst. A stream that nobody but the source draws from costs nothing. Where no number
leads from one state to the next (the model seeds, or draws an odd count of normal numbers)
the state itself is kept, 2.5 to 5 KB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from shoal.core.errors import TrialError
from shoal.data.position import Epoch, Moves, Trail
from shoal.data.reading import END, Reader
from shoal.data.streams import Stream, numbers_between, skip

MAKING = -1  # the index of the making of an epoch's iterator, before fetch 0
SEARCHES = 2  # in vain, one after another; then a stream's states are kept without a search


class Recorder:
    """What a source drew, fetch by fetch. Goes on from ``trail``, at whose end the streams are."""

    def __init__(self, streams: Mapping[str, Stream], trail: Trail, *, within: bool) -> None:
        self._streams = streams
        self._start = trail.start
        self._ended = trail.epochs[:-1] if within else trail.epochs
        self._rows = {
            name: _Row(stream, trail.epochs[-1].moves.get(name) if within else None)
            for name, stream in streams.items()
        }
        self._before: dict[str, Any] = {}

    def before(self) -> None:
        """Note the streams; call before the source may draw."""
        self._before = {name: stream.get() for name, stream in self._streams.items()}

    def undo(self) -> None:
        """Put the streams back to where ``before`` saw them."""
        for name, state in self._before.items():
            self._streams[name].set(state)

    def made(self) -> None:
        """The source has made an iterator."""
        if not self._start:
            self._start = {n: s.pack(self._before[n]) for n, s in self._streams.items()}
            for name, row in self._rows.items():
                row.known = self._before[name]
        for name, row in self._rows.items():
            row.note(MAKING, self._before[name], always=True)

    def fetched(self, index: int) -> None:
        """The source has yielded batch ``index`` of the epoch, or ended there."""
        for name, row in self._rows.items():
            row.note(index, self._before[name])

    def end_epoch(self, batches: int) -> None:
        """The epoch was read to its end."""
        self._ended = (*self._ended, self._epoch(batches))
        for row in self._rows.values():
            row.clear()

    def trail(self, batches: int, *, within: bool) -> Trail:
        """All so far; ``batches`` of the current epoch if the position is within one."""
        current = (self._epoch(batches),) if within else ()
        return Trail(self._start, (*self._ended, *current))

    def _epoch(self, batches: int) -> Epoch:
        moves = {name: row.moves() for name, row in self._rows.items() if row.has_moves}
        return Epoch(batches, moves)


class _Row:
    """One stream's moves in the current epoch. ``known`` is where a replay would have it."""

    def __init__(self, stream: Stream, moves: Moves | None) -> None:
        self._stream = stream
        self._runs = list(moves.runs) if moves else []
        self._states = dict(moves.states) if moves else {}
        self._failures = 0
        self.known: Any = stream.get()

    @property
    def has_moves(self) -> bool:
        return bool(self._runs or self._states)

    def moves(self) -> Moves:
        return Moves(tuple(self._runs), dict(self._states))

    def clear(self) -> None:
        self._runs, self._states = [], {}

    def note(self, index: int, before: Any, *, always: bool = False) -> None:
        """The source was read; keep how the stream came to ``before`` if it drew from there."""
        after = self._stream.get()
        if always or not self._stream.same(before, after):
            self._add(index, before)
            self.known = after

    def _add(self, index: int, before: Any) -> None:
        if self._stream.same(self.known, before):
            return
        gap = self._gap(before)
        if gap is None:
            self._states[index] = self._stream.pack(before)
            return
        first, count, last_gap = self._runs[-1] if self._runs else (index, 0, gap)
        if self._runs and (gap, index) == (last_gap, first + count):
            self._runs[-1] = (first, count + 1, gap)
        else:
            self._runs.append((index, 1, gap))

    def _gap(self, before: Any) -> int | None:
        if self._failures >= SEARCHES:
            return None
        gap = numbers_between(self._stream, self.known, before)
        self._failures = 0 if gap is not None else self._failures + 1
        return gap


def follow(
    trail: Trail, streams: Mapping[str, Stream], reader: Reader, *, within: bool
) -> Iterator[Any] | None:
    """Have a source that is as it was built go through all of ``trail``.

    Returns the iterator of the last epoch if the position is ``within`` it. The streams are
    left where the source's last draw left them.

    Raises:
        TrialError: the source does not yield as many batches as it did.
    """
    for name, state in trail.start.items():
        streams[name].set(streams[name].unpack(state))
    iterator = None
    for number, epoch in enumerate(trail.epochs, 1):
        iterator = _read_again(epoch, streams, reader)
        if not within or number < len(trail.epochs):
            _take_steps(_steps(epoch).get(epoch.batches, ()), streams)
            _require_end(reader.fetch(iterator), epoch.batches)
            iterator = None
    return iterator


def _read_again(epoch: Epoch, streams: Mapping[str, Stream], reader: Reader) -> Iterator[Any]:
    steps = _steps(epoch)
    _take_steps(steps.get(MAKING, ()), streams)
    iterator = reader.open()
    for index in range(epoch.batches):
        _take_steps(steps.get(index, ()), streams)
        if reader.fetch(iterator) is END:
            raise TrialError(
                f"the data source ended after {index} batches of an epoch of which the trial "
                f"had read {epoch.batches}. A source must yield the same batches each time it "
                "is built and read with the same random state."
            )
    return iterator


def _require_end(fetched: Any, batches: int) -> None:
    if fetched is not END:
        raise TrialError(
            f"the data source yielded more than the {batches} batches that an epoch had when "
            "the trial read it. A source must yield the same batches each time it is built and "
            "read with the same random state."
        )


class _Step(NamedTuple):
    """What brings one stream to where it was before a fetch: a count of numbers, or a state."""

    stream: str
    gap: int = 0
    state: Any = None


def _steps(epoch: Epoch) -> dict[int, list[_Step]]:
    """What is to be done before each fetch of an epoch."""
    steps: dict[int, list[_Step]] = {}
    for name, moves in epoch.moves.items():
        for first, count, gap in moves.runs:
            for index in range(first, first + count):
                steps.setdefault(index, []).append(_Step(name, gap))
        for index, state in moves.states.items():
            steps.setdefault(index, []).append(_Step(name, state=state))
    return steps


def _take_steps(steps: Iterable[_Step], streams: Mapping[str, Stream]) -> None:
    for step in steps:
        stream: Any = streams[step.stream]
        if step.gap:
            skip(stream, step.gap)
        else:
            stream.set(stream.unpack(step.state))
