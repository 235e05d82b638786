"""What every part of a run shares, with very many trials."""

from __future__ import annotations

import os
from types import SimpleNamespace

from shoal.execution.floor import Floor
from shoal.execution.trial import TrialRun
from shoal.scheduler import leases
from shoal.testing import make_job


class Worker:
    """Notes which trials it was to run."""

    def __init__(self) -> None:
        self.granted: list[int] = []

    def send(self, order, descriptors=()) -> None:
        if hasattr(order, "job"):
            self.granted.append(order.job.trial)


def floor_of(trials: int) -> tuple[Floor, Worker]:
    """A floor of one device on which so many trials have begun to wait."""
    plan = SimpleNamespace(study="many", rule="", active=1, devices=(), spill_dir="")
    worker = Worker()
    pool, settings = SimpleNamespace(workers={}), SimpleNamespace(checkpoint_every_s=300.0)
    floor = Floor(plan, pool, settings, lambda events: None, lambda: False)
    for number in range(trials):
        layout = SimpleNamespace(num_bytes=1)
        floor.states[number] = TrialRun(job=make_job(number), layout=layout, total=4)
        floor.open.add(number)
        floor.begin(floor.states[number])
    pool.workers["cpu:0"] = worker
    return floor, worker


def test_nothing_of_a_trials_last_step_is_held_once_it_has_ended():
    floor, _ = floor_of(1)
    state = floor.states[0]
    state.progress = SimpleNamespace(step=4)
    floor.end(state)
    assert state.progress is None


def test_hundreds_of_trials_in_a_row_find_no_room_on_the_host():
    floor, worker = floor_of(400)
    waiting = floor.states[399]
    waiting.descriptor = os.memfd_create("waits")  # for others, and has all the room there is
    floor.leave(waiting)
    floor.fits_host = lambda jobs: len(jobs) <= 1
    floor.do(leases.DeviceJoined("cpu:0"))
    assert not worker.granted
    assert sum(map(floor.is_deferred, floor.states.values())) == 399
    floor.end(waiting)
    (first,) = worker.granted
    assert floor.states[first].descriptor is not None
    floor.states[first].close()


def test_where_one_gave_its_room_back_no_more_begin_than_have_room():
    floor, worker = floor_of(400)
    asked: list[int] = []
    floor.fits_host = lambda jobs: asked.append(len(jobs)) or len(jobs) <= 2
    floor.do(leases.DeviceJoined("cpu:0"))
    first = floor.states[worker.granted[0]]
    floor.leave(first)
    second = floor.states[worker.granted[1]]
    floor.leave(second)  # both wait for others, and hold what room there is
    assert sum(map(floor.is_deferred, floor.states.values())) == 398
    asked.clear()
    first.close()
    floor.begin_deferred()
    third = floor.states[worker.granted[2]]
    floor.leave(third)
    assert sum(map(floor.is_deferred, floor.states.values())) == 397
    assert len(asked) < 10  # and not once for each of those that wait
    second.close()
    third.close()
