"""What goes wrong with workers, and what is looked at to see it."""

from __future__ import annotations

from types import SimpleNamespace

from shoal.execution.failures import SameEnds
from shoal.execution.recovery import Recovery
from shoal.execution.watchdog import Backoff, Watchdog


class Ended:
    """A trial that has ended, which nobody has to look at several times a second."""

    @property
    def is_parked(self) -> bool:
        raise AssertionError("it was looked at")


def test_trials_that_have_ended_are_not_looked_at_in_each_round():
    seen = []
    runs = SimpleNamespace(is_parked=False, devices=("cpu:0",), is_new_there=False)
    floor = SimpleNamespace(
        states={0: Ended(), 1: runs},
        open={1},
        pool=SimpleNamespace(workers={"cpu:0": SimpleNamespace(has_begun=True)}),
        plan=SimpleNamespace(devices=()),
    )
    recovery = Recovery(
        floor,
        SimpleNamespace(),
        SimpleNamespace(),
        retries=0,
        watchdog=Watchdog(),
        backoff=Backoff(),
        same_ends=SameEnds(),
        give_up=lambda reason, error: None,
    )
    recovery._watch = lambda worker, name, now, leased: seen.append((name, leased))
    recovery.tick()
    assert seen == [("cpu:0", {"cpu:0": False})]
