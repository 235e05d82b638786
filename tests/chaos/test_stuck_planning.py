"""Workers that hang while the study is planned: found, replaced, and whose fault it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import troubles
from processes import Process

import shoal
from shoal.core.errors import WorkerError
from shoal.core.event import PlanningWaited, StepFinished, TrialFailed, WorkerDied
from shoal.execution.run import Limits
from shoal.execution.watchdog import Watchdog
from shoal.planning import asking

STEPS = 3
LIMIT_S = 3.0  # of workers that are warm; one that starts needs longer
SLOW_S = 1.0
pytestmark = pytest.mark.clock


@pytest.fixture
def hasty(monkeypatch, run_study):
    """A function: from now on three seconds without work are a hang; so many workers are warm."""

    def make_hasty(workers):
        space = shoal.grid(lr=[0.01 / (1 + index) for index in range(workers)])
        run_study(troubles.recipe(), space, steps=1, devices=workers)
        dog = {"least_s": LIMIT_S, "first_s": LIMIT_S}
        limits = lambda study: Limits(slow_s=SLOW_S, watchdog=Watchdog(**dog))  # noqa: E731
        monkeypatch.setattr(shoal.Study, "limits", limits)

    return make_hasty


@pytest.fixture
def run(run_study, heard, hasty, assert_alone, tmp_path):
    """A study with a trial for each place of trouble; those that finish have the plain bits.

    ``hangs`` is how many workers it costs; troubles that come ``once`` need a flag for it.
    """

    def run(places, trouble="sleep", *, hangs=1, once=False, recipe=None, **options):
        hasty(hangs + options.get("devices", 1))
        flag = str(tmp_path / "flag") if once else ""
        space = shoal.grid(where=list(places), trouble=[trouble], flag=[flag], lr=[0.01])
        recipe = recipe or troubles.stuck_recipe()
        options = {"callbacks": [heard], "metric": "train_loss", **options}
        report = run_study(recipe, space, steps=STEPS, **options)
        finished = [trial for trial in report.trials if trial.state == "FINISHED"]
        assert_alone(report, finished, recipe, steps=STEPS)
        return report

    return run


def states(report):
    return [trial.state for trial in report.trials]


def check_place(error_line):
    """A table's line of a hang says for how long, and where."""
    assert error_line.startswith("it got nothing done for")
    assert "troubles.py:" in error_line
    assert error_line.endswith("in happen; 3 s are allowed")


def is_alive(pid):
    return Path(f"/proc/{pid}").exists()


# -- a hang -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        pytest.param("sleep", "in happen", marks=pytest.mark.full),
        ("sleep in C", "in happen"),
        pytest.param("stopped process", "(no answer)", marks=pytest.mark.full),
    ],
)
def test_a_model_that_hangs_once_is_built_again_and_trains_to_the_same_bits(
    trouble, words, run, heard
):
    report = run(["model", ""], trouble, once=True)
    (death,) = heard.of(WorkerDied)
    assert "while it measured trial 0" in death.reason
    assert "it got nothing done for" in death.reason
    assert "3 s are allowed" in death.reason
    assert words in death.reason
    assert not is_alive(death.pid)
    assert states(report) == ["FINISHED"] * 2


@pytest.mark.full
def test_a_model_that_hangs_each_time_fails_with_the_place_and_alone(run, heard):
    report = run(["model", ""], hangs=3)
    assert states(report) == ["FAILED", "FINISHED"]
    assert len(heard.of(WorkerDied)) == 3
    error = report.trials[0].error
    assert "the worker died 3 times while it measured this trial" in error
    assert "in build_stuck" in error
    check_place(report.trials[0].error_line)
    assert not heard.of(StepFinished, trial=0)
    assert not any(is_alive(event.pid) for event in heard.of(WorkerDied))


@pytest.mark.parametrize(("place", "work"), [("batch", "build"), ("forward", "measure")])
def test_so_does_a_first_batch_that_never_comes_and_a_forward_that_never_ends(
    place, work, run, heard, monkeypatch
):
    monkeypatch.setattr(asking, "MAX_DEATHS", 1)
    report = run([place, ""], devices=2)
    assert states(report) == ["FAILED", "FINISHED"]
    assert len(heard.of(WorkerDied)) == 1
    check_place(report.trials[0].error_line)
    waits = heard.of(PlanningWaited, trial=0)
    assert 1 <= len(waits) <= 3
    assert sorted(event.seconds for event in waits) == [event.seconds for event in waits]
    assert {(event.work, event.limit_s) for event in waits} == {(work, LIMIT_S)}


def test_a_study_whose_only_trial_hangs_says_where(run, heard, monkeypatch):
    monkeypatch.setattr(asking, "MAX_DEATHS", 1)
    with pytest.raises(WorkerError) as caught:
        run(["data"])
    assert "the trial cannot run" in str(caught.value)
    assert "in data_stuck" in str(caught.value)
    assert not heard.of(TrialFailed)


def test_a_recipe_that_hangs_when_it_is_loaded_is_the_fault_of_no_trial(run):
    recipe = troubles.stuck_recipe(loss=troubles.StuckWhenLoaded())
    with pytest.raises(WorkerError, match="cannot work, it died while the study was") as caught:
        run([""], recipe=recipe)
    assert "in happen" in str(caught.value)


# -- no hang ----------------------------------------------------------------------------------


@pytest.mark.full
def test_many_trials_may_take_longer_than_a_hang_when_each_takes_less(run, heard):
    recipe = troubles.recipe(model=troubles.build_slowly)
    report = run(["", "a", "b"], recipe=recipe, trouble="", hangs=0)
    assert states(report) == ["FINISHED"] * 3
    assert not heard.of(WorkerDied)
    waits = heard.of(PlanningWaited)
    assert {"build", "measure"} <= {event.work for event in waits}
    assert all(event.seconds < LIMIT_S for event in waits)


# -- shoal plan -------------------------------------------------------------------------------

FILE = """
import time
import torch
from torch.utils.data import DataLoader, Dataset
import shoal
from shoal.execution.run import Limits
from shoal.execution.watchdog import Watchdog
from shoal.planning import asking

asking.MAX_DEATHS = 1

class Numbers(Dataset):
    def __init__(self, stuck):
        self.stuck = stuck

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.stuck:
            time.sleep(1000)
        return torch.ones(4), torch.tensor(0)

def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])

class Hasty(shoal.Study):
    def limits(self):
        return Limits(slow_s=3.0, watchdog=Watchdog(least_s=15.0, first_s=15.0))

study = Hasty(
    "stuck",
    shoal.Recipe(
        model=lambda hp: torch.nn.Linear(4, 2),
        data=lambda hp: (DataLoader(Numbers(hp["stuck"]), 4, num_workers=1), None),
        loss=loss,
    ),
    space=shoal.grid(stuck=[True, False], lr=[0.1]),
    epochs=1,
    metric="train_loss",
)
"""


@pytest.mark.full
def test_a_plan_is_printed_though_a_loader_of_one_trial_never_answers(tmp_path):
    (tmp_path / "study.py").write_text(FILE)
    popen = subprocess.Popen(
        [sys.executable, "-m", "shoal", "plan", "study.py", "--devices", "cpu:1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process = Process(popen, None)
    output, errors = popen.communicate(timeout=90.0)
    assert popen.returncode == 0, errors
    assert "trial 0 cannot begin: it got nothing done for" in output
    assert "trial 1 (stuck=False, lr=0.1; seed 1): Resident" in output
    assert "planning: trial 0 is being built on cpu:0, for" in errors
    assert "counts as a hang" in errors
    assert "in _try_get_data" in errors or "in __next__" in errors
    process.check_nothing_left()
