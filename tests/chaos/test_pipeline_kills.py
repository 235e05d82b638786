"""Pipelines of a study that is killed, or whose workers are, at any instant: the same bits."""

from __future__ import annotations

import random
import signal
import sys

import pytest
import staged
import studies
from hunting import check_clean
from processes import Runner, shared_memory

INSTANTS = (
    ("run", "kill after WorkerStarted"),  # it is being planned
    ("run", "kill before TrialPlanned"),
    ("run", "kill after TrialStarted"),  # the grants are out
    ("run", "kill late"),  # a generation is on disk, and its step not on record
    ("resume", "kill before TrialRestarted"),
    ("resume", "kill after CheckpointWritten"),
    ("run", "kill before TrialFinished"),  # the last generation is written
    ("run", "kill before StudyFinished"),
)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_a_study_killed_at_each_delicate_instant_ends_on_the_same_bits(schedule, tmp_path):
    runner = Runner(tmp_path, maker="staged", schedule=schedule, lr=[1e-2])
    shared = shared_memory()
    for verb, instant in INSTANTS:
        process = runner.start(instant, verb=verb)
        assert process.wait() == -signal.SIGKILL, f"{instant}: {runner.words()}"
        process.check_nothing_left()
    assert runner.run() == 0, runner.words()
    staged.check_alone(runner.place, schedule)
    check_clean(runner, shared)


def run_under_fire(
    folder, schedule: str, kills: int, seed: int, shards: int | None = None
) -> None:
    """Workers and whole studies are killed, and each run has another number of devices."""
    sys.stderr.write(f"seed {seed}\n")  # shown when it fails
    draw, shared, epochs = random.Random(seed), shared_memory(), 4 * kills
    every = draw.choice([0, 0.05, 0.3])
    options = {"schedule": schedule, "epochs": epochs, "checkpoint_every": every}
    options |= {"shards": shards} if shards else {}
    runner = Runner(folder, maker="staged", lr=[1e-2, 3e-3, 1e-3], **options)
    for _ in range(kills):
        runner._devices = draw.choice([2, 2, 3])
        process = runner.start(**{studies.PACE_S: "0.01"})
        process.wait_for("StepFinished", or_end=True)
        if draw.random() < 0.6 and not process.is_over_after(draw.uniform(0.0, 1.0)):
            process.kill_a_worker(draw)
            if not process.is_over_after(draw.uniform(0.0, 1.0)):
                process.kill_a_worker(draw)
        if not process.is_over_after(draw.uniform(0.0, 4.0)):
            process.kill()
        process.check_nothing_left()
    assert runner.start().wait() == 0, runner.words()
    staged.check_alone(runner.place, schedule, epochs)
    check_clean(runner, shared)


@pytest.mark.slow
def test_pipelines_killed_at_random_instants_end_on_the_same_bits(tmp_path):
    run_under_fire(tmp_path, "flush", kills=1, seed=random.SystemRandom().randrange(10**6))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_spilled_stages_killed_at_random_instants_end_on_the_same_bits(tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    run_under_fire(tmp_path, "flush", kills=2, seed=seed, shards=5)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", ["gpipe", "flush"])
def test_spilled_stages_killed_often_end_on_the_same_bits(schedule, seed, tmp_path):
    run_under_fire(tmp_path, schedule, kills=6, seed=seed, shards=5)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("schedule", ["flush", "zb-h1", "2bw"])
def test_pipelines_killed_often_end_on_the_same_bits(schedule, seed, tmp_path):
    run_under_fire(tmp_path, schedule, kills=8, seed=seed)
