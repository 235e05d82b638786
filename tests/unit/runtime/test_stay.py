"""Who waits for room on a device comes in, and gangs never wait for each other in a circle."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from shoal.builders import make_job, make_shard
from shoal.core.technique import Pipelined
from shoal.runtime.loop import DeviceLoop
from shoal.runtime.seats.parking import Parking
from shoal.runtime.seats.stay import Arrival, Lobby
from shoal.runtime.wire.messages import Grant


def arrival(trial: int, gang: int = 1) -> Arrival:
    stages = {"technique": Pipelined(stages=gang)} if gang > 1 else {}
    job = make_job(trial, [make_shard() for _ in range(gang)], **stages)
    return Arrival(Grant(job=job, layout=None, progress=None, until=1), region=None)


def names(lobby: Lobby, fits=lambda entry: True) -> list[int]:
    found = []
    while (entry := lobby.next(fits)) is not None:
        found.append(entry.grant.job.trial)
    return found


def test_the_first_that_fits_comes_in():
    lobby = Lobby()
    for trial in (0, 1, 2):
        lobby.add(arrival(trial))
    assert names(lobby, lambda entry: entry.grant.job.trial != 0) == [1, 2]
    assert names(lobby) == [0]


def test_a_gang_overtakes_trials_but_no_gang():
    lobby = Lobby()
    for entry in (arrival(0, gang=2), arrival(1, gang=2), arrival(2)):
        lobby.add(entry)
    assert names(lobby, lambda entry: entry.grant.job.trial != 0) == [2]
    assert names(lobby) == [0, 1]


ROOM = 4
NEEDS = st.lists(st.integers(1, ROOM), min_size=3, max_size=3)


@given(gangs=st.lists(NEEDS, min_size=1, max_size=6), draws=st.randoms(use_true_random=False))
def test_every_gang_is_complete_at_last(gangs, draws):
    """Whatever each takes on each device, and whichever device hears of its grants first."""
    grants = [deque(range(len(gangs))) for _ in range(3)]
    lobbies, seated = [Lobby() for _ in range(3)], [set() for _ in range(3)]

    def admit(device: int) -> None:
        def fits(entry: Arrival) -> bool:
            taken = sum(gangs[trial][device] for trial in seated[device])
            return taken + gangs[entry.grant.job.trial][device] <= ROOM

        while (entry := lobbies[device].next(fits)) is not None:
            seated[device].add(entry.grant.job.trial)

    left = set()
    while len(left) < len(gangs):
        complete = sorted(set.intersection(*seated))
        told = [device for device in range(3) if grants[device]]
        assert complete or told, "they wait for each other"
        if told and (not complete or draws.random() < 0.5):
            device = draws.choice(told)
            lobbies[device].add(arrival(grants[device].popleft(), gang=3))
            admit(device)
        else:
            gone = draws.choice(complete)
            left.add(gone)
            for device in range(3):
                seated[device].discard(gone)
                admit(device)


def test_nobody_comes_in_beside_what_a_trial_held_whose_error_is_still_there():
    """The frames of its pass refer to each other: what they hold is free when they are found."""
    said = SimpleNamespace(refuse=lambda trial, error: None)
    parking, came = Parking(SimpleNamespace(), said, pin=False), []

    def enter(grant, region):
        if not came:
            parking.refuse(grant.job.trial, MemoryError())
        came.append(grant.job.trial)

    loop = SimpleNamespace(_lobby=Lobby(), _parking=parking, _enter_device=enter)
    loop._fits = lambda entry: True
    for trial in (0, 1, 2):
        loop._lobby.add(arrival(trial))
    DeviceLoop._admit_pending(loop)
    assert came == [0]
    assert parking.let_go()
    DeviceLoop._admit_pending(loop)
    assert came == [0, 1, 2]
    assert not parking.let_go()
