"""Copies of a pipeline one of whose workers dies, hangs or is gone go on to the same bits."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import staged
import studies
from hunting import Hunter, at_step, check_nothing_left, sockets
from listening import Heard
from processes import shared_memory

import shoal
from shoal.core.event import TrialReplanned, TrialRestarted, TrialWaits, WorkerDied
from shoal.execution import recovery
from shoal.execution.watchdog import Backoff, Watchdog
from shoal.runtime.pool import WorkerPool

pytestmark = [pytest.mark.timeout(120), pytest.mark.clock]
LIMIT_S = 3.0
DEVICES = 4


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    return tmp_path_factory.mktemp("traps")


@pytest.fixture(scope="module")
def workers(traps):
    """Workers that step into traps."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(staged.TRAPS, str(traps))
        with WorkerPool() as pool:
            pool.warm(DEVICES)
            yield pool


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def hunter(traps, heard):
    yield Hunter(traps, heard)
    for path in traps.iterdir():
        path.unlink()


@pytest.fixture
def train(tmp_path, workers, hunter, heard, monkeypatch):
    """Train a study of one trial in two copies, and look that nothing is left of it."""
    before, usual = shared_memory(), shoal.Study.limits

    def limits(study):
        watchdog = Watchdog(least_s=LIMIT_S, factor=1.0, first_s=60.0)  # cold workers
        return replace(usual(study), watchdog=watchdog, backoff=Backoff(first_s=0.01, most_s=0.1))

    monkeypatch.setattr(shoal.Study, "limits", limits)

    def train(*, devices=DEVICES, stages=2, schedule="flush", callbacks=()):
        study = staged.make(tmp_path, lr=[1e-2], schedule=schedule)
        workers.warm(devices)
        ours = sockets(os.getpid())
        try:
            study.run(
                hardware=shoal.Hardware.virtual(devices=devices, memory=studies.MEMORY),
                workers=workers,
                technique=shoal.Pipelined(stages=stages, width=2, schedule=schedule),
                callbacks=[heard, hunter, *callbacks],
                progress=False,
                timeline=False,
            )
        finally:
            check_nothing_left(workers, study.name)
            assert sockets(os.getpid()) <= ours + devices
            assert shared_memory() <= before
        hunter.check_over()
        staged.check_alone(study.directory, schedule, copies=2)
        return study

    return train


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("device", "point", "schedule"),
    [
        (2, "backward", "flush"),
        (3, "step", "2bw"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [(0, "forward", "2bw"), (1, "store", "flush"), (3, "store", "2bw")]
        ),
    ],
)
def test_a_worker_of_any_copy_that_dies_costs_the_steps_since_the_generation(
    device, point, schedule, train, hunter, heard
):
    hunter.at(at_step(0, 4), lambda: hunter.lay(f"cpu:{device}", point, "kill"))
    train(schedule=schedule)
    (death,) = heard.of(WorkerDied)
    assert death.device == f"cpu:{device}"
    (restarted,) = heard.of(TrialRestarted)
    assert restarted.step >= 2


def test_a_worker_that_hangs_is_found_and_the_other_copy_is_not_ended(train, hunter, heard):
    hunter.at(at_step(0, 4), lambda: hunter.lay("cpu:3", "backward", "sleep"))
    train()
    assert [death.device for death in heard.of(WorkerDied)] == ["cpu:3"]


def _break(hunter: Hunter, device: str) -> None:
    staged.break_device(hunter.folder, device)
    hunter.kill(device)


@pytest.mark.full
def test_where_a_device_is_gone_each_copy_has_fewer_stages(train, hunter, heard, monkeypatch):
    hunter.at(at_step(0, 4), lambda: _break(hunter, "cpu:5"))
    train(devices=6, stages=3)
    (replanned,) = heard.of(TrialReplanned)
    assert (replanned.technique, replanned.shards) == ("Pipelined", 2)


@pytest.mark.full
def test_where_there_are_too_few_for_as_many_copies_it_waits(train, hunter, heard):
    def mend(event) -> None:
        if isinstance(event, WorkerDied) and len(heard.of(WorkerDied)) > recovery.GONE_AFTER + 2:
            (hunter.folder / "broken cpu:3").unlink(missing_ok=True)

    hunter.at(at_step(0, 4), lambda: _break(hunter, "cpu:3"))
    train(callbacks=[mend])
    (waited,) = heard.of(TrialWaits)
    assert "2 copies of 2 stages or more take 4 devices; 3 are there" in waited.reason
