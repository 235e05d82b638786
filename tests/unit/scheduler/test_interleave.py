import pytest

from shoal.core.errors import TransitionError
from shoal.scheduler.interleave import Candidate, Interleaver


def candidate(trial, ticket, remaining_s=1.0, warm=False):
    return Candidate(trial, ticket, remaining_s, warm)


def test_of_those_with_as_much_left_the_oldest_step_goes_first():
    interleaver = Interleaver()
    assert interleaver.choose([candidate(1, 7, warm=True), candidate(2, 3)]) == 2


def test_between_two_steps_the_resident_trial_goes_first():
    interleaver = Interleaver()
    assert interleaver.choose([candidate(1, 5), candidate(2, 5, warm=True)]) == 2


def test_equal_tickets_and_residency_leave_the_longest_remaining():
    interleaver = Interleaver()
    assert interleaver.choose([candidate(1, 5, 1.0), candidate(2, 5, 2.0)]) == 2


def test_the_choice_does_not_depend_on_the_order_of_candidates():
    interleaver = Interleaver()
    candidates = [candidate(3, 5), candidate(1, 5), candidate(2, 5)]
    assert interleaver.choose(candidates) == interleaver.choose(candidates[::-1]) == 1


def test_steps_draw_tickets_in_the_order_they_start():
    interleaver = Interleaver()
    assert interleaver.started(4, step=0) == 0
    assert interleaver.started(9, step=0) == 1
    interleaver.step_finished(4)
    assert interleaver.ticket(4) == 2  # the one its next step will get
    assert interleaver.started(4, step=1) == 2
    assert interleaver.ticket(9) == 1


def test_no_candidates_is_refused_with_the_steps_in_progress():
    interleaver = Interleaver()
    interleaver.started(1, step=0)
    with pytest.raises(TransitionError, match="no candidates; in progress are steps of 1 trial"):
        interleaver.choose([])


def test_a_second_step_of_a_trial_is_refused_until_the_first_ends():
    interleaver = Interleaver()
    interleaver.started(1, step=3)
    with pytest.raises(TransitionError, match=r"started step 4 while its step 3 \(ticket 0\)"):
        interleaver.started(1, step=4)


def test_a_step_that_never_started_cannot_finish():
    interleaver = Interleaver()
    interleaver.started(2, step=0)
    with pytest.raises(TransitionError, match=r"trial 1 finished a step .* in progress: 2"):
        interleaver.step_finished(1)


def test_a_forgotten_trial_may_start_its_step_again():
    interleaver = Interleaver()
    interleaver.started(1, step=3)
    interleaver.forget(1)
    interleaver.forget(1)
    assert interleaver.started(1, step=3) == 1


def test_two_equal_trials_take_turns_by_step_and_not_by_unit():
    # Given two trials of 3 units a step, always feasible
    interleaver = Interleaver()
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


def test_it_goes_by_another_rule_from_then_on_and_steps_keep_their_tickets():
    interleaver = Interleaver()
    assert interleaver.started(1, step=0) == 0
    short = candidate(1, interleaver.ticket(1), 4.0)._replace(step_s=1.0)
    long = candidate(2, interleaver.ticket(2), 9.0)._replace(step_s=3.0)
    assert interleaver.choose([short, long]) == 2
    interleaver.follow("shortest step first")
    assert interleaver.choose([short, long]) == 1
    assert interleaver.ticket(1) == 0
