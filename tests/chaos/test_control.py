"""What can be asked of a study that runs, through its socket: the trials end on exact bits."""

from __future__ import annotations

import copy
import socket
import warnings
from dataclasses import replace

import pytest
import torch
import troubles
from listening import Heard, Orders

import shoal
from shoal.control import (
    CloneTrial,
    Continue,
    ExtendTrials,
    Pause,
    Status,
    StopStudy,
    StopTrial,
    send,
)
from shoal.control.commands import command_to_json
from shoal.core.errors import SpecError, TrialError
from shoal.core.event import (
    CheckpointWritten,
    StepFinished,
    StudyContinued,
    StudyPaused,
    TrialFailed,
    TrialFinished,
    TrialRestarted,
    TrialStarted,
    TrialStopped,
)
from shoal.execution import floor
from shoal.recipes.optimizers import build_optimizer
from shoal.recipes.schedules import build_schedule
from shoal.rng import seed_all
from shoal.testing import assert_same, plain_loop
from shoal.ui.control import (
    clone_command,
    continue_study,
    extend_study,
    pause_study,
    stop_study,
)
from shoal.verify import read_losses

STEPS = 120
TECHNIQUES = {"resident": None, "spilled": shoal.Spilled(shards=3)}


class Bench:
    """One study in one directory, run as often as a test wants."""

    def __init__(self, directory, workers, monkeypatch) -> None:
        self.directory, self.workers, self._monkeypatch = directory, workers, monkeypatch
        self.heard, self.orders = Heard(), Orders(directory / "it", monkeypatch)
        self.recipe = troubles.recipe(clip_grad_norm=0.5, schedule=troubles.falling)

    def run(self, *, lr=(0.01, 0.003), steps=STEPS, devices=2, technique=None, **options):
        """Run or go on; returns the report."""
        names = ("trials", "retries", "time_limit", "trial_time_limit", "checkpoint_every")
        settings = {name: options.pop(name) for name in names if name in options}
        space = options.pop("space", shoal.grid(lr=list(lr)))
        study = shoal.Study(
            "it", self.recipe, space=space, steps=steps, directory=self.directory, **settings
        )
        hardware = shoal.Hardware.virtual(devices=devices, memory="64MiB")
        with self._monkeypatch.context() as short:
            if devices > 1:  # a worker is not through before the study hears of its steps
                short.setattr(floor, "LEASE_S", 0.1)
            return study.run(
                hardware=hardware,
                technique=technique,
                workers=self.workers,
                progress=False,
                timeline=False,
                callbacks=[self.heard, self.orders],
                **options,
            )

    def check_bits(self, report, trials, steps=STEPS):
        """Compare finished trials with the plain loop."""
        losses = read_losses(report.directory)
        for trial in trials:
            assert trial.state == "FINISHED", trial.error
            plain = plain_loop(self.recipe, trial.hp, trial.seed, steps=steps)
            assert_same(plain, trial, losses=losses[trial.number])


@pytest.fixture
def bench(tmp_path, warm_workers, monkeypatch):
    return Bench(tmp_path, warm_workers, monkeypatch)


def at_step(trial, step):
    return lambda event: (
        isinstance(event, StepFinished) and event.trial == trial and event.step >= step
    )


def finished(trial):
    return lambda event: isinstance(event, TrialFinished) and event.trial == trial


def states(report):
    return [trial.state for trial in report.trials]


def saved_step(report, number):
    return report.trials[number].load_state()["step"]


# -- the study --------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_stopped_study_is_saved_at_its_last_steps_and_goes_on_to_the_same_bits(technique, bench):
    bench.orders.at(at_step(0, 20), StopStudy(reason="enough"), "stop")
    report = bench.run(technique=TECHNIQUES[technique])
    assert report.stopped == "enough"
    assert bench.orders.join()["stop"]["unsaved"] == []
    last = {e.trial: e.step for e in bench.heard.of(StepFinished)}
    written = {e.trial: e.step for e in bench.heard.of(CheckpointWritten)}
    assert written == last  # of those that had begun
    assert not bench.heard.of(TrialFinished)
    report = bench.run(technique=TECHNIQUES[technique])
    bench.check_bits(report, report.trials)


def test_a_paused_study_uses_no_device_until_it_goes_on(bench):
    seen = {}

    def act():
        answer = send(bench.directory / "it", Pause())
        seen["state"] = send(bench.directory / "it", Status())["state"]
        seen["steps"] = len(bench.heard.of(StepFinished))
        with pytest.raises(SpecError, match="paused already"):
            send(bench.directory / "it", Pause())
        seen["steps later"] = len(bench.heard.of(StepFinished))
        seen["files"] = {e.trial: e.step for e in bench.heard.of(CheckpointWritten)}
        return answer, send(bench.directory / "it", Continue())

    bench.orders.at(at_step(0, 20), act, "pause")
    report = bench.run()
    paused, continued = bench.orders.join()["pause"]
    assert "the devices are idle" in paused["text"]
    assert continued["text"] == "going on"
    assert seen["state"] == "paused"
    assert seen["steps"] == seen["steps later"]
    events = bench.heard.of(StudyPaused, StudyContinued, StepFinished)
    kinds = [type(event) for event in events]
    at = kinds.index(StudyPaused)
    assert kinds[at + 1] is StudyContinued
    assert seen["files"] == {e.trial: e.step for e in events[:at]}
    bench.check_bits(report, report.trials)


def test_a_study_can_be_stopped_while_it_is_paused(bench):
    def act():
        send(bench.directory / "it", Pause())
        return send(bench.directory / "it", StopStudy())

    bench.orders.at(at_step(0, 20), act, "stop")
    report = bench.run()
    assert report.stopped == "shoal stop"
    assert bench.orders.join()["stop"]["unsaved"] == []
    report = bench.run()
    bench.check_bits(report, report.trials)


def test_a_study_that_is_not_paused_cannot_go_on(bench):
    bench.orders.at(at_step(0, 20), Continue(), "continue")
    bench.run(lr=[0.01])
    assert "running, not paused" in str(bench.orders.join()["continue"])


@pytest.mark.clock
def test_the_time_limit_of_a_run_saves_and_the_next_run_goes_on(bench):
    report = bench.run(steps=1500, time_limit=1.0, lr=[0.01])
    assert "the time limit of 1 s is reached, planning not counted" in report.stopped
    assert states(report) == ["PENDING"] or not report.trials[0].is_done
    (last,) = {e.step for e in bench.heard.of(CheckpointWritten)}
    assert last == bench.heard.of(StepFinished)[-1].step
    report = bench.run(steps=1500, lr=[0.01])
    bench.check_bits(report, report.trials, steps=1500)


def test_the_commands_of_the_shell_reach_the_study(bench, capsys):
    runs = bench.directory

    def act():
        return [
            pause_study("it", runs, as_json=False),
            extend_study("it", ExtendTrials(trials=1), runs, [], as_json=False),
            continue_study("it", runs, [], as_json=False),
            stop_study("it", 0, runs, grace_s=30.0, reason="", as_json=False),
            stop_study("it", None, runs, grace_s=30.0, reason="enough", as_json=False),
        ]

    bench.orders.at(at_step(0, 10), act, "codes")
    report = bench.run(space=shoal.grid(lr=[0.01, 0.003]), trials=1, steps=2000, devices=1)
    assert bench.orders.join()["codes"] == [0] * 5
    assert report.stopped == "enough"
    assert len(report.trials) == 2
    out = capsys.readouterr().out
    for words in ("paused", "added trial 1", "going on", "trial 0 is stopped", "stopped: every"):
        assert words in out


# -- one trial --------------------------------------------------------------------------------


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_stopped_trial_keeps_its_state_and_resume_does_not_begin_it_again(technique, bench):
    technique = TECHNIQUES[technique]
    bench.orders.at(at_step(0, 20), StopTrial(trial=0, reason="seen enough"), "stop")
    report = bench.run(technique=technique)
    assert states(report) == ["STOPPED", "FINISHED"]
    assert "is stopped" in bench.orders.join()["stop"]["text"]
    (stopped,) = bench.heard.of(TrialStopped)
    assert stopped.reason == "seen enough"
    last = bench.heard.of(StepFinished, trial=0)[-1].step
    assert stopped.step == last == saved_step(report, 0)
    bench.check_bits(report, report.trials[1:])
    plain = plain_loop(bench.recipe, report.trials[0].hp, report.trials[0].seed, steps=last)
    found = report.trials[0].load_state()["model"]
    assert all(torch.equal(t, found[name]) for name, t in plain.state()["model"].items())
    report = bench.run(technique=technique)
    assert states(report) == ["STOPPED", "FINISHED"]
    assert len(bench.heard.of(TrialStarted)) == 2


def test_a_trial_that_has_ended_or_is_not_there_cannot_be_stopped(bench):
    bench.orders.at(finished(0), StopTrial(trial=0), "ended")
    bench.orders.at(at_step(0, 5), StopTrial(trial=9), "unknown")
    bench.run(devices=1)
    answers = bench.orders.join()
    assert "trial 0 has ended already" in str(answers["ended"])
    assert isinstance(answers["unknown"], SpecError)


def test_a_trial_that_waits_for_a_device_can_be_stopped(bench):
    bench.orders.at(at_step(0, 5), StopTrial(trial=2), "stop")
    report = bench.run(lr=(0.01, 0.003, 0.001), devices=1, steps=60)
    assert states(report)[2] == "STOPPED"
    assert states(report)[:2] == ["FINISHED"] * 2


@pytest.mark.clock
def test_the_time_limit_of_a_trial_stops_it_alone(bench):
    report = bench.run(trial_time_limit=0.2, steps=3000, lr=[0.01])
    assert states(report) == ["STOPPED"]
    (stopped,) = bench.heard.of(TrialStopped)
    assert "time limit" in stopped.reason
    assert saved_step(report, 0) == stopped.step < 3000
    assert not report.stopped


# -- more trials ------------------------------------------------------------------------------


def test_a_study_is_extended_while_it_runs_and_the_new_trials_stay(bench):
    space = shoal.grid(lr=[0.01, 0.003, 0.001, 0.02])
    bench.orders.at(at_step(0, 20), ExtendTrials(trials=2), "extend")
    begun = lambda event: isinstance(event, StepFinished) and event.trial == 3  # noqa: E731
    bench.orders.at(begun, StopStudy(), "stop")
    bench.run(space=space, trials=2)
    answers = bench.orders.join()
    assert answers["extend"]["trials"] == [2, 3]
    report = bench.run(space=space, trials=2)
    assert len(report.trials) == 4
    bench.check_bits(report, report.trials)


def test_an_order_whose_answer_was_lost_can_be_repeated(bench):
    order = ExtendTrials(trials=1)

    def act():
        place = bench.directory / "it"
        with socket.socket(socket.AF_UNIX) as client:  # it leaves before it is answered
            client.connect(str(place / "control.sock"))
            client.sendall(command_to_json(order).encode() + b"\n")
        return [send(place, order), send(place, ExtendTrials(to=3)), send(place, order)]

    bench.orders.at(at_step(0, 20), act, "extend")
    report = bench.run(space=shoal.grid(lr=[0.01, 0.003, 0.001, 0.02]), trials=2)
    first, in_all, again = bench.orders.join()["extend"]
    for answer in (first, again):
        assert (answer["trials"], answer["added"]) == ([2], False)
        assert "trial 2 was added by the same command on " in answer["text"]
    assert (in_all["trials"], in_all["added"]) == ([], False)
    assert len(report.trials) == 3
    bench.check_bits(report, report.trials)


def test_a_paused_study_can_be_extended(bench):
    def act():
        send(bench.directory / "it", Pause())
        answer = send(bench.directory / "it", ExtendTrials(trials=1))
        send(bench.directory / "it", Continue())
        return answer

    bench.orders.at(at_step(0, 20), act, "extend")
    report = bench.run(space=shoal.grid(lr=[0.01, 0.003]), trials=1, devices=1)
    assert bench.orders.join()["extend"]["trials"] == [1]
    bench.check_bits(report, report.trials)


# -- clones -----------------------------------------------------------------------------------


def warm_reference(recipe, parent, hp, at, steps=STEPS):
    """The parent trained alone to step ``at``; from there with the clone's hyperparameters."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a schedule that catches up steps before its optimizer
        trained = _train_warm(recipe, parent, hp, at, steps)
    torch.set_num_threads(before)
    return trained


def _train_warm(recipe, parent, hp, at, steps):
    seed_all(parent.seed)
    model = recipe.model(parent.hp)
    train, _ = recipe.data(parent.hp)
    optimizer = build_optimizer(recipe, model.named_parameters(), parent.hp)
    schedule = build_schedule(recipe, optimizer, parent.hp, train)
    losses = []
    model.train()
    for step in range(steps):
        if step == at:
            moments = {p: copy.deepcopy(optimizer.state[p]) for p in model.parameters()}
            optimizer = build_optimizer(recipe, model.named_parameters(), hp)
            optimizer.state.update(moments)
            schedule = build_schedule(recipe, optimizer, hp, train)
            for _ in range(at):
                schedule.step()
        batch = train[step % len(train)]
        optimizer.zero_grad(set_to_none=True)
        loss = recipe.loss(model(batch[0]), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad_norm)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return model, optimizer, losses


def check_warm(bench, report, clone):
    """A warm clone's bits against the reference's."""
    parent, trial = report.trials[0], report.trials[clone]
    steps = bench.heard.of(StepFinished, trial=clone)
    at = steps[0].step - 1
    model, optimizer, losses = warm_reference(bench.recipe, parent, trial.hp, at)
    state = trial.load_state()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state["model"][name]), name
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, state["optimizer"]["state"][name][key]), (name, key)
    assert state["optimizer"]["groups"][0]["lr"] == optimizer.param_groups[0]["lr"]
    assert [e.loss for e in steps] == losses[at:]
    return at


@pytest.mark.sample(1)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_warm_clone_of_a_running_trial_goes_on_from_its_bits(technique, bench):
    order = CloneTrial(trial=0, changes={"lr": 0.02}, warm=True)
    bench.orders.at(at_step(0, 21), order, "clone")
    report = bench.run(technique=TECHNIQUES[technique])
    assert bench.orders.join()["clone"]["trials"] == [2]
    assert states(report) == ["FINISHED"] * 3
    assert check_warm(bench, report, 2) >= 21
    bench.check_bits(report, report.trials[:2])


def test_a_cold_clone_begins_anew_and_equals_a_trial_of_its_own(bench):
    order = CloneTrial(trial=0, changes={"lr": 0.02}, warm=False)
    bench.orders.at(at_step(0, 21), order, "clone")
    report = bench.run()
    assert report.trials[2].hp["lr"] == 0.02
    bench.check_bits(report, report.trials)


def test_a_clone_is_made_once_however_often_it_is_ordered(bench):
    order = CloneTrial(trial=0, changes={"lr": 0.02}, warm=True)

    def act():
        place = bench.directory / "it"
        again = CloneTrial(trial=0, changes={"lr": 0.02}, warm=True, again=True)
        return [send(place, command) for command in (order, order, again)]

    bench.orders.at(at_step(0, 21), act, "clones")
    report = bench.run()
    answers = bench.orders.join()["clones"]
    assert [(a["trials"], a["added"]) for a in answers] == [([2], True), ([2], False), ([3], True)]
    assert states(report) == ["FINISHED"] * 4
    check_warm(bench, report, 2)


def test_a_warm_clone_that_is_cut_short_begins_from_its_parent_again(bench):
    order = CloneTrial(trial=0, changes={"lr": 0.02}, warm=True)
    bench.orders.at(at_step(0, 21), order, "clone")
    bench.orders.at(at_step(2, 0), StopStudy(grace_s=0.0), "stop")  # no time to save it
    bench.run()
    assert list(bench.orders.join()["stop"]["unsaved"])
    first = bench.heard.of(StepFinished, trial=2)[0].step
    report = bench.run()
    assert states(report) == ["FINISHED"] * 3
    model, _, _ = warm_reference(bench.recipe, report.trials[0], report.trials[2].hp, first - 1)
    state = report.trials[2].load_state()["model"]
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_a_warm_clone_of_a_finished_trial_is_refused_and_leaves_nothing(bench):
    order = CloneTrial(trial=0, changes={"lr": 0.02})
    bench.orders.at(finished(0), order, "clone")
    report = bench.run(devices=1)
    words = f"would begin after step {STEPS} of {STEPS}, with nothing left to train"
    assert words in str(bench.orders.join()["clone"])
    assert states(report) == ["FINISHED"] * 2
    assert not list((bench.directory / "it" / "trials" / "0002").glob("step-*"))
    with pytest.raises(shoal.SpecError, match=words):
        bench.run(devices=1, resume=True, clones=[order])
    assert len(shoal.open(bench.directory / "it", bench.recipe).trials) == 2
    more = bench.run(devices=1, resume=True, clones=[replace(order, warm=False)])
    assert states(more) == ["FINISHED"] * 3


def test_a_warm_clone_of_a_trial_that_never_ran_is_refused(bench):
    order = CloneTrial(trial=1, changes={"lr": 0.02}, warm=True)
    bench.orders.at(at_step(0, 5), order, "clone")
    report = bench.run(devices=1, steps=60)
    assert "has no state that a clone could begin from" in str(bench.orders.join()["clone"])
    assert len(report.trials) == 2


def test_a_clone_with_an_unknown_hyperparameter_is_refused(bench):
    order = CloneTrial(trial=0, changes={"lrr": 0.02}, warm=True)
    bench.orders.at(at_step(0, 5), order, "clone")
    report = bench.run(lr=[0.01], steps=60)
    assert "has no hyperparameter 'lrr'" in str(bench.orders.join()["clone"])
    assert len(report.trials) == 1


def test_a_warm_clone_that_is_another_model_fails_alone(bench):
    space = shoal.grid(lr=[0.01], width=[64])
    order = CloneTrial(trial=0, changes={"width": 32}, warm=True)
    bench.orders.at(at_step(0, 20), order, "clone")
    report = bench.run(space=space)
    assert states(report) == ["FINISHED", "FAILED"]
    words = "and the model that is made has (32,). Its hyperparameters are others than those of"
    assert words in report.trials[1].error
    bench.check_bits(report, report.trials[:1])


def test_the_shell_reads_a_change_as_the_type_that_the_study_has(bench):
    bench.run(lr=[0.01], steps=2)
    command = clone_command("it", 0, ["lr=1"], bench.directory, warm=True)
    assert command == CloneTrial(trial=0, changes={"lr": 1.0}, warm=True)


# -- retries ----------------------------------------------------------------------------------


def test_a_trial_that_raised_once_goes_on_to_the_bits_of_the_plain_loop(bench, tmp_path):
    space = shoal.grid(lr=[0.01], trouble=["raise"], flag=[str(tmp_path / "flag")])
    report = bench.run(space=space, retries=2, steps=20, checkpoint_every=0)
    bench.check_bits(report, report.trials, steps=20)


def test_a_trial_that_raises_each_time_fails_after_its_retries(bench):
    space = shoal.grid(lr=[0.01], trouble=["raise"], flag=[""])
    report = bench.run(space=space, retries=2, steps=20)
    assert states(report) == ["FAILED"]
    assert "the model gave up" in report.trials[0].error
    assert len(bench.heard.of(TrialFailed)) == 1


def test_a_trial_that_fails_three_times_in_the_same_way_has_failed(bench):
    space = shoal.grid(lr=[0.01], trouble=["raise"], flag=[""])
    report = bench.run(space=space, retries=9, steps=20)
    assert states(report) == ["FAILED"]
    assert len(bench.heard.of(TrialRestarted)) == 2


# -- a recipe that cannot work ------------------------------------------------------------------


def test_after_failures_alike_the_study_runs_with_a_recipe_that_was_mended(bench):
    lr = (0.01, 0.02, 0.03, 0.04, 0.05)
    bench.recipe = troubles.recipe(data=troubles.data_that_ends_early, accumulate=2)
    with pytest.raises(TrialError, match="failed in the same way"):
        bench.run(lr=lr, steps=6, devices=1)
    assert len(bench.heard.of(TrialFailed)) == 3
    bench.recipe = troubles.recipe(accumulate=2)
    report = bench.run(lr=lr, steps=6)
    bench.check_bits(report, report.trials, steps=6)


def test_failures_alike_do_not_stop_a_study_that_trained_before(bench):
    bench.recipe = troubles.recipe(accumulate=2, data=troubles.data_that_ends_at_will)
    bench.run(space=shoal.grid(lr=[0.01], ends=[False]), steps=6)
    space = shoal.grid(lr=[0.01, 0.02, 0.03, 0.04], ends=[False, True])
    report = bench.run(space=space, steps=6)
    assert states(report).count("FAILED") == 4
    assert states(report).count("FINISHED") == 4
