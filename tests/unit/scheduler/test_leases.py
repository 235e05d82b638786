import random

import pytest

from shoal.core.errors import TransitionError
from shoal.scheduler.leases import (
    DeviceJoined,
    DeviceLost,
    ExtendLease,
    GrantLease,
    LeaseEnded,
    Leases,
    StepFinished,
    TrialAdded,
    TrialEnded,
)
from shoal.scheduler.policy import Fifo, LongestRemainingFirst, Random
from shoal.scheduler.roster import Roster


def study(devices=1, active=1, lease_s=4.0, policy=None):
    """A machine with devices d0, d1, ...; steps of 1 s make leases of ``lease_s`` steps."""
    leases = Leases(policy or LongestRemainingFirst(), active=active, lease_s=lease_s)
    for index in range(devices):
        assert leases.handle(DeviceJoined(f"d{index}")) == []
    return leases


def steps(leases, trial, device, count, seconds=1.0):
    """Finish ``count`` steps; returns what was ordered after the last one."""
    orders = []
    for _ in range(count):
        orders = leases.handle(StepFinished(trial, device, seconds))
    return orders


# Granting


def test_a_trial_is_granted_a_lease_as_soon_as_a_device_is_free():
    leases = study()
    assert leases.handle(TrialAdded(7, 100, 1.0)) == [GrantLease(7, "d0", 4)]
    assert leases.leased == {"d0": (7,)}


def test_a_device_that_joins_takes_what_waits():
    leases = study(devices=0)
    assert leases.handle(TrialAdded(7, 100, 1.0)) == []
    assert leases.waiting == (7,)
    assert leases.handle(DeviceJoined("cuda:0")) == [GrantLease(7, "cuda:0", 4)]


def test_of_many_trials_that_wait_alike_one_looks_for_room(monkeypatch):
    leases, asked, has_room = study(devices=2), [], Roster.has_room

    def ask(self, trial, device):
        asked.append(device)
        return has_room(self, trial, device)

    monkeypatch.setattr(Roster, "has_room", ask)
    for trial in range(500):
        leases.handle(TrialAdded(trial, 100, 1.0))
    asked.clear()
    (granted,) = leases.handle(TrialEnded(0))
    assert granted.device == "d0"
    assert len(asked) < 20


def test_a_lease_is_never_longer_than_the_trial():
    assert study().handle(TrialAdded(1, 1, 1.0)) == [GrantLease(1, "d0", 1)]
    assert study().handle(TrialAdded(1, 2, 9.0)) == [GrantLease(1, "d0", 2)]


def test_leases_get_shorter_towards_the_end_of_a_trial():
    sizes = [study().handle(TrialAdded(1, left, 1.0))[0].steps for left in (100, 40, 30, 20, 5)]
    assert sizes == [4, 4, 3, 2, 2]


def test_leases_do_not_get_shorter_than_many_round_trips():
    leases = study(lease_s=2.0)
    assert leases.handle(TrialAdded(1, 1000, 0.001))[0].steps == 500


def test_a_lease_of_long_steps_has_two_so_that_the_next_is_decided_during_the_first():
    leases = study()
    assert leases.handle(TrialAdded(1, 50, 30.0)) == [GrantLease(1, "d0", 2)]
    assert steps(leases, 1, "d0", 1, seconds=30.0) == [ExtendLease(1, "d0", 1)]


def test_trials_spread_over_devices_before_they_share_one():
    leases = study(devices=2, active=2)
    orders = [leases.handle(TrialAdded(t, 10, 1.0))[0].device for t in range(4)]
    assert orders == ["d0", "d1", "d0", "d1"]


def test_more_trials_than_places_wait():
    leases = study(devices=2, active=2)
    for trial in range(5):
        leases.handle(TrialAdded(trial, 10, 1.0))
    assert leases.waiting == (4,)


def test_the_longest_waiting_trial_is_granted_first():
    leases = study(devices=0)
    for trial, left in enumerate((10, 30, 20)):
        leases.handle(TrialAdded(trial, left, 1.0))
    assert leases.handle(DeviceJoined("d0"))[0].trial == 1


def test_fifo_grants_in_the_order_of_arrival():
    leases = study(devices=0, policy=Fifo())
    for trial, left in enumerate((10, 30, 20)):
        leases.handle(TrialAdded(trial, left, 1.0))
    assert leases.handle(DeviceJoined("d0"))[0].trial == 0


def test_random_repeats_itself_with_an_equal_generator():
    def chosen():
        leases = study(devices=0, policy=Random(random.Random(3)))
        for trial in range(20):
            leases.handle(TrialAdded(trial, 10, 1.0))
        return leases.handle(DeviceJoined("d0"))

    assert chosen() == chosen()


# Extending


def test_a_lease_is_topped_up_when_half_of_it_is_left():
    leases = study()
    leases.handle(TrialAdded(1, 100, 1.0))
    assert steps(leases, 1, "d0", 1) == []
    assert steps(leases, 1, "d0", 1) == [ExtendLease(1, "d0", 2)]
    assert steps(leases, 1, "d0", 1) == []
    assert steps(leases, 1, "d0", 1) == [ExtendLease(1, "d0", 2)]


def test_the_last_lease_is_not_extended():
    leases = study()
    leases.handle(TrialAdded(1, 5, 1.0))
    assert steps(leases, 1, "d0", 2) == [ExtendLease(1, "d0", 1)]
    assert steps(leases, 1, "d0", 3) == []


def test_the_length_of_a_lease_follows_the_measured_steps():
    leases = study(lease_s=8.0)
    assert leases.handle(TrialAdded(1, 1000, 1.0))[0].steps == 8
    # When its steps turn out to be ten times faster than predicted
    orders = [order for _ in range(100) for order in steps(leases, 1, "d0", 1, seconds=0.1)]
    # Then about 80 of them make a lease, topped up by half of it
    assert 30 <= max(order.steps for order in orders) <= 50


def test_a_short_trial_leaves_when_a_longer_one_has_no_slack():
    # Given trials of 100 and 140 s on two devices, and one of 1000 s that waits
    leases = study(devices=2)
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(TrialAdded(2, 140, 1.0))
    leases.handle(TrialAdded(3, 1000, 1.0))
    # When half of each lease is done
    assert steps(leases, 1, "d0", 2) == []
    assert steps(leases, 2, "d1", 2) == [ExtendLease(2, "d1", 2)]
    # Then only the shorter one runs out of lease and the long one has its place
    assert steps(leases, 1, "d0", 2) == []
    assert leases.handle(LeaseEnded(1, "d0", 96)) == [GrantLease(3, "d0", 4)]
    assert leases.waiting == (1,)


def test_a_longer_trial_with_slack_waits_in_peace():
    # Given three devices and much short work: 1000 s are far from the study's end
    leases = study(devices=3)
    for trial in range(3):
        leases.handle(TrialAdded(trial, 2000, 1.0))
        steps(leases, trial, f"d{trial}", 2)
    for trial in range(3, 9):
        leases.handle(TrialAdded(trial, 2000, 1.0))
    leases.handle(TrialAdded(9, 2500, 1.0))
    # When the running trials come to their next decision, then they stay
    assert all(steps(leases, trial, f"d{trial}", 2) for trial in range(3))


def test_one_device_has_no_reason_to_change_the_order():
    leases = study()
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(TrialAdded(2, 1000, 1.0))
    assert steps(leases, 1, "d0", 2) == [ExtendLease(1, "d0", 2)]


def test_equal_trials_do_not_take_each_others_place_lease_by_lease():
    leases = study(devices=2)
    for trial in range(8):
        leases.handle(TrialAdded(trial, 100, 1.0))
    assert len([order for _ in range(50) for order in steps(leases, 0, "d0", 1)]) > 20
    assert leases.leased["d0"] == (0,)


def test_a_trial_that_was_never_measured_is_tried_while_there_is_time():
    # Given as many trials as finish just in time if all are as short as predicted
    leases = study(devices=2)
    for trial in range(4):
        leases.handle(TrialAdded(trial, 100, 1.0))
    # Then one of those that wait may well be longer, and gets a place at once
    assert steps(leases, 0, "d0", 4) == []
    assert leases.handle(LeaseEnded(0, "d0", 96))[0].trial == 2


def test_a_place_is_given_up_once_for_each_trial_that_needs_one():
    leases = study(devices=3)
    for trial in range(3):
        leases.handle(TrialAdded(trial, 100, 1.0))
    leases.handle(TrialAdded(9, 1000, 1.0))
    extended = [bool(steps(leases, trial, f"d{trial}", 2)) for trial in range(3)]
    assert extended.count(False) == 1


def test_a_trial_is_extended_after_all_when_the_one_that_needed_its_place_is_gone():
    leases = study(devices=2)
    leases.handle(TrialAdded(0, 1000, 1.0))
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(TrialAdded(2, 1000, 1.0))
    assert steps(leases, 1, "d1", 2) == []
    leases.handle(TrialEnded(2))
    assert steps(leases, 1, "d1", 1) == [ExtendLease(1, "d1", 3)]


def test_a_late_extension_does_not_disturb_the_next_lease():
    # Given an extension that crossed the worker's LeaseEnded
    leases = study()
    leases.handle(TrialAdded(1, 100, 1.0))
    assert steps(leases, 1, "d0", 2) == [ExtendLease(1, "d0", 2)]
    # When the worker says that the lease had ended after 4 steps
    orders = leases.handle(LeaseEnded(1, "d0", 96))
    # Then a new lease begins with all its steps
    assert orders == [GrantLease(1, "d0", 4)]


# Unknown length


def test_unknown_length_counts_as_one_more_lease():
    leases = study(devices=0)
    leases.handle(TrialAdded(1, None, 1.0))
    leases.handle(TrialAdded(2, 5, 1.0))
    leases.handle(TrialAdded(3, 3, 1.0))
    leases.handle(DeviceJoined("d0"))
    assert leases.leased == {"d0": (2,)}  # 5 s, then 4 s (one lease), then 3 s
    assert leases.handle(DeviceJoined("d1"))[0] == GrantLease(1, "d1", 4)


def test_unknown_length_is_extended_until_the_worker_says_it_ended():
    leases = study()
    leases.handle(TrialAdded(1, None, 1.0))
    assert steps(leases, 1, "d0", 50) == [ExtendLease(1, "d0", 2)]
    assert leases.handle(LeaseEnded(1, "d0", 0)) == []
    assert leases.waiting == ()
    assert leases.handle(TrialEnded(1)) == []


def test_a_length_becomes_known_at_the_end_of_a_lease():
    leases = study()
    leases.handle(TrialAdded(1, None, 1.0))
    assert leases.handle(LeaseEnded(1, "d0", 2)) == [GrantLease(1, "d0", 2)]


def test_a_length_becomes_known_with_a_step_in_the_middle_of_a_lease():
    leases = study()
    leases.handle(TrialAdded(1, None, 1.0))
    assert steps(leases, 1, "d0", 1) == []
    assert leases.handle(StepFinished(1, "d0", 1.0, steps_left=1)) == []
    assert steps(leases, 1, "d0", 1) == []
    with pytest.raises(TransitionError, match="0 steps left in its lease"):
        leases.handle(StepFinished(1, "d0", 1.0))


# Sharing a device


def test_two_trials_of_one_device_separate_when_another_device_is_idle():
    leases = study(active=2)
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(TrialAdded(2, 100, 1.0))
    leases.handle(DeviceJoined("d1"))
    assert steps(leases, 1, "d0", 4) == []
    assert leases.handle(LeaseEnded(1, "d0", 96)) == [GrantLease(1, "d1", 4)]
    assert steps(leases, 2, "d0", 2) == [ExtendLease(2, "d0", 2)]


def test_only_one_trial_moves_to_an_idle_device():
    leases = study(active=3)
    for trial in range(3):
        leases.handle(TrialAdded(trial, 100, 1.0))
    leases.handle(DeviceJoined("d1"))
    extended = [bool(steps(leases, trial, "d0", 2)) for trial in range(3)]
    assert extended == [False, True, True]


def test_nobody_moves_for_less_than_a_lease_and_the_move():
    leases = study(active=2)
    leases.handle(TrialAdded(1, 4, 1.0, switch_s=10.0))
    leases.handle(TrialAdded(2, 6, 1.0, switch_s=10.0))
    leases.handle(DeviceJoined("d1"))
    assert steps(leases, 2, "d0", 1) == [ExtendLease(2, "d0", 1)]


def test_a_trial_prefers_the_device_where_it_is_at_home():
    # Given trial 1 at home on d1 and a shorter trial that never ran
    leases = study(devices=2, policy=LongestRemainingFirst())
    leases.handle(TrialAdded(0, 100, 1.0))
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(TrialAdded(2, 97, 1.0))
    # When its lease ended there
    orders = leases.handle(LeaseEnded(1, "d1", 96))
    # Then it stays, because the other's 97 s are hardly more than its 96 s
    assert orders == [GrantLease(1, "d1", 4)]


# Losing and ending


def test_trials_of_a_lost_device_go_on_elsewhere_from_their_stored_state():
    leases = study(devices=2)
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(TrialAdded(2, 3, 1.0))
    steps(leases, 1, "d0", 4)
    assert leases.handle(DeviceLost("d0", {1: 98})) == []
    assert leases.waiting == (1,)
    assert leases.handle(TrialEnded(2)) == [GrantLease(1, "d1", 4)]
    steps(leases, 1, "d1", 98)
    with pytest.raises(TransitionError, match="with 0 steps left in its lease"):
        leases.handle(StepFinished(1, "d1", 1.0))


def test_a_device_may_join_again_after_it_was_lost():
    leases = study()
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(DeviceLost("d0"))
    assert leases.handle(DeviceJoined("d0")) == [GrantLease(1, "d0", 4)]


def test_the_device_of_an_ended_trial_goes_to_the_next():
    leases = study()
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(TrialAdded(2, 100, 1.0))
    assert leases.handle(TrialEnded(1)) == [GrantLease(2, "d0", 4)]


def test_what_was_on_its_way_when_a_trial_ended_is_ignored():
    leases = study()
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(TrialEnded(1))
    assert leases.handle(StepFinished(1, "d0", 1.0)) == []
    assert leases.handle(LeaseEnded(1, "d0", 96)) == []
    assert leases.handle(TrialEnded(1)) == []


def test_an_ended_trial_may_be_added_again_with_new_steps():
    leases = study()
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(TrialEnded(1))
    assert leases.handle(TrialAdded(1, 50, 1.0)) == [GrantLease(1, "d0", 4)]


# Refusals


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (DeviceJoined("d0"), "device 'd0' joined twice; 1 devices are known"),
        (DeviceLost("d9"), "device 'd9' was lost but is not known; known are d0"),
        (DeviceLost("d0", {5: 1}), "steps_left of trials 5, which have no lease on it; .* are 1"),
        (DeviceLost("d0", {1: -1}), "trial 1 on the lost device 'd0' has -1 steps left"),
        (TrialAdded(1, 5, 1.0), "trial 1 was added twice; it has 100 steps left"),
        (TrialAdded(3, 0, 1.0), "trial 3 was added with steps_left=0"),
        (TrialAdded(3, -2, 1.0), "trial 3 has -2 steps left"),
        (TrialAdded(3, 5, 0.0), "step_s=0.0"),
        (TrialAdded(3, 5, 1.0, -1.0), "switch_s=-1.0"),
        (StepFinished(3, "d0", 1.0), "trial 3 finished a step but was never added; 2 trials"),
        (StepFinished(2, "d0", 1.0), "trial 2 finished a step on 'd0', but it waits with 50"),
        (StepFinished(1, "d1", 1.0), "on 'd1', but it has its lease on 'd0' with 100 steps left"),
        (StepFinished(1, "d0", -1.0), "finished a step of -1.0 s"),
        (StepFinished(1, "d0", 1.0, -1), "trial 1 on 'd0' has -1 steps left"),
        (LeaseEnded(2, "d0", 1), "trial 2 ended its lease on 'd0', but it waits"),
        (LeaseEnded(1, "d0", 101), "with 101 steps left; it had 100 when the lease began"),
        (LeaseEnded(1, "d0", None), "with None steps left; it had 100"),
        (LeaseEnded(1, "d0", -1), "trial 1 on 'd0' has -1 steps left"),
        (TrialEnded(3), "trial 3 ended but was never added"),
    ],
)
def test_an_impossible_event_is_refused_with_its_numbers_and_changes_nothing(event, message):
    leases = study()
    leases.handle(TrialAdded(1, 100, 1.0))
    leases.handle(TrialAdded(2, 50, 1.0))
    with pytest.raises(TransitionError, match=message):
        leases.handle(event)
    assert (leases.leased, leases.waiting) == ({"d0": (1,)}, (2,))


def test_a_step_beyond_the_lease_is_refused():
    leases = study()
    leases.handle(TrialAdded(1, 2, 1.0))
    steps(leases, 1, "d0", 2)
    with pytest.raises(TransitionError, match="0 steps left in its lease"):
        leases.handle(StepFinished(1, "d0", 1.0))
