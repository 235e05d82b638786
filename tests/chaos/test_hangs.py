"""Workers that hang or die: found, replaced, and what their trials become."""

from __future__ import annotations

import os
import signal

import pytest
import troubles

import shoal
from shoal.core.errors import TrialError, WorkerError
from shoal.core.event import (
    StepFinished,
    TrialFailed,
    TrialReplanned,
    TrialRestarted,
    WorkerDied,
    WorkerStalled,
    WorkerStarted,
)
from shoal.execution import recovery
from shoal.execution.run import Limits
from shoal.execution.watchdog import Backoff, Watchdog

STEPS = 9
LIMIT_S = 2.0
pytestmark = pytest.mark.clock


@pytest.fixture
def hasty(monkeypatch):
    """Studies that call two seconds without work a hang, and wait for nothing after a death."""

    def limits(study):
        watchdog = Watchdog(least_s=LIMIT_S, factor=10.0, first_s=20.0, told_s=LIMIT_S / 4)
        backoff = Backoff(first_s=0.01, most_s=0.1)
        return Limits(retries=study.retries, watchdog=watchdog, backoff=backoff)

    monkeypatch.setattr(shoal.Study, "limits", limits)


@pytest.fixture
def run(run_study, heard, hasty, assert_alone):
    """A study of troubles; trials that finish have the plain bits."""

    def run(troubles_, *, steps=STEPS, lr=(0.01,), recipe=None, **options):
        space = shoal.grid(trouble=troubles_, lr=list(lr), flag=[options.pop("flag", "")])
        recipe = recipe or troubles.recipe()
        options = {"callbacks": [heard], "checkpoint_every": 0, **options}
        report = run_study(recipe, space, steps=steps, **options)
        finished = [trial for trial in report.trials if trial.state == "FINISHED"]
        assert_alone(report, finished, recipe, steps=steps)
        return report

    return run


def states(report):
    return [trial.state for trial in report.trials]


# -- hangs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "words"),
    [("sleep", "in happen"), ("deadlock", "in __iter__"), ("stopped process", "(no answer)")],
)
def test_a_hang_is_found_and_the_trial_goes_on_to_the_same_bits(
    trouble, words, run, heard, tmp_path
):
    report = run([trouble, ""], flag=str(tmp_path / "flag"), devices=2)
    (death,) = heard.of(WorkerDied)
    assert "it got nothing done for" in death.reason
    assert words in death.reason
    # long before; a slow disk may have had another one told of
    told = [event for event in heard.of(WorkerStalled) if event.device == death.device][-1]
    assert told.trials == (0,)
    assert LIMIT_S / 4 < told.seconds < told.limit_s
    assert words.strip("()").replace("no answer", "") in told.place
    assert [event.trial for event in heard.of(TrialRestarted)] == [0]
    assert heard.of(TrialRestarted)[0].step in (1, 2)  # the third batch hung
    assert states(report) == ["FINISHED"] * 2


@pytest.mark.full
def test_a_trial_that_hangs_each_time_fails_with_the_stacks_and_alone(run, heard):
    report = run(["sleep", ""], checkpoint_every=300)
    assert states(report) == ["FAILED", "FINISHED"]
    assert len(heard.of(WorkerDied)) == 3
    error = report.trials[0].error
    assert "the worker died 3 times while it ran this trial" in error
    assert "it got nothing done for" in error
    assert "in happen" in error


def test_a_long_but_honest_step_is_not_killed(run, heard, monkeypatch):
    def limits(study):
        return Limits(watchdog=Watchdog(least_s=LIMIT_S / 2, factor=1e6, first_s=20.0))

    monkeypatch.setattr(shoal.Study, "limits", limits)
    report = run(["long step"], steps=4)  # of which the third one is long
    assert states(report) == ["FINISHED"]
    assert max(event.seconds for event in heard.of(StepFinished)) > LIMIT_S / 2
    assert not heard.of(WorkerDied)


@pytest.mark.full
def test_building_a_model_may_take_as_long_as_a_first_step(run, heard):
    recipe = troubles.recipe(model=troubles.build_slowly)
    report = run([""], lr=(0.01, 0.003), recipe=recipe, steps=3)
    assert states(report) == ["FINISHED"] * 2
    assert not heard.of(WorkerDied)


# -- deaths -----------------------------------------------------------------------------------


def test_a_trial_that_kills_its_worker_each_time_is_given_up_and_blames_no_other(run, heard):
    technique = shoal.Spilled(shards=3)  # two trials on one device
    report = run(["kill", ""], technique=technique, checkpoint_every=300)
    assert states(report) == ["FAILED", "FINISHED"]
    assert len(heard.of(WorkerDied)) == 3
    assert "the worker died 3 times" in report.trials[0].error


@pytest.mark.parametrize("deadly", [0, 1])
def test_data_that_kill_an_arrays_worker_each_time_end_their_trial_and_no_other(
    deadly, run_study, heard, hasty
):
    """Those of the trial that an array's passes count as are not told from a pass."""
    space = shoal.grid(trouble=["kill" if slot == deadly else "" for slot in range(3)], lr=[0.01])
    recipe = troubles.recipe(model=troubles.build_calm, data=troubles.deadly_to_some)
    options = {"fuse": 3, "callbacks": [heard], "steps": 9, "checkpoint_every": 300}
    report = run_study(recipe, space, **options)
    expected = ["FINISHED"] * 3
    expected[deadly] = "FAILED"
    assert states(report) == expected
    if deadly:
        assert len(heard.of(WorkerDied)) == 3
        reasons = {event.trial: event.reason for event in heard.of(TrialReplanned)}
        assert reasons == {1: "its own code ended its array's worker"}


def test_a_model_that_ends_its_process_when_it_is_built_fails_alone(run, heard):
    report = run(["exit in build", ""])
    assert states(report) == ["FAILED", "FINISHED"]
    assert "the worker died 3 times while it measured this trial" in report.trials[0].error
    assert "exit code 3" in report.trials[0].error
    assert not heard.of(StepFinished, trial=0)


@pytest.mark.parametrize("breaks", ["plan", "run"])
@pytest.mark.usefixtures("hasty")
def test_an_exception_of_shoal_s_own_in_every_trial_stops_the_study(breaks, run_study, heard):
    space = shoal.grid(breaks=[breaks], lr=[0.01 / (1 + index) for index in range(6)])
    with pytest.raises(WorkerError) as caught:
        run_study(troubles.broken_recipe(), space, steps=STEPS, callbacks=[heard])
    words = str(caught.value)
    assert "workers, when it was the turn of trials 0" in words
    assert "this is an error of shoal itself" in words
    assert words.endswith("TypeError: 'NoneType' object is not callable")
    deaths = heard.of(WorkerDied)
    assert 3 <= len(deaths) <= 5
    assert all("ended by an exception" in death.reason for death in deaths)
    assert not heard.of(TrialFailed)


@pytest.mark.full
def test_deaths_are_forgiven_to_a_trial_that_gets_further(run, heard, monkeypatch, tmp_path):
    monkeypatch.setattr(recovery, "MAX_DEATHS", 2)
    recipe = troubles.recipe(data=troubles.deadly_data)
    report = run([""], recipe=recipe, flag=str(tmp_path / "flag"))
    assert len(heard.of(WorkerDied)) == 3
    assert states(report) == ["FINISHED"]


def test_an_idle_worker_that_dies_costs_no_trial_anything(run, heard):
    killed = []

    def kill(event):
        if isinstance(event, StepFinished) and not killed:
            started = {e.device: e.pid for e in heard.of(WorkerStarted)}
            (idle,) = [pid for device, pid in started.items() if device != event.device]
            killed.append(idle)
            os.kill(idle, signal.SIGKILL)

    report = run(["raise", ""], devices=2, callbacks=[heard, kill], lr=(0.01,), steps=40)
    assert states(report) == ["FAILED", "FINISHED"]


def test_workers_that_never_begin_end_the_study_and_its_trials_stay(
    run, heard, monkeypatch, tmp_path
):
    monkeypatch.setattr(recovery, "MAX_STILLBORN", 2)
    flag = tmp_path / "broken"

    def kill(event):
        if isinstance(event, StepFinished) and not flag.exists():
            flag.touch()
            os.kill(heard.of(WorkerStarted)[-1].pid, signal.SIGKILL)

    recipe = troubles.recipe(loss=troubles.Fragile(str(flag)))
    with pytest.raises(WorkerError, match="2 workers in a row ended before they could") as why:
        run([""], callbacks=[heard, kill], recipe=recipe, steps=400)
    assert "the module of the loss is gone" in str(why.value)
    assert not heard.of(TrialFailed)


# -- failures alike ---------------------------------------------------------------------------


def test_the_first_three_trials_that_fail_alike_stop_the_study(run, heard):
    recipe = troubles.recipe(data=troubles.data_that_ends_early, accumulate=2)
    with pytest.raises(TrialError) as caught:
        run([""], lr=(0.01, 0.02, 0.03, 0.04, 0.05, 0.06), recipe=recipe)
    assert "failed in the same way" in str(caught.value)
    assert str(caught.value).count("OSError: the disk is gone") == 1
    assert len(heard.of(TrialFailed)) == 3
    assert not heard.of(StepFinished)
