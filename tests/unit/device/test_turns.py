"""Whose optimizer step runs on the host next."""

from __future__ import annotations

import threading
import time

import pytest

from shoal.device.streams import Piece, ThreadStream, Turn, Turns


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


class Queue:
    """Threads that ask for turns in the order of ``trials`` while somebody holds the only one."""

    def __init__(self, turns):
        self.turns, self.order, self.threads = turns, [], []

    def _work(self, trial):
        with self.turns.take(trial):
            self.order.append(trial)

    def run(self, trials):
        with self.turns.take(-1):
            for waiting, trial in enumerate(trials, start=1):
                self.threads.append(threading.Thread(target=self._work, args=(trial,)))
                self.threads[-1].start()
                wait_until(lambda count=waiting: len(self.turns._waiting) == count)
        for thread in self.threads:
            thread.join(10)
        return self.order


def test_first_come_first_served_until_there_is_a_rule():
    assert Queue(Turns()).run([3, 1, 2]) == [3, 1, 2]


def test_who_waits_is_chosen_each_time_a_turn_is_free():
    turns, asked = Turns(), []

    def largest(trials):
        asked.append(list(trials))
        return max(trials)

    turns.choose = largest
    assert Queue(turns).run([1, 3, 2]) == [3, 2, 1]
    assert asked == [[1, 3, 2], [1, 2], [1]]


def test_as_many_at_a_time_as_there_are_places():
    turns = Turns(2)
    with turns.take(0), turns.take(1):
        third = threading.Thread(target=Queue(turns)._work, args=(2,))
        third.start()
        wait_until(lambda: turns._waiting)
    third.join(10)
    assert not third.is_alive()


def test_work_that_raises_gives_its_turn_back():
    turns = Turns()
    with pytest.raises(ValueError, match="no"), turns.take(0):
        raise ValueError("no")
    with turns.take(1):
        pass


def test_a_stream_takes_a_turn_when_its_work_could_run_and_not_before():
    turns, free = Turns(), threading.Event()
    first, second = (ThreadStream(name, lambda: None) for name in ("first", "second"))
    done = []
    blocked = first.submit(free.wait)
    late = second.submit(lambda: done.append("late"), [blocked], turn=Turn(turns, 0))
    with turns.take(1):  # the one that still waits for what it needs holds nothing
        free.set()
        wait_until(lambda: turns._waiting)
        assert not done
    late.wait()
    assert done == ["late"]
    first.close()
    second.close()


def test_a_rule_that_raises_leaves_nobody_waiting_and_is_told_to_the_next_work():
    def broken(trials):
        raise LookupError("no such trial")

    turns, hold = Turns(), threading.Event()
    turns.choose = broken
    first, second = (ThreadStream(name, lambda: None) for name in ("first", "second"))
    begun = first.submit(hold.wait, turn=Turn(turns, 0))
    wait_until(lambda: not turns._free)
    waited = second.submit(lambda: None, turn=Turn(turns, 1))
    wait_until(lambda: turns._waiting)
    hold.set()
    begun.wait()
    waited.wait()
    with pytest.raises(LookupError, match="no such trial"):
        first.submit(lambda: None).wait()
    first.close()
    second.close()


def in_pieces(stream, names, done, turn):
    return stream.submit_pieces([Piece(lambda n=n: done.append(n)) for n in names], turn=turn)


@pytest.fixture
def two_streams():
    streams = [ThreadStream(name, lambda: None) for name in ("first", "second")]
    yield streams
    for stream in streams:
        stream.close()


def test_between_two_pieces_the_turn_goes_to_whose_work_is_most_urgent(two_streams):
    turns, done, first, second = Turns(), [], *two_streams
    turns.choose = max  # of trials
    begun, go_on = threading.Event(), threading.Event()

    def long():
        begun.set()
        go_on.wait()

    pieces = [Piece(long), Piece(lambda: done.append("rest"))]
    patient = first.submit_pieces(pieces, turn=Turn(turns, 1))
    begun.wait()
    urgent = in_pieces(second, ["urgent", "all of it"], done, Turn(turns, 2))
    wait_until(lambda: turns._waiting)
    go_on.set()
    patient.wait()
    urgent.wait()
    assert done == ["urgent", "all of it", "rest"]
    assert patient.start <= urgent.start
    assert urgent.end <= patient.end


def test_who_is_not_more_urgent_waits_for_all_pieces(two_streams):
    turns, done, first, second = Turns(), [], *two_streams
    turns.choose = max
    begun, go_on = threading.Event(), threading.Event()
    pieces = [Piece(lambda: begun.set() or go_on.wait()), Piece(lambda: done.append("rest"))]
    urgent = first.submit_pieces(pieces, turn=Turn(turns, 2))
    begun.wait()
    patient = in_pieces(second, ["later"], done, Turn(turns, 1))
    wait_until(lambda: turns._waiting)
    go_on.set()
    urgent.wait()
    patient.wait()
    assert done == ["rest", "later"]


def test_work_behind_that_could_run_keeps_the_turn_but_for_whom_the_rule_has_go_first(two_streams):
    turns, done, first, second = Turns(), [], *two_streams
    turns.choose = max
    begun, go_on = threading.Event(), threading.Event()
    first.submit(lambda: begun.set() or go_on.wait(), turn=Turn(turns, 5))
    begun.wait()
    other = in_pieces(second, ["other"], done, Turn(turns, 4))
    wait_until(lambda: turns._waiting)
    last = [
        in_pieces(first, [name], done, Turn(turns, rank)) for name, rank in [("a", 5), ("b", 3)]
    ]
    go_on.set()
    for event in [other, last[1]]:
        event.wait()
    assert done == ["a", "other", "b"]
    assert last[0].end <= other.start <= other.end <= last[1].start


def test_work_behind_that_waits_for_more_than_its_turn_gives_it_back(two_streams):
    turns, done, first, second = Turns(), [], *two_streams
    turns.choose = max
    begun, go_on, free = (threading.Event() for _ in range(3))
    first.submit(lambda: begun.set() or go_on.wait(), turn=Turn(turns, 5))
    begun.wait()
    needed = ThreadStream("needed", lambda: None)
    missing = needed.submit(free.wait)
    late = first.submit(lambda: done.append("late"), [missing], turn=Turn(turns, 6))
    in_pieces(second, ["other"], done, Turn(turns, 4))
    wait_until(lambda: turns._waiting)
    go_on.set()
    wait_until(lambda: done == ["other"])
    free.set()
    late.wait()
    needed.close()


def test_work_behind_whose_needs_failed_fails_and_that_after_it_runs(two_streams):
    turns, done, first, second = Turns(), [], *two_streams

    def raises():
        raise ValueError("no")

    broken = second.submit(raises)
    begun, go_on = threading.Event(), threading.Event()
    first.submit(lambda: begun.set() or go_on.wait(), turn=Turn(turns, 5))
    begun.wait()
    failed = first.submit(lambda: done.append("never"), [broken], turn=Turn(turns, 5))
    last = in_pieces(first, ["last"], done, Turn(turns, 5))
    go_on.set()
    with pytest.raises(ValueError, match="no"):
        failed.wait()
    last.wait()
    assert done == ["last"]


def test_a_rule_that_raises_when_a_turn_is_given_back_loses_no_work_that_was_looked_at(
    two_streams,
):
    def broken(claims):
        raise LookupError("no such trial")

    turns, done, first, second = Turns(), [], *two_streams
    begun, go_on, free = (threading.Event() for _ in range(3))
    first.submit(lambda: begun.set() or go_on.wait(), turn=Turn(turns, 0))
    begun.wait()
    missing = second.submit(free.wait)
    last = first.submit(lambda: done.append("never"), [missing], turn=Turn(turns, 0))
    third = ThreadStream("third", lambda: None)
    waited = third.submit(lambda: None, turn=Turn(turns, 1))
    wait_until(lambda: turns._waiting)
    turns.choose = broken
    go_on.set()
    waited.wait()
    free.set()
    with pytest.raises(LookupError, match="no such trial"):
        last.wait()
    assert not done
    third.close()


def test_a_piece_that_raises_ends_the_work_and_gives_the_turn_back(two_streams):
    turns, done, first, second = Turns(), [], *two_streams

    def raises():
        raise ValueError("no")

    pieces = [
        Piece(lambda: done.append("one")),
        Piece(raises),
        Piece(lambda: done.append("three")),
    ]
    with pytest.raises(ValueError, match="no"):
        first.submit_pieces(pieces, turn=Turn(turns, 1)).wait()
    in_pieces(second, ["next"], done, Turn(turns, 2)).wait()
    assert done == ["one", "next"]


def test_a_rule_that_raises_between_two_pieces_fails_their_work_and_leaves_nobody_waiting(
    two_streams,
):
    def broken(trials):
        raise LookupError("no such trial")

    turns, done, first, second = Turns(), [], *two_streams
    turns.choose = broken
    begun, go_on = threading.Event(), threading.Event()
    pieces = [Piece(lambda: begun.set() or go_on.wait()), Piece(lambda: done.append("rest"))]
    failed = first.submit_pieces(pieces, turn=Turn(turns, 0))
    begun.wait()
    waited = in_pieces(second, ["other"], done, Turn(turns, 1))
    wait_until(lambda: turns._waiting)
    go_on.set()
    with pytest.raises(LookupError, match="no such trial"):
        failed.wait()
    waited.wait()
    assert done == ["other"]


def test_work_of_no_pieces_is_over_at_once(two_streams):
    two_streams[0].submit_pieces([], turn=Turn(Turns(), 0)).wait()


def test_work_that_nobody_wants_any_more_waits_for_no_turn(two_streams):
    turns, done, first, second = Turns(), [], *two_streams
    hold, off = threading.Event(), threading.Event()
    held = first.submit(hold.wait, turn=Turn(turns, 1))
    wait_until(lambda: not turns._free)
    left_out = [
        second.submit_pieces(
            [Piece(lambda: done.append("never"))] * 3,
            turn=Turn(turns, 2, off.is_set),
        )
        for _ in range(2)  # one that waits for a turn, and one behind it
    ]
    wait_until(lambda: turns._waiting)
    off.set()
    turns.let_go()
    second.close()  # while the turn is another one's
    assert not hold.is_set()
    assert all(event.done for event in left_out)
    hold.set()
    held.wait()
    assert not done
    assert turns._free == 1


def test_work_that_gave_way_goes_on_without_a_turn_when_it_is_off(two_streams):
    turns, done, first, second = Turns(), [], *two_streams
    turns.choose = max
    begun, go_on, hold, off = (threading.Event() for _ in range(4))
    pieces = [Piece(lambda: begun.set() or go_on.wait()), Piece(lambda: done.append("never"))]
    gone = first.submit_pieces(pieces, turn=Turn(turns, 1, off.is_set))
    begun.wait()
    urgent = second.submit(hold.wait, turn=Turn(turns, 2))
    wait_until(lambda: turns._waiting)
    go_on.set()
    wait_until(lambda: turns._waiting and turns._waiting[0].claim == 1)
    off.set()
    turns.let_go()
    gone.wait()
    hold.set()
    urgent.wait()
    assert not done
    assert in_pieces(first, ["next"], done, Turn(turns, 3)).wait() is None
    assert done == ["next"]
