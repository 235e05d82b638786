import pytest

from shoal.core.errors import TransitionError
from shoal.scheduler.leases import (
    DeviceJoined,
    DeviceLost,
    ExtendLease,
    GrantLease,
    Held,
    LeaseEnded,
    Leases,
    Released,
    StepFinished,
    TrialAdded,
    TrialEnded,
)
from shoal.scheduler.policy import Fifo, LongestRemainingFirst


def study(devices=2, active=1, policy=None):
    """A machine with devices d0, d1, ...; steps of 1 s make leases of 4 steps."""
    leases = Leases(policy or LongestRemainingFirst(), active=active, lease_s=4.0)
    for index in range(devices):
        assert leases.handle(DeviceJoined(f"d{index}")) == []
    return leases


def add(leases, trial, left=100, **how):
    return leases.handle(TrialAdded(trial, left, 1.0, **how))


def steps(leases, trial, device, count):
    """Finish ``count`` steps; returns what was ordered after the last one."""
    orders = []
    for _ in range(count):
        orders = leases.handle(StepFinished(trial, device, 1.0))
    return orders


def calling(devices=2, gang=2, left=100):
    """Single trials on all devices but d0, which is free, and kept for gang 7 that waits."""
    leases = study(devices=devices)
    for trial in range(devices):
        add(leases, trial)
        steps(leases, trial, f"d{trial}", 1)
    add(leases, 7, left=left, gang=gang)
    assert leases.handle(TrialEnded(0)) == []
    assert leases.called == {f"d{index}": 7 for index in range(gang)}
    return leases


# Granting


def test_a_gang_is_granted_all_its_devices_at_once():
    leases = study(devices=3)
    assert add(leases, 7, gang=2) == [GrantLease(7, "d0", 4, ("d0", "d1"))]
    assert leases.leased == {"d0": (7,), "d1": (7,), "d2": ()}


def test_the_grant_of_an_ordinary_trial_names_its_one_device():
    assert add(study(), 7)[0].devices == ("d0",)


def test_a_gang_waits_until_enough_devices_have_joined():
    leases = study(devices=1)
    assert add(leases, 7, gang=3) == []
    assert leases.handle(DeviceJoined("d1")) == []
    assert leases.waiting == (7,)
    assert leases.handle(DeviceJoined("d2")) == [GrantLease(7, "d0", 4, ("d0", "d1", "d2"))]


def test_devices_that_are_too_few_for_a_gang_go_to_others():
    leases = study(devices=2)
    add(leases, 7, gang=3)
    assert add(leases, 1)[0].device == "d0"
    assert add(leases, 2)[0].device == "d1"
    assert steps(leases, 1, "d0", 2) == [ExtendLease(1, "d0", 2)]
    assert leases.called == {}


def test_a_gang_takes_one_place_on_each_of_its_devices():
    leases = study(active=2)
    add(leases, 7, gang=2)
    assert [add(leases, trial)[0].device for trial in (1, 2)] == ["d0", "d1"]
    assert add(leases, 3) == []
    assert leases.leased == {"d0": (7, 1), "d1": (7, 2)}


def test_two_gangs_share_their_devices_each_in_its_own_order():
    # Given a trial on d0, so that a gang has its first stage on d1
    leases = study(active=2)
    add(leases, 1)
    assert add(leases, 7, gang=2)[0].devices == ("d1", "d0")
    # When the trial is gone, then a second gang begins where there is as much to do
    leases.handle(TrialEnded(1))
    assert add(leases, 8, gang=2)[0].devices == ("d0", "d1")
    assert leases.leased == {"d0": (7, 8), "d1": (7, 8)}


def test_a_gang_goes_back_to_where_it_was_stage_by_stage():
    # Given a gang on d1 and d2, beside a short trial on d1, while d0 has become empty
    leases = study(devices=3, active=2)
    add(leases, 1, left=200)
    assert add(leases, 7, gang=2)[0].devices == ("d1", "d2")
    assert add(leases, 2, left=3)[0].device == "d1"
    leases.handle(TrialEnded(1))
    # When its lease ends, then the emptier device does not tempt it for less than a lease
    assert leases.handle(LeaseEnded(7, "d1", 96))[0].devices == ("d1", "d2")


def test_a_stage_stays_where_it_was_when_another_has_lost_its_device():
    leases = study(devices=3)
    add(leases, 7, gang=2)
    orders = leases.handle(DeviceLost("d0", {7: 90}))
    assert orders == [GrantLease(7, "d2", 4, ("d2", "d1"))]


def test_a_device_that_joins_again_after_it_was_lost_is_nobodys_home():
    leases = study(devices=2)
    add(leases, 7, gang=2)
    leases.handle(DeviceLost("d0", {7: 90}))
    leases.handle(Held())
    leases.handle(DeviceJoined("d2"))
    leases.handle(DeviceJoined("d0"))
    assert leases.handle(Released())[0].devices == ("d2", "d1")


# Extending and ending


def test_a_gangs_leader_speaks_for_it():
    leases = study()
    add(leases, 7, gang=2)
    assert steps(leases, 7, "d0", 2) == [ExtendLease(7, "d0", 2)]
    assert leases.handle(LeaseEnded(7, "d0", 98)) == [GrantLease(7, "d0", 4, ("d0", "d1"))]


def test_all_devices_of_an_ended_gang_go_to_others():
    leases = study()
    add(leases, 7, gang=2)
    add(leases, 1)
    add(leases, 2)
    assert [order.device for order in leases.handle(TrialEnded(7))] == ["d0", "d1"]


def test_what_was_on_its_way_when_a_gang_ended_is_ignored():
    leases = study()
    add(leases, 7, gang=2)
    leases.handle(TrialEnded(7))
    assert leases.handle(StepFinished(7, "d0", 1.0)) == []


@pytest.mark.parametrize("lost", ["d0", "d1"])
def test_a_gang_that_loses_one_device_leaves_them_all(lost):
    leases = study()
    add(leases, 7, gang=2)
    steps(leases, 7, "d0", 4)
    add(leases, 1, left=40)
    left = ({"d0", "d1"} - {lost}).pop()
    # When one of its devices is gone, then the other is free for a trial that waits
    assert leases.handle(DeviceLost(lost, {7: 98})) == [GrantLease(1, left, 4)]
    assert leases.waiting == (7,)
    # And the gang goes on from its stored state when there are enough devices again
    leases.handle(TrialEnded(1))
    (order,) = leases.handle(DeviceJoined("d2"))
    assert (order.trial, set(order.devices)) == (7, {left, "d2"})
    steps(leases, 7, order.device, 98)
    with pytest.raises(TransitionError, match="with 0 steps left in its lease"):
        leases.handle(StepFinished(7, order.device, 1.0))


# Calling


def test_a_gang_calls_its_devices_while_single_trials_want_them_too():
    # Given trials on three devices, and a gang that waits for two before another single trial
    leases = calling(devices=3)
    assert add(leases, 4, left=20) == []
    # When the leases come to their middle, then one of the called device is not topped up
    assert steps(leases, 1, "d1", 1) == []
    assert steps(leases, 2, "d2", 1) == [ExtendLease(2, "d2", 2)]
    assert steps(leases, 1, "d1", 2) == []
    # And with its end the gang has both devices
    orders = leases.handle(LeaseEnded(1, "d1", 96))
    assert orders == [GrantLease(7, "d0", 4, ("d0", "d1"))]
    assert leases.called == {}
    assert leases.waiting == (4, 1)


def test_a_gang_does_not_wait_for_its_call_when_other_devices_are_free():
    # Given a gang that waits for d1, and a longer trial that waits for any device
    leases = calling(devices=3)
    add(leases, 4, left=1000)
    # When another device comes free, then the gang has waited first
    assert leases.handle(TrialEnded(2)) == [GrantLease(7, "d0", 4, ("d0", "d2"))]
    leases.handle(TrialEnded(4))
    assert steps(leases, 1, "d1", 1) == [ExtendLease(1, "d1", 2)]


def test_a_device_that_the_gang_has_not_called_goes_to_others():
    leases = calling(devices=4, gang=3)
    add(leases, 4)
    assert leases.handle(TrialEnded(3)) == [GrantLease(4, "d3", 4)]
    assert leases.called == {"d0": 7, "d1": 7, "d2": 7}


def test_of_several_trials_on_a_called_device_the_least_in_rank_leaves():
    leases = study(active=2)
    for trial, left in enumerate((1000, 1000, 900, 80)):
        add(leases, trial, left=left)
    assert leases.leased == {"d0": (0, 2), "d1": (1, 3)}
    for trial, device in ((0, "d0"), (1, "d1"), (2, "d0"), (3, "d1")):
        steps(leases, trial, device, 1)
    # Given a gang that found a place on d0, and whose other one will be on d1
    add(leases, 7, gang=2, left=700)
    leases.handle(TrialEnded(2))
    assert leases.called == {"d0": 7, "d1": 7}
    # When the trials of d1 come to their decision, then one of them leaves
    assert steps(leases, 1, "d1", 1) == [ExtendLease(1, "d1", 2)]
    assert steps(leases, 3, "d1", 1) == []
    assert steps(leases, 0, "d0", 1) == [ExtendLease(0, "d0", 2)]
    assert leases.handle(LeaseEnded(3, "d1", 78))[0].devices == ("d0", "d1")


def test_of_a_called_device_one_trial_leaves_and_not_the_next_as_well():
    # Given two equal trials on each device, and a gang that has called both devices
    leases = study(active=2)
    for trial in range(4):
        add(leases, trial)
        steps(leases, trial, f"d{trial % 2}", 1)
    add(leases, 7, gang=2)
    leases.handle(TrialEnded(0))
    assert leases.called == {"d0": 7, "d1": 7}
    # When the first has been told to leave and the second comes to rank after it
    assert steps(leases, 1, "d1", 1) == []
    assert steps(leases, 3, "d1", 1) == [ExtendLease(3, "d1", 2)]
    # Then it is still the first that leaves
    assert steps(leases, 3, "d1", 2) == [ExtendLease(3, "d1", 2)]


def test_a_trial_that_ranks_before_the_gang_is_not_called_away():
    # Given a trial of 1000 s, which a gang of 100 s would have to send away
    leases = study()
    add(leases, 0)
    add(leases, 1, left=1000)
    add(leases, 7, gang=2)
    assert leases.handle(TrialEnded(0)) == []
    # Then nothing is kept for the gang, and another trial has the free device
    assert leases.called == {}
    assert add(leases, 2, left=20) == [GrantLease(2, "d0", 2)]


def test_a_device_where_one_leaves_anyway_is_called_whoever_that_is():
    # Given an older trial in its last lease
    leases = study(policy=Fifo())
    add(leases, 0)
    add(leases, 1, left=2)
    add(leases, 7, gang=2)
    assert leases.handle(TrialEnded(0)) == []
    assert leases.called == {"d0": 7, "d1": 7}
    assert leases.handle(TrialEnded(1))[0].trial == 7


def test_a_place_that_becomes_free_for_a_gang_is_not_there_for_another_trial():
    # Given a trial without slack beside a gang that has called the place on d1
    leases = calling(devices=3)
    add(leases, 4, left=1000)
    assert steps(leases, 1, "d1", 1) == []
    # Then it needs another one to leave
    assert steps(leases, 2, "d2", 1) == []


def test_a_gang_calls_as_soon_as_it_ranks_before_who_has_to_leave():
    leases = study()
    add(leases, 1, left=120)
    add(leases, 7, gang=2, left=50)
    assert steps(leases, 1, "d0", 10) == [ExtendLease(1, "d0", 2)]
    assert leases.called == {}
    # When the running trial has hardly more to do than the gang may have
    assert steps(leases, 1, "d0", 20) == []
    # Then it leaves, although nothing else has happened
    assert leases.called == {"d0": 7, "d1": 7}


def test_by_fifo_a_gang_waits_for_older_trials_and_sends_away_younger_ones():
    leases = study(devices=3, policy=Fifo())
    for trial in (0, 1):
        add(leases, trial)
    add(leases, 7, gang=3)
    assert leases.called == {}
    assert add(leases, 2)[0].device == "d2"
    assert leases.handle(TrialEnded(0)) == []
    assert leases.called == {}
    assert steps(leases, 1, "d1", 2) == [ExtendLease(1, "d1", 2)]
    assert leases.handle(TrialEnded(1)) == []
    assert leases.called == {"d0": 7, "d1": 7, "d2": 7}
    assert steps(leases, 2, "d2", 2) == []


def test_a_gang_without_slack_calls_although_no_place_is_free():
    # Given two trials of 100 s, and a gang of 1000 s
    leases = study()
    for trial in (0, 1):
        add(leases, trial)
    add(leases, 7, gang=2, left=1000)
    assert leases.called == {}
    # When one of them comes to its decision, then both leave
    assert steps(leases, 0, "d0", 2) == []
    assert leases.called == {"d0": 7, "d1": 7}
    assert steps(leases, 1, "d1", 2) == []
    assert leases.handle(LeaseEnded(0, "d0", 98)) == []
    assert leases.handle(LeaseEnded(1, "d1", 98))[0].devices == ("d0", "d1")


def test_a_longer_gang_with_slack_waits_in_peace():
    leases = study(devices=3)
    for trial in range(3):
        add(leases, trial, left=2000)
        steps(leases, trial, f"d{trial}", 2)
    for trial in range(3, 9):
        add(leases, trial, left=2000)
    add(leases, 9, left=2500, gang=2)
    assert all(steps(leases, trial, f"d{trial}", 2) for trial in range(3))
    assert leases.called == {}


def test_trials_of_an_array_are_not_called_away():
    leases = study()
    add(leases, 0)
    add(leases, 1, lane=("a", 0))
    add(leases, 7, gang=2, left=1000)
    leases.handle(TrialEnded(0))
    assert leases.called == {}
    assert add(leases, 2)[0].device == "d0"
    # When the array is done, then it is the single trial that leaves
    leases.handle(TrialEnded(1))
    assert leases.called == {"d0": 7, "d1": 7}


def test_one_gang_calls_at_a_time():
    # Given a gang that waits for two more devices, and another one that ranks before it
    leases = calling(devices=4, gang=3)
    add(leases, 8, gang=2, left=1000)
    leases.handle(TrialEnded(3))
    assert leases.called == {"d0": 7, "d1": 7, "d2": 7}
    # When the first has what it waits for, then it is the other's turn
    steps(leases, 1, "d1", 3)
    assert leases.handle(LeaseEnded(1, "d1", 96))[0].devices == ("d0", "d1", "d3")
    assert steps(leases, 2, "d2", 1) == []
    assert set(leases.called.values()) == {8}


def test_the_places_of_a_gang_that_ended_before_it_had_them_go_to_others():
    leases = calling()
    add(leases, 4)
    assert leases.handle(TrialEnded(7)) == [GrantLease(4, "d0", 4)]
    assert leases.called == {}
    assert steps(leases, 1, "d1", 1) == [ExtendLease(1, "d1", 2)]


def test_a_gang_whose_called_device_is_lost_calls_others():
    leases = calling(devices=3)
    assert leases.handle(DeviceLost("d1")) == []
    assert leases.called == {"d0": 7, "d2": 7}
    assert steps(leases, 2, "d2", 1) == []


def test_a_gang_whose_called_device_is_lost_does_not_wait_for_one_that_is_left():
    leases = calling()
    assert leases.handle(DeviceLost("d1")) == [GrantLease(1, "d0", 4)]
    assert leases.called == {}


# Overdue


def overdue_gang():
    """Gang 7 waits on two devices with trials 1 and 17, after eight later ones passed it."""
    leases = study()
    add(leases, 9, left=1000)
    add(leases, 1, left=1000)
    add(leases, 7, left=10, gang=2)
    pass_by(leases, 9, "d0", times=8)
    return leases


def pass_by(leases, running, device, times):
    """One after another, later trials get the place of the one that runs there."""
    for ended in range(running, running + times):
        add(leases, ended + 1)
        (order,) = leases.handle(TrialEnded(ended))
        assert (order.trial, order.device) == (ended + 1, device)


def test_a_gang_that_later_trials_passed_often_calls_whoever_is_on_its_devices():
    leases = overdue_gang()
    assert leases.called == {}
    assert steps(leases, 1, "d1", 2) == []
    assert leases.called == {"d0": 7, "d1": 7}
    assert steps(leases, 17, "d0", 2) == []
    assert leases.handle(LeaseEnded(1, "d1", 998)) == []
    assert leases.handle(LeaseEnded(17, "d0", 98))[0].devices == ("d0", "d1")


def test_an_overdue_gang_has_the_next_free_place():
    leases = overdue_gang()
    add(leases, 18)
    assert leases.handle(TrialEnded(17)) == []
    assert leases.called == {"d0": 7, "d1": 7}


def test_a_gang_that_was_overdue_stays_to_its_end():
    leases = overdue_gang()
    steps(leases, 1, "d1", 2)
    leases.handle(LeaseEnded(1, "d1", 998))
    leases.handle(LeaseEnded(17, "d0", 100))
    assert steps(leases, 7, "d0", 1) == [ExtendLease(7, "d0", 1)]
    assert [len(steps(leases, 7, "d0", 1)) for _ in range(9)] == [1] * 7 + [0, 0]


def test_a_gang_is_not_passed_over_while_there_are_too_few_devices_for_it():
    leases = study(devices=1)
    add(leases, 7, left=10, gang=2)
    add(leases, 9)
    pass_by(leases, 9, "d0", times=20)
    leases.handle(DeviceJoined("d1"))
    assert steps(leases, 29, "d0", 2) == [ExtendLease(29, "d0", 2)]
    assert leases.called == {}


def test_a_single_trial_that_later_gangs_passed_often_calls_a_place():
    leases = study()
    add(leases, 10, gang=2)
    add(leases, 1, left=5)
    for ended in range(10, 14):
        add(leases, ended + 1, gang=2)
        assert leases.handle(TrialEnded(ended))[0].trial == ended + 1
    assert steps(leases, 14, "d0", 2) == []
    assert leases.called == {"d0": 1}
    assert leases.handle(LeaseEnded(14, "d0", 98))[0] == GrantLease(1, "d0", 2)


def test_a_single_trial_that_later_single_trials_pass_is_not_overdue():
    leases = study(devices=3)
    add(leases, 7, gang=2)
    add(leases, 9)
    add(leases, 1, left=5)
    pass_by(leases, 9, "d2", times=20)
    assert steps(leases, 29, "d2", 2) == [ExtendLease(29, "d2", 2)]
    assert leases.called == {}


# Giving way


def test_a_gang_leaves_for_a_longer_trial_without_slack():
    leases = study()
    add(leases, 7, gang=2, left=20)
    add(leases, 1, left=1000)
    # When the gang's time is up, then the longer trial runs and others use the second device
    add(leases, 2, left=10)
    assert steps(leases, 7, "d0", 2) == []
    orders = leases.handle(LeaseEnded(7, "d0", 18))
    assert [(order.trial, order.device) for order in orders] == [(1, "d0"), (2, "d1")]


def test_a_longer_trial_with_slack_waits_while_a_gang_runs():
    leases = study()
    add(leases, 7, gang=2, left=200)
    add(leases, 1, left=100)
    assert steps(leases, 7, "d0", 2) == [ExtendLease(7, "d0", 2)]
    assert leases.waiting == (1,)


def test_a_gang_that_leaves_makes_room_for_as_many_trials_as_it_had_devices():
    leases = study(devices=3)
    add(leases, 7, left=20, gang=2)
    add(leases, 3, left=60)
    for trial in (1, 2):
        add(leases, trial, left=1000)
    assert steps(leases, 7, "d0", 1) == []
    assert steps(leases, 3, "d2", 2) == [ExtendLease(3, "d2", 2)]


def test_a_gang_stays_beside_a_trial_for_which_there_is_not_enough_time():
    leases = study(devices=3, active=2)
    add(leases, 7, left=50, gang=2)
    for trial, left in enumerate((100, 300, 100, 100, 5)):
        add(leases, trial, left=left)
    assert leases.leased == {"d0": (7, 1), "d1": (7, 2), "d2": (0, 3)}
    assert steps(leases, 7, "d0", 2) == [ExtendLease(7, "d0", 2)]


def test_work_of_gangs_counts_on_each_of_their_devices():
    # Given three gangs, so much work that a single trial of less has time
    leases = study(devices=4)
    add(leases, 7, left=400, gang=2)
    add(leases, 8, left=400, gang=2)
    add(leases, 9, left=280, gang=2)
    add(leases, 1, left=290)
    assert steps(leases, 7, "d0", 2) == [ExtendLease(7, "d0", 2)]


def test_of_a_gang_and_a_longer_trial_that_exclude_each_other_neither_is_late():
    # Given a trial with 150 s left that a gang of 100 s has called away
    leases = study()
    add(leases, 1, left=170)
    steps(leases, 1, "d0", 16)
    add(leases, 7, gang=2)
    steps(leases, 1, "d0", 4)
    assert leases.handle(LeaseEnded(1, "d0", 150))[0].trial == 7
    # Then the gang stays: only one of them can run, so the trial has as much slack as it has work
    assert steps(leases, 7, "d0", 20) == [ExtendLease(7, "d0", 2)]


def test_a_gang_moves_to_idle_devices_as_a_whole():
    # Given two gangs on the same devices, and two more devices
    leases = study(active=2)
    add(leases, 7, gang=2)
    add(leases, 8, gang=2)
    for device in ("d2", "d3"):
        leases.handle(DeviceJoined(device))
    # Then one of them leaves and the other stays
    assert steps(leases, 7, "d0", 2) == []
    assert steps(leases, 8, "d0", 2) == [ExtendLease(8, "d0", 2)]
    assert leases.handle(LeaseEnded(7, "d0", 98))[0].devices == ("d2", "d3")


def test_trials_beside_a_gang_leave_for_an_idle_device():
    leases = study(active=2)
    add(leases, 7, gang=2)
    add(leases, 1)
    leases.handle(DeviceJoined("d2"))
    assert steps(leases, 1, "d0", 2) == []
    assert leases.handle(LeaseEnded(1, "d0", 98))[0].device == "d2"


def test_a_gang_that_is_too_large_does_not_keep_trials_from_spreading():
    leases = study(devices=1, active=2)
    add(leases, 7, gang=5)
    add(leases, 1)
    add(leases, 2)
    leases.handle(DeviceJoined("d1"))
    assert steps(leases, 1, "d0", 2) == []
    assert leases.handle(LeaseEnded(1, "d0", 98))[0].device == "d1"


# Refusals


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (TrialAdded(3, 5, 1.0, gang=0), "trial 3 was added with gang=0 and lane=None"),
        (TrialAdded(3, 5, 1.0, lane=("a", 0), gang=2), "gang=2 and lane=.'a', 0.: give at least"),
        (
            StepFinished(7, "d1", 1.0),
            "trial 7 finished a step on 'd1', but it has its lease on 'd0', the leader of its "
            "gang on d0, d1, with 100 steps left",
        ),
        (LeaseEnded(7, "d1", 98), "trial 7 ended its lease on 'd1', but .* 'd0', the leader"),
        (LeaseEnded(7, "d2", 98), "trial 7 ended its lease on 'd2', but"),
        (DeviceLost("d2", {7: 98}), "steps_left of trials 7, which have no lease on it"),
        (DeviceLost("d1", {7: -1}), "trial 7 on the lost device 'd1' has -1 steps left"),
    ],
)
def test_an_impossible_event_about_gangs_is_refused_and_changes_nothing(event, message):
    leases = study(devices=3)
    add(leases, 7, gang=2)
    with pytest.raises(TransitionError, match=message):
        leases.handle(event)
    assert (leases.leased, leases.waiting) == ({"d0": (7,), "d1": (7,), "d2": ()}, ())
