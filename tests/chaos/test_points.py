"""A study that begins with points of its user's, killed, grown, and begun from an earlier one."""

from __future__ import annotations

import signal

import pytest
import searches
import studies
from processes import Runner

import shoal
from shoal.core.errors import SpecError

optuna = pytest.importorskip("optuna")
POINTS = [{"lr": 0.01}, {"lr": 0.02, "norm": False, "dropout": 0.25}, {"norm": True}]
SMALL = {"lr": shoal.uniform(0.01, 0.05, step=0.01), "norm": True}
PLAIN = {"space": SMALL, "sampler": None, "pruner": None, "generation": None, "epochs": 1}


def hps(report):
    return [dict(trial.hp) for trial in report.trials]


@pytest.mark.slow
def test_a_search_killed_before_its_points_end_comes_to_the_same_trials(tmp_path, warm_workers):
    study = searches.make(tmp_path / "undisturbed", points=POINTS)
    report = studies.run(study, warm_workers)
    assert [hp["lr"] for hp in hps(report)[:2]] == [0.01, 0.02]
    assert hps(report)[1:3] == [POINTS[1], {"lr": report.trials[2].hp["lr"], "norm": True}]
    assert len(report.trials) == searches.TRIALS

    runner = Runner(tmp_path, maker="searches", points=POINTS)
    assert runner.run("kill after TrialPlanned") == -signal.SIGKILL, runner.words()
    assert runner.run("kill before TrialPruned") == -signal.SIGKILL, runner.words()
    assert runner.start(verb="resume").wait() == 0, runner.words()
    assert searches.outcome(runner.place) == searches.outcome(study.directory)


def test_a_sampler_that_learnt_of_other_points_is_not_gone_on_with(tmp_path, warm_workers):
    def run(*points):
        study = searches.make(tmp_path, trials=4, epochs=1, pruner=None, points=points)
        return studies.run(study, warm_workers)

    first = run(*POINTS[:2])
    assert hps(run(*POINTS[:2])) == hps(first)
    with pytest.raises(SpecError, match=r"its points\[0\] was .*, and \{'lr': 0.03\} is ask"):
        run({"lr": 0.03}, POINTS[1])
    with pytest.raises(SpecError, match=r"its points\[1\] was .*, and is not there now"):
        run(POINTS[0])
    with pytest.raises(SpecError, match=r"its points\[2\] was not there, and \{'norm': Tr"):
        run(*POINTS)


def test_a_study_that_draws_at_random_can_be_given_points_later(tmp_path, warm_workers):
    def run(trials, **options):
        space = {"lr": shoal.log_uniform(1e-3, 1e-1), "norm": True}
        study = searches.make(tmp_path, **PLAIN | options | {"space": space, "trials": trials})
        return studies.run(study, warm_workers)

    first = run(2)
    more = run(4, points=[{"lr": 0.05}, {"lr": 0.03}])
    assert hps(more) == [*hps(first), {"lr": 0.05, "norm": True}, {"lr": 0.03, "norm": True}]
    assert [trial.seconds for trial in more.trials[:2]] == [t.seconds for t in first.trials]
    with pytest.raises(SpecError, match="2 of its 4 trials are not asked for any more"):
        run(4)


def test_a_study_begins_with_the_best_of_an_earlier_one(tmp_path, warm_workers, assert_alone):
    earlier = studies.run(searches.make(tmp_path, **PLAIN, trials=4), warm_workers)
    report = shoal.open(earlier.directory)
    wider = {"lr": shoal.log_uniform(1e-3, 1e-1)}
    wider["norm"] = shoal.choice(True, False, when={False: {"dropout": 0.1}})
    options = PLAIN | {"space": wider, "name": "later", "sampler": "tpe", "trials": 3}
    study = searches.make(tmp_path, points=report.ranking()[:2], **options)
    later = studies.run(study, warm_workers)
    assert hps(later)[:2] == [dict(trial.hp) for trial in earlier.ranking()[:2]]
    assert_alone(later, later.trials, searches.recipe(), epochs=1)


def test_an_extension_does_not_come_to_points_again(tmp_path, warm_workers):
    def make():
        points = [{"lr": 0.03}]
        options = PLAIN | {"sampler": "grid", "trials": 2}
        return searches.make(tmp_path, **options, points=points)

    studies.run(make(), warm_workers)
    report = studies.run(make(), warm_workers, extend=3)
    assert report.trials[0].hp["lr"] == 0.03
    assert sorted(hp["lr"] for hp in hps(report)) == [0.01, 0.02, 0.03, 0.04, 0.05]
    with pytest.raises(SpecError, match="6 trials were asked for, but the space has only 5 point"):
        studies.run(make(), warm_workers, extend=1)
