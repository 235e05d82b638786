"""A search that is killed, disturbed, short of memory or meddled with comes to the same trials."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys

import pytest
import searches
import studies
import torch
from listening import Heard, Orders
from processes import Runner

import shoal
from shoal.control import CloneTrial, Continue, Pause, StopTrial
from shoal.core.errors import CapacityError, SpecError, StorageError
from shoal.core.event import (
    SamplerEnded,
    StepFinished,
    StudyChanged,
    StudyPaused,
    TrialFinished,
    TrialParked,
    TrialPlanned,
    TrialPruned,
    TrialResumed,
    TrialStarted,
)
from shoal.execution import floor
from shoal.execution.trial import TrialRun
from shoal.launch.keeping import Keeper
from shoal.memory.store import create_region
from shoal.observe import read_events
from shoal.observe.snapshot import Snapshot
from shoal.runtime.pool import WorkerPool
from shoal.runtime.saving import checkpoint
from shoal.search import wanted
from shoal.testing import assert_same, plain_loop
from shoal.verify import read_losses

optuna = pytest.importorskip("optuna")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, warm_workers):
    """What the study comes to on one device, when nothing happens."""
    study = searches.make(tmp_path_factory.mktemp("search"))
    studies.run(study, warm_workers)
    return searches.outcome(study.directory)


def states(report):
    return [str(trial.state) for trial in report.trials]


# -- killed, disturbed ------------------------------------------------------------------------


def test_the_undisturbed_study_has_pruned_some_and_come_to_all_trials(undisturbed):
    ends = [state for _, _, _, state, _, _ in undisturbed]
    assert len(ends) == searches.TRIALS
    assert set(ends) == {"PRUNED", "FINISHED"}
    assert any("dropout" in hp for _, hp, _, _, _, _ in undisturbed)
    assert any("dropout" not in hp for _, hp, _, _, _, _ in undisturbed)


def test_a_search_killed_at_delicate_instants_comes_to_the_same_leaderboard(tmp_path, undisturbed):
    runner = Runner(tmp_path, maker="searches")
    for hook in ("kill before TrialPruned", "kill after TrialFinished"):
        assert runner.run(hook) == -signal.SIGKILL, runner.words()
    assert runner.start(verb="resume").wait() == 0, runner.words()
    assert searches.outcome(runner.place) == undisturbed
    for trial in shoal.open(runner.place, searches.recipe()).trials:
        assert trial.load_state()["step"] == trial.history[-1]["step"]


@pytest.mark.full
def test_a_search_killed_at_a_random_instant_comes_to_the_same_leaderboard(tmp_path, undisturbed):
    seed = random.SystemRandom().randrange(10**6)
    sys.stderr.write(f"seed {seed}\n")  # shown when it fails
    draw, runner = random.Random(seed), Runner(tmp_path, maker="searches", devices=3)
    process = runner.start(**{studies.PACE_S: "0.02"})
    process.wait_for("StepFinished", or_end=True)
    if not process.is_over_after(draw.uniform(0.0, 2.0)):
        process.kill()
    assert runner.run() == 0, runner.words()
    assert searches.outcome(runner.place) == undisturbed


def test_the_death_of_workers_changes_nothing(tmp_path, undisturbed):
    runner = Runner(tmp_path, maker="searches")
    process = runner.start(**{studies.PACE_S: "0.01"})
    for count in (1, 2):
        process.wait_for("TrialParked", count)
        assert process.kill_a_worker()
    assert process.wait() == 0, runner.words()
    assert searches.outcome(runner.place) == undisturbed


# -- exact ------------------------------------------------------------------------------------


def test_pruning_leaves_every_trial_on_the_bits_of_training_alone(tmp_path, warm_workers):
    study = searches.make(tmp_path, generation=4, trials=8)
    report = studies.run(study, warm_workers, devices=2)

    losses = read_losses(study.directory)
    assert {"PRUNED", "FINISHED"} == set(states(report))
    for trial in report.trials:
        plain = plain_loop(searches.recipe(), trial.hp, trial.seed, epochs=searches.EPOCHS)
        if trial.state == "FINISHED":
            assert_same(plain, trial, losses=losses[trial.number])
        else:
            taken = losses[trial.number]
            assert tuple(taken) == tuple(plain.losses[: len(taken)])
            assert 0 < len(taken) < len(plain.losses)
            step = trial.load_state()["step"]
            assert step == len(taken) == trial.history[-1]["step"]


def test_a_lease_that_ends_before_its_first_step_loses_nothing(
    tmp_path, warm_workers, monkeypatch, assert_alone
):
    """What is on its way to a device must not be stored from there before it has come.

    Copies are delayed under poison, so that it is still on its way when the lease ends.
    """
    granted = {}
    before_halt = TrialRun.before_halt

    def early(state, step):
        count = granted[state.job.trial] = granted.get(state.job.trial, 0) + 1
        return state.step if count < 3 else before_halt(state, step)

    monkeypatch.setattr(TrialRun, "before_halt", early)
    study = searches.make(tmp_path, sampler="random", pruner=None, generation=None, trials=6)
    heard = Heard()
    hardware = shoal.Hardware.virtual(devices=2, memory=studies.MEMORY, poison=True)
    shown = {"progress": False, "timeline": False, "workers": warm_workers}
    report = study.run(hardware=hardware, callbacks=[heard], **shown)
    assert {event.trial for event in heard.of(TrialParked) if not event.step} == set(granted)
    assert_alone(report, report.trials, searches.recipe(), epochs=searches.EPOCHS)


@pytest.mark.full
def test_a_pruned_trial_is_not_the_best_and_can_be_loaded(tmp_path, warm_workers):
    report = studies.run(searches.make(tmp_path), warm_workers)

    pruned = next(trial for trial in report.trials if trial.state == "PRUNED")
    assert report.best.state == "FINISHED"
    rows = [line.split() for line in str(report).splitlines()]
    assert any(row[:1] == [str(pruned.number)] and "pruned" in row for row in rows)
    assert pruned.load()(torch.zeros(2, 6)).shape == (2, 3)
    again = studies.run(searches.make(tmp_path), warm_workers)
    assert states(again) == states(report)  # nothing is begun anew


# -- short of memory, meddled with ------------------------------------------------------------


@pytest.mark.full
def test_where_the_host_has_no_room_for_a_generation_one_waits_on_disk(
    tmp_path, warm_workers, monkeypatch, undisturbed
):
    there, refused = set(), []
    close = TrialRun.close

    def create(name, num_bytes, directory):
        if len(there) >= 2:
            refused.append(name)
            raise CapacityError("cannot allocate 1 MiB of host memory")
        there.add(name.rpartition("-")[2])
        return create_region(name, num_bytes, directory)

    def closed(state):
        there.discard(str(state.job.trial))
        close(state)

    monkeypatch.setattr(floor, "create_region", create)
    monkeypatch.setattr(TrialRun, "close", closed)
    study = searches.make(tmp_path)
    studies.run(study, warm_workers)
    assert refused
    assert searches.outcome(study.directory) == undisturbed


@pytest.mark.full
def test_a_trial_that_waits_at_its_rung_can_be_stopped_and_the_others_go_on(
    tmp_path, warm_workers, monkeypatch
):
    study, orders = searches.make(tmp_path), Orders(tmp_path / "k", monkeypatch)
    orders.at(lambda e: isinstance(e, TrialParked) and e.trial == 0, StopTrial(trial=0), "stop")
    report = studies.run(study, warm_workers, callbacks=[orders])
    assert "stopped" in orders.join()["stop"]["text"]
    assert states(report)[0] == "STOPPED"
    assert len(report.trials) == searches.TRIALS
    assert {"PRUNED", "FINISHED"} == set(states(report)[1:])


def test_a_search_can_be_paused_while_trials_wait_at_their_rung(
    tmp_path, warm_workers, monkeypatch, undisturbed
):
    study, orders = searches.make(tmp_path), Orders(tmp_path / "k", monkeypatch)
    orders.at(lambda e: isinstance(e, TrialParked) and e.trial == 1, Pause(), "pause")
    orders.at(lambda e: isinstance(e, StudyPaused), Continue(), "continue")
    studies.run(study, warm_workers, callbacks=[orders])
    assert "going on" in orders.join()["continue"]["text"]
    assert searches.outcome(study.directory) == undisturbed


@pytest.mark.full
def test_a_clone_belongs_to_no_generation_and_trains_to_its_end(
    tmp_path, warm_workers, monkeypatch, undisturbed
):
    study, orders = searches.make(tmp_path, trials=6), Orders(tmp_path / "k", monkeypatch)
    worst = CloneTrial(trial=1, changes={}, warm=False)
    orders.at(lambda e: isinstance(e, TrialPruned) and e.trial == 1, worst, "clone")
    report = studies.run(study, warm_workers, callbacks=[orders])
    assert orders.join()["clone"]["trials"] == [6]
    assert states(report)[6] == "FINISHED"
    assert searches.outcome(study.directory)[:6] == undisturbed[:6]


def test_a_point_that_fits_no_device_fails_alone(tmp_path, warm_workers):
    recipe = shoal.Recipe(model=_wide, data=searches.data, loss=searches.loss)
    options = {"space": {"lr": 0.01, "width": shoal.choice(8, 100_000)}, "trials": 7}
    options |= {"generation": 2, "epochs": 1, "sampler": Scripted({4: 100_000, 6: 100_000})}
    report = studies.run(shoal.Study("k", recipe, directory=tmp_path, **options), warm_workers)
    assert states(report) == ["FINISHED"] * 4 + ["FAILED", "FINISHED", "FAILED"]
    assert "TooLarge" in report.trials[4].error


@pytest.mark.parametrize("width", [100_000, -1], ids=["fits no device", "cannot be built"])
def test_a_point_that_cannot_run_fails_alone_in_a_run_that_goes_on_too(
    width, tmp_path, warm_workers
):
    recipe = shoal.Recipe(model=_wide, data=searches.data, loss=searches.loss)
    options = {"space": {"lr": 0.01, "width": shoal.choice(8, 100_000, -1)}, "epochs": 1}
    options |= {"generation": 1, "sampler": Scripted({2: width}), "directory": tmp_path}
    for trials in (2, 3, 4):  # only the one that cannot run is left to the second run
        report = studies.run(shoal.Study("k", recipe, trials=trials, **options), warm_workers)
        assert states(report) == ["FINISHED", "FINISHED", "FAILED", "FINISHED"][:trials]
    assert ("TooLarge" if width > 0 else "negative dimension") in report.trials[2].error


class Scripted(optuna.samplers.BaseSampler):
    """Suggests a width by the number of the trial, 8 unless told otherwise."""

    def __init__(self, widths) -> None:
        self.widths = widths

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        return self.widths.get(trial.number, 8) if name == "width" else 0.01


def _wide(hp):
    return torch.nn.Sequential(torch.nn.Linear(6, hp["width"]), torch.nn.Linear(hp["width"], 3))


@pytest.mark.full
def test_more_trials_of_a_search_are_asked_for_by_its_file(tmp_path, warm_workers):
    first = studies.run(searches.make(tmp_path, trials=5), warm_workers)
    with pytest.raises(SpecError, match=r"cannot be extended by hand.*trials=7"):
        studies.run(searches.make(tmp_path, trials=5), warm_workers, extend=2)
    more = studies.run(searches.make(tmp_path, trials=9), warm_workers)
    assert [dict(t.hp) for t in more.trials[:5]] == [dict(t.hp) for t in first.trials]
    assert len(more.trials) == 9
    with pytest.raises(SpecError, match="its search came to 9 already"):
        studies.run(searches.make(tmp_path, trials=7), warm_workers)


def test_a_search_goes_on_by_its_own_rules_only(tmp_path, warm_workers):
    studies.run(searches.make(tmp_path, trials=4), warm_workers)
    for change, word in (
        ({"pruner": "median"}, "had pruner=asha"),
        ({"pruner": None}, "had pruner=asha"),
        ({"generation": 2}, "had generation=3"),
        ({"epochs": 5}, "had epochs=4"),
        ({"mode": "max"}, "had mode=min"),
    ):
        with pytest.raises(SpecError, match=word):
            studies.run(searches.make(tmp_path, trials=4, **change), warm_workers)


# -- what a pruner cannot work with -----------------------------------------------------------


def test_a_trial_without_validation_data_cannot_be_compared_and_fails_alone(
    tmp_path, warm_workers
):
    def data(hp):
        return _unvalidated(hp) if hp["norm"] else searches.data(hp)

    recipe = shoal.Recipe(model=searches.build, data=data, loss=searches.loss)
    study = shoal.Study(
        *("k", recipe), space={"lr": 0.1, "dropout": 0.1, "norm": shoal.choice(False, True)},
        epochs=2, pruner="asha", directory=tmp_path,
    )  # fmt: skip
    report = studies.run(study, warm_workers)
    assert states(report) == ["FINISHED", "FAILED"]
    assert "compares 'valid_loss', and the evaluation after step 4" in report.trials[1].error


def test_a_metric_that_is_not_a_number_is_said_to_be_why_a_trial_was_pruned(
    tmp_path, warm_workers
):
    recipe = shoal.Recipe(
        model=searches.build, data=searches.data, loss=searches.loss, metrics={"odd": _odd}
    )
    study = shoal.Study(
        *("k", recipe), space=searches.SPACE, trials=3, epochs=2, pruner="asha",
        metric="valid_odd", directory=tmp_path,
    )  # fmt: skip
    report = studies.run(study, warm_workers)
    assert states(report) == ["PRUNED"] * 3
    found = [e.reason for e in read_events(study.directory) if isinstance(e, TrialPruned)]
    assert set(found) == {"its valid_odd was not a number at evaluation 1"}


def _odd(output, batch):
    return float("nan")


def _unvalidated(hp):
    return searches.data(hp)[0], None


def test_data_of_no_known_length_is_refused_before_anything_trains(tmp_path, warm_workers):
    recipe = shoal.Recipe(model=searches.build, data=_endless, loss=searches.loss)
    study = shoal.Study(
        *("k", recipe), space=searches.SPACE, trials=3, epochs=2, pruner="asha",
        directory=tmp_path,
    )  # fmt: skip
    with pytest.raises(shoal.core.errors.PlanError, match="does not say how many"):
        studies.run(study, warm_workers)
    assert not (tmp_path / "k").exists()


class _Stream:
    def __init__(self, batches) -> None:
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def _endless(hp):
    train, valid = searches.data(hp)
    return _Stream(list(train)), valid


def _endless_if_wide(hp):
    return (_endless if hp["width"] > 8 else searches.data)(hp)


def test_a_later_trial_whose_data_has_no_known_length_fails_alone_also_on_going_on(
    tmp_path, warm_workers
):
    recipe = shoal.Recipe(model=_wide, data=_endless_if_wide, loss=searches.loss)

    def run(**options):
        study = shoal.Study(
            *("k", recipe), space={"width": shoal.integer(2, 20), "lr": shoal.uniform(0, 1)},
            trials=6, epochs=2, generation=2, sampler=Scripted({4: 9}), pruner="asha",
            directory=tmp_path,
        )  # fmt: skip
        return studies.run(study, warm_workers, **options)

    def stop(event):
        if isinstance(event, TrialPlanned) and event.trial >= 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit):
        run(callbacks=[stop])
    report = run()
    assert "FAILED" not in states(report)[:4] + states(report)[5:]
    assert "trial 4" in report.trials[4].error
    assert "does not say how many batches" in report.trials[4].error
    assert not report.trials[4].history


@pytest.mark.full
def test_a_study_that_keeps_the_best_keeps_no_state_of_the_pruned(tmp_path, warm_workers):
    heard = Heard()
    study = searches.make(tmp_path, keep_finished="best:1")
    studies.run(study, warm_workers, callbacks=[heard])
    pruned = heard.of(TrialPruned)
    assert pruned
    assert all(event.checkpoint for event in pruned)
    for event in pruned:
        assert not checkpoint.generations(study.directory, event.trial).all()
    assert os.listdir(study.directory)


def test_what_a_killed_run_had_not_let_go_of_the_next_one_does(
    tmp_path, warm_workers, monkeypatch
):
    heard, made = Heard(), functools.partial(searches.make, tmp_path, keep_finished="best:1")
    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "see", lambda keeper, event: None)
        studies.run(made(), warm_workers, callbacks=[heard])
    places = [checkpoint.generations(made().directory, e.trial) for e in heard.of(TrialPruned)]
    assert all(place.all() for place in places)
    studies.run(made(), warm_workers)
    assert not any(place.all() for place in places)


# -- no more points ---------------------------------------------------------------------------


class Ends(optuna.samplers.RandomSampler):
    """Has the study stop when it is told of the fifth trial."""

    def __init__(self) -> None:
        super().__init__(seed=1)

    def after_trial(self, study, trial, state, values):
        if trial.number == 4:
            study.stop()


GRID = optuna.samplers.GridSampler({"lr": [0.01, 0.02, 0.03, 0.04, 0.05]}, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "count"), [(Ends(), 8), (GRID, 5)])
def test_a_study_whose_sampler_has_no_more_points_ends_with_those_there_are(
    tmp_path, warm_workers, sampler, count
):
    def study(trials):
        space = {"lr": shoal.uniform(0.001, 0.1), "norm": True}
        return searches.make(
            tmp_path, space=space, trials=trials, generation=2, sampler=sampler, epochs=2
        )

    heard = Heard()
    report = studies.run(study(20), warm_workers, callbacks=[heard])
    assert {"PRUNED", "FINISHED"} >= set(states(report))
    assert len(report.trials) == count
    assert not report.stopped
    (ended,) = heard.of(SamplerEnded)
    assert (ended.sampler, ended.trials, ended.asked) == (type(sampler).__name__, count, 20)
    before = Snapshot.of(read_events(report.directory))
    assert (before.total, before.is_finished) == (count, True)
    assert f"there are {count} of the 20" in before.warnings[0]

    known = list(read_events(report.directory))
    studies.run(study(20), warm_workers)
    assert list(read_events(report.directory)) == known
    again = studies.run(study(30), warm_workers)  # none comes of that, and it says so
    assert len(again.trials) == count
    assert "of the 30" in Snapshot.of(read_events(report.directory)).warnings[0]


@pytest.mark.slow
def test_what_was_tried_again_before_a_sampler_ran_out_stays(tmp_path, warm_workers, monkeypatch):
    def study():
        space = {"lr": shoal.uniform(0.001, 0.1), "norm": True}
        options = {"space": space, "trials": 7, "generation": 7, "sampler": GRID, "epochs": 1}
        return searches.make(tmp_path, pruner=None, **options)

    with monkeypatch.context() as patch:  # as it was on record before points were counted
        patch.setattr(wanted, "num_points", lambda sampler, space, points: None)
        first = studies.run(study(), warm_workers)
    assert len(first.trials) == 7
    assert states(studies.run(study(), warm_workers)) == ["FINISHED"] * 7


# -- what is on record counts -----------------------------------------------------------------


class Upgraded(Scripted):
    """Says otherwise for trials than the version of it that began the study did."""

    shift = 0.0

    def sample_independent(self, study, trial, name, distribution):
        value = super().sample_independent(study, trial, name, distribution)
        return value if name == "width" else value + type(self).shift


def test_a_sampler_that_answers_otherwise_from_the_first_trial_on_changes_nothing_on_record(
    tmp_path, warm_workers, monkeypatch
):
    recipe = shoal.Recipe(model=_wide, data=searches.data, loss=searches.loss)
    space = {"lr": shoal.uniform(0.001, 0.1), "width": shoal.choice(8, 16)}

    def study(trials):
        options = {"space": space, "trials": trials, "generation": 2, "epochs": 1}
        return shoal.Study("k", recipe, directory=tmp_path, sampler=Upgraded({}), **options)

    first = studies.run(study(5), warm_workers)
    monkeypatch.setattr(Upgraded, "shift", 0.005)
    heard = Heard()
    more = studies.run(study(8), warm_workers, callbacks=[heard])
    rates = [trial.hp["lr"] for trial in more.trials]
    assert rates[:5] == [trial.hp["lr"] for trial in first.trials] == [0.01] * 5
    assert rates[5:] == [0.015] * 3
    words = " ".join(word for event in heard.of(StudyChanged) for word in event.changes)
    assert "would have given trial 0 another point than is on record" in words
    wider = study(8)
    wider.space = space | {"lr": shoal.uniform(0.001, 0.2)}
    with pytest.raises(SpecError, match="its sampler drew from the space lr=Uniform"):
        studies.run(wider, warm_workers)


def test_a_sampler_or_pruner_made_with_other_values_is_another_one(tmp_path, warm_workers):
    def study(sampler, pruner):
        return searches.make(tmp_path, trials=4, sampler=sampler, pruner=pruner)

    random_one, halving = optuna.samplers.RandomSampler, optuna.pruners.SuccessiveHalvingPruner
    studies.run(study(random_one(seed=1), halving(min_resource=1)), warm_workers)
    studies.run(study(random_one(seed=1), halving(min_resource=1)), warm_workers)
    with pytest.raises(SpecError, match=r"pruner, optuna's Succ.*had min_resource=1, and .*=2"):
        studies.run(study(random_one(seed=1), halving(min_resource=2)), warm_workers)
    with pytest.raises(SpecError, match="RandomSampler, had another seed, or none"):
        studies.run(study(random_one(seed=2), halving(min_resource=1)), warm_workers)


class Raises(Scripted):
    """Raises where it is asked for a trial beyond the last that it is meant for."""

    def __init__(self, last) -> None:
        super().__init__({})
        self.last = last

    def sample_independent(self, study, trial, name, distribution):
        if trial.number > self.last:
            raise ValueError("no more")
        return super().sample_independent(study, trial, name, distribution)


def test_a_study_whose_sampler_raises_late_loses_nothing_and_goes_on_with_a_mended_one(
    tmp_path, warm_workers
):
    def run(last, trials=7, **options):
        study = searches.make(
            tmp_path, trials=trials, space={"lr": shoal.uniform(0.0, 0.1), "norm": True},
            epochs=2, generation=2, sampler=Raises(last),
        )  # fmt: skip
        return studies.run(study, warm_workers, **options)

    for _ in range(2):
        with pytest.raises(SpecError, match=r"ValueError: no more.*The 4 trials that there are"):
            run(3)
    assert len(run(3, trials=4).trials) == 4
    with pytest.raises(SpecError, match=r"had last=3, and last=9 is asked for now.*or accept it"):
        run(9)
    report = run(9, accept_recipe=True)
    assert set(states(report)) <= {"FINISHED", "PRUNED"}
    assert len(report.trials) == 7
    assert len(run(9, trials=8).trials) == 8  # it is on record


# -- no room ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_generation_that_does_not_fit_the_host_waits_until_there_is_room(
    tmp_path, warm_workers, is_interrupted
):
    recipe = shoal.Recipe(model=_wide, data=searches.data, loss=searches.loss)
    widths = {4: 2000, 5: 2000, 6: 2000}
    options = {"space": {"lr": 0.01, "width": shoal.choice(8, 2000)}, "trials": 7, "epochs": 2}
    study = shoal.Study(
        "k", recipe, directory=tmp_path, generation=2, sampler=Scripted(widths), **options
    )
    hardware = shoal.Hardware.virtual(devices=2, memory="4MiB", host_memory="900KiB")
    shown = {"workers": warm_workers, "progress": False, "timeline": False}

    def interrupt(event) -> None:
        if isinstance(event, StepFinished) and event.trial == 4:
            signal.raise_signal(signal.SIGINT)

    if is_interrupted:  # with two of them waiting, which do not fit together
        with pytest.raises(SystemExit):
            study.run(hardware=hardware, callbacks=[interrupt], **shown)
    heard = Heard()
    report = study.run(hardware=hardware, callbacks=[heard], **shown)
    assert states(report) == ["FINISHED"] * 7, [trial.error for trial in report.trials]
    assert [trial.hp["width"] for trial in report.trials] == [8] * 4 + [2000] * 3
    there, most = set(), 0
    for event in heard.of(TrialStarted, TrialResumed, TrialFinished):
        if event.trial in widths:
            (there.discard if isinstance(event, TrialFinished) else there.add)(event.trial)
            most = max(most, len(there))
    assert most == 1  # two of them do not fit


@pytest.mark.full
def test_where_those_that_wait_cannot_be_saved_the_study_ends_and_goes_on_later(
    tmp_path, monkeypatch, undisturbed
):
    full, there, close = tmp_path / "full", set(), TrialRun.close

    def create(name, num_bytes, directory):
        if len(there) >= 2:
            raise CapacityError("cannot allocate 1 MiB of host memory")
        there.add(name.rpartition("-")[2])
        return create_region(name, num_bytes, directory)

    def closed(state):
        there.discard(str(state.job.trial))
        close(state)

    monkeypatch.setenv(studies.FULL, str(full))
    with WorkerPool() as workers, monkeypatch.context() as short:
        short.setattr(floor, "create_region", create)
        short.setattr(TrialRun, "close", closed)
        full.touch()
        with pytest.raises(StorageError, match="of those that have some none can be saved"):
            studies.run(searches.make(tmp_path, checkpoint_every=3600), workers)
    full.unlink()
    with WorkerPool() as workers:
        studies.run(searches.make(tmp_path, checkpoint_every=3600), workers)
    assert searches.outcome(tmp_path / "k") == undisturbed
