"""What a sampler or pruner was made with, as it is kept on record."""

import json

import pytest

from shoal.search.parameters import first_difference, parameters_of

optuna = pytest.importorskip("optuna")
samplers, pruners = optuna.samplers, optuna.pruners


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
