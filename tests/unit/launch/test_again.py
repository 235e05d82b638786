"""The same study again: done at once, or only what is new is trained, to the plain bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import studies
from studies import written

import shoal
from shoal.core.errors import SpecError, StorageError
from shoal.core.event import StepFinished, StudyChanged, TrialFinished, TrialPlanned
from shoal.launch import starts
from shoal.observe import read_events
from shoal.runtime.pool import WorkerPool
from shoal.runtime.saving import checkpoint


class NoWorkers(WorkerPool):
    """A pool for a study that is done already."""

    def configure(self, *arguments, **options):
        pytest.fail("workers were started")


@pytest.fixture
def run(warm_workers):
    def run(study, **options):
        shown = {"progress": False, "timeline": False, "workers": warm_workers}
        return study.run(hardware=studies.hardware(1), **(shown | options))

    return run


def make(folder, **options):
    return studies.make(folder, **({"kinds": ["resident"], "epochs": 1} | options))


def test_a_study_that_is_done_is_reported_at_once(tmp_path, run):
    first = run(make(tmp_path))
    before = list(read_events(first.directory))

    again = run(make(tmp_path), workers=NoWorkers())

    assert again.to_dict() == first.to_dict()
    assert list(read_events(first.directory)) == before


def test_a_longer_study_goes_on_from_its_end(tmp_path, run):
    run(make(tmp_path, epochs=2))

    run(make(tmp_path, epochs=4))

    study = make(tmp_path, epochs=4)
    studies.check_alone(study.directory, 4)
    assert [e.step for e in written(study, StepFinished)] == list(range(1, 41))
    assert [e.step for e in written(study, TrialFinished)] == [20, 40]
    (change,) = written(study, StudyChanged)
    assert "4 epochs instead of 2" in change.changes[0]


def test_a_longer_study_that_dies_when_its_record_stands_goes_on_as_long(
    tmp_path, run, monkeypatch
):
    """The record says 4 epochs, and no event says that the trial is to go on."""
    run(make(tmp_path, epochs=2))
    with monkeypatch.context() as patch:
        patch.setattr("shoal.launch.run.remove_strays", lambda strays: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(make(tmp_path, epochs=4))

    run(make(tmp_path, epochs=4))

    studies.check_alone(tmp_path / "k", 4)


def test_a_longer_study_that_dies_before_its_first_step_goes_on_as_long(
    tmp_path, run, monkeypatch
):
    run(make(tmp_path, epochs=2))
    with monkeypatch.context() as patch:
        patch.setattr("shoal.launch.run.Execution", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(make(tmp_path, epochs=4))

    run(make(tmp_path, epochs=4))

    studies.check_alone(tmp_path / "k", 4)


def test_a_wider_grid_trains_what_is_new(tmp_path, run):
    run(make(tmp_path, lr=[3e-3]))

    run(make(tmp_path, lr=[1e-2, 3e-3], kinds=["resident", "workers"]))

    report = shoal.open(tmp_path / "k")
    assert len(report.trials) == 4
    assert (report.trials[0].hp["kind"], report.trials[0].hp["lr"]) == ("resident", 3e-3)
    studies.check_alone(tmp_path / "k", 1)
    steps = [e for e in written(make(tmp_path), StepFinished) if e.trial == 0]
    assert len(steps) == 10, "it was not trained again"


def test_weights_alone_can_be_loaded_and_not_trained_on(tmp_path, run):
    report = run(make(tmp_path, keep_finished="weights", checkpoint_every=0))

    (trial,) = report.trials
    assert len(checkpoint.generations(report.directory, 0).all()) == 1
    plain = studies.alone("resident", 3e-3, 0, 1).model.state_dict()
    loaded = trial.load().state_dict()
    assert all(loaded[name].equal(plain[name]) for name in plain)
    assert trial.load_state()["optimizer"] is None
    with pytest.raises(SpecError, match="weights"):
        run(make(tmp_path, epochs=2, keep_finished="weights"))


def test_the_best_of_a_study_keeps_its_state(tmp_path, run):
    report = run(make(tmp_path, lr=[1e-5, 1e-2], keep_finished="best:1"))

    kept = [n for n in (0, 1) if checkpoint.generations(report.directory, n).all()]
    assert kept == [report.best.number]
    assert report.best.load_state()["optimizer"] is not None
    with pytest.raises(SpecError, match="not at"):
        report.trials[1 - kept[0]].load()


def test_other_numerics_are_refused_by_name_until_they_are_accepted(tmp_path, run, monkeypatch):
    run(make(tmp_path))
    real = starts.check_numerics

    def other(plan, before, **how):
        old = {n: {**key, "torch": "1.0"} for n, key in before.items()}
        return real(plan, old, **how)

    monkeypatch.setattr("shoal.launch.run.check_numerics", other)
    study = make(tmp_path, epochs=2)
    with pytest.raises(SpecError, match=r"torch of trial 0 was '1\.0'"):
        run(study)
    assert len(written(study, TrialFinished)) == 1

    run(study, accept_numerics=True)

    assert len(written(study, TrialFinished)) == 2
    (change,) = written(study, StudyChanged)
    assert any("torch of trial 0 was '1.0'" in sentence for sentence in change.changes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resume": False}, "already holds a study"),
        ({"resume": True, "overwrite": True}, "Choose one"),
    ],
)
def test_contradictions_are_refused_and_change_nothing(tmp_path, run, options, words):
    study = make(tmp_path)
    run(study)
    before = list(read_events(study.directory))

    with pytest.raises(SpecError, match=words):
        run(study, workers=NoWorkers(), **options)

    assert list(read_events(study.directory)) == before


def test_there_has_to_be_something_to_resume(tmp_path, run):
    with pytest.raises(SpecError, match=r"no study in .* to resume"):
        run(make(tmp_path), resume=True)

    assert not list(tmp_path.iterdir())


def test_overwrite_whose_plan_fails_gives_the_study_back(tmp_path, run, monkeypatch):
    study = make(tmp_path)
    run(study)
    with monkeypatch.context() as patch:
        patch.setattr(
            "shoal.launch.policy.CheckpointPolicy.check",
            lambda *_, **__: (_ for _ in ()).throw(StorageError("no room")),
        )
        with pytest.raises(StorageError, match="no room"):
            run(study, overwrite=True)

    studies.check_alone(study.directory, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_trials_that_are_left_have_as_many_threads_as_those_that_have_ended(
    tmp_path, run, monkeypatch
):
    """One trial would have both cores, if it were all of the study."""
    hardware = replace(studies.hardware(2), shared_cores=2)
    monkeypatch.setattr(studies, "hardware", lambda devices: hardware)
    run(make(tmp_path, lr=[1e-2, 3e-3]))

    run(make(tmp_path, lr=[1e-2, 3e-3, 1e-3]))

    planned = written(make(tmp_path), TrialPlanned)
    assert [event.numerics["threads"] for event in planned] == [1, 1, 1]
    studies.check_alone(tmp_path / "k", 1)
