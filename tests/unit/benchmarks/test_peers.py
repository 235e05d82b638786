"""The pure part of benchmarks/peers: held bytes, steps a second, agreement, words."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

_PLACE = Path(__file__).parents[3] / "benchmarks" / "peers"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_{name}", _PLACE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


held, pace, processes, report = map(_load, ("held", "pace", "processes", "report"))


# -- held bytes ----------------------------------------------------------------------------


def changes(*pairs):
    return [held.Change(key, size) for key, size in pairs]


def test_what_outlives_a_step_does_not_pass_through():
    home, activation = (1, 100), (2, 30)

    found = held.held(changes(home, activation, (2, 0)))

    assert found == held.Held(total=130, outliving=100, passing=30)


def test_a_gradient_that_stays_is_not_passing_from_its_first_moment_on():
    found = held.held(changes((1, 100), (2, 30), (3, 100), (2, 0)))

    assert found == held.Held(total=230, outliving=200, passing=30)


def test_a_storage_that_grows_and_shrinks_back_passes_with_what_it_grew():
    found = held.held(changes((1, 8), (1, 64), (2, 16), (1, 8), (2, 0)))

    assert found == held.Held(total=80, outliving=8, passing=72)


@pytest.mark.full
def test_a_watched_step_counts_what_was_there_what_came_and_what_went():
    weight = torch.zeros(1000)

    with held.StepWatch() as watch:
        passing = weight + 1
        weight.add_(passing.sum())
        del passing
        kept = weight * 2
    found = held.held(watch.changes)

    assert found.passing >= 4000
    assert found.outliving >= weight.nbytes + kept.nbytes
    assert found.total >= found.outliving


@pytest.mark.full
def test_a_watched_storage_may_be_resized_behind_the_operators():
    weight = torch.zeros(1000)

    with held.StepWatch() as watch:
        weight.untyped_storage().resize_(0)
        torch.ones(1)
        weight.untyped_storage().resize_(40_000)
        torch.ones(1)
        weight.untyped_storage().resize_(0)
    found = held.held(watch.changes)

    assert 40_000 <= found.passing < 80_000


# -- pace ----------------------------------------------------------------------------------


def ends(*times):
    return [pace.Ended(time, time / 2) for time in times]


def test_a_lone_trial_is_timed_from_the_end_of_its_warm_up():
    found = pace.pace({0: ends(9.0, 10.0, 12.0, 14.0)}, warm_up=2)

    assert found == pace.Pace(2.0, 1.0)


def test_trials_one_after_another_leave_out_warming_up_and_the_change():
    found = pace.pace({0: ends(5.0, 7.0, 9.0), 1: ends(20.0, 22.0, 24.0)}, warm_up=1)

    assert found == pace.Pace(2.0, 1.0)


@pytest.mark.parametrize("ahead_s", [0.0, 0.1, 1.0, 1.9])
def test_trials_together_cost_the_same_however_far_one_is_ahead(ahead_s):
    first = [2.0 * step for step in range(1, 8)]
    second = [time + ahead_s for time in first]

    found = pace.pace({0: ends(*first), 1: ends(*second)}, warm_up=2)

    assert found.seconds_a_step == pytest.approx(1.0)
    assert found.cpu_seconds_a_step == pytest.approx(0.5)


def test_cpu_seconds_are_read_between_the_times_at_which_they_were_looked_up():
    read = [pace.Ended(1.0, 10.0), pace.Ended(3.0, 14.0)]

    assert pace.used_at(read, 2.0) == pytest.approx(12.0)
    assert pace.used_at(read, 0.5) == 10.0


# -- agreement -----------------------------------------------------------------------------


def test_equal_losses_are_bitwise_equal():
    assert report.agreement([2.5, 2.0], [2.5, 2.0], within=0.0) == (True, "bitwise")


def test_losses_may_differ_by_no_more_than_is_allowed():
    assert report.agreement([2.0, 1.000001], [2.0, 1.0], within=1e-5) == (True, "within 1.0e-06")


@pytest.mark.parametrize("wrong", [1.1, math.nan, math.inf])
def test_the_first_step_that_differs_is_named_with_both_losses(wrong):
    same, words = report.agreement([2.0, wrong, 7.0], [2.0, 1.0, 1.0], within=1e-5)

    assert not same
    assert words == f"differs at step 2: {wrong:.7g}, not 1"


def test_a_run_that_ended_early_differs():
    assert report.agreement([2.0], [2.0, 1.0], within=1.0) == (False, "has 1 losses, not 2")


# -- words ---------------------------------------------------------------------------------


def test_a_reason_is_the_error_itself_without_folders():
    trace = """Traceback (most recent call last):
  File "/somewhere/deep/arm.py", line 3, in <module>
ModuleNotFoundError: No module named 'deepspeed' in /somewhere/deep/site-packages
some last words of a library
"""

    assert report.reason(trace) == (
        "ModuleNotFoundError: No module named 'deepspeed' in site-packages"
    )


def test_a_reason_of_another_rank_and_of_nothing():
    assert report.reason("[rank0]: RuntimeError: no device\n") == "RuntimeError: no device"
    assert report.reason("") == "no output"
    assert len(report.reason("ValueError: " + "x" * 500)) == report.LONGEST


def test_a_command_keeps_its_options_and_loses_its_folders():
    said = report.without_folders("run.py --json out/a.json --deepspeed-python /a/b/bin/python")

    assert said == "run.py --json out/a.json --deepspeed-python python"


def test_what_was_not_run_says_why_in_the_table():
    assert "| peer | not run: RuntimeError: no | " in report.table(
        {"peer": {"not_run": "RuntimeError: no"}}
    )


# -- processes -----------------------------------------------------------------------------


@pytest.fixture
def server():
    """A process by the name of shoal's server, with one forked from it, as a worker is."""
    code = "import os, sys; os.fork(); os.write(1, b'.'); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "shoal.forkserver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(2) == b".."
        yield process
        process.stdin.close()


def test_a_worker_that_was_forked_by_a_server_is_of_the_family(server):
    assert server.pid in processes.family(os.getpid())

    _, forked = processes.family(server.pid)

    assert 0 < processes.own_bytes(forked) < processes.highest_bytes(forked)
