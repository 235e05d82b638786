"""A pipeline whose workers die, hang or raise at any point goes on to the plain loop's bits."""

from __future__ import annotations

import re
import signal
import time
from copy import copy
from dataclasses import replace

import pytest
import staged
import studies
from hunting import Hunter, at_step, began, check_saved, leaving_nothing
from listening import Orders
from processes import until

import shoal
import shoal.launch.run as launch_run
from shoal.control import CloneTrial, Continue, Pause, StopTrial, send
from shoal.core.errors import StorageError, WorkerError
from shoal.core.event import (
    CheckpointDamaged,
    CheckpointWritten,
    StepFinished,
    StorageFailed,
    TrialFailed,
    TrialParked,
    TrialPlanned,
    TrialReplanned,
    TrialRestarted,
    TrialResumed,
    TrialStopped,
    TrialWaits,
    WorkerDied,
    WorkerStarted,
)
from shoal.execution import floor, recovery
from shoal.execution.run import Limits
from shoal.execution.watchdog import Backoff
from shoal.planning.deciding import Deciding
from shoal.runtime.saving import checkpoint

OTHER_HANGS = [(0, "sleep"), (0, "stop"), (1, "stop")]
pytestmark = [pytest.mark.timeout(120), pytest.mark.clock]
PAUSED = 75
LIMIT_S = 2.5  # of a hang: a worker that waits for others says so each second
STAGES = staged.STAGES
ALONE = 8  # the width of trials that have a device to themselves


@pytest.fixture
def train(tmp_path, workers, hunter, heard, hasty):
    """Train a study of pipelines, and look that nothing is left of it in any process."""

    def train(*, devices=STAGES, memory=studies.MEMORY, callbacks=(), technique=None, **options):
        study = staged.make(tmp_path, **options)
        callbacks = [heard, hunter, *callbacks]
        hardware = shoal.Hardware.virtual(devices=devices, memory=memory)
        shown = {"progress": False, "timeline": False}
        with leaving_nothing(workers, study.name, devices):
            study.run(
                hardware=hardware,
                workers=workers,
                callbacks=callbacks,
                technique=technique,
                **shown,
            )
        return study

    return train


# -- deaths -----------------------------------------------------------------------------------


def test_a_pipeline_ends_on_the_plain_bits_and_leaves_nothing(train):
    study = train()
    staged.check_alone(study.directory)


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    "point",
    [
        "backward",
        "store",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("forward", "step", "stored")),
    ],
)
def test_a_stage_that_dies_at_any_point_costs_the_steps_since_its_generation(
    point, stage, train, hunter, heard
):
    hunter.at(at_step(0, 4), lambda: hunter.lay(f"cpu:{stage}", point, "kill"))
    study = train()
    hunter.check_over()
    staged.check_alone(study.directory)
    (death,) = heard.of(WorkerDied)
    assert death.device == f"cpu:{stage}"
    assert 0 in death.trials
    restarted = heard.of(TrialRestarted)
    assert sorted(event.trial for event in restarted) == sorted(death.trials)
    assert next(event.step for event in restarted if event.trial == 0) >= 2


SPILLED = [
    shoal.Pipelined(stages=STAGES, shards=5, optimizer="host", keep=(1,)),
    shoal.Pipelined(stages=STAGES, shards=5, schedule="gpipe", optimizer="device", keep=()),
]


@pytest.mark.parametrize(
    ("stage", "point", "technique"),
    [
        (1, "backward", SPILLED[0]),
        pytest.param(0, "backward", SPILLED[1], marks=pytest.mark.full),
        pytest.param(1, "step", SPILLED[0], marks=pytest.mark.full),
        pytest.param(0, "store", SPILLED[0], marks=pytest.mark.full),
        pytest.param(1, "stored", SPILLED[1], marks=pytest.mark.full),
    ],
)
def test_a_spilled_stage_that_dies_costs_the_steps_since_its_generation(
    stage, point, technique, train, hunter, heard
):
    """Its shards were written to the region at any time; nobody goes on from there."""
    hunter.at(at_step(0, 4), lambda: hunter.lay(f"cpu:{stage}", point, "kill"))
    study = train(technique=technique)
    hunter.check_over()
    staged.check_alone(study.directory)
    (death,) = heard.of(WorkerDied)
    assert death.device == f"cpu:{stage}"
    restarted = heard.of(TrialRestarted)
    assert next(event.step for event in restarted if event.trial == 0) >= 2


def test_the_end_of_a_lease_is_no_news_when_a_stage_is_gone_since(
    train, hunter, heard, tmp_path, monkeypatch
):
    """The first stage says it when the study has begun the next lease on the same devices."""

    def cross() -> None:
        hunter.lay("cpu:1", "left", "kill later")
        hunter.lay("cpu:0", "over", "pause")

    orders = Orders(tmp_path / "k", monkeypatch)
    orders.at(at_step(0, 4), CloneTrial(trial=0, changes={"lr": 3e-3}, warm=False), "no park")
    orders.at(at_step(0, 9), CloneTrial(trial=0, changes={"lr": 0.02}, warm=True), "park")
    hunter.at(began(0), cross)
    study = train(lr=[1e-2], epochs=30, checkpoint_every="1h", callbacks=[orders])
    hunter.check_over()
    staged.check_alone(study.directory, epochs=30, trials=[0, 1])
    assert orders.join()["no park"]["trials"] == [1]
    (death,) = heard.of(WorkerDied)
    assert 0 in death.trials


def test_steps_that_are_told_late_are_not_counted_for_the_next_lease(train, hunter, heard):
    def cross() -> None:
        hunter.lay("cpu:1", "store", "kill later", 5)
        hunter.lay("cpu:0", "store", "pause", 5)  # with a step that it has not told yet

    hunter.at(lambda event: isinstance(event, TrialPlanned), cross)
    study = train(lr=[1e-2])
    hunter.check_over()
    staged.check_alone(study.directory)
    assert len(heard.of(WorkerDied)) == 1


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_dies_right_after_its_grant_costs_nothing(stage, train, hunter, heard):
    is_planned = lambda e: isinstance(e, TrialPlanned) and e.trial == 1  # noqa: E731
    hunter.at(is_planned, lambda: hunter.lay(f"cpu:{stage}", "granted", "kill"))
    study = train()
    hunter.check_over()
    staged.check_alone(study.directory)
    (death,) = heard.of(WorkerDied)
    assert death.device == f"cpu:{stage}"
    assert {event.step for event in heard.of(TrialRestarted)} == {0}


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_dies_while_it_builds_costs_nothing(stage, train, hunter, heard):
    is_planned = lambda e: isinstance(e, TrialPlanned) and e.trial == 1  # noqa: E731
    hunter.at(is_planned, lambda: hunter.lay(f"cpu:{stage}", "build", "kill"))
    study = train()
    hunter.check_over()
    staged.check_alone(study.directory)
    assert [event.device for event in heard.of(WorkerDied)] == [f"cpu:{stage}"]


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_both_stages_that_die_at_once_cost_the_steps_since_the_generation(
    schedule, train, hunter, heard
):
    def kill() -> None:
        for device in ("cpu:0", "cpu:1"):
            hunter.kill(device)

    hunter.at(at_step(0, 5), kill)
    study = train(schedule=schedule)
    staged.check_alone(study.directory, schedule)
    assert len(heard.of(WorkerDied)) == 2


def test_pipelines_on_overlapping_devices_survive_a_death_and_are_not_blamed(
    train, hunter, heard, monkeypatch
):
    monkeypatch.setattr(recovery, "MAX_DEATHS", 1)  # who is blamed fails
    hunter.at(at_step(0, 4), lambda: hunter.lay("cpu:1", "forward", "kill"))
    study = train(devices=3, lr=[1e-2, 3e-3, 1e-3])
    hunter.check_over()
    blamed = [trial.number for trial in study.report().trials if trial.state == "FAILED"]
    others = [trial for trial in range(3) if trial not in blamed]
    staged.check_alone(study.directory, trials=others)
    assert len(blamed) == 1


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu:0", "cpu:1"])
def test_single_trials_beside_pipelines_survive_a_death_too(
    device, train, hunter, heard, monkeypatch
):
    settle = Deciding.settle

    def settled(deciding, trial, *args):
        if trial.hp["width"] == ALONE:
            deciding = copy(deciding)
            deciding._request = replace(deciding._request, technique=shoal.Resident())
        return settle(deciding, trial, *args)

    monkeypatch.setattr(Deciding, "settle", settled)
    hunter.at(at_step(0, 4), lambda: hunter.kill(device))
    study = train(width=[staged.WIDTH, ALONE], devices=3, epochs=12)
    techniques = {e.trial: e.technique for e in heard.of(TrialPlanned)}
    assert set(techniques.values()) == {"Pipelined", "Resident"}
    staged.check_alone(study.directory, epochs=12)
    (death,) = heard.of(WorkerDied)
    assert {e.trial for e in heard.of(TrialRestarted)} == set(death.trials)


# -- hangs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "what"),
    [
        (1, "sleep"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in OTHER_HANGS),
    ],
)
def test_a_stage_that_hangs_is_found_and_those_that_wait_for_it_are_not_ended(
    stage, what, train, hunter, heard
):
    hunter.at(at_step(0, 4), lambda: hunter.lay(f"cpu:{stage}", "forward", what))
    began = time.monotonic()
    study = train()
    assert time.monotonic() - began < 30
    hunter.check_over()
    staged.check_alone(study.directory)
    (death,) = heard.of(WorkerDied)
    assert death.device == f"cpu:{stage}"
    still_s = re.search(r"it got nothing done for (\d+) s", death.reason)
    assert still_s
    assert int(still_s[1]) < 2 * LIMIT_S
    assert ("in happen" if what == "sleep" else "(no answer)") in death.reason


@pytest.mark.full
def test_a_stage_that_hangs_in_the_middle_of_a_store_is_found(train, hunter, heard):
    hunter.at(at_step(0, 4), lambda: hunter.lay("cpu:1", "store", "stop"))
    study = train()
    hunter.check_over()
    staged.check_alone(study.directory)
    assert [event.device for event in heard.of(WorkerDied)] == ["cpu:1"]


# -- stopped and paused -------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_every_pipeline_and_the_next_run_ends_on_the_same_bits(
    number, schedule, train, hunter, heard, tmp_path
):
    hunter.at(at_step(0, 5), lambda: signal.raise_signal(number))
    options = {"schedule": schedule, "checkpoint_every": "1h", "epochs": 8}
    with pytest.raises(SystemExit) as ending:
        train(**options)
    assert ending.value.code == PAUSED
    check_saved(tmp_path / "k")
    train(**options)
    assert not heard.of(WorkerDied)
    staged.check_alone(tmp_path / "k", schedule, 8)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_a_paused_pipeline_goes_on_to_the_same_bits(
    schedule, train, hunter, heard, tmp_path, monkeypatch
):
    orders = Orders(tmp_path / "k", monkeypatch)

    def act():
        send(tmp_path / "k", Pause())
        check_saved(tmp_path / "k")
        return send(tmp_path / "k", Continue())

    orders.at(at_step(0, 5), act, "pause")
    study = train(schedule=schedule, epochs=30, checkpoint_every="1h", callbacks=[orders])
    assert orders.join()["pause"]["text"] == "going on"
    staged.check_alone(study.directory, schedule, 30)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_dies_while_its_trial_is_parked_costs_nothing(
    stage, train, hunter, heard, tmp_path, monkeypatch
):
    orders = Orders(tmp_path / "k", monkeypatch)

    def act():
        send(tmp_path / "k", Pause())
        hunter.kill(f"cpu:{stage}")
        until(lambda: heard.of(WorkerDied), "nobody saw it")
        return send(tmp_path / "k", Continue())

    orders.at(at_step(0, 5), act, "pause")
    study = train(epochs=30, checkpoint_every="1h", callbacks=[orders])
    orders.join()
    staged.check_alone(study.directory, epochs=30)
    assert [death.trials for death in heard.of(WorkerDied)] == [()]
    assert not heard.of(TrialRestarted)


@pytest.mark.full
def test_a_stopped_pipeline_keeps_its_state_and_the_other_goes_on(
    train, heard, tmp_path, monkeypatch
):
    orders = Orders(tmp_path / "k", monkeypatch)
    orders.at(at_step(0, 5), StopTrial(trial=0), "stop")
    study = train(epochs=30, checkpoint_every="1h", callbacks=[orders])
    assert "is stopped" in orders.join()["stop"]["text"]
    report = study.report()
    assert [trial.state for trial in report.trials] == ["STOPPED", "FINISHED"]
    last = heard.of(StepFinished, trial=0)[-1].step
    assert report.trials[0].load_state()["step"] == last
    staged.check_alone(study.directory, epochs=30, trials=[1])


@pytest.mark.full
def test_a_stage_that_dies_while_its_trial_is_stopped_loses_nothing_that_is_in_the_region(
    train, hunter, heard, tmp_path, monkeypatch
):
    """The first stage is writing the generation, and has all of it."""
    orders = Orders(tmp_path / "k", monkeypatch)

    def act():
        hunter.lay("cpu:0", "save", "pause")
        hunter.lay("cpu:1", "left", "kill later")
        return send(tmp_path / "k", StopTrial(trial=0))

    orders.at(at_step(0, 5), act, "stop")
    study = train(epochs=30, checkpoint_every="1h", callbacks=[orders])
    hunter.check_over()
    assert "is stopped" in orders.join()["stop"]["text"]
    report = study.report()
    assert [trial.state for trial in report.trials] == ["STOPPED", "FINISHED"]
    (stopped,) = heard.of(TrialStopped)
    assert stopped.step == heard.of(StepFinished, trial=0)[-1].step
    assert report.trials[0].load_state()["step"] == stopped.step
    staged.check_alone(study.directory, epochs=30, trials=[1])


@pytest.mark.full
def test_the_time_limit_saves_every_pipeline(train, heard, tmp_path):
    options = {"epochs": 300, "checkpoint_every": "1h", "lr": [1e-2]}
    study = train(time_limit=2.0, **options)
    assert "time limit of 2 s" in study.report().stopped
    check_saved(tmp_path / "k")
    train(**options)
    staged.check_alone(study.directory, epochs=300)


# -- disks ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_disk_that_is_full_at_the_last_save_loses_no_generation(train, traps, tmp_path):
    room = traps / "full"

    def fill(event) -> None:
        if at_step(0, 8)(event):
            room.touch()

    with pytest.raises(StorageError, match="did its last step, 12, and cannot be saved"):
        train(callbacks=[fill], lr=[1e-2], checkpoint_every="1h")
    room.unlink()
    study = train(lr=[1e-2], checkpoint_every="1h")
    staged.check_alone(study.directory)


@pytest.mark.full
def test_a_disk_that_has_room_for_some_saves_trains_to_the_end(train, hunter, traps):
    room = traps / "full"

    hunter.at(lambda event: isinstance(event, CheckpointWritten), room.touch)
    hunter.at(lambda event: isinstance(event, StorageFailed), room.unlink)
    study = train(lr=[1e-2], epochs=30, checkpoint_every=0.05)
    hunter.check_over()
    staged.check_alone(study.directory, epochs=30)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_a_damaged_generation_costs_the_steps_since_the_one_before(
    schedule, train, hunter, heard, tmp_path
):
    hunter.at(at_step(0, 5), lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit):
        train(schedule=schedule, lr=[1e-2])
    before, newest = checkpoint.generations(tmp_path / "k", 0).all()[-2:]
    path = newest.path / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    train(schedule=schedule, lr=[1e-2])
    staged.check_alone(tmp_path / "k", schedule)
    assert [event.trial for event in heard.of(CheckpointDamaged)] == [0]
    assert [event.step for event in heard.of(TrialRestarted)] == [before.step]


# -- trials that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_raises_once_has_its_trial_tried_again(stage, train, hunter, heard):
    hunter.at(at_step(0, 4), lambda: hunter.lay(f"cpu:{stage}", "backward", "raise"))
    study = train(retries=1)
    hunter.check_over()
    staged.check_alone(study.directory)
    assert len(heard.of(TrialRestarted)) == 1
    assert not heard.of(WorkerDied)


def test_two_stages_that_raise_at_once_are_one_failure(train, hunter, heard):
    def lay() -> None:
        hunter.lay("cpu:0", "step", "raise")
        hunter.lay("cpu:1", "step", "raise")

    hunter.at(at_step(0, 4), lay)
    study = train(lr=[1e-2], retries=2)
    staged.check_alone(study.directory)
    # The first stage may hear of the other before it comes to its own trap: then there are two.
    assert len(heard.of(TrialRestarted)) in (1, 2)


def test_a_stage_that_raises_each_time_fails_its_trial_and_no_other(train, hunter, heard):
    def again(event) -> None:
        if isinstance(event, TrialFailed):
            for path in hunter.folder.glob("step-*"):
                path.unlink()
        elif at_step(0, 4)(event) or isinstance(event, TrialRestarted):
            hunter.lay("cpu:1", "step", "raise")

    study = train(lr=[1e-2], retries=5, callbacks=[again])
    (trial,) = study.report().trials
    assert trial.state == "FAILED"
    assert "the stage gave up" in trial.error
    assert len(heard.of(TrialRestarted)) == 2  # the third time in the same way was the last


@pytest.mark.full
def test_workers_that_never_begin_end_the_study_and_its_pipelines_stay(
    train, hunter, heard, monkeypatch, tmp_path
):
    monkeypatch.setattr(recovery, "MAX_STILLBORN", 2)

    def kill(event) -> None:
        if isinstance(event, WorkerStarted):
            return
        if at_step(0, 4)(event) and not broken.exists():
            broken.touch()
            hunter.kill("cpu:1")
            hunter.kill("cpu:0")

    broken = hunter.folder / "broken"
    with pytest.raises(WorkerError, match="2 workers in a row ended before they could"):
        train(callbacks=[kill], lr=[1e-2])
    broken.unlink()
    assert not heard.of(TrialFailed)
    study = train(lr=[1e-2])
    staged.check_alone(study.directory)


@pytest.mark.full
def test_a_gang_waits_for_a_device_that_takes_long_to_come_back(train, hunter, heard, monkeypatch):
    def limits(study):
        return Limits(backoff=Backoff(first_s=1.5, most_s=1.5))

    monkeypatch.setattr(shoal.Study, "limits", limits)
    hunter.at(at_step(0, 3), lambda: hunter.kill("cpu:1"))
    hunter.at(at_step(0, 5), lambda: hunter.kill("cpu:1"))
    study = train(lr=[1e-2])
    hunter.check_over()
    staged.check_alone(study.directory)
    assert len(heard.of(WorkerDied)) == 2


def _break(hunter: Hunter, device: str) -> None:
    staged.break_device(hunter.folder, device)
    hunter.kill(device)


@pytest.mark.parametrize(
    ("schedule", "devices", "then"),
    [
        ("zb-h1", 3, "Pipelined"),
        pytest.param("2bw", 3, "Pipelined", marks=pytest.mark.full),
        pytest.param("flush", 2, "Resident", marks=pytest.mark.full),
    ],
)
def test_a_pipeline_one_of_whose_devices_is_gone_goes_on_over_fewer(
    schedule, devices, then, train, hunter, heard
):
    hunter.at(at_step(0, 4), lambda: _break(hunter, f"cpu:{devices - 1}"))
    technique = shoal.Pipelined(stages=devices, schedule=schedule)
    study = train(lr=[1e-2], devices=devices, schedule=schedule, technique=technique)
    staged.check_alone(study.directory, schedule)
    (replanned,) = heard.of(TrialReplanned)
    assert (replanned.technique, replanned.shards) == (then, devices - 1)
    assert f"cpu:{devices - 1} did not come back" in replanned.reason


def _in_turns(monkeypatch):
    """Trials have the devices one after the other, in short leases."""
    real = floor.leases.Leases
    monkeypatch.setattr(floor, "LEASE_S", 0.15)
    monkeypatch.setattr(floor.leases, "LEAST_LEASE_S", 0.1)
    monkeypatch.setattr(
        floor.leases, "Leases", lambda policy, active, lease_s: real(policy, lease_s=lease_s)
    )


def _when_other_runs(heard, waits: int):
    """True when a trial has been parked after some steps, and the other one has a lease."""

    def happens(event) -> bool:
        parked = any(e.trial == waits and e.step >= 6 for e in heard.of(TrialParked))
        return parked and isinstance(event, TrialResumed) and event.trial != waits

    return happens


@pytest.mark.parametrize(
    ("schedule", "devices", "dead", "every"),
    [
        pytest.param("zb-h1", 3, 0, 0, marks=pytest.mark.full),
        pytest.param("zb-h1", 3, 2, 0, marks=pytest.mark.full),
        pytest.param("flush", 2, 1, 0, marks=pytest.mark.full),
        pytest.param("flush", 2, 1, "1h", marks=pytest.mark.full),
    ],
)
def test_a_pipeline_that_waits_when_a_device_goes_loses_no_step(
    schedule, devices, dead, every, train, hunter, heard, monkeypatch
):
    """Workers that are there still have its session, of the old stages."""
    _in_turns(monkeypatch)
    hunter.at(_when_other_runs(heard, waits=0), lambda: _break(hunter, f"cpu:{dead}"))
    study = train(
        devices=devices,
        schedule=schedule,
        technique=shoal.Pipelined(stages=devices, schedule=schedule),
        epochs=50,
        checkpoint_every=every,
    )
    hunter.check_over()
    staged.check_alone(study.directory, schedule, epochs=50)
    assert {event.trial for event in heard.of(TrialReplanned)} == {0, 1}
    if dead:  # the worker of the first stage lives, and has it
        (restarted,) = [e for e in heard.of(TrialRestarted) if e.trial == 0]
        assert restarted.step >= 6


@pytest.mark.full
def test_a_pipeline_that_waits_for_the_hosts_memory_is_begun_once(
    train, hunter, heard, monkeypatch
):
    monkeypatch.setattr(launch_run, "fits_host", lambda jobs, plan, budget: len(jobs) <= 1)
    hunter.at(at_step(0, 4), lambda: _break(hunter, "cpu:1"))
    study = train()
    hunter.check_over()
    staged.check_alone(study.directory)


@pytest.mark.full
def test_a_pipeline_that_cannot_do_with_fewer_waits_for_the_device(train, hunter, heard):
    def mend(event) -> None:
        if isinstance(event, WorkerDied) and len(heard.of(WorkerDied)) > recovery.GONE_AFTER + 2:
            (hunter.folder / "broken cpu:1").unlink(missing_ok=True)

    hunter.at(at_step(0, 4), lambda: _break(hunter, "cpu:1"))
    study = train(lr=[1e-2], schedule="2bw", callbacks=[mend])
    staged.check_alone(study.directory, "2bw")
    assert not heard.of(TrialReplanned)
    (waited,) = heard.of(TrialWaits)
    assert "no worker can begin on cpu:1, and trial 0 takes 2 devices" in waited.reason


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("memory", [110_000, 130_000])
def test_a_pipeline_that_fits_in_no_way_fails_with_the_bytes_it_needs(memory, train, heard):
    """Both stages find it out at once, the second one while the first one's is planned."""
    study = train(lr=[1e-2], width=[staged.OUTGROWN], memory=memory, schedule="zb-h1")
    (trial,) = study.report().trials
    assert trial.state == "FAILED"
    assert re.search(r"stage \d of trial 0 took [\d.]+ KiB on cpu:\d, [\d.]+ KiB", trial.error)
    assert "it was planned again, and cannot be run" in trial.error


@pytest.mark.full
def test_a_pipeline_that_outgrows_a_device_goes_on_with_recomputing(train, heard):
    study = train(lr=[1e-2], width=[staged.OUTGROWN], memory=170_000)
    (replanned,) = heard.of(TrialReplanned)
    assert replanned.technique == "Pipelined"
    staged.check_alone(study.directory)


@pytest.mark.full
@pytest.mark.parametrize("memory", [100_000, 120_000])
def test_a_pipeline_that_outgrows_its_devices_goes_on_in_spilled_stages(memory, train, heard):
    study = train(lr=[1e-2], width=[staged.OUTGROWN], memory=memory)
    assert {event.technique for event in heard.of(TrialReplanned)} == {"Pipelined"}
    staged.check_alone(study.directory)


@pytest.mark.full
def test_spilled_stages_that_outgrow_a_device_go_on_with_less_there(train, heard):
    technique = shoal.Pipelined(stages=STAGES, shards=4, optimizer="host")
    study = train(lr=[1e-2], width=[staged.OUTGROWN], memory=100_000, technique=technique)
    assert {event.technique for event in heard.of(TrialReplanned)} == {"Pipelined"}
    staged.check_alone(study.directory)


@pytest.mark.full
def test_a_step_on_the_host_that_hangs_is_ended(train, hunter, heard):
    """The other stage waits for this one, and this one for its own thread."""
    hunter.at(at_step(0, 4), lambda: hunter.lay("cpu:1", "step", "sleep"))
    study = train(technique=SPILLED[0])
    hunter.check_over()
    staged.check_alone(study.directory)
    assert [death.device for death in heard.of(WorkerDied)] == ["cpu:1"]
