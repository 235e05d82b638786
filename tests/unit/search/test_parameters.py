"""What a sampler or pruner was made with, as it is kept on record."""

import importlib.util
import json
import linecache
import sys

import pytest

from shoal.search.parameters import (
    first_difference,
    is_seeded_otherwise,
    parameters_of,
)

optuna = pytest.importorskip("optuna")
samplers, pruners = optuna.samplers, optuna.pruners
pytestmark = pytest.mark.filterwarnings(
    "ignore::optuna.exceptions.ExperimentalWarning", "ignore:`x0` has been deprecated"
)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda n: samplers.TPESampler(seed=n), "rng.rng"),
        (lambda n: samplers.TPESampler(seed=0, n_startup_trials=n), "n_startup_trials"),
        (lambda n: samplers.NSGAIISampler(seed=0, population_size=n + 2), "population_size"),
        (lambda n: pruners.SuccessiveHalvingPruner(reduction_factor=n + 2), "reduction_factor"),
        (lambda n: pruners.MedianPruner(n_startup_trials=n), "n_startup_trials"),
    ],
)
def test_equal_objects_have_equal_texts_and_others_name_what_differs(make, name):
    assert parameters_of(make(1)) == parameters_of(make(1))
    found, was, now = first_difference(parameters_of(make(1)), parameters_of(make(2)))
    assert name in found
    assert was != now


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (
            lambda: pruners.PatientPruner(None, 2),
            lambda: pruners.PatientPruner(pruners.ThresholdPruner(upper=0.1), 2),
            ("wrapped_pruner", "None", "ThresholdPruner"),
        ),
        (
            lambda: pruners.PatientPruner(pruners.NopPruner(), 2),
            lambda: pruners.PatientPruner(pruners.MedianPruner(), 2),
            ("wrapped_pruner", "NopPruner", "MedianPruner"),
        ),
        (
            lambda: samplers.QMCSampler(seed=1),
            lambda: samplers.QMCSampler(seed=1, independent_sampler=samplers.TPESampler(seed=1)),
            ("independent_sampler", "RandomSampler", "TPESampler"),
        ),
        (
            lambda: samplers.CmaEsSampler(seed=1),
            lambda: samplers.CmaEsSampler(seed=1, x0={"lr": 0.1}),
            ("x0", "None", "dict of lr"),
        ),
        (
            lambda: samplers.CmaEsSampler(seed=1, x0={"lr": 0.1}),
            lambda: samplers.CmaEsSampler(seed=1, x0={"lr": 0.1, "momentum": 0.9}),
            ("x0", "dict of lr", "dict of lr, momentum"),
        ),
        (
            lambda: samplers.NSGAIISampler(seed=1),
            lambda: samplers.NSGAIISampler(seed=1, crossover=samplers.nsgaii.BLXAlphaCrossover()),
            ("child_generation_strategy.crossover", "UniformCrossover", "BLXAlphaCrossover"),
        ),
    ],
)
def test_what_is_inside_an_object_is_told_by_its_class(one, other, told):
    assert first_difference(parameters_of(one()), parameters_of(other())) == told
    assert first_difference(parameters_of(one()), parameters_of(one())) is None


def test_a_record_from_before_classes_were_told_goes_on_and_has_none_where_there_was_nothing():
    def old(value):
        known = json.loads(parameters_of(value))
        return json.dumps({name: of for name, of in known.items() if "Pruner" not in of})

    before = pruners.PatientPruner(pruners.MedianPruner(), 2)
    assert first_difference(old(before), parameters_of(before)) is None
    now = pruners.PatientPruner(pruners.PercentilePruner(25.0), 2)
    assert first_difference(old(before), parameters_of(now)) is not None  # percentile
    found = first_difference(old(pruners.PatientPruner(None, 2)), parameters_of(before))
    assert found == ("wrapped_pruner", "None", "MedianPruner")


def test_classes_that_a_library_keeps_to_itself_may_be_renamed():
    known = json.loads(parameters_of(samplers.TPESampler(seed=1)))
    assert "rng" not in known
    assert "parzen_estimator_parameters" not in known
    assert known["random_sampler"] == "RandomSampler"


def test_a_text_holds_no_address_and_ends_where_objects_hold_each_other():
    class Loop:
        def __init__(self) -> None:
            self.own, self.values, self._of = self, {"a": [1, (2, None)]}, len

    known = json.loads(parameters_of(Loop()))
    assert known["values.a.0"] == "1"
    assert known["of"] == "len"
    assert parameters_of(Loop()) == parameters_of(Loop())
    assert "0x" not in parameters_of(samplers.TPESampler(seed=0))


def test_names_that_one_text_alone_has_are_no_difference():
    assert first_difference('{"a": "1"}', '{"b": "2"}') is None
    assert first_difference("", '{"a": "1"}') is None
    assert first_difference('{"b": "1", "a": "1"}', '{"a": "2", "b": "2"}') == ("a", "1", "2")


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (lambda: samplers.TPESampler(seed=0), lambda: samplers.TPESampler(seed=1), True),
        (lambda: grid_of(3, seed=0), lambda: grid_of(3, seed=1), True),
        (lambda: grid_of(3, seed=0), lambda: grid_of(3, seed=0), False),
        (lambda: grid_of(3, seed=0), lambda: grid_of(4, seed=0), False),
        (
            lambda: samplers.TPESampler(seed=0),
            lambda: samplers.TPESampler(seed=1, n_startup_trials=3),
            False,
        ),
    ],
)
def test_another_seed_is_told_from_another_value(one, other, told):
    assert is_seeded_otherwise(parameters_of(one()), parameters_of(other())) is told


def grid_of(values, **options):
    return samplers.GridSampler({"a": list(range(values))}, **options)


RULE = """
import optuna

class Rule(optuna.pruners.BasePruner):
    def __init__(self, most):
        self.most = most

    def prune(self, study, trial):
        return trial.number > self.most
"""


def test_the_text_of_a_users_own_class_is_a_part_of_it(tmp_path, monkeypatch):
    def made_of(text):
        (tmp_path / "rules.py").write_text(text)
        linecache.clearcache()
        spec = importlib.util.spec_from_file_location("rules", tmp_path / "rules.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "rules", module)
        exec(compile(text, str(tmp_path / "rules.py"), "exec"), vars(module))
        nested = pruners.PatientPruner(module.Rule(3), 2)
        return parameters_of(module.Rule(3)), parameters_of(nested)

    before = made_of(RULE)
    laid_out = made_of(
        RULE.replace("prune(self, study, trial):", "prune(self, study,  trial):  #")
    )
    changed = made_of(RULE.replace("number >", "number >="))

    assert laid_out == before
    assert first_difference(before[0], changed[0])[0] == "the code of Rule"
    assert first_difference(before[1], changed[1])[0] == "wrapped_pruner.the code of Rule"
    assert "code" not in parameters_of(pruners.MedianPruner())
