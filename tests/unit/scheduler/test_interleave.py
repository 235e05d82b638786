import pytest

from shoal.core.errors import TransitionError
from shoal.scheduler.interleave import Candidate, Interleaver
from shoal.scheduler.policy import LongestLeftFirst


def candidate(trial, ticket, remaining_s=1.0, warm=False):
    return Candidate(trial, ticket, remaining_s, warm)


def test_of_those_with_as_much_left_the_oldest_step_goes_first():
    interleaver = Interleaver(LongestLeftFirst())
    assert interleaver.choose([candidate(1, 7, warm=True), candidate(2, 3)]) == 2


def test_between_two_steps_the_resident_trial_goes_first():
    interleaver = Interleaver(LongestLeftFirst())
    assert interleaver.choose([candidate(1, 5), candidate(2, 5, warm=True)]) == 2


def test_equal_tickets_and_residency_leave_the_longest_remaining():
    interleaver = Interleaver(LongestLeftFirst())
    assert interleaver.choose([candidate(1, 5, 1.0), candidate(2, 5, 2.0)]) == 2


def test_the_choice_does_not_depend_on_the_order_of_candidates():
    interleaver = Interleaver(LongestLeftFirst())
    candidates = [candidate(3, 5), candidate(1, 5), candidate(2, 5)]
    assert interleaver.choose(candidates) == interleaver.choose(candidates[::-1]) == 1


def test_steps_draw_tickets_in_the_order_they_start():
    interleaver = Interleaver(LongestLeftFirst())
    assert interleaver.started(4, step=0) == 0
    assert interleaver.started(9, step=0) == 1
    interleaver.step_finished(4)
    assert interleaver.ticket(4) == 2  # the one its next step will get
    assert interleaver.started(4, step=1) == 2
    assert interleaver.ticket(9) == 1


def test_no_candidates_is_refused_with_the_steps_in_progress():
    interleaver = Interleaver(LongestLeftFirst())
    interleaver.started(1, step=0)
    with pytest.raises(TransitionError, match="no candidates; in progress are steps of 1 trial"):
        interleaver.choose([])


def test_a_second_step_of_a_trial_is_refused_until_the_first_ends():
    interleaver = Interleaver(LongestLeftFirst())
    interleaver.started(1, step=3)
    with pytest.raises(TransitionError, match=r"started step 4 while its step 3 \(ticket 0\)"):
        interleaver.started(1, step=4)


def test_a_step_that_never_started_cannot_finish():
    interleaver = Interleaver(LongestLeftFirst())
    interleaver.started(2, step=0)
    with pytest.raises(TransitionError, match=r"trial 1 finished a step .* in progress: 2"):
        interleaver.step_finished(1)


def test_a_forgotten_trial_may_start_its_step_again():
    interleaver = Interleaver(LongestLeftFirst())
    interleaver.started(1, step=3)
    interleaver.forget(1)
    interleaver.forget(1)
    assert interleaver.started(1, step=3) == 1


def test_two_equal_trials_take_turns_by_step_and_not_by_unit():
    # Given two trials of 3 units a step, always feasible
    interleaver = Interleaver(LongestLeftFirst())
    units_done, steps_done, order = {1: 0, 2: 0}, {1: 0, 2: 0}, []
    # When twelve units run
    for _ in range(12):
        chosen = interleaver.choose(
            [candidate(t, interleaver.ticket(t), 10.0 - steps_done[t]) for t in (1, 2)]
        )
        order.append(chosen)
        if units_done[chosen] == 0:
            interleaver.started(chosen, steps_done[chosen])
        units_done[chosen] = (units_done[chosen] + 1) % 3
        if units_done[chosen] == 0:
            interleaver.step_finished(chosen)
            steps_done[chosen] += 1
    # Then whole steps alternate
    assert order == [1, 1, 1, 2, 2, 2, 1, 1, 1, 2, 2, 2]


def of(trial, ticket, left_s, step_s=1.0):
    return Candidate(trial=trial, ticket=ticket, remaining_s=left_s, warm=False, step_s=step_s)


def test_the_trial_with_the_most_steps_left_goes_first():
    ready = [of(0, ticket=1, left_s=5.0), of(1, ticket=2, left_s=9.0)]
    assert LongestLeftFirst().choose(ready).trial == 1


def test_of_trials_with_as_many_whole_steps_left_the_oldest_step_goes_first():
    ready = [of(0, ticket=2, left_s=9.4), of(1, ticket=1, left_s=8.6)]
    assert LongestLeftFirst().choose(ready).trial == 1


def test_what_is_left_is_counted_in_steps_of_the_longest():
    ready = [of(0, ticket=1, left_s=20.0, step_s=10.0), of(1, ticket=2, left_s=23.0, step_s=0.1)]
    assert LongestLeftFirst().choose(ready).trial == 0


def test_trials_of_unknown_length_take_turns_by_age():
    ready = [of(0, 2, 0.0, 0.0), of(1, 1, 0.0, 0.0)]
    assert LongestLeftFirst().choose(ready).trial == 1
