"""Points that are tried first: what trials come of them, and what is said of those that cannot."""

import itertools
import warnings
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import shoal
from shoal.core.errors import SpecError
from shoal.core.spec import HyperParameters
from shoal.search import choice, grid, integer, log_uniform, sample, uniform
from shoal.search.facts import Facts
from shoal.search.suggest import Suggester
from shoal.search.wanted import check_search

SPACE = {
    "lr": log_uniform(1e-5, 1e-1),
    "opt": choice(
        "sgd",
        "adam",
        when={
            "sgd": {
                "momentum": uniform(0, 1),
                "slow": choice(False, True, when={True: {"k": 3}}),
            }
        },
    ),
    "drop": uniform(0.0, 0.5, step=0.1),
    "depth": integer(1, 9),
}
WHOLE = {"lr": 1e-3, "opt": "adam", "drop": 0.3, "depth": 4}
SGD = {"opt": "sgd", "momentum": 0.5, "slow": False}
GRID = grid(width=[64, 128], lr=[0.1, 0.2, 0.3])


def ask(space=SPACE, **options):
    usual = {"sampler": None, "pruner": None, "generation": None, "trials": 6, "seed": 0}
    usual |= {"name": "s", "mode": "min", "metric": "valid_loss", "evaluations": 9}
    return check_search(space=space, **(usual | options))


def trials(space=SPACE, **options):
    return [dict(trial.hp) for trial in ask(space, **options).first_trials()]


def agrees(hp, point):
    return all(type(hp.get(name)) is type(v) and hp[name] == v for name, v in point.items())


# -- drawn at random ----------------------------------------------------------------------------


def test_the_first_trials_have_the_values_of_the_points_and_the_rest_is_drawn():
    found = trials(points=[WHOLE, {"lr": 1e-2}, SGD])
    assert found[0] == WHOLE
    assert agrees(found[1], {"lr": 1e-2})
    assert agrees(found[2], SGD)
    assert found[1].keys() >= {"lr", "opt", "drop", "depth"}
    assert list(found[2]) == ["lr", "opt", "momentum", "slow", "drop", "depth"]


def test_the_trials_after_the_points_are_those_that_would_be_there_without_them():
    assert trials(points=[WHOLE, {"lr": 1e-2}], trials=6)[2:] == trials(trials=4)
    assert trials(points=[{"lr": 1e-2}], trials=3) == trials(points=[{"lr": 1e-2}], trials=6)[:3]


def test_what_points_leave_out_is_drawn_for_each_of_them_anew():
    found = trials(points=[{}, {"lr": 1e-2}, {"lr": 1e-2}], trials=4)
    depths = [(hp["depth"], hp["drop"], hp["opt"]) for hp in found]
    assert len(set(depths)) > 2


def test_a_point_that_is_there_twice_is_two_trials_with_two_seeds():
    both = ask(points=[WHOLE, WHOLE]).first_trials()[:2]
    assert [dict(trial.hp) for trial in both] == [WHOLE, WHOLE]
    assert [trial.seed for trial in both] == [0, 1]


def test_values_are_taken_as_the_space_has_them():
    given = {"lr": np.float64(1e-3), "opt": "adam", "drop": 0.1 + 0.2, "depth": 4.0}
    space = {**SPACE, "decay": choice(0.0, 0.1), "free": uniform(0, 2)}
    (hp,) = trials(space, points=[{**given, "decay": 0, "free": np.int64(1)}], trials=1)
    assert {name: repr(value) for name, value in hp.items()} == {
        "lr": "0.001", "opt": "'adam'", "drop": "0.3", "depth": "4", "decay": "0.0", "free": "1.0",
    }  # fmt: skip


def test_a_trial_of_a_report_stands_for_its_hyperparameters():
    trial = SimpleNamespace(hp=HyperParameters(WHOLE))
    assert trials(points=[trial, trial.hp], trials=2) == [WHOLE, WHOLE]


@pytest.mark.parametrize("points", [(), [], iter([])])
def test_no_points_are_a_study_without(points):
    assert trials(points=points) == trials()
    assert ask(points=points).explain(3) == ()


# -- of a grid ----------------------------------------------------------------------------------


def test_a_grid_begins_with_the_points_and_does_not_come_to_them_again():
    found = trials(GRID, points=[{"width": 128, "lr": 0.2}], trials=None)
    assert found[0] == {"width": 128, "lr": 0.2}
    assert found[1:] == [hp for hp in trials(GRID, trials=None) if hp != found[0]]


def test_of_a_grid_the_first_point_that_agrees_is_meant_and_is_not_taken():
    found = trials(GRID, points=[{"lr": 0.1}, {"lr": 0.1}, {"width": 128, "lr": 0.3}], trials=3)
    assert found == [
        {"width": 64, "lr": 0.1}, {"width": 128, "lr": 0.1}, {"width": 128, "lr": 0.3}
    ]  # fmt: skip
    found = trials(GRID, points=[{"lr": 0.1}, {"width": 64, "lr": 0.1}], trials=2)
    assert found == [{"width": 128, "lr": 0.1}, {"width": 64, "lr": 0.1}]
    with pytest.raises(SpecError, match=r"points\[2\] = \{'lr': 0.1\} leaves.*all of.*2 points"):
        trials(GRID, points=[{"lr": 0.1}] * 3)


def test_a_grid_has_as_many_trials_more_as_points_are_there_again():
    point = {"width": 128, "lr": 0.2}
    assert Counter(map(str, trials(GRID, points=[point] * 3, trials=None)))[str(point)] == 3
    assert len(trials(GRID, points=[point] * 3, trials=8)) == 8
    with pytest.raises(SpecError, match=r"9 trials .*only 6 points, 2 of which points= repeats"):
        trials(GRID, points=[point] * 3, trials=9)


def test_a_part_of_a_grid_only_grows():
    points = [{"width": 128, "lr": 0.2}, {"lr": 0.1}]
    counts = [trials(GRID, points=points, trials=count) for count in range(2, 7)]
    for fewer, more in itertools.pairwise(counts[:-1]):
        assert more[: len(fewer)] == fewer
    assert all(hp in counts[-1] for hp in counts[-2])


def test_a_grid_with_branches_has_points_in_them():
    space = {
        "kind": choice("a", "b", when={"b": {"k": choice(1, 2, 3)}}),
        "x": choice(0, 1),
    }
    found = trials(space, points=[{"kind": "b", "k": 2}, {"x": 1}], trials=None)
    assert found[:2] == [{"kind": "b", "k": 2, "x": 0}, {"kind": "a", "x": 1}]
    assert len(found) == len({str(hp) for hp in found}) == 8


def test_a_point_of_a_grid_that_no_memory_could_hold_is_quick():
    space = grid(**{f"n{index}": range(100) for index in range(20)})
    found = sample(space, 4, points=({"n3": 7}, {"n19": 99}))
    assert [found[0]["n3"], found[1]["n19"]] == [7, 99]


# -- where a sampler decides --------------------------------------------------------------------


optuna = pytest.importorskip("optuna")
LIST = [WHOLE, {"lr": 1e-2}, SGD, {}]


@pytest.mark.parametrize("kind", ["TPESampler", "RandomSampler", "NSGAIISampler"])
def test_a_sampler_is_asked_and_told_as_optuna_itself_would(kind):
    ours = Suggester(getattr(optuna.samplers, kind)(seed=3), ask().space, "min", tuple(LIST))
    mine = [ours.suggest() for _ in range(14)]
    study = optuna.create_study(sampler=getattr(optuna.samplers, kind)(seed=3))
    for point in LIST[:3]:
        study.enqueue_trial(point)
    theirs = [study.ask() for _ in range(14)]
    values = [by_hand(trial) for trial in theirs]
    assert mine == values
    for index, value in enumerate(values):
        ours.tell(index, Facts({}, values=[value["lr"]], how="finished", value=value["lr"]))
        theirs[index].report(value["lr"], 1)
        study.tell(theirs[index], value["lr"])
    assert [ours.suggest() for _ in range(5)] == [by_hand(study.ask()) for _ in range(5)]


def by_hand(trial):
    hp = {"lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True)}
    hp["opt"] = trial.suggest_categorical("opt", ["sgd", "adam"])
    if hp["opt"] == "sgd":
        hp["momentum"] = trial.suggest_float("momentum", 0, 1)
        hp["slow"] = trial.suggest_categorical("slow", [False, True])
        if hp["slow"]:
            hp["k"] = trial.suggest_categorical("k", [3])
    hp["drop"] = round(trial.suggest_float("drop", 0, 0.5, step=0.1), 1)
    return hp | {"depth": trial.suggest_int("depth", 1, 9)}


def test_a_sampler_that_draws_jointly_knows_what_is_given():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = optuna.samplers.TPESampler(seed=1, multivariate=True, group=True)
    found = trials(points=LIST, sampler=sampler, trials=12)
    assert found[0] == WHOLE
    assert all(agrees(hp, point) for hp, point in zip(found, LIST, strict=False))


def brute_force():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.samplers.BruteForceSampler(seed=1)


def test_a_sampler_that_tries_each_point_once_has_those_that_are_there_twice_beside_them():
    point = {"width": 128, "lr": 0.2}
    wanted = ask(GRID, sampler=brute_force(), points=[point, point], trials=20, generation=9)
    found = Counter(str(dict(trial.hp)) for trial in wanted.first_trials())
    assert wanted.total == 7
    assert sorted(found.values()) == [1, 1, 1, 1, 1, 2]
    with pytest.raises(SpecError, match=r"points\[0\] = \{'lr': 0.2\} leaves names out"):
        ask(GRID, sampler=brute_force(), points=[{"lr": 0.2}])


def test_a_sampler_without_a_seed_is_found_behind_any_number_of_points():
    with pytest.raises(SpecError, match="RandomSampler draws otherwise each time"):
        trials(points=[WHOLE] * 5, sampler=optuna.samplers.RandomSampler())


def test_a_sampler_that_cannot_be_given_points_is_found_before_anything_trains():
    class Cannot(optuna.samplers.RandomSampler):
        def after_trial(self, study, trial, state, values):
            if "fixed_params" in trial.system_attrs and trial.number == 4:
                raise RuntimeError("who asked for that?")

    with pytest.raises(SpecError, match=r"Cannot cannot serve .*who asked for that"):
        trials(points=[WHOLE] * 5, sampler=Cannot(seed=1), trials=30)


def test_optuna_s_own_grid_takes_no_points():
    sampler = optuna.samplers.GridSampler({"width": [64], "lr": [0.1, 0.2]})
    with pytest.raises(SpecError, match=r"GridSampler .*takes no others.*sampler='grid'"):
        ask(GRID, sampler=sampler, points=[{"width": 64, "lr": 0.1}])


# -- the record ---------------------------------------------------------------------------------


def test_a_plan_names_the_trials_that_are_given():
    assert ask(points=[WHOLE]).explain(6)[0] == "  points: trial 0 has the values of points="
    lines = ask(points=[WHOLE] * 3, sampler="tpe").explain(6)
    assert lines[0] == "  points: trials 0 to 2 have the values of points="


def test_the_record_of_a_study_whose_sampler_learns_of_points_has_them():
    words = ask(points=[{"lr": 1e-3}, SGD], sampler="tpe").words()
    assert words["points"] == ('[{"lr": 0.001}, {"opt": "sgd", "momentum": 0.5, "slow": false}]')
    assert "points" not in ask(sampler="tpe").words()
    assert "points" not in ask(points=[WHOLE], pruner="asha").words()


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ({"lr": 1e-3}, r"as in points=\[\{.lr.: 1e-3\}\], or .*, got \{"),
        ("abc", r"points is a list of dicts.*report\.ranking\(\)\[:5\], got 'abc'\."),
        (SimpleNamespace(trials=["x" * 99]), "got a SimpleNamespace"),
        (None, r"points is a list of dicts, .* got None\."),
        ({WHOLE["lr"]}, "is a set, whose order"),
        ([3], r"points\[0\] is a dict of hyperparameters.* or a trial of a report, got 3"),
        ([WHOLE, {"rate": 1}], r"points\[1\] has 'rate', which is no name.*'lr', 'opt', 'momen"),
        ([{"momentun": 1}], r"Did you mean 'momentum'\?"),
        ([{"lr": 1}], r"points\[0\]\['lr'\] is 1, which is not in the space: .*1e-05 to 0.1"),
        ([{"lr": True}], r"points\[0\]\['lr'\] is True, which is not"),
        ([{"lr": "0.1"}], r"points\[0\]\['lr'\] is '0.1', which is not"),
        ([{"lr": float("nan")}], r"points\[0\]\['lr'\] has the value nan"),
        ([{"lr": uniform(0, 1)}], r"points\[0\]\['lr'\] has a value of type Uniform"),
        ([{"drop": 0.25}], r"numbers from 0.0 to 0.5 in steps of 0.1\. Give a value of these"),
        ([{"depth": 4.5}], "whole numbers from 1 to 9"),
        ([{"opt": "rms"}], r"is 'rms', which is not in the space: it has 'sgd', 'adam'\."),
        ([{"opt": "adam", "momentum": 0.5}], "with opt='sgd' have, and it has opt='adam'"),
        ([{"momentum": 0.5}], "only trials with opt='sgd' have, and it has no opt. Give opt="),
        ([{"opt": "sgd", "k": 3}], "only trials with slow=True have, and it has no slow"),
        ([{"opt": "sgd", "slow": False, "k": 3}], "with slow=True have, and it has slow=False"),
        ([{}] * 7, "points= has 7 points, which count among the trials, and trials=6"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_what_cannot_be_tried_is_refused_before_anything_trains(points, words, sampler):
    with pytest.raises(SpecError, match=words):
        trials(points=points, sampler=sampler)


def test_numbers_that_are_two_values_of_a_list_are_told_apart():
    space = {"a": choice(1, 1.0, True, 0)}
    assert repr(trials(space, points=[{"a": 1.0}, {"a": True}], trials=2)) == (
        "[{'a': 1.0}, {'a': True}]"
    )
    with pytest.raises(SpecError, match=r"is False, which is not in the space: it has 1, 1\.0"):
        trials(space, points=[{"a": False}])


def test_a_grid_without_end_is_refused_as_that_whatever_else_is_asked_for():
    with pytest.raises(SpecError, match="sampler='grid' needs a finite space, but 'lr' is Unif"):
        ask(sampler="grid", pruner=shoal.PBT(), trials=None, points=[{"depth": 3}])


def test_a_population_begins_with_points():
    wanted = ask(pruner=shoal.PBT(), points=[WHOLE], trials=4, sampler="random")
    assert dict(wanted.first_trials()[0].hp) == WHOLE
    wanted = ask(GRID, pruner=shoal.PBT(), points=[{"width": 64, "lr": 0.1}] * 2, trials=None)
    assert wanted.words()["population"] == "7"
    assert replace(wanted, points=()).words()["population"] == "6"


@pytest.mark.parametrize("name", ["lr", "drop", "depth"])
def test_a_number_that_no_float_can_hold_is_none_of_the_space(name):
    with pytest.raises(SpecError, match=rf"points\[0\]\['{name}'\] is 1000.* not in the space"):
        ask(points=[{name: 10**400}])


def test_a_point_is_the_same_in_whatever_order_its_names_are():
    """A study goes on with it, whoever has written it again."""
    turned = dict(reversed(WHOLE.items()))
    assert list(ask(points=[turned]).points[0]) == list(WHOLE)
