"""Studies whose trials change seats, killed at delicate instants: the same seats and bits."""

from __future__ import annotations

import random
import signal
import time

import pytest
import ranks
import studies
from processes import Runner

from shoal.core.event import StepFinished, TrialReplanned, TrialRestarted
from shoal.core.seats import epochs_of

FUSED = ("--fuse", ranks.FUSE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, warm_workers):
    study = ranks.make(tmp_path_factory.mktemp("ranks"))
    studies.run(study, warm_workers, devices=2, fuse=ranks.FUSE)
    return ranks.outcome(study.directory)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "hooks",
    [
        ("kill before TrialReplanned", "kill after TrialReplanned"),
        ("kill after TrialPruned", "kill after CheckpointWritten"),
    ],
    ids=["at seats", "at ends"],
)
@pytest.mark.parametrize("checkpoint_every", [0.05, 60])
def test_killed_where_seats_change(hooks, checkpoint_every, undisturbed, tmp_path):
    runner = Runner(tmp_path, maker="ranks", checkpoint_every=checkpoint_every)
    for number, hook in enumerate(hooks):
        runner._devices = 1 + number
        words = FUSED if number == 0 else ()
        code = runner.start(hook, words=words, **{studies.PACE_S: "0.01"}).wait()
        assert code in (-signal.SIGKILL, 0), runner.words()
        assert number or code, "it was not killed"
    assert runner.start(verb="resume").wait() == 0, runner.words()
    assert ranks.outcome(runner.place) == undisturbed
    ranks.check(runner.place)


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(s, marks=pytest.mark.full) for s in range(3, 20))]
)
def test_killed_at_any_instant(seed, undisturbed, tmp_path):
    draw = random.Random(seed)
    runner = Runner(tmp_path, maker="ranks", checkpoint_every=draw.choice([0, 0.05, 0.5, 60]))
    words = FUSED
    for _ in range(3):
        runner._devices = draw.choice([1, 2, 3])
        process = runner.start(words=words, **{studies.PACE_S: "0.01"})
        process.wait_for("StepFinished", or_end=True)
        words = ()
        if draw.random() < 0.5 and not process.is_over_after(draw.uniform(0.0, 1.0)):
            process.kill_a_worker(draw)
        if not process.is_over_after(draw.uniform(0.0, 1.5)):
            process.kill()
    assert runner.start(words=words).wait() == 0, runner.words()
    assert ranks.outcome(runner.place) == undisturbed
    ranks.check(runner.place)


def wait_for_a_step_in_a_new_seat(runner) -> None:
    for _ in range(2400):
        events = runner.events()
        seats = {e.trial: e.step for e in events if isinstance(e, TrialReplanned)}
        steps = [e for e in events if isinstance(e, StepFinished)]
        if any(e.step > seats.get(e.trial, e.step) for e in steps):
            return
        time.sleep(0.05)
    raise AssertionError(f"nobody got another seat:\n{runner.words()}")


def test_a_worker_that_dies_later_sets_its_trials_back_to_their_old_seats(undisturbed, tmp_path):
    """Nothing is saved on the way: they begin anew, and come by the same seats."""
    runner = Runner(tmp_path, maker="ranks", checkpoint_every=60)
    runner._devices = 1
    process = runner.start(words=FUSED, **{studies.PACE_S: "0.05"})
    wait_for_a_step_in_a_new_seat(runner)
    assert process.kill_a_worker(random.Random(0))
    assert process.wait() == 0, runner.words()
    events = runner.events()
    back = {e.trial: n for n, e in enumerate(events) if isinstance(e, TrialRestarted)}
    seats = {
        e.trial: n for n, e in enumerate(events) if isinstance(e, TrialReplanned) and e.step == 4
    }
    assert any(seats.get(trial, n) < n for trial, n in back.items()), "nobody had a seat before"
    assert ranks.outcome(runner.place) == undisturbed
    ranks.check(runner.place)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_killed_and_gone_on_with_in_other_widths(seed, tmp_path):
    """Wherever it stood: before its first rung, between rungs, or among trials by themselves."""
    draw = random.Random(seed)
    runner = Runner(tmp_path, maker="ranks", checkpoint_every=draw.choice([0.05, 0.2]))
    wishes = [FUSED, *(("--fuse", w, "--accept-numerics") for w in ("3", "2", "off")), ()]
    for words in wishes:
        runner._devices = draw.choice([1, 2])
        process = runner.start(words=words, **{studies.PACE_S: "0.01"})
        process.wait_for("StepFinished", or_end=True)
        if not process.is_over_after(draw.uniform(0.2, 1.0)):
            process.kill()
    assert runner.start().wait() == 0, runner.words()
    told = [epochs_of(row.numerics) for row in ranks.rows_of(runner.place)]
    assert any(epoch.asked for epochs in told for epoch in epochs)
    ranks.check_seats(runner.place)
