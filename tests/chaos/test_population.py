"""A population that is killed, disturbed, short of memory or damaged comes to the same trials."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from dataclasses import replace

import populations
import pytest
import studies
import torch
from listening import Heard, Orders
from processes import Runner

import shoal
from shoal.control import CloneTrial, Continue, Pause, StopTrial
from shoal.core.errors import CapacityError, PlanError, SpecError, StorageError
from shoal.core.event import StepFinished, StudyPaused, TrialExploited, TrialParked, WorkerStarted
from shoal.execution import exploiting, floor
from shoal.execution.trial import TrialRun
from shoal.memory.store import create_region
from shoal.runtime.pool import WorkerPool
from shoal.runtime.saving import checkpoint
from shoal.ui.show import describe_trial, leaderboard, read_snapshot
from shoal.verify import verify_trials


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, warm_workers):
    """What the study comes to on one device, when nothing happens."""
    study = populations.make(tmp_path_factory.mktemp("population"))
    studies.run(study, warm_workers)
    return populations.outcome(study.directory)


def states(report):
    return [str(trial.state) for trial in report.trials]


# -- exact ------------------------------------------------------------------------------------


def test_every_trial_ends_on_the_bits_of_a_plain_loop_of_its_lineage(
    tmp_path, warm_workers, undisturbed
):
    study = populations.make(tmp_path)
    report = studies.run(study, warm_workers, devices=2)

    assert states(report) == ["FINISHED"] * populations.TRIALS
    assert sum(len(trial.inherited) for trial in report.trials) == 2 * (populations.EPOCHS - 1)
    populations.assert_lineage(report, epochs=populations.EPOCHS)
    assert populations.outcome(study.directory) == undisturbed


@pytest.mark.full
def test_in_the_middle_of_an_epoch_too_and_every_other_evaluation(tmp_path, warm_workers):
    options = {"steps": 19, "eval_every": 3, "pruner": shoal.PBT(interval=2, quantile=0.4)}
    study = populations.make(tmp_path, **options)
    report = studies.run(study, warm_workers, devices=3)
    taken = [one["step"] for trial in report.trials for one in trial.inherited]
    assert sorted(taken) == [6, 6, 12, 12, 18, 18]
    populations.assert_lineage(report, steps=19, eval_every=3)


def test_a_report_says_from_whom_and_with_what_each_trial_went_on(tmp_path, warm_workers):
    study = populations.make(tmp_path)
    report = studies.run(study, warm_workers)
    trial = next(trial for trial in report.trials if trial.inherited)
    first = trial.inherited[0]
    steps = [stretch["after"] for stretch in trial.hp_schedule]
    assert steps == [0, *(one["step"] for one in trial.inherited)]
    assert trial.hp_schedule[0]["hp"] == first["before"]
    assert trial.hp_schedule[-1]["hp"] == dict(trial.hp)
    assert trial.load_state()["optimizer"]["groups"][0]["weight_decay"] == trial.hp["weight_decay"]
    assert trial.load()[2].p == trial.hp["dropout"]
    assert f"from {trial.inherited[-1]['source']} at {trial.inherited[-1]['step']}" in str(report)
    assert trial.to_dict()["inherited"] == list(trial.inherited)

    snapshot = read_snapshot(study.directory)
    words = describe_trial(snapshot, snapshot.trial(trial.number), study.directory)
    assert f"after step {first['step']} it went on from trial {first['source']}'s state" in words
    assert "  from  " in leaderboard(snapshot)


def test_verify_trains_the_lineage_again_and_finds_the_same_bits(tmp_path, warm_workers):
    study = populations.make(tmp_path)
    studies.run(study, warm_workers)
    rows = read_snapshot(study.directory).trials
    verdicts = list(verify_trials(study.directory, rows, recipe=populations.recipe()))
    assert all(verdict.equal for verdict in verdicts), verdicts
    notes = " ".join(note for verdict in verdicts for note in verdict.notes)
    assert "with the trials that it went on from trained again too" in notes


# -- killed, disturbed ------------------------------------------------------------------------


@pytest.mark.full
def test_a_population_killed_around_its_exploits_comes_to_the_same(tmp_path, undisturbed):
    runner = Runner(tmp_path, maker="populations")
    hooks = [f"kill {when} TrialExploited" for when in ("before", "after")]
    for hook in [*hooks, *hooks]:
        assert runner.run(hook) == -signal.SIGKILL, runner.words()
    assert runner.start(verb="resume").wait() == 0, runner.words()
    assert populations.outcome(runner.place) == undisturbed
    populations.assert_lineage(
        shoal.open(runner.place, populations.recipe()), epochs=populations.EPOCHS
    )


@pytest.mark.full
def test_a_population_killed_at_a_random_instant_comes_to_the_same(tmp_path, undisturbed):
    seed = random.SystemRandom().randrange(10**6)
    sys.stderr.write(f"seed {seed}\n")  # shown when it fails
    draw, runner = random.Random(seed), Runner(tmp_path, maker="populations", devices=3)
    for _ in range(2):
        process = runner.start(**{studies.PACE_S: "0.02"})
        process.wait_for("StepFinished", or_end=True)
        if not process.is_over_after(draw.uniform(0.0, 2.0)):
            process.kill()
    assert runner.run() == 0, runner.words()
    assert populations.outcome(runner.place) == undisturbed


@pytest.mark.slow
def test_the_death_of_workers_changes_nothing(tmp_path, undisturbed):
    runner = Runner(tmp_path, maker="populations")
    process = runner.start(**{studies.PACE_S: "0.05"})
    for kind in ("TrialParked", "TrialExploited"):
        process.wait_for(kind)
        assert process.kill_a_worker()
    assert process.wait() == 0, runner.words()
    assert populations.outcome(runner.place) == undisturbed


def test_a_population_can_be_paused_while_trials_wait(
    tmp_path, warm_workers, monkeypatch, undisturbed
):
    study, orders = populations.make(tmp_path), Orders(tmp_path / "k", monkeypatch)
    orders.at(lambda e: isinstance(e, TrialParked) and e.trial == 1, Pause(), "pause")
    orders.at(lambda e: isinstance(e, StudyPaused), Continue(), "continue")
    studies.run(study, warm_workers, callbacks=[orders])
    assert "going on" in orders.join()["continue"]["text"]
    assert populations.outcome(study.directory) == undisturbed


def test_who_is_stopped_at_a_rung_is_copied_by_nobody(tmp_path, warm_workers, monkeypatch):
    study, orders = populations.make(tmp_path), Orders(tmp_path / "k", monkeypatch)
    orders.at(lambda e: isinstance(e, TrialParked) and e.trial == 0, StopTrial(trial=0), "stop")
    report = studies.run(study, warm_workers, callbacks=[orders])
    assert "stopped" in orders.join()["stop"]["text"]
    assert states(report) == ["STOPPED", *["FINISHED"] * 4]
    taken = [one for trial in report.trials for one in trial.inherited]
    assert taken
    assert all(one["source"] != 0 for one in taken)
    populations.assert_lineage(report, epochs=populations.EPOCHS)


@pytest.mark.full
def test_a_clone_is_copied_by_nobody_and_copies_nobody(
    tmp_path, warm_workers, monkeypatch, undisturbed
):
    study, orders = populations.make(tmp_path), Orders(tmp_path / "k", monkeypatch)
    clone = CloneTrial(trial=1, changes={}, warm=False)
    orders.at(lambda e: isinstance(e, TrialExploited), clone, "clone")
    report = studies.run(study, warm_workers, callbacks=[orders])
    assert orders.join()["clone"]["trials"] == [5]
    assert report.trials[5].inherited == []
    assert populations.outcome(study.directory)[:5] == undisturbed


# -- short of memory, of disk; damaged --------------------------------------------------------


def test_where_the_host_has_no_room_for_all_some_wait_on_disk(
    tmp_path, warm_workers, monkeypatch, undisturbed
):
    there, refused, close = set(), [], TrialRun.close

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
    study = populations.make(tmp_path)
    studies.run(study, warm_workers)
    assert refused
    assert populations.outcome(study.directory) == undisturbed


@pytest.mark.full
def test_a_full_disk_at_a_rung_stops_the_study_which_goes_on_later(
    tmp_path, warm_workers, monkeypatch, undisturbed
):
    calls = itertools.count()
    inherit = exploiting.inherit

    def full(*args):
        if next(calls) == 1:  # one of the two is written already
            raise StorageError("there is no space left on the device.")
        return inherit(*args)

    monkeypatch.setattr(exploiting, "inherit", full)
    study = populations.make(tmp_path)
    with pytest.raises(StorageError, match="no space left"):
        studies.run(study, warm_workers)
    assert not [t for t in shoal.open(study.directory).trials if t.inherited]
    studies.run(study, warm_workers)
    assert populations.outcome(study.directory) == undisturbed


def _interrupted(tmp_path, warm_workers, **options):
    """The study, interrupted soon after its first exploits; who copied, and from whom."""
    heard = Heard()

    def interrupt(event) -> None:
        heard(event)
        taken = {e.trial for e in heard.of(TrialExploited)}
        if isinstance(event, StepFinished) and event.trial in taken and event.step >= 5:
            signal.raise_signal(signal.SIGINT)

    study = populations.make(tmp_path, checkpoint_every="1h", **options)
    with pytest.raises(SystemExit):
        studies.run(study, warm_workers, callbacks=[interrupt])
    (first, *_) = heard.of(TrialExploited)
    return study, first


def _damage(place, trial, step=None):
    """Spoil every generation of a trial, or those of one step."""
    for generation in checkpoint.generations(place, trial).all():
        if step in (None, generation.step):
            path = generation.path / "manifest.json"
            path.write_bytes(path.read_bytes()[:-20] + b"#" * 20)


@pytest.mark.full
def test_what_was_taken_over_and_is_damaged_is_taken_over_again(
    tmp_path, warm_workers, undisturbed
):
    study, exploit = _interrupted(tmp_path, warm_workers)
    _damage(study.directory, exploit.trial)
    studies.run(study, warm_workers)
    assert populations.outcome(study.directory) == undisturbed


@pytest.mark.full
@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_where_the_source_is_gone_too_the_trial_fails_and_says_why(tmp_path, warm_workers, how):
    study, exploit = _interrupted(tmp_path, warm_workers)
    _damage(study.directory, exploit.trial)
    place = checkpoint.generations(study.directory, exploit.source)
    for generation in place.all() if how == "removed" else ():
        if generation.step == exploit.step:
            place.remove(generation)
    _damage(study.directory, exploit.source, exploit.step)
    report = studies.run(study, warm_workers)
    failed = report.trials[exploit.trial]
    assert states(report).count("FAILED") == 1
    assert f"went on from the state of trial {exploit.source} after step 4" in failed.error
    assert f"trial {exploit.source} has no generation of that step any more" in failed.error
    populations.assert_lineage(report, epochs=populations.EPOCHS)


# -- what a population cannot be --------------------------------------------------------------


def test_a_population_goes_on_by_its_own_rules_only(tmp_path, warm_workers):
    studies.run(populations.make(tmp_path), warm_workers)
    wider = populations.SPACE | {"lr": shoal.log_uniform(1e-5, 1e-1)}
    for change, word in (
        ({"pruner": shoal.PBT(quantile=0.5)}, r"had pruner=PBT\(.*quantile=0.4"),
        ({"pruner": "asha"}, r"had pruner=PBT\("),
        ({"trials": 6}, "had population=5"),
        ({"space": wider}, "had space="),
        ({"epochs": 5}, "had epochs=4"),
    ):
        with pytest.raises(SpecError, match=word):
            studies.run(populations.make(tmp_path, **change), warm_workers)
    with pytest.raises(SpecError, match="its trials are a population"):
        studies.run(populations.make(tmp_path), warm_workers, extend=2)


def _narrow(hp):
    return populations.nn.Linear(6, 3)


def _wide(hp):
    return populations.nn.Linear(6, hp["width"])


def _unmeasured(output, batch):
    raise AssertionError("a trial was measured")


def test_trials_of_several_shapes_are_refused_with_what_differs(tmp_path, warm_workers):
    recipe = shoal.Recipe(model=_wide, data=populations.searches.data, loss=_unmeasured)
    space = {"lr": shoal.log_uniform(1e-4, 1e-1), "width": shoal.choice(3, 4)}
    study = shoal.Study(
        *("k", recipe), space=space, trials=6, epochs=3, directory=tmp_path, pruner=shoal.PBT()
    )
    with pytest.raises(
        PlanError, match=r"'parameter .*differ in width \(\d there.*each value of it"
    ):
        studies.run(study, warm_workers)
    assert not (tmp_path / "k").exists()


def _either(named, hp):
    parameters = [parameter for _, parameter in named]
    if hp["kind"] == "adam":
        return torch.optim.Adam(parameters, lr=hp["lr"])
    return torch.optim.SGD(parameters, lr=hp["lr"])


def test_trials_of_several_optimizers_are_refused_with_the_name_that_tells_them_apart(
    tmp_path, warm_workers
):
    recipe = replace(
        populations.searches.recipe(), optimizer=_either, model=_narrow, loss=_unmeasured
    )
    kinds = shoal.choice("sgd", "adam", when={"sgd": {"clip": shoal.uniform(0.1, 0.9)}})
    space = {"lr": shoal.log_uniform(1e-4, 1e-1), "kind": kinds}
    study = shoal.Study(
        *("k", recipe), space=space, trials=6, epochs=3, directory=tmp_path, pruner=shoal.PBT()
    )
    words = (
        r"the optimizer is \w+ there and \w+ here; an optimizer of another kind.*"
        r"differ in kind \('\w+' there and '\w+' here\)\. "
    )
    with pytest.raises(PlanError, match=words):
        studies.run(study, warm_workers)
    assert not (tmp_path / "k").exists()


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("width", (3, 4), r"'parameter bias' is \(\d,\) there and \(\d,\) here"),
        ("kind", ("sgd", "adam"), r"the optimizer is \w+ there and \w+ here"),
        ("momentum", (0.0, 0.9), r"the optimizer is SGD.* there and SGD.* here"),
    ],
)
def test_what_trials_that_begin_alike_may_come_to_be_is_refused_before_any_is_measured(
    name, values, words, tmp_path, warm_workers
):
    recipe = shoal.Recipe(
        model=lambda hp: populations.nn.Linear(6, hp["width"] if name == "width" else 3),
        data=populations.searches.data,
        loss=_unmeasured,
        optimizer=lambda named, hp: (
            torch.optim.SGD([p for _, p in named], lr=hp["lr"], momentum=hp["momentum"])
            if name == "momentum"
            else _either(named, {"kind": "sgd", **hp})
        ),
    )
    space = {"lr": shoal.log_uniform(1e-4, 1e-1), name: shoal.choice(*values)}
    options = {"trials": 2, "epochs": 3, "directory": tmp_path, "pruner": shoal.PBT(quantile=0.5)}
    made = (shoal.Study("k", recipe, space=space, seed=seed, **options) for seed in range(20))
    study = next(s for s in made if len({repr(t.hp[name]) for t in s.trials}) == 1)
    for refused in (study.plan, study.run):
        with pytest.raises(PlanError, match=rf"if {name} becomes .*: with .*{words}\. Leave "):
            refused(hardware=studies.hardware(1), workers=warm_workers)
    assert not (tmp_path / "k").exists()
    named = shoal.PBT(quantile=0.5, vary=("lr",))
    allowed = shoal.Study(
        "k",
        replace(recipe, loss=populations.loss),
        space=space,
        seed=study.seed,
        **{**options, "pruner": named},
    )
    assert len(allowed.plan(hardware=studies.hardware(1), workers=warm_workers).jobs) == 2


def test_weights_of_the_step_before_are_refused(tmp_path, warm_workers):
    recipe = shoal.Recipe(
        model=lambda hp: populations.nn.Sequential(
            *(populations.nn.Linear(6, 6) for _ in range(3)), populations.nn.Linear(6, 3)
        ),
        data=populations.searches.data,
        loss=populations.loss,
        accumulate=2,
    )
    space = {"lr": shoal.log_uniform(1e-4, 1e-1)}
    study = shoal.Study(
        *("k", recipe), space=space, trials=4, epochs=3, directory=tmp_path, pruner=shoal.PBT()
    )
    with pytest.raises(PlanError, match="Use a synchronous schedule"):
        studies.run(
            study, warm_workers, technique=shoal.Pipelined(stages=2, schedule="2bw"), devices=2
        )


def _batched(hp):
    train, valid = populations.searches.data(hp)
    return populations.searches.DataLoader(train.dataset, hp["batch"]), valid


def test_data_that_would_change_with_a_trial_is_refused(tmp_path, warm_workers):
    recipe = shoal.Recipe(model=populations.build, data=_batched, loss=populations.loss)
    space = populations.SPACE | {"batch": shoal.choice(8, 16)}
    options = {"space": space, "trials": 6, "epochs": 3, "directory": tmp_path}
    study = shoal.Study("k", recipe, pruner=shoal.PBT(), **options)
    with pytest.raises(SpecError, match=r"reads the hyperparameter 'batch'.*PBT\(vary="):
        studies.run(study, warm_workers)
    named = shoal.PBT(vary=("lr",))
    with pytest.raises(PlanError, match="steps apart"):
        studies.run(shoal.Study("k", recipe, pruner=named, **options), warm_workers)


def _narrows(hp):
    """What a float may change in a model: its width, or whether there is a layer at all."""
    kind = populations.nn.Dropout if hp["dropout"] else populations.nn.Identity
    return populations.nn.Sequential(kind(), populations.nn.Linear(6, int(hp["width"])))


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (shoal.uniform(3.0, 4.0), r"if width becomes 4\.0: with 3\.\d+, which trial 0 has, and "),
        (shoal.uniform(2.0, 3.9), r"if width becomes 2\.0: with 3\.\d+, which trial 0 has, and "),
    ],
)
def test_a_float_that_would_change_shapes_on_the_way_is_refused_before_any_is_measured(
    width, words, tmp_path, warm_workers
):
    recipe = shoal.Recipe(model=_narrows, data=populations.searches.data, loss=_unmeasured)
    space = {"lr": shoal.log_uniform(1e-4, 1e-1), "width": width}
    space |= {"dropout": shoal.uniform(0.0, 0.5)}
    options = {"space": space, "trials": 2, "epochs": 3, "pruner": shoal.PBT(quantile=0.5)}
    made = (shoal.Study("k", recipe, directory=tmp_path, seed=s, **options) for s in range(99))
    study = next(s for s in made if {int(t.hp["width"]) for t in s.trials} == {3})
    shapes = r"that, 'parameter 1.bias' is \(3,\) there and \(\d,\) here\. Leave width out of "
    with pytest.raises(PlanError, match=words + shapes):
        studies.run(study, warm_workers)
    assert not (tmp_path / "k").exists()


def test_floats_that_change_shapes_together_are_refused_by_both_names(tmp_path, warm_workers):
    recipe = shoal.Recipe(
        model=lambda hp: populations.nn.Linear(6, 3 + (hp["lr"] * hp["other"] > 0.2)),
        data=populations.searches.data,
        loss=_unmeasured,
    )
    space = {"lr": shoal.uniform(0.1, 0.5), "other": shoal.uniform(0.1, 0.5)}
    options = {"space": space, "trials": 2, "epochs": 3, "pruner": shoal.PBT(quantile=0.5)}
    made = (shoal.Study("k", recipe, directory=tmp_path, seed=s, **options) for s in range(99))
    study = next(s for s in made if all(max(t.hp.values()) < 0.4 for t in s.trials))
    with pytest.raises(
        PlanError, match=r"lr becomes 0\.5 and other becomes 0\.5: .*each value of "
    ):
        studies.run(study, warm_workers)


def test_a_float_that_turns_something_off_at_0_alone_is_no_change(tmp_path, warm_workers):
    recipe = shoal.Recipe(
        model=_narrows,
        data=populations.searches.data,
        loss=populations.loss,
        optimizer=lambda named, hp: torch.optim.SGD(
            [p for _, p in named], hp["lr"], momentum=hp["momentum"]
        ),
    )
    space = {"lr": shoal.log_uniform(1e-4, 1e-1), "momentum": shoal.uniform(0.0, 0.9), "width": 3}
    space |= {"dropout": shoal.uniform(0.0, 0.5)}
    study = shoal.Study(
        *("k", recipe), space=space, trials=2, epochs=3, pruner=shoal.PBT(quantile=0.5),
        directory=tmp_path,
    )  # fmt: skip
    assert len(study.plan(hardware=studies.hardware(1), workers=warm_workers).jobs) == 2


def test_a_changed_hyperparameter_that_changes_shapes_fails_its_trial(tmp_path, warm_workers):
    """One that does so between the values that are looked at when the study is planned."""
    later: list[float] = []
    recipe = shoal.Recipe(
        model=lambda hp: populations.nn.Linear(6, 3 + (hp["lr"] in later)),
        data=populations.searches.data,
        loss=populations.loss,
    )
    options = {"trials": 2, "epochs": 3, "directory": tmp_path}
    options |= {"pruner": shoal.PBT(quantile=0.5, resample=0.0, perturb=(2.0,))}
    space = {"lr": shoal.uniform(0.01, 0.5)}
    made = (shoal.Study("k", recipe, space=space, seed=s, **options) for s in range(99))
    study = next(s for s in made if all(t.hp["lr"] < 0.25 for t in s.trials))
    later.extend(2 * trial.hp["lr"] for trial in study.trials)
    report = studies.run(study, warm_workers)
    assert sorted(states(report)) == ["FAILED", "FINISHED"]
    (failed,) = (trial for trial in report.trials if trial.error)
    assert "'weight' is (4, 6) with the hyperparameters that this trial has now" in failed.error


def test_folds_of_a_population_are_warned_of(tmp_path, warm_workers):
    """Of a name that the model reads as well."""

    def build(hp):
        return populations.nn.Linear(6, 3, bias=hp["fold"] >= 0)

    def folded(hp):
        train, valid = populations.searches.data(hp)
        return (train, valid) if hp["fold"] else (valid, train)

    recipe = shoal.Recipe(model=build, data=folded, loss=populations.loss)
    space = {"lr": shoal.log_uniform(1e-4, 1e-1), "fold": shoal.choice(0, 1)}
    options = {"space": space, "trials": 4, "steps": 8, "eval_every": 2, "directory": tmp_path}
    population = shoal.Study("k", recipe, pruner=shoal.PBT(vary=("lr",)), **options)
    plain = shoal.Study("k", recipe, **options)
    given = {"hardware": studies.hardware(1), "workers": warm_workers}
    (warning,) = population.plan(**given).warnings
    assert "reads 'fold', in which trials of this population differ" in warning
    assert plain.plan(**given).warnings == ()


# -- clones, a worker that dies over what is damaged, a source that cannot be saved ------------


@pytest.mark.full
@pytest.mark.parametrize("warm", [True, False])
def test_a_clone_has_the_hyperparameters_that_its_parent_has_then(tmp_path, warm_workers, warm):
    study = populations.make(tmp_path)
    report = studies.run(study, warm_workers)
    parent = next(trial for trial in report.trials if trial.inherited)
    clone = CloneTrial(trial=parent.number, changes={"dropout": 0.3}, warm=warm)
    if warm:  # nothing is left to train of a trial that is done
        with pytest.raises(shoal.SpecError, match="with nothing left to train"):
            studies.run(populations.make(tmp_path), warm_workers, clones=[clone])
        return
    more = studies.run(populations.make(tmp_path), warm_workers, clones=[clone])
    assert dict(more.trials[5].hp) == {**parent.hp, "dropout": 0.3}


@pytest.mark.full
def test_a_worker_that_dies_over_what_is_damaged_changes_nothing(
    tmp_path, monkeypatch, undisturbed
):
    monkeypatch.setenv(studies.PACE_S, "0.05")  # so that it dies before the next rung
    study = populations.make(tmp_path, checkpoint_every="1h")
    heard, done = Heard(), []

    def disturb(event) -> None:
        heard(event)
        taken = {e.trial for e in heard.of(TrialExploited)}
        if isinstance(event, StepFinished) and event.trial in taken and not done:
            _damage(study.directory, event.trial)
            done.append(event.trial)
            os.kill(heard.of(WorkerStarted)[-1].pid, signal.SIGKILL)

    with WorkerPool() as workers:
        studies.run(study, workers, callbacks=[disturb])
    again = [e for e in heard.of(TrialExploited, trial=done[0]) if e.step == 4]
    assert len(again) == 2
    assert populations.outcome(study.directory) == undisturbed


@pytest.mark.full
def test_a_source_that_cannot_be_saved_stops_the_study_which_goes_on_later(
    tmp_path, monkeypatch, undisturbed
):
    full = tmp_path / "full"
    monkeypatch.setenv(studies.FULL, str(full))
    full.touch()
    study = populations.make(tmp_path, checkpoint_every="1h")
    with (
        WorkerPool() as workers,
        pytest.raises(StorageError, match=r"go on from the state of trial \d.*cannot be saved"),
    ):
        studies.run(study, workers)
    full.unlink()
    with WorkerPool() as workers:
        studies.run(study, workers)
    assert populations.outcome(study.directory) == undisturbed
