"""What is asked of a search, and what is said of what cannot be served."""

import builtins
import importlib.util
import subprocess
import sys
import threading
import warnings
from typing import get_args

import pytest

import shoal
from shoal.core.errors import SpecError
from shoal.search import choice, integer, log_uniform, uniform
from shoal.search.facts import Facts, How
from shoal.search.suggest import Suggester
from shoal.search.wanted import check_search

optuna = pytest.importorskip("optuna")
SPACE = {"lr": log_uniform(1e-5, 1e-1), "kind": choice("a", "b", when={"a": {"k": integer(1, 3)}})}


def ask(space=SPACE, *, metric="valid_loss", **options):
    usual = {"name": "s", "sampler": None, "pruner": None, "generation": None, "trials": 12}
    usual |= {"seed": 0, "mode": "min", "evaluations": 9}
    return check_search(space=space, metric=metric, **(usual | options))


def points(**options):
    return [dict(trial.hp) for trial in ask(**options).first_trials()]


# -- what is served ---------------------------------------------------------------------------


def test_a_plain_study_keeps_nothing_of_a_search_and_begins_none():
    assert ask().begin() is None
    assert ask().words() == {}
    assert ask().explain(3) == ()
    assert ask({"a": choice(1, 2)}, trials=None).sampler == "grid"


def test_tpe_gives_two_generations_before_any_result_and_the_same_ones_each_time():
    first = points(sampler="tpe", trials=40, generation=4)
    assert len(first) == 8
    assert points(sampler="tpe", trials=99, generation=4) == first
    assert points(sampler="tpe", trials=40, generation=4, seed=1) != first
    assert all(("k" in point) == (point["kind"] == "a") for point in first)


def test_a_sampler_object_is_asked_and_left_as_it_was():
    sampler = optuna.samplers.RandomSampler(seed=3)
    assert points(sampler=sampler, generation=6) == points(sampler=sampler, generation=6)


def test_a_study_says_in_its_plan_how_trials_come_and_end():
    words = "\n".join(ask(sampler="tpe", pruner="asha", trials=40).explain(18))
    assert "tpe; 18 of 40 trials are known now" in words
    assert "after 1, 3, 9, ... evaluations" in words
    own = ask(sampler=optuna.samplers.RandomSampler(seed=1), pruner=optuna.pruners.NopPruner())
    words = own.words()
    assert '"rng.rng": "' in words.pop("sampler parameters")
    assert words == {
        "sampler": "optuna's RandomSampler",
        "pruner": "optuna's NopPruner",
        "pruner parameters": "{}",
        "generation": "9",
    }


@pytest.mark.parametrize("trials", [3, 8, None])
def test_a_sampler_that_tries_each_point_once_is_asked_for_no_more_than_it_has(trials):
    grid = optuna.samplers.GridSampler({"lr": [0.1, 0.2, 0.3]}, seed=1)
    wanted = ask({"lr": uniform(0, 1)}, sampler=grid, trials=trials, generation=1)
    assert wanted.total == 3
    assert ("8 were asked for" in wanted.explain(2)[0]) == (trials == 8)
    assert len({trial.hp["lr"] for trial in wanted.first_trials()}) == 2
    assert ask({"lr": uniform(0, 1)}, sampler=grid, trials=2).total == 2


def brute_force(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is experimental in Optuna 5
        return optuna.samplers.BruteForceSampler(seed=1, **options)


def test_all_points_of_a_space_are_counted_by_branch():
    inner = {"a": {"k": integer(1, 3), "m": choice(0, 1)}}
    space = {"kind": choice("a", "b", when=inner), "n": integer(1, 2)}
    assert ask(space, sampler=brute_force(), trials=99).total == 14
    found = points(space=space, sampler=brute_force(), trials=99, generation=20)
    assert len({tuple(point.items()) for point in found}) == len(found) == 14
    assert ask(space, sampler=brute_force(avoid_premature_stop=True), trials=99).total == 99


# -- what is not ------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["tpee", "TPE", "cmaes", 3, object()])
def test_an_unknown_sampler_is_refused_with_those_there_are(asked):
    with pytest.raises(SpecError, match=r"sampler=.*not known.*'grid', 'random', 'tpe'"):
        ask(sampler=asked)


@pytest.mark.parametrize("asked", ["sha", True, optuna.samplers.RandomSampler(seed=0)])
def test_an_unknown_pruner_is_refused_with_those_there_are(asked):
    with pytest.raises(SpecError, match=r"pruner=.*not known.*'asha', 'hyperband', 'median'"):
        ask(pruner=asked)


@pytest.mark.parametrize("generation", [0, -1, 2.0, True, "3"])
def test_a_generation_is_a_number_of_trials(generation):
    with pytest.raises(SpecError, match="generation is a whole number from 1"):
        ask(generation=generation)


@pytest.mark.parametrize("main", ["__main__", "__shoal_main__"])
def test_a_pruner_of_the_studys_own_file_has_one_name_however_that_is_read(main):
    class Cut(optuna.pruners.NopPruner):
        __module__ = main

    assert ask(pruner=Cut()).words()["pruner"] == "__main__'s Cut"


def test_a_sampler_without_end_needs_a_number_of_trials():
    for sampler in ("tpe", brute_force(avoid_premature_stop=True)):
        with pytest.raises(SpecError, match=r"how many points sampler=.* has: give trials=N"):
            ask({"width": shoal.choice(1, 2)}, sampler=sampler, trials=None)
    with pytest.raises(SpecError, match="nothing to choose"):
        ask({}, sampler="tpe")


def test_trying_every_point_of_a_space_without_end_is_refused_before_anything_trains():
    space = {"a": choice(1, 2, when={2: {"lr": uniform(0, 1)}})}
    with pytest.raises(SpecError, match=r"BruteForceSampler tries every point.*'lr' is Uniform"):
        ask(space, sampler=brute_force())


@pytest.mark.parametrize("values", [(2, 1, True), (0, False), (3.0, 3)])
def test_values_that_optuna_takes_for_one_are_refused_where_its_samplers_decide(values):
    space = {"b": choice("x", "y", when={"x": {"a": choice(*values)}})}
    words = f"'a' has the values {values[-2]!r} and {values[-1]!r}, which Optuna takes for one"
    with pytest.raises(SpecError, match=words):
        ask(space, sampler="tpe")
    assert ask(space, sampler="random", pruner="asha").space
    assert ask({"a": choice(1, 1, "1", None)}, sampler="tpe").space


def test_a_sampler_that_draws_otherwise_each_time_needs_a_seed():
    with pytest.raises(SpecError, match=r"RandomSampler\(seed=0\)"):
        ask(sampler=optuna.samplers.RandomSampler()).first_trials()


def test_without_optuna_a_search_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "optuna":
            raise ModuleNotFoundError("No module named 'optuna'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SpecError, match=r"sampler='tpe' needs Optuna.*pip install 'optuna"):
        ask(sampler="tpe")
    assert ask(pruner="asha", sampler="random").begin() is not None  # needs no Optuna


def test_optuna_is_imported_by_nobody_who_does_not_ask():
    code = "import sys, shoal.study, shoal.ui.cli; sys.exit('optuna' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("evaluations", [0, 1])
def test_a_pruner_needs_evaluations_before_the_end(evaluations):
    with pytest.raises(SpecError, match="evaluated only once, at the end"):
        ask(pruner="asha", evaluations=evaluations)


def test_a_pruner_needs_a_metric_of_evaluations():
    with pytest.raises(SpecError, match="'train_loss' is none of these"):
        ask(pruner="median", metric="train_loss")


def test_hyperband_needs_to_know_how_long_trials_are():
    with pytest.raises(SpecError, match=r"has to know how often.*pruner='asha'"):
        ask(pruner="hyperband", evaluations=None)


class Stubborn(optuna.samplers.BaseSampler):
    """Suggests what it was told to."""

    def __init__(self, relative=None, alone=None) -> None:
        self.relative, self.alone = relative or {}, alone

    def infer_relative_search_space(self, study, trial):
        kind = optuna.distributions.FloatDistribution(0, 1)
        return dict.fromkeys(self.relative, kind)

    def sample_relative(self, study, trial, search_space):
        return self.relative

    def sample_independent(self, study, trial, name, distribution):
        return self.alone


def test_a_name_that_is_not_in_the_space_is_refused():
    with pytest.raises(SpecError, match=r"'depth', which is no name.*it has kind, lr"):
        ask({"lr": 0.1, "kind": "a"}, sampler=Stubborn({"depth": 0.5}, 0.1)).first_trials()


@pytest.mark.parametrize("value", [7.0, -1.0])
def test_a_value_outside_the_space_is_refused(value):
    space = {"lr": uniform(0, 1)}
    with pytest.raises(SpecError, match=rf"Stubborn suggests lr={value}, which is not in"):
        ask(space, sampler=Stubborn(alone=value)).first_trials()


def test_a_value_outside_the_space_is_refused_where_optuna_would_draw_another():
    space = {"lr": uniform(0, 1)}
    with pytest.raises(SpecError, match=r"Stubborn suggests lr=99\.0, which is not in"):
        ask(space, sampler=Stubborn({"lr": 99.0}, 0.5)).first_trials()


@pytest.fixture
def without(monkeypatch):
    def lack(package):
        found = importlib.util.find_spec
        absent = {package: None}
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n: absent[n] if n in absent else found(n)
        )

    return lack


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_package_that_a_sampler_will_need_is_asked_for_before_the_first_trial(without):
    without("cmaes")
    sampler = optuna.samplers.CmaEsSampler(seed=0)
    for one in (sampler, optuna.samplers.PartialFixedSampler({"lr": 0.1}, sampler)):
        with pytest.raises(SpecError, match="the sampler CmaEsSampler needs the package cmaes"):
            ask(sampler=one).first_trials()


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_package_that_a_pruner_will_need_is_asked_for_before_the_first_trial(without):
    without("scipy")
    pruner = optuna.pruners.WilcoxonPruner()
    for one in (pruner, optuna.pruners.PatientPruner(pruner, 1)):
        with pytest.raises(SpecError, match="the pruner WilcoxonPruner needs the package scipy"):
            ask(pruner=one)


def test_a_value_that_is_none_of_a_choices_is_refused():
    with pytest.raises(SpecError, match="Stubborn cannot serve this space"):
        ask({"kind": choice("a", "b")}, sampler=Stubborn(alone="c")).first_trials()


def test_a_sampler_that_cannot_serve_the_space_is_refused_with_its_words():
    grid = optuna.samplers.GridSampler({"kind": ["a", "b"]}, seed=0)
    with pytest.raises(SpecError, match=r"GridSampler cannot serve.*name, lr, is not found"):
        ask(sampler=grid).first_trials()


def test_a_study_passes_on_what_it_is_told(tmp_path):
    recipe = shoal.Recipe(model=print, data=print)
    with pytest.raises(SpecError, match="evaluated only once"):
        shoal.Study("s", recipe, space=SPACE, trials=3, epochs=1, pruner="asha")
    with pytest.raises(SpecError, match="evaluated only once"):
        shoal.Study("s", recipe, space=SPACE, trials=3, steps=9, eval_every=9, pruner="asha")
    study = shoal.Study("s", recipe, space=SPACE, trials=30, epochs=9, sampler="tpe")
    assert len(study.trials) == 18


def test_what_a_sampler_raises_when_its_points_are_looked_at_is_said_in_words():
    class Absent(optuna.samplers.RandomSampler):
        def infer_relative_search_space(self, study, trial):
            return optuna.search_space.intersection_search_space([])

        def sample_relative(self, study, trial, search_space):
            raise ImportError("a library is not installed")

    with pytest.raises(SpecError, match="ImportError: a library is not installed"):
        points(sampler=Absent(seed=0))


def test_a_sampler_or_pruner_that_cannot_be_copied_is_refused_in_words():
    sampler, pruner = optuna.samplers.RandomSampler(seed=0), optuna.pruners.NopPruner()
    sampler.lock = pruner.lock = threading.Lock()
    with pytest.raises(SpecError, match=r"sampler RandomSampler cannot be copied.*TypeError"):
        points(sampler=sampler)
    with pytest.raises(SpecError, match=r"pruner NopPruner cannot be copied.*TypeError"):
        ask(pruner=pruner)


def test_a_sampler_that_suggests_none_where_a_mapping_is_meant_is_refused_in_words():
    class Nothing(optuna.samplers.RandomSampler):
        def sample_relative(self, study, trial, search_space):
            return None

    with pytest.raises(SpecError, match="Nothing cannot serve this space: TypeError"):
        points(sampler=Nothing(seed=0))


def test_a_sampler_that_raises_when_it_is_told_of_trials_is_refused_before_any_trains():
    def constraints(trial):
        return (trial.user_attrs["memory"] - 1.0,)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is experimental in Optuna 5
        sampler = optuna.samplers.TPESampler(seed=0, constraints_func=constraints)
    with pytest.raises(SpecError, match="TPESampler cannot serve this space: KeyError: 'memory'"):
        points(sampler=sampler)


def test_a_sampler_that_draws_otherwise_once_it_is_told_of_trials_needs_a_seed():
    class Learns(optuna.samplers.RandomSampler):
        def after_trial(self, study, trial, state, values):
            self.reseed_rng()

    with pytest.raises(SpecError, match="draws otherwise each time"):
        points(sampler=Learns(seed=0))


@pytest.mark.parametrize("startup", [10, 30])
def test_a_sampler_that_draws_at_random_at_first_is_asked_until_it_goes_by_results(startup):
    options = {"seed": 0, "n_startup_trials": startup, "weights": lambda count: [1]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = optuna.samplers.TPESampler(**options)
    assert len(points(sampler=wrong, trials=startup)) == min(18, startup)  # it never comes so far
    with pytest.raises(
        SpecError, match="TPESampler cannot serve this space: ValueError: operands"
    ):
        points(sampler=wrong, trials=99)


def test_a_sampler_sees_the_curve_of_every_trial_it_is_told_of():
    class Looks(optuna.samplers.RandomSampler):
        def after_trial(self, study, trial, state, values):
            seen.append((state.name, trial.intermediate_values))

    seen = []
    suggester = Suggester(Looks(seed=0), ask().space, "min")
    told = [Facts({}, values=[0.5, 0.25], how=how, value=0.25) for how in get_args(How)]
    for index, facts in enumerate(told):
        suggester.suggest()
        suggester.tell(index, facts)
    curve = {1: 0.5, 2: 0.25}
    assert seen == [("COMPLETE", curve), ("PRUNED", curve), ("FAIL", curve)]


@pytest.mark.parametrize("seed", [-1, 2**40])
def test_any_seed_of_a_study_serves_tpe(seed):
    assert points(sampler="tpe", seed=2**32 + 5, trials=4) == points(
        sampler="tpe", seed=5, trials=4
    )
    wanted = ask(sampler="tpe", seed=seed)
    assert wanted._make_sampler() is not None
