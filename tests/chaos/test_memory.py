"""Out of memory: the trial is planned smaller, or fails alone with the bytes it needs."""

from __future__ import annotations

import os
import signal

import pytest
import troubles
from listening import Orders

import shoal
from shoal.control import StopStudy, StopTrial
from shoal.core.errors import CapacityError
from shoal.core.event import (
    StepFinished,
    TrialFailed,
    TrialFinished,
    TrialPlanned,
    TrialReplanned,
    TrialRestarted,
    TrialStarted,
    WorkerDied,
)
from shoal.execution import floor
from shoal.execution.ladder import same_bits
from shoal.execution.replanning import Replanning
from shoal.memory.store import create_region

STEPS = 9
BIG = 128  # rows of the third batch, where the others have 4


@pytest.fixture
def run(run_study, heard, assert_alone):
    """A study in which some trials have a large batch; those that finish have the plain bits."""

    def run(rows, memory, technique=None, *, lr=(0.01,), callbacks=(), steps=STEPS, **options):
        space = shoal.grid(rows=rows, lr=list(lr))
        recipe = troubles.recipe(clip_grad_norm=0.5, schedule=troubles.falling)
        options = {"technique": technique, "callbacks": [heard, *callbacks], **options}
        report = run_study(recipe, space, memory=memory, steps=steps, **options)
        finished = [trial for trial in report.trials if trial.state == "FINISHED"]
        assert_alone(report, finished, recipe, steps=steps)
        return report

    return run


def states(report):
    return [trial.state for trial in report.trials]


# -- rungs ------------------------------------------------------------------------------------


def test_a_resident_trial_that_outgrows_its_device_goes_on_spilled(run, heard):
    report = run([troubles.ROWS, BIG], 900_000)
    (replanned,) = heard.of(TrialReplanned)
    assert states(report) == ["FINISHED"] * 2
    assert (replanned.technique, replanned.trial) == ("Spilled", 1)
    assert "it is the one that is measured" in replanned.reason
    assert heard.of(TrialPlanned, trial=1)[0].technique == "Resident"
    assert [e.step for e in heard.of(TrialRestarted)] == [0]


def test_it_goes_on_from_its_newest_generation(run, heard):
    report = run([BIG], 900_000, checkpoint_every=0)
    (restarted,) = heard.of(TrialRestarted)
    assert restarted.step == 2  # the third batch was the large one
    assert states(report) == ["FINISHED"]


def test_a_spilled_trial_gives_up_its_lookahead_first(run, heard):
    report = run([BIG], 405_000, shoal.Spilled(shards=3, lookahead=1, keep=(), recompute=True))
    (replanned,) = heard.of(TrialReplanned)
    assert replanned.shards == 3
    assert states(report) == ["FINISHED"]


def test_a_trial_that_ran_out_of_memory_recomputes_from_then_on(run, heard, jobs):
    report = run([BIG], 450_000, shoal.Spilled(shards=3, lookahead=1, keep=(), keep_turn=0))
    assert jobs[0].technique.keep_activations == (1,)
    assert len(jobs) > 1
    assert all(job.technique.keep_activations == () for job in jobs[1:])
    assert states(report) == ["FINISHED"]


def test_what_waits_for_its_backward_goes_to_the_host_before_a_trial_fails(run, jobs):
    report = run([BIG], 320_000, shoal.Spilled(shards=5, lookahead=0, keep=(), keep_turn=0))
    assert [job.technique.boundaries for job in jobs][:: len(jobs) - 1] == ["device", "host"]
    assert states(report) == ["FINISHED"]


def test_a_spilled_trial_is_cut_into_more_shards_then(run, heard):
    report = run([BIG], 340_000, shoal.Spilled(shards=3, lookahead=1, keep=(), recompute=True))
    assert heard.of(TrialReplanned)[-1].shards > 3
    assert len(heard.of(TrialReplanned)) <= 3
    assert states(report) == ["FINISHED"]


def test_a_trial_that_fits_in_no_way_fails_alone_with_the_bytes_it_needs(run):
    report = run([troubles.ROWS, BIG], 200_000, shoal.Spilled(shards=3, lookahead=1))
    assert states(report) == ["FINISHED", "FAILED"]
    error = report.trials[1].error
    assert "CapacityError" in error
    assert "were reserved for it" in error
    assert "does not fit a device of 195.3 KiB" in error
    assert "KiB in all" in error


def test_a_trial_that_fits_only_alone_waits_until_its_neighbour_has_left(run, heard):
    technique = shoal.Spilled(shards=3, lookahead=1)
    report = run([BIG, troubles.ROWS], 500_000, technique)
    assert states(report) == ["FINISHED"] * 2
    for replanned in heard.of(TrialReplanned):
        assert (replanned.trial, replanned.shards) == (0, 3)


def test_two_trials_out_of_memory_at_one_time_are_both_planned_smaller(run, heard):
    report = run([BIG], 900_000, lr=(0.01, 0.003), devices=2)
    assert states(report) == ["FINISHED"] * 2
    assert {e.trial for e in heard.of(TrialReplanned)} == {0, 1}


def test_the_key_of_the_bits_is_the_same_on_every_rung(run, jobs):
    run([BIG], 900_000)
    keys = [job.numerics for job in jobs]
    assert len(keys) >= 2
    assert all(same_bits(keys[0], key) for key in keys)


# -- while it is planned again ----------------------------------------------------------------


class During:
    """Does something once, when a plan is asked for while the study runs."""

    def __init__(self, monkeypatch) -> None:
        self.work = lambda floor: None
        plan = Replanning.plan

        def planned(replanning, trials, planner=None):
            work, self.work = self.work, lambda floor: None
            work(replanning._floor)
            return plan(replanning, trials, planner)

        monkeypatch.setattr(Replanning, "plan", planned)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_worker_that_dies_meanwhile_costs_time_and_no_bits(devices, run, heard, monkeypatch):
    def kill(floor):
        worker = next(iter(floor.pool.workers.values()))
        os.kill(worker.pid, signal.SIGKILL)

    During(monkeypatch).work = kill
    report = run([troubles.ROWS, BIG], 900_000, devices=devices)
    assert len(heard.of(WorkerDied)) == 1
    assert states(report) == ["FINISHED"] * 2
    assert heard.of(TrialReplanned)


def test_a_stop_meanwhile_is_obeyed(run, heard, monkeypatch, tmp_path):
    orders = Orders(tmp_path / "study-0", monkeypatch)
    orders.at(lambda event: event is None, StopStudy(), "stop")
    During(monkeypatch).work = lambda floor: orders(None)
    report = run([BIG], 900_000, checkpoint_every=0, callbacks=[orders])
    assert report.stopped == "shoal stop"
    assert orders.join()["stop"]["unsaved"] == []
    assert not heard.of(TrialFinished, TrialFailed)


def test_a_trial_can_be_stopped_while_it_is_planned_again(run, heard, monkeypatch, tmp_path):
    orders = Orders(tmp_path / "study-0", monkeypatch)
    orders.at(lambda event: event is None, StopTrial(trial=1), "stop")
    During(monkeypatch).work = lambda floor: orders(None)
    report = run([troubles.ROWS, BIG], 900_000, callbacks=[orders], checkpoint_every=0)
    assert states(report) == ["FINISHED", "STOPPED"]
    assert "stopped" in orders.join()["stop"]["text"]


# -- the host's memory ------------------------------------------------------------------------


def test_without_host_memory_a_trial_waits_until_another_one_has_ended(run, heard, monkeypatch):
    refused = []

    def create(name, num_bytes, directory):
        if name.endswith("-1") and not refused:
            refused.append(name)
            raise CapacityError("cannot allocate 1 MiB of host memory")
        return create_region(name, num_bytes, directory)

    monkeypatch.setattr(floor, "create_region", create)
    report = run([troubles.ROWS], "64MiB", lr=(0.01, 0.003), devices=2)
    assert states(report) == ["FINISHED"] * 2
    events = heard.of(TrialStarted, TrialFinished)
    order = [(type(event).__name__, event.trial) for event in events]
    assert order.index(("TrialFinished", 0)) < order.index(("TrialStarted", 1))


def test_alone_a_trial_without_host_memory_fails_with_the_bytes(run, heard, monkeypatch):
    def create(name, num_bytes, directory):
        raise CapacityError(f"cannot allocate {num_bytes} bytes of host memory for {name}")

    monkeypatch.setattr(floor, "create_region", create)
    report = run([troubles.ROWS], "64MiB")
    assert states(report) == ["FAILED"]
    assert "bytes of host memory for study-0-0" in report.trials[0].error
    assert not heard.of(StepFinished)
