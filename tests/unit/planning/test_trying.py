"""Arrays are tried on all devices at the same moments, and the slowest of them counts."""

from __future__ import annotations

import time

import pytest

from shoal.core.spec import TrialSpec
from shoal.core.units import Bytes, Seconds
from shoal.planner.width import ArrayPace, Candidate
from shoal.planning.trying import (
    AT_LENGTH,
    BRIEFLY,
    EVEN_S,
    LEAD_S,
    found_of,
    noise_of,
    try_arrays,
)
from shoal.runtime.pool import Gone
from shoal.runtime.wire.messages import (
    ArrayTry,
    MeasuredArray,
    Refused,
    TimeArray,
    TimedArray,
)

TRIALS = [TrialSpec(number=n, hp={}, seed=n) for n in range(8)]
BUILT = ArrayTry(unit_bytes=Bytes(7), build_s=Seconds(0.5), once_s=(0.01, 0.02, 0.0, 0.0), nodes=3)


class Workers:
    """Answer in turn; ``built`` and ``rounds`` by worker."""

    def __init__(self, built, rounds=((1.0, 2.0, 0.0, 0.0),)):
        self.built, self.rounds, self.asked = built, rounds, []

    def measure_arrays(self, order, count, only=()):
        self.asked.append((order, count))
        self.only = list(only)
        names = list(only) or range(min(count, len(self.built)))
        if isinstance(order, TimeArray):
            return {n: TimedArray(0, self.rounds) for n in names}
        return {
            n: MeasuredArray(0, self.built[n])
            if isinstance(self.built[n], ArrayTry)
            else self.built[n]
            for n in names
        }


def tried(workers, *candidates, **options):
    todo = list(candidates)
    return try_arrays(
        workers, TRIALS, len(workers.built), lambda _: todo.pop(0) if todo else None, **options
    )


def test_all_workers_are_told_the_same_moment_which_is_still_to_come():
    workers = Workers([BUILT, BUILT])
    before = time.monotonic()
    tried(workers, Candidate(4, "eager"))
    (built, two), (timed, also) = workers.asked
    assert (built.width, built.kind, two, also) == (4, "eager", 2, 2)
    assert before + LEAD_S <= timed.begin <= time.monotonic() + LEAD_S
    assert timed.slices_s == (AT_LENGTH.slice_s, AT_LENGTH.slice_s, 0.0, 0.0)
    assert timed.rounds == AT_LENGTH.rounds


def test_a_slice_is_as_long_as_what_takes_longest_on_any_device():
    workers = Workers([BUILT, ArrayTry(once_s=(0.01, 2.0, 0.1, 9.0))])
    tried(workers, Candidate(4, "eager"))
    timed = workers.asked[1][0]
    assert timed.slices_s == pytest.approx((EVEN_S, 2.4, 0.12, 10.8))
    assert timed.rounds == 3


def test_a_trial_alone_is_timed_as_long_as_the_array_beside_it():
    """In a slice of two short steps what passes over the machine hits one of the two alone."""
    workers = Workers([ArrayTry(once_s=(0.009, 0.15, 0.0, 0.0))])
    tried(workers, Candidate(16, "eager"))
    assert workers.asked[1][0].slices_s == pytest.approx((0.18, 0.18, 0.0, 0.0))


def test_short_studies_are_looked_at_for_less_long():
    workers = Workers([BUILT])
    tried(workers, Candidate(4, "eager"), pace=ArrayPace(3, 0.02))
    timed = workers.asked[1][0]
    assert timed.rounds == 3
    assert timed.slices_s == pytest.approx((0.024, 0.024, 0.0, 0.0))


def test_briefly_is_one_round():
    workers = Workers([BUILT])
    tried(workers, Candidate(4, "eager"), pace=BRIEFLY)
    assert workers.asked[1][0].rounds == 1


def test_the_median_of_a_workers_rounds_counts_and_the_slowest_worker():
    quick = [(1.0, 2.0, 0.1, 0.4)] * 3
    slow = [(1.5, 9.0, 0.2, 0.3), (1.5, 4.0, 0.0, 0.0), (1.4, 4.0, 0.2, 0.3)]
    found = found_of(Candidate(8, "traced"), [BUILT, BUILT], [quick, slow])
    assert (found.width, found.kind) == (8, "traced")
    assert (found.alone_s, found.step_s) == (1.5, 4.0)
    assert (found.alone_valid_s, found.valid_s) == (0.2, 0.4)
    assert (found.unit_bytes, found.build_s) == (7, 0.5)


def test_noise_is_by_what_rounds_differ():
    assert noise_of([(1.0, 2.0, 0, 0)] * 5) == 0
    assert noise_of([(1.0, 2.0, 0, 0)]) == 0
    some = noise_of([(1.0, 2.0, 0, 0), (1.0, 2.4, 0, 0), (1.0, 1.6, 0, 0)])
    assert 0.1 < some < 0.3


def test_an_array_that_had_one_round_is_no_steadier_than_the_trial_alone():
    assert noise_of([(1.0, 9.0, 0, 0), (1.0, 0.0, 0, 0), (1.0, 0.0, 0, 0)]) == 0
    some = noise_of([(1.0, 9.0, 0, 0), (1.2, 0.0, 0, 0), (0.8, 0.0, 0, 0)])
    assert some == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Gone("it was killed"), "it was killed"),
        (Refused(0, "Traceback\nValueError: no", None), "ValueError: no"),
        (ArrayTry(declined="it is odd"), "it is odd"),
    ],
)
def test_what_keeps_one_worker_from_it_declines_all(answer, words):
    measure = tried(Workers([BUILT, answer]), Candidate(4, "eager"))
    assert words in measure.declined


def test_where_one_is_declined_the_others_let_go_of_theirs():
    """They were kept for two minutes, beside the trials that had come to the device by then."""
    workers = Workers([BUILT, ArrayTry(declined="it is odd"), BUILT])
    tried(workers, Candidate(4, "eager"))
    _, (told, count) = workers.asked
    assert (told.rounds, count) == (0, 2)
    assert workers.only == [0, 2]


def test_what_keeps_a_graph_from_being_made_leaves_the_others():
    odd = ArrayTry(declined="no graph", is_kind=True)
    measure = tried(Workers([odd]), Candidate(4, "traced"))
    assert measure.declined == ""
    assert [(f.width, f.kind, f.declined) for f in measure.widths] == [(4, "traced", "no graph")]


def test_that_passes_may_overlap_is_known_from_then_on():
    one = ArrayTry(once_s=(0.01, 0.02, 0.0, 0.0), overlaps=True)
    other = ArrayTry(declined="no graph", is_kind=True)
    assert tried(Workers([one]), Candidate(4, "eager")).overlaps
    assert tried(Workers([other]), Candidate(4, "eager")).overlaps is False
    odd = ArrayTry(declined="it differs", is_kind=True, overlaps=True)
    measure = tried(Workers([odd]), Candidate(4, "eager"), Candidate(16, "eager"))
    assert measure.overlaps
    assert not measure.declined


def test_what_it_took_is_told():
    measure = tried(Workers([BUILT]), Candidate(4, "eager"), Candidate(8, "eager"))
    assert 0 < measure.first_s <= measure.took_s
    assert [found.width for found in measure.widths] == [4, 8]
    assert measure.nodes == 3
