"""Who copies whom in a population, what changes, and what is said of what cannot be meant."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.core.errors import SpecError
from shoal.search import PBT, choice, integer, log_uniform, uniform
from shoal.search.pbt import check_size, exploits, varied
from shoal.search.space import check_space
from shoal.search.wanted import check_search

SPACE = check_space(
    {
        "lr": log_uniform(1e-5, 1e-1),
        "shift": uniform(-2, 2),
        "depth": integer(1, 9),
        "act": choice("relu", "gelu", "silu"),
        "kind": choice("a", "b", when={"a": {"k": integer(1, 3)}}),
        "seed": choice(1, 2),
        "width": 64,
    }
)
USUAL = PBT()
NAMES = varied(USUAL, SPACE)
POINT = {"lr": 1e-2, "shift": 0.5, "depth": 4, "act": "gelu", "kind": "b", "seed": 1, "width": 64}


def at(values, *, asked=USUAL, mode="min", seed=0, rung=1, points=None):
    points = points or {trial: {**POINT, "seed": trial} for trial in values}
    return exploits(asked, NAMES, mode=mode, seed=seed, rung=rung, values=values, points=points)


# -- exploit ----------------------------------------------------------------------------------


def test_the_worst_quarter_goes_on_from_the_best_quarter():
    values = {trial: float(trial) for trial in range(8)}
    assert set(at(values)) == {6, 7}
    assert {e.source for e in at(values).values()} <= {0, 1}
    assert set(at(values, mode="max")) == {0, 1}
    assert {e.source for e in at(values, mode="max").values()} <= {6, 7}


def test_of_equal_trials_the_first_are_the_best():
    assert set(at(dict.fromkeys(range(4), 1.0))) == {3}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_copied_by_nobody_and_its_trial_copies(value):
    found = at({0: value, 1: 0.5, 2: 0.6, 3: 0.7})
    assert {trial: e.source for trial, e in found.items()} == {0: 1}
    assert at(dict.fromkeys(range(4), value)) == {}


def test_of_those_that_are_left_one_copies_though_the_quantile_is_less():
    assert set(at({0: 1.0, 5: 2.0})) == {5}
    assert at({3: 1.0}) == {}
    assert at({}) == {}


@given(
    st.dictionaries(st.integers(0, 40), st.floats(), max_size=24),
    st.floats(0.01, 0.5),
    st.sampled_from(["min", "max"]),
    st.integers(0, 99),
)
def test_nobody_copies_a_worse_one_or_one_that_copies(values, quantile, mode, seed):
    found = at(values, asked=PBT(quantile=quantile), mode=mode, seed=seed)
    for trial, exploit in found.items():
        source = exploit.source
        assert source != trial
        assert source not in found
        assert math.isfinite(values[source])
        if math.isfinite(values[trial]):
            ahead = (
                values[source] <= values[trial]
                if mode == "min"
                else (values[source] >= values[trial])
            )
            assert ahead
    assert found == at(dict(reversed(values.items())), asked=PBT(quantile=quantile), mode=mode,
                       seed=seed)  # fmt: skip


# -- explore ----------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(0, 1))
def test_what_changes_stays_within_the_space_and_the_rest_stays_the_trials_own(seed, rung, often):
    found = at({0: 1.0, 1: 2.0}, seed=seed, rung=rung, asked=PBT(resample=often))
    hp = found[1].hp
    assert found[1].before == {**POINT, "seed": 1}
    assert list(hp) == list(POINT)
    assert 1e-5 <= hp["lr"] <= 1e-1
    assert -2 <= hp["shift"] <= 2
    assert type(hp["depth"]) is int
    assert 1 <= hp["depth"] <= 9
    assert hp["act"] in ("relu", "gelu", "silu")
    assert (hp["kind"], hp["seed"], hp["width"]) == ("b", 1, 64)


def test_values_are_the_sources_and_perturbed_by_the_factors():
    points = {0: {**POINT, "lr": 1e-3}, 1: {**POINT, "lr": 1e-1}}
    drawn = {
        at({0: 1.0, 1: 2.0}, seed=seed, asked=PBT(resample=0), points=points)[1].hp["lr"]
        for seed in range(20)
    }
    assert drawn == {1e-3 * 0.8, 1e-3 * 1.25}


def test_a_whole_number_changes_by_one_at_least_and_a_choice_to_its_neighbour():
    points = {0: {**POINT, "depth": 2, "act": "relu"}, 1: POINT}
    hps = [
        at({0: 1.0, 1: 2.0}, seed=seed, asked=PBT(resample=0), points=points)[1].hp
        for seed in range(20)
    ]
    assert {hp["depth"] for hp in hps} == {1, 3}
    assert {hp["act"] for hp in hps} == {"relu", "gelu"}


def test_each_trial_and_rung_draws_its_own():
    values = {trial: float(trial) for trial in range(8)}
    one, other = at(values, asked=PBT(resample=1)), at(values, asked=PBT(resample=1), rung=2)
    assert one[6].hp["lr"] != one[7].hp["lr"]
    assert one[6].hp["lr"] != other[6].hp["lr"]
    assert one == at(values, asked=PBT(resample=1))
    assert one != at(values, asked=PBT(resample=1), seed=1)


# -- what varies ------------------------------------------------------------------------------


def test_what_has_one_value_brings_others_or_is_the_seed_does_not_vary():
    assert list(NAMES) == ["lr", "shift", "depth", "act"]
    assert list(varied(PBT(vary=("act", "lr")), SPACE)) == ["act", "lr"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("seed", "the trial's own seed"),
        ("kind", "brings other names"),
        ("width", "has one value only"),
        ("k", "is no name of the space"),
    ],
)
def test_a_name_that_cannot_vary_is_refused_with_those_that_can(name, why):
    with pytest.raises(SpecError, match=rf"names '{name}', which .*{why}.*lr, shift, depth, act"):
        varied(PBT(vary=(name,)), SPACE)


def test_a_space_with_nothing_to_change_is_refused():
    with pytest.raises(SpecError, match=r"has nothing to change.*Give one a range"):
        varied(PBT(), check_space({"lr": 0.1, "seed": choice(1, 2, 3, 4)}))


# -- what cannot be meant ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interval": 0}, "interval is a whole number"),
        ({"interval": 1.0}, "interval is a whole number"),
        ({"quantile": 0}, "quantile is a share"),
        ({"quantile": 0.6}, "quantile is a share"),
        ({"quantile": True}, "quantile is a share"),
        ({"resample": 1.1}, "resample is a probability"),
        ({"vary": ()}, "vary is a list of names"),
        ({"vary": "lr"}, "vary is a list of names"),
        ({"perturb": ()}, "perturb is a list of factors"),
        ({"perturb": (0.0, 2.0)}, "perturb is a list of factors"),
        ({"perturb": 1.2}, "perturb is a list of factors"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_an_example(options, words):
    with pytest.raises(SpecError, match=rf"{words}.*pruner=shoal\.PBT\("):
        PBT(**options)


def test_lists_will_do():
    assert PBT(vary=["lr"], perturb=[0.5, 2.0]) == PBT(vary=("lr",), perturb=(0.5, 2.0))


def test_a_population_of_which_nobody_would_copy_is_refused():
    with pytest.raises(SpecError, match=r"population of 3 trials is too small.*Give trials=4"):
        check_size(PBT(), 3)
    check_size(PBT(), 4)
    check_size(PBT(quantile=0.5), 2)


def ask(space=None, **options):
    usual = {"name": "s", "sampler": None, "pruner": PBT(), "generation": None, "trials": 8}
    usual |= {"seed": 0, "mode": "min", "evaluations": 9, "metric": "valid_loss"}
    return check_search(space=space or {"lr": log_uniform(1e-5, 1e-1)}, **(usual | options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trials": 3}, "too small"),
        ({"space": {"lr": choice(0.1, 0.2)}, "trials": None}, "population of 2 trials"),
        ({"space": {"lr": 0.1}, "trials": None}, "nothing to change"),
        ({"sampler": "tpe"}, "learns from what a trial's hyperparameters came to"),
        ({"generation": 4}, "Leave generation out"),
        ({"evaluations": 1}, "evaluated only once"),
        ({"evaluations": 3, "pruner": PBT(interval=3)}, "no rung before the end"),
        ({"metric": "train_loss"}, "none of these"),
        ({"pruner": "pbt"}, r"a shoal\.PBT"),
    ],
)
def test_a_study_refuses_a_population_that_it_cannot_train(options, words):
    if options.get("sampler") == "tpe":
        pytest.importorskip("optuna")
    with pytest.raises(SpecError, match=words):
        ask(**options)


def test_a_study_says_in_its_plan_and_its_record_what_happens_at_a_rung():
    asked = ask()
    (line,) = asked.explain(8)
    assert "after each evaluation all 8 trials wait" in line
    assert "the worst 2 go on from states of the best, with lr changed" in line
    assert "every 3 evaluations all 8" in ask(pruner=PBT(interval=3)).explain(8)[0]
    words = asked.words()
    assert words["population"] == "8"
    assert "quantile=0.25" in words["pruner"]
    assert "lr=Uniform" in words["space"]
    assert asked.varied == ("lr",)
    assert ask(pruner="asha").varied == ()


def test_it_is_a_public_name():
    assert shoal.PBT is PBT
