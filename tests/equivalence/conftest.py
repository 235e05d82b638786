"""Studies whose trials are held to the plain loop, and watched; those over several devices too."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import staging
import twins
import zoo
from listening import Heard, Orders, short_leases
from watching import STEPS, Watched

import shoal
from shoal.control import StopStudy
from shoal.core.event import StepFinished, TrialReplanned
from shoal.execution import floor
from shoal.planning import deciding
from shoal.scheduler import leases

LR = {"lr": 1e-2}


@pytest.fixture
def watch(run_study, assert_alone):
    """A function that trains, compares with the plain loop, and returns what happened.

    ``exact``: no peak is above what was predicted; so where all batches are alike.
    """

    def run(recipe, space, technique, *, steps=STEPS, exact=False, **options):
        seen = Watched()
        options = {"technique": technique, "callbacks": [seen], "timeline": True, **options}
        report = run_study(recipe, space, steps=steps, **options)
        assert_alone(report, report.trials, recipe, steps=steps)
        if exact or recipe.data is zoo.data:
            seen.assert_no_peak_was_above_what_was_predicted()
        return seen

    return run


# -- stages -------------------------------------------------------------------------------


@pytest.fixture
def run_staged(run_study):
    """Run a study in stages, hold all its trials to their loop, and return the report."""

    def run(recipe, technique, space=None, *, devices=None, options=None, **loop):
        heard = Heard()
        loop = loop or {"epochs": 2}
        report = run_study(
            recipe,
            space or LR,
            technique=technique,
            **{
                "devices": devices or technique.stages * technique.width,
                "callbacks": [heard],
                **loop,
                **(options or {}),
            },
        )
        staging.assert_staged(report, recipe, technique, **loop)
        assert not heard.of(TrialReplanned)
        return report

    return run


@pytest.fixture
def impatient(monkeypatch):
    """Leases of a step, one trial on a device at a time; it leaves as soon as another waits."""
    monkeypatch.setattr(floor, "LEASE_S", 1e-3)
    monkeypatch.setattr(floor, "STEADY_S", 0.0)
    monkeypatch.setattr(leases, "should_leave", lambda roster, *args: bool(roster.waiting))
    monkeypatch.setattr(deciding, "MOST_ACTIVE", 1)


@pytest.fixture
def interrupted(tmp_path, warm_workers, monkeypatch):
    """Run a study, stop it after a step of trial 0, and run it again otherwise."""

    def run(recipe, technique, then, *, devices=3, step=3, again=None, **options):
        orders, heard = Orders(tmp_path / "k", monkeypatch), Heard()
        space = options.pop("space", LR)
        settings = {"epochs": 6, "checkpoint_every": 60, **options}
        shown = {"progress": False, "timeline": False, "workers": warm_workers}
        orders.at(after_step(step), StopStudy(), "stop")
        for how, callback in ((technique, orders), (then, heard)):
            study = shoal.Study("k", recipe, space=space, directory=tmp_path, **settings)
            hardware = shoal.Hardware.virtual(devices=devices, memory="64MiB")
            more = (again or {}) if callback is heard else {}
            told = {**shown, **more, "callbacks": [callback], "technique": how}
            with short_leases(monkeypatch) if callback is orders else nullcontext():
                report = study.run(hardware=hardware, **told)
            if callback is orders:
                orders.join()
                assert report.stopped
                assert 0 < report.trials[0].load_state()["step"] < 2 * settings["epochs"]
        return report

    return run


def after_step(step):
    """Whether an event is of a step as late as that."""
    return lambda event: isinstance(event, StepFinished) and event.step >= step


# -- replicas -----------------------------------------------------------------------------


@pytest.fixture
def run_replicas(run_study):
    """Run a study with replicas, hold all its trials to the rule, and return the report."""

    seen = []

    def run(recipe, technique, space=None, *, devices=None, options=None, **loop):
        heard = Heard()
        loop = loop or {"epochs": 2}
        report = run_study(
            recipe,
            space or LR,
            technique=technique,
            devices=devices or technique.width,
            **{"callbacks": [heard], **loop, **(options or {})},
        )
        twins.assert_replicated(report, recipe, technique, **loop)
        assert not heard.of(TrialReplanned)
        seen.append(heard)
        return report

    run.heard = seen
    return run
