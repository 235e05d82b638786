"""Trials with replicas whose workers die, hang or raise at any point go on to the same bits."""

from __future__ import annotations

import random
import signal
import time

import copied
import pytest
import studies
from hunting import at_step, check_clean, leaving_nothing
from processes import Runner, shared_memory

import shoal
from shoal.core.event import TrialFailed, TrialRestarted, WorkerDied

pytestmark = [pytest.mark.timeout(120), pytest.mark.clock]
LIMIT_S = 3.0  # of a hang: a worker that waits for others says so each second
KINDS = pytest.mark.parametrize("shard", [False, True], ids=["ddp", "fsdp"])


@pytest.fixture
def train(tmp_path, workers, hunter, heard, hasty):
    """Train a study with replicas, and look that nothing is left of it in any process."""

    def train(*, devices=copied.WIDTH, **options):
        study = copied.make(tmp_path, **options)
        hardware = shoal.Hardware.virtual(devices=devices, memory=studies.MEMORY)
        shown = {"progress": False, "timeline": False, "callbacks": [heard, hunter]}
        with leaving_nothing(workers, study.name, devices):
            study.run(hardware=hardware, workers=workers, **shown)
        return study

    return train


def soon(shard: bool, rank: int, point: str):
    """The product of points is ``full``; a death inside a backward of each is not."""
    marks = () if (point == "backward" and shard == bool(rank)) else pytest.mark.full
    return pytest.param(shard, rank, point, marks=marks)


POINTS = ("forward", "backward", "finish", "step", "store", "stored")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shard", "rank", "point"),
    [soon(shard, rank, point) for shard in (False, True) for rank in (0, 1) for point in POINTS],
)
def test_a_replica_that_dies_at_any_point_costs_the_steps_since_its_generation(
    shard, rank, point, train, hunter, heard
):
    hunter.at(at_step(0, 4), lambda: hunter.lay(f"cpu:{rank}", point, "kill"))
    study = train(shard=shard)
    hunter.check_over()
    copied.check_alone(study.directory, shard)
    (death,) = heard.of(WorkerDied)
    assert death.device == f"cpu:{rank}"
    restarted = heard.of(TrialRestarted)
    assert [event.trial for event in restarted] == list(death.trials) == [0]
    assert restarted[0].step >= 2


@pytest.mark.parametrize(
    ("shard", "rank", "point"),
    [
        (False, 1, "backward"),
        (True, 0, "forward"),
        (True, 1, "step"),
        pytest.param(False, 0, "finish", marks=pytest.mark.full),
        pytest.param(True, 1, "build", marks=pytest.mark.full),
    ],
)
def test_a_replica_that_raises_fails_its_trial_alone(shard, rank, point, train, hunter, heard):
    hunter.at(at_step(0, 2), lambda: hunter.lay(f"cpu:{rank}", point, "raise"))
    study = train(shard=shard)
    hunter.check_over()
    (failed,) = heard.of(TrialFailed)
    assert "the stage gave up" in failed.error
    others = {0, 1} - {failed.trial}
    copied.check_alone(study.directory, shard, trials=others)
    assert not heard.of(WorkerDied)


@pytest.mark.parametrize(
    ("shard", "rank", "what"),
    [(False, 1, "stop"), pytest.param(True, 0, "sleep", marks=pytest.mark.full)],
)
def test_a_replica_that_hangs_is_ended_and_not_the_one_that_waits_for_it(
    shard, rank, what, train, hunter, heard
):
    hunter.at(at_step(0, 4), lambda: hunter.lay(f"cpu:{rank}", "forward", what))
    began = time.monotonic()
    study = train(shard=shard)
    assert time.monotonic() - began < 60
    hunter.check_over()
    copied.check_alone(study.directory, shard)
    assert [event.device for event in heard.of(WorkerDied)] == [f"cpu:{rank}"]


@pytest.mark.parametrize("shard", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_study_that_is_killed_goes_on_where_it_was(shard, tmp_path):
    """The process group dies with a step under way; no process is left, nor shared memory."""
    runner = Runner(tmp_path, maker="copied", shard=shard, lr=[1e-2])
    shared = shared_memory()
    for verb, instant in (("run", "kill late"), ("resume", "kill before TrialFinished")):
        process = runner.start(instant, verb=verb)
        assert process.wait() == -signal.SIGKILL, f"{instant}: {runner.words()}"
        process.check_nothing_left()
    assert runner.run() == 0, runner.words()
    copied.check_alone(runner.place, shard)
    check_clean(runner, shared)


@pytest.mark.full
@pytest.mark.timeout(900)
@KINDS
def test_replicas_killed_at_random_instants_end_on_the_same_bits(shard, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    draw, shared, epochs = random.Random(seed), shared_memory(), 12
    runner = Runner(tmp_path, maker="copied", lr=[1e-2, 3e-3], shard=shard, epochs=epochs)
    for _ in range(3):
        process = runner.start(**{studies.PACE_S: "0.01"})
        process.wait_for("StepFinished", or_end=True)
        if draw.random() < 0.6 and not process.is_over_after(draw.uniform(0.0, 1.0)):
            process.kill_a_worker(draw)
        if not process.is_over_after(draw.uniform(0.0, 4.0)):
            process.kill()
        process.check_nothing_left()
    assert runner.start().wait() == 0, (seed, runner.words())
    copied.check_alone(runner.place, shard, epochs)
    check_clean(runner, shared)
