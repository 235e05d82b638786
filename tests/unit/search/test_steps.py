"""Ranges with a step: which values they have, and what is said of those that cannot be."""

import decimal
import json
import math
import random
import warnings

import pytest

from shoal.core.errors import SpecError
from shoal.search import PBT, choice, grid, integer, log_uniform, sample, uniform
from shoal.search.handover import HandedOver, write_optuna
from shoal.search.pbt import exploits
from shoal.search.space import check_space, size
from shoal.search.wanted import check_search

ONE_VALUE = "the step is larger than hi - lo, so that 1.* would be the only value"


def values(entry):
    return [entry.at(index) for index in range(entry.count)]


def ask(space, **options):
    usual = {"sampler": None, "pruner": None, "generation": None, "trials": 12, "seed": 0}
    usual |= {"name": "s", "mode": "min", "metric": "valid_loss", "evaluations": 9}
    return check_search(space=space, **(usual | options))


def points(space, **options):
    return [dict(trial.hp) for trial in ask(space, **options).first_trials()]


def test_the_values_are_whole_steps_from_the_lower_end():
    assert values(integer(1, 9, step=2)) == [1, 3, 5, 7, 9]
    assert values(integer(-4, 5, step=3)) == [-4, -1, 2, 5]
    assert values(uniform(0, 10, step=2.5)) == [0.0, 2.5, 5.0, 7.5, 10.0]
    assert {type(value) for value in values(uniform(0, 4, step=2))} == {float}


def test_floats_are_counted_in_decimals_whatever_context_the_user_has():
    with decimal.localcontext() as context:
        context.prec = 2
        tenths = values(uniform(0.1, 0.7, step=0.1))
        assert values(uniform(100.1, 100.4, step=0.1)) == [100.1, 100.2, 100.3, 100.4]
    assert tenths == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert json.loads(json.dumps(tenths)) == tenths


def test_where_no_step_ends_at_the_upper_end_a_warning_says_which_value_is_the_last():
    with pytest.warns(
        UserWarning, match=r"integer\(1, 10, step=2\): no step .* last value is 9\."
    ):
        entry = integer(1, 10, step=2)
    assert values(entry) == [1, 3, 5, 7, 9]
    with pytest.warns(UserWarning, match=r"ends at 1\.0, so the last value is 0\.9") as said:
        assert uniform(0, 1, step=0.3).hi == 0.9
    assert said[0].filename == __file__


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: integer(1, 9, step=0), r"integer\(1, 9, step=0\): a step is a whole number"),
        (lambda: integer(1, 9, step=2.0), "a step is a whole number from 1, got 2.0"),
        (lambda: integer(1, 9, step=True), "a step is a whole number from 1, got True"),
        (lambda: integer(1, 9, log=True, step=2), r"log=True, step=2\): .*have no step"),
        (lambda: integer(1, 3, step=5), ONE_VALUE),
        (lambda: uniform(1, 3, step=5), ONE_VALUE),
        (lambda: uniform(0, 1, step=0), "a step is a number above 0, got 0"),
        (lambda: uniform(0, 1, step=-0.1), "a step is a number above 0"),
        (lambda: uniform(0, 1, step=math.inf), "a step is a number above 0"),
        (lambda: uniform(0, 1, step="0.1"), "a step is a number above 0, got '0.1'"),
        (lambda: uniform(0, 1, step=1e-9), "a step is at least 1e-07 of the larger bound"),
        (lambda: log_uniform(1, 9, step=2), r"log_uniform\(step=...\): .*integer\(lo, hi, log"),
    ],
)
def test_a_step_that_cannot_be_meant_is_refused(make, words):
    with pytest.raises(SpecError, match=words):
        make()


def test_a_range_without_a_step_is_written_and_drawn_as_ever():
    assert repr(uniform(0, 1)) == "Uniform(lo=0, hi=1, log=False)"
    assert repr(integer(1, 9, log=True)) == "Integer(lo=1, hi=9, log=True)"
    assert repr(integer(1, 9, step=2)) == "Integer(lo=1, hi=9, log=False, step=2)"
    assert integer(1, 9, log=True, step=1) == integer(1, 9, log=True)
    assert [integer(2, 4).pick(unit) for unit in (0.0, 0.5, 0.99)] == [2, 3, 4]


def test_a_grid_that_is_asked_for_lists_ranges():
    branch = choice("x", "y", when={"y": {"k": integer(1, 2)}})
    space = {"a": uniform(0.1, 0.3, step=0.1), "b": branch}
    assert size(check_space(space)) == 9
    assert [list(point.values()) for point in sample(space, None, sampler="grid")] == [
        [0.1, "x"], [0.1, "y", 1], [0.1, "y", 2],
        [0.2, "x"], [0.2, "y", 1], [0.2, "y", 2],
        [0.3, "x"], [0.3, "y", 1], [0.3, "y", 2],
    ]  # fmt: skip
    with pytest.raises(SpecError, match="10 trials were asked for, but the space has only 9"):
        sample(space, 10, sampler="grid")


def test_a_range_in_a_grid_is_the_list_of_its_values():
    space = grid(a=uniform(0.1, 0.3, step=0.1), b=integer(1, 9, step=4), c=integer(1, 2))
    assert space == grid(a=[0.1, 0.2, 0.3], b=[1, 5, 9], c=[1, 2])
    with pytest.raises(SpecError, match=r"got a uniform, .* take a uniform with a step, or write"):
        grid(a=uniform(0, 1))


def test_ranges_are_drawn_at_random_where_no_grid_is_asked_for():
    space = {"depth": integer(8, 64, step=8)}
    drawn = [point["depth"] for point in sample(space, 40)]
    assert set(drawn) == set(range(8, 65, 8))
    with pytest.raises(SpecError, match=r"give trials=N, or sampler='grid' for each of its 8 poi"):
        sample(space, None)


def test_a_population_goes_from_step_to_step():
    space = check_space({"drop": uniform(0.0, 0.5, step=0.1), "width": integer(16, 64, step=16)})
    asked = PBT(resample=0.0)
    seen = set()
    for seed in range(60):
        draw = random.Random(seed)
        hp = {name: entry.pick(draw.random()) for name, entry in space.items()}
        found = exploits(
            asked, space, mode="min", seed=seed, rung=1,
            values={0: 0.1, 1: 0.2}, points={0: hp, 1: hp},
        )  # fmt: skip
        new = found[1].hp
        seen.add(new["drop"])
        for name, entry in space.items():
            assert new[name] in values(entry)
            assert new[name] != hp[name] or hp[name] in (entry.lo, entry.hi)
    assert seen == set(values(space["drop"]))


class TestWithOptuna:
    """What samplers and the dashboard of Optuna's are told, and what they suggest."""

    SPACE = {  # noqa: RUF012
        "drop": uniform(0.1, 0.7, step=0.1),
        "width": integer(8, 64, step=8),
        "lr": log_uniform(1e-4, 1e-1),
    }

    @pytest.fixture(autouse=True)
    def optuna(self):
        return pytest.importorskip("optuna")

    @pytest.mark.parametrize("kind", ["TPESampler", "RandomSampler", "NSGAIISampler"])
    def test_what_a_sampler_suggests_is_one_of_the_values(self, optuna, kind):
        sampler = getattr(optuna.samplers, kind)(seed=3)
        found = points(self.SPACE, sampler=sampler, trials=40, generation=20)
        assert len(found) == 40
        assert {p["drop"] for p in found} == set(values(self.SPACE["drop"]))
        assert {p["width"] for p in found} == set(range(8, 65, 8))

    def test_every_point_is_tried_once_where_a_sampler_does_that(self, optuna):
        space = {name: self.SPACE[name] for name in ("drop", "width")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is experimental in Optuna 5
            sampler = optuna.samplers.BruteForceSampler(seed=1)
        found = points(space, sampler=sampler, trials=99, generation=56)
        assert len(found) == len({tuple(p.values()) for p in found}) == 56

    def test_a_grid_of_optuna_s_that_misses_the_steps_is_refused(self, optuna):
        sampler = optuna.samplers.GridSampler({"drop": [0.1, 0.15]})
        with pytest.raises(SpecError, match=r"suggests drop=0.15, which is not in .*step=0.1"):
            points({"drop": self.SPACE["drop"]}, sampler=sampler, generation=2)

    def test_a_study_is_handed_over_with_its_steps(self, optuna, tmp_path):
        def trial(**hp):
            return HandedOver(
                point=hp, state="COMPLETE", value=1.0, curve={}, began=0.0, ended=1.0
            )

        space = {name: self.SPACE[name] for name in ("drop", "width")}
        inside = [trial(drop=0.3, width=16), trial(drop=0.7, width=72)]
        outside = [*inside, trial(drop=0.25, width=7)]  # a clone
        for name, trials in (("in", inside), ("out", outside)):
            write_optuna(
                tmp_path / name, "s", mode="min", metric="valid_loss", space=space, trials=trials
            )
        steps = {}
        for name in ("in", "out"):
            study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path / name}")
            found = study.trials[-1].distributions
            steps[name] = found["drop"].step, found["width"].step, found["width"].high
        assert steps == {"in": (0.1, 8, 72), "out": (None, 1, 72)}
