"""Studies whose recipe allows stale weights: what is chosen is on record, and stays."""

from __future__ import annotations

import pytest
import staging
from listening import Heard, Orders, short_leases

import shoal
from shoal import Pipelined
from shoal.control import CloneTrial, StopStudy
from shoal.core.event import StepFinished, StudyChanged
from shoal.planner import timetoloss
from shoal.planning import weighing
from shoal.verify import verify_trials

ALLOWED, WORTHLESS = shoal.Stale(efficiency=1.0), shoal.Stale(efficiency=1e-6)
STALE, NEW = Pipelined(stages=2, schedule="2bw"), Pipelined(stages=2, schedule="flush")
LR = {"lr": 1e-2}


@pytest.fixture(autouse=True)
def much_sooner(monkeypatch):
    """Whatever steps of milliseconds take on a loaded machine, a whole step's worth wins."""
    monkeypatch.setattr(weighing, "RIVALS", ("2bw",))
    monkeypatch.setattr(timetoloss, "WORTH", 100.0)


@pytest.fixture
def run(tmp_path, warm_workers):
    """Run a study, or go on with it; ``callback`` hears what happens."""

    def go(recipe, callback, technique="pipelined", *, space=LR, epochs=6, devices=2, **request):
        settings = {"epochs": epochs, "checkpoint_every": 60, "directory": tmp_path}
        study = shoal.Study("k", recipe, space=space, **settings)
        return study.run(
            hardware=shoal.Hardware.virtual(devices=devices, memory="64MiB"),
            technique=technique,
            callbacks=[callback],
            progress=False,
            timeline=False,
            workers=warm_workers,
            **request,
        )

    return go


@pytest.fixture
def stopped(run, tmp_path, monkeypatch):
    """Run a study until a step, and stop it there."""

    def go(recipe, technique="pipelined", **how):
        orders = Orders(tmp_path / "k", monkeypatch)
        orders.at(lambda e: isinstance(e, StepFinished) and e.step >= 5, StopStudy(), "stop")
        with short_leases(monkeypatch):
            report = run(recipe, orders, technique, **how)
        orders.join()
        assert report.stopped
        return report

    return go


def keys(report):
    return [numerics.get("weights") for numerics in staging.numerics(report)]


def assert_verified(report, recipe):
    for verdict in verify_trials(report.directory, staging.rows(report), recipe=recipe):
        assert verdict.equal, verdict
        assert any("by the rule of 2bw" in note for note in verdict.notes)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("predict", "again"),
    [
        (False, "pipelined"),
        (True, None),
        pytest.param(False, Pipelined(stages=2), marks=pytest.mark.full),
    ],
)
def test_what_was_chosen_goes_on_whatever_is_sooner_then_and_is_verified(
    predict, again, stopped, run
):
    first = staging.rich(stale=shoal.Stale(efficiency=1.0, predict=predict))
    report = stopped(first)
    word = "one step old" + ", guessed" * predict
    assert keys(report) == [word]
    heard, then = Heard(), staging.rich(stale=WORTHLESS)
    report = run(then, heard, again)
    staging.assert_staged(
        report, then, Pipelined(stages=2, schedule="2bw", predict=predict), epochs=6
    )
    assert keys(report) == [word]
    (changed,) = heard.of(StudyChanged)
    assert "Recipe(stale=Stale(efficiency=1e-06, predict=False)); it was Stale(" in str(changed)
    assert_verified(report, then)


@pytest.mark.full
def test_what_began_synchronous_stays_so_when_stale_weights_are_allowed_later(stopped, run):
    assert keys(stopped(staging.rich())) == [None]
    allowed = staging.rich(stale=ALLOWED)
    report = run(allowed, Heard())
    staging.assert_staged(report, allowed, NEW, epochs=6)
    assert keys(report) == [None]


def test_what_was_allowed_once_goes_on_when_it_is_not_any_more(stopped, run):
    stopped(staging.rich(stale=ALLOWED))
    report = run(staging.rich(), Heard(), None)
    staging.assert_staged(report, staging.rich(), STALE, epochs=6)


@pytest.mark.slow
def test_trials_that_are_added_and_cloned_train_as_the_others_do(stopped, run):
    recipe = staging.rich(stale=ALLOWED)
    stopped(recipe)
    clones = [CloneTrial(trial=0, changes={"lr": 0.02}, warm=warm) for warm in (False, True)]
    report = run(staging.rich(stale=WORTHLESS), Heard(), clones=clones)
    assert [trial.state for trial in report.trials] == ["FINISHED"] * 3
    assert keys(report) == ["one step old"] * 3
    staging.assert_staged(report, recipe, STALE, report.trials[:2], epochs=6)


@pytest.mark.full
def test_a_clone_of_a_running_trial_has_its_versions(run, tmp_path, monkeypatch):
    recipe = staging.rich(stale=ALLOWED)
    orders = Orders(tmp_path / "k", monkeypatch)
    clone = CloneTrial(trial=0, changes={"lr": 0.02})
    orders.at(lambda e: isinstance(e, StepFinished) and e.step >= 5, clone, "clone")
    with short_leases(monkeypatch):
        report = run(recipe, orders)
    orders.join()
    assert [trial.state for trial in report.trials] == ["FINISHED"] * 2
    assert keys(report) == ["one step old"] * 2
    staging.assert_staged(report, recipe, STALE, report.trials[:1], epochs=6)
