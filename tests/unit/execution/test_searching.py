"""Who waits on disk where the host has no room for all that wait for each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.execution.hunt import Hunt
from shoal.execution.searching import Searching
from shoal.search import Search
from shoal.search.rules import Halving


def run_of(trial, *, device="", gang=1, saves=False):
    return SimpleNamespace(
        job=SimpleNamespace(trial=trial, gang=gang),
        device=device,
        after_save=["work"] * saves,
        descriptor=7,
        is_dirty=True,
        parked_at="cpu:0",
    )


@pytest.mark.parametrize(
    ("states", "waiting", "put_away"),
    [
        ([run_of(0), run_of(1)], {0, 1}, [0]),
        ([run_of(0), run_of(1, device="cpu:1")], {0}, [0]),  # or cpu:0 would idle
        ([run_of(0), run_of(1)], {0}, [0]),  # 1 waits for a device, which it will get
        ([run_of(0), run_of(1, device="cpu:1"), run_of(2, device="cpu:0")], {0}, []),
        ([run_of(0), run_of(1, saves=True), run_of(2, device="cpu:0")], {0, 1}, []),
        ([run_of(0), run_of(1, saves=True)], {0, 1}, [0]),
        ([run_of(0), run_of(1, device="cpu:1", gang=2)], {0}, []),
        ([run_of(1, device="cpu:1")], set(), []),
    ],
)
def test_as_many_wait_on_disk_as_devices_would_idle(states, waiting, put_away):
    floor = SimpleNamespace(
        states={state.job.trial: state for state in states},
        open={state.job.trial for state in states},
        plan=SimpleNamespace(at_once=2),
        pool=SimpleNamespace(workers={"cpu:0": None, "cpu:1": None}),
    )
    saved = []
    pausing = SimpleNamespace(save_then=lambda state, work: saved.append(state.job.trial))
    hunt = Hunt(Search(2, Halving("min")), lambda event: None)
    searching = Searching(hunt, floor, pausing, None, None, lambda *why: pytest.fail(str(why)))
    for trial in waiting:
        searching.arrived(states[trial])
    searching._make_room()
    assert saved == put_away
