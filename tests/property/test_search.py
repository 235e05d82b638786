"""A search comes to the same trials and ends, whoever is quicker and whatever is killed."""

from __future__ import annotations

import functools
import random
import warnings
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.search import Search, choice, integer, log_uniform, uniform
from shoal.search.wanted import Wanted, check_search

LENGTH = 9  # evaluations of a trial
EVERY = 10  # steps from one to the next
SPACE = {
    "x": uniform(-5, 5),
    "kind": choice(
        "a", "b", when={"a": {"y": log_uniform(1e-4, 1)}, "b": {"depth": integer(1, 9)}}
    ),
    "constant": 3,
}
FINITE = {
    "x": integer(-2, 2),
    "kind": choice("a", "b", when={"a": {"y": choice(0.1, 0.2)}}),
    "constant": 3,
}  # 15 points
optuna = pytest.importorskip("optuna")


def brute_force(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is experimental in Optuna 5
        return optuna.samplers.BruteForceSampler(seed=1, **options)


class Ends(optuna.samplers.RandomSampler):
    """Has the study stop when it was told of so many trials, or asked for so many."""

    def __init__(self, told: int = 99, asked: int = 99) -> None:
        super().__init__(seed=1)
        self.told, self.asked = told, asked

    def before_trial(self, study, trial):
        if trial.number + 1 == self.asked:
            study.stop()

    def after_trial(self, study, trial, state, values):
        if trial.number + 1 == self.told:
            study.stop()


SEARCHES = {
    "tpe": {"sampler": "tpe"},
    "tpe, asha": {"sampler": "tpe", "pruner": "asha"},
    "tpe, hyperband": {"sampler": "tpe", "pruner": "hyperband"},
    "random, asha": {"sampler": "random", "pruner": "asha"},
    "random, median": {"sampler": "random", "pruner": "median"},
    "objects": {
        "sampler": optuna.samplers.NSGAIISampler(seed=1, population_size=6),
        "pruner": optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    },
    "random, an object": {"sampler": "random", "pruner": optuna.pruners.HyperbandPruner(1, 9)},
    "tpe, their median": {
        "sampler": "tpe",
        "pruner": optuna.pruners.MedianPruner(n_startup_trials=2),
    },
    "ends when told": {"sampler": Ends(told=6), "pruner": "asha"},
    "ends when asked": {"sampler": Ends(asked=11)},
    "brute force": {"sampler": brute_force(), "space": FINITE},
    "tpe, asha, points": {
        "sampler": "tpe",
        "pruner": "asha",
        "points": [{"x": 1.0}, {"kind": "a", "y": 0.5}, {"x": 2.0, "kind": "b", "depth": 3}],
    },
    "random, median, points": {"sampler": "random", "pruner": "median", "points": [{"x": 0.5}]},
    "brute force, points": {
        "sampler": brute_force(),
        "space": FINITE,
        "points": [{"x": 1, "kind": "b", "constant": 3}] * 2,
    },
    "brute force again": {
        "sampler": brute_force(avoid_premature_stop=True),
        "space": FINITE,
        "pruner": "median",
    },
}


@dataclass
class Trial:
    """A trial as a database has it."""

    point: dict
    length: int
    values: list[float] = field(default_factory=list)
    how: str | None = None


def wanted(name: str, generation: int, trials: int) -> Wanted:
    return check_search(
        name="s",
        generation=generation,
        trials=trials,
        seed=1,
        mode="min",
        metric="valid_loss",
        evaluations=LENGTH,
        **{"sampler": None, "pruner": None, "space": SPACE, **SEARCHES[name]},
    )


def measure(trial: Trial) -> float:
    point, after = trial.point, len(trial.values) + 1
    value = point["x"] ** 2 + point.get("y", 0) + point.get("depth", 0) / 10 + 5 / after
    return float("nan") if abs(point["x"]) > 4.8 and after > 2 else value


class World:
    """Trials that advance in an order of somebody's choice, and a search that hears of it."""

    def __init__(self, asked: Wanted, draw: random.Random) -> None:
        self.asked, self.draw = asked, draw
        self.trials: list[Trial] = []
        self.search = asked.begin()
        self.add([dict(trial.hp) for trial in asked.first_trials()])
        assert self.search.more() == []

    def add(self, points) -> None:
        for point in points:
            length = LENGTH if point["x"] < 3 else 7  # not all are as long
            self.trials.append(Trial(point, length))
            self.search.enroll(len(self.trials) - 1, point)
            self.search.ends_at(len(self.trials) - 1, length, every=EVERY)

    def kill(self) -> None:
        """All is forgotten but what is on record."""
        self.search = search = self.asked.begin()
        for number, trial in enumerate(self.trials):
            search.enroll(number, trial.point)
            for rung, value in enumerate(trial.values, start=1):
                search.report(number, rung * EVERY, value)
            if trial.how:
                search.end(number, trial.how, trial.values[-1] if trial.values else None)
            else:
                done = EVERY * len(trial.values) + self.draw.randrange(EVERY)
                search.ends_at(number, trial.length, every=EVERY, done=done)
        new = search.more()
        assert search.differs_from is None
        self.add(new)

    def run(self, kills: float) -> tuple[list[dict], list[tuple[str, int]]]:
        """To the end: every trial's point, and how and when each ended."""
        while self.step():
            if self.draw.random() < kills:
                self.kill()
        return [t.point for t in self.trials], [(t.how, len(t.values)) for t in self.trials]

    def step(self) -> bool:
        search = self.search
        search.decide()
        if search.can_ask and self.draw.random() < 0.5:
            self.add(search.more())
        able = [n for n, trial in enumerate(self.trials) if not trial.how and self.may(n, trial)]
        if not able:
            if search.can_ask:
                return True
            assert all(trial.how for trial in self.trials), "they wait for each other"
            return search.to_come > 0
        self.advance(self.draw.choice(able))
        return True

    def may(self, number: int, trial: Trial) -> bool:
        rung = self.search.next_rung(number)
        waits = rung == len(trial.values) < trial.length
        return not waits or self.search.pruned_at(number) == rung

    def advance(self, number: int) -> None:
        trial, search = self.trials[number], self.search
        if search.pruned_at(number) == len(trial.values):
            trial.how = "pruned"
            search.end(number, "pruned")
        elif number % 11 == 10 and len(trial.values) == 2:
            trial.how = "failed"
            search.end(number, "failed")
        elif len(trial.values) == trial.length:
            trial.how = "finished"
            search.end(number, "finished", trial.values[-1])
        else:
            trial.values.append(measure(trial))
            search.report(number, len(trial.values) * EVERY, trial.values[-1])


@functools.cache
def undisturbed(name: str, generation: int, trials: int):
    """Each trial in turn: nobody is ahead of anybody."""
    world = World(wanted(name, generation, trials), random.Random(0))
    world.draw.choice = lambda able: min(able, key=lambda n: len(world.trials[n].values))
    return world.run(kills=0.0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SEARCHES)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), generation=st.sampled_from([1, 3, 4, 9]))
def test_results_do_not_depend_on_who_is_quicker(name, seed, generation):
    world = World(wanted(name, generation, 20), random.Random(seed))
    assert world.run(kills=0.0) == undisturbed(name, generation, 20)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SEARCHES)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_search_that_is_killed_again_and_again_goes_on_from_what_is_on_record(name, seed):
    world = World(wanted(name, 4, 18), random.Random(seed))
    assert world.run(kills=0.05) == undisturbed(name, 4, 18)


@pytest.mark.parametrize("name", ["tpe", "tpe, asha", "objects"])
def test_more_trials_leave_those_that_are_there_as_they_are(name):
    points, ends = undisturbed(name, 4, 12)
    more_points, more_ends = undisturbed(name, 4, 24)
    assert more_points[:12] == points
    assert more_ends[:12] == ends


def test_a_pruned_study_finishes_fewer_trials_and_keeps_a_good_one():
    points, ends = undisturbed("random, asha", 9, 20)
    finished = [n for n, (how, _) in enumerate(ends) if how == "finished"]
    best = sorted(range(20), key=lambda n: points[n]["x"] ** 2)[:3]
    assert set(finished) & set(best)
    assert sum(how == "pruned" for how, _ in ends) > 10


@pytest.mark.parametrize(
    ("name", "generation", "trials"),
    [
        ("ends when told", 1, 7),  # the next one trains when the sixth is told of
        ("ends when told", 4, 12),  # two generations are told of where the fourth is asked for
        ("ends when asked", 4, 11),
        ("brute force", 9, 15),
        ("brute force, points", 4, 16),
    ],
)
def test_a_search_ends_with_the_trials_that_its_sampler_has_points_for(name, generation, trials):
    points, ends = undisturbed(name, generation, 40)
    assert len(points) == trials
    assert all(how for how, _ in ends)
    assert undisturbed(name, generation, trials - 1)[0] == points[:-1]


def test_every_point_is_tried_where_some_are_tried_again():
    points, _ = undisturbed("brute force again", 3, 60)
    distinct = {(point["x"], point.get("y")) for point in points}
    assert len(distinct) == 15
    assert 15 <= len(points) < 60


def test_a_search_without_pruner_never_has_a_trial_wait():
    search = wanted("tpe", 9, 20).begin()
    search.enroll(0, {"x": 0.0})
    assert isinstance(search, Search)
    assert search.next_rung(0) is None
