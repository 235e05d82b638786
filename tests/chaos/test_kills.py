"""Killed with all its processes at any instant, a study goes on to the same bits."""

from __future__ import annotations

import random
import sys

import pytest
import studies
from processes import Runner, shared_memory, until

from shoal.core.event import TrialFinished

SWEPT = ("control.sock", "reserve", ".study.json.tmp", "study.db-wal", "study.db-shm")
INSTANTS = (
    ("run", "kill after WorkerStarted"),  # it is being planned
    ("run", "kill before TrialPlanned"),  # the record is written, no event says so yet
    ("run", "kill late"),
    ("resume", "kill before TrialRestarted"),
    ("resume", "kill after CheckpointWritten"),
    ("run", "kill before TrialFinished"),  # the last generation is written
    ("run", "kill before StudyFinished"),
)


def check_grown(before, after) -> None:
    """What was read once is there for ever, in its place."""
    assert after[: len(before)] == before


def kill_at_random(runner: Runner, draw: random.Random) -> bool:
    """One run that is killed at some instant; False when it ended before that."""
    known = runner.events()
    process = runner.start(**{studies.PACE_S: "0.02"})
    if draw.random() < 0.7:
        process.wait_for(
            "StepFinished", or_end=True
        )  # else it dies while it starts, or soon after
        is_over = process.is_over_after(draw.uniform(0.0, 1.0))
    else:
        is_over = process.is_over_after(draw.uniform(0.5, 5.0))
    seen = runner.events()
    if not is_over:
        process.kill()
    now = runner.events()
    check_grown(known, seen)
    check_grown(seen, now)
    process.check_nothing_left()
    return not is_over


def run_under_fire(folder, kills: int, epochs: int, seed: int) -> None:
    sys.stderr.write(f"seed {seed}\n")  # shown when it fails
    draw, shared = random.Random(seed), shared_memory()
    runner = Runner(folder, epochs=epochs)
    done = sum(kill_at_random(runner, draw) for _ in range(kills))
    assert done, "no kill came before its end"

    known = runner.events()
    assert runner.run() == 0, runner.words()

    check_grown(known, runner.events())
    studies.check_alone(runner.place, epochs)
    finished = [e.trial for e in runner.events() if isinstance(e, TrialFinished)]
    assert sorted(finished) == [0, 1, 2]
    check_clean(runner, shared)


def check_clean(runner: Runner, shared: set[str]) -> None:
    """Nothing hinders anybody: no socket, no reserve, no half-written file, no memory."""
    left = {path.name for path in runner.place.iterdir()}
    assert not left & set(SWEPT), left
    assert not list(runner.place.glob("trials/*/*.tmp"))
    until(lambda: shared_memory() <= shared, "shared memory is left", deadline_s=20.0)


@pytest.mark.full
def test_a_study_killed_at_random_instants_ends_on_the_same_bits(tmp_path):
    run_under_fire(tmp_path, kills=5, epochs=5, seed=random.SystemRandom().randrange(10**6))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_studies_killed_ten_times_each_end_on_the_same_bits(tmp_path, seed):
    run_under_fire(tmp_path, kills=10, epochs=12, seed=seed)


def test_a_study_killed_at_each_delicate_instant_ends_on_the_same_bits(tmp_path):
    # Saved after each step, the worker may be many generations ahead of the record.
    options = {"kinds": ("resident",), "epochs": 2, "checkpoint_every": 0, "keep": 1}
    runner = Runner(tmp_path, devices=1, **options)
    shared = shared_memory()
    for verb, instant in INSTANTS:
        known = runner.events()

        assert runner.start(instant, verb=verb).wait() == -9, f"{instant}: {runner.words()}"

        check_grown(known, runner.events())
    assert runner.run() == 0, runner.words()
    studies.check_alone(runner.place, 2)
    check_clean(runner, shared)
