"""A search comes to the same trials and ends, whoever is quicker and whatever is killed."""

from __future__ import annotations

import functools
import random
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
optuna = pytest.importorskip("optuna")
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
        space=SPACE,
        generation=generation,
        trials=trials,
        seed=1,
        mode="min",
        metric="valid_loss",
        evaluations=LENGTH,
        **{"sampler": None, "pruner": None, **SEARCHES[name]},
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


def test_a_search_without_pruner_never_has_a_trial_wait():
    search = wanted("tpe", 9, 20).begin()
    search.enroll(0, {"x": 0.0})
    assert isinstance(search, Search)
    assert search.next_rung(0) is None
