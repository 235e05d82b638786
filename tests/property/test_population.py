"""A population comes to the same, whoever is quicker and whatever is killed."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.search import PBT, Population, choice, log_uniform
from shoal.search.wanted import check_search

LENGTH, EVERY = 9, 10
SPACE = {"lr": log_uniform(1e-4, 1), "kind": choice("a", "b", "c"), "own": choice(1, 2)}
ASKED = {
    "each": PBT(quantile=0.25, vary=("lr", "kind")),
    "half": PBT(quantile=0.5, vary=("lr",), resample=1.0),
    "third": PBT(interval=3, quantile=0.3, vary=("lr", "kind")),
}


@dataclass
class Trial:
    """A trial as a database and its checkpoints have it; ``state`` is all that it learnt."""

    hp: dict
    state: float = 0.0
    step: int = 0
    values: dict[int, float] = field(default_factory=dict)
    taken: list[tuple] = field(default_factory=list)  # on record: step, exploit
    how: str | None = None
    saved: tuple = (0, 0.0, None)


class World:
    """Trials that train in an order of somebody's choice, and a population that hears of it."""

    def __init__(self, asked: PBT, draw: random.Random, trials: int = 8) -> None:
        wanted = check_search(
            name="s", space=SPACE, sampler=None, pruner=asked, generation=None, trials=trials,
            seed=3, mode="min", metric="valid_loss", evaluations=LENGTH,
        )  # fmt: skip
        self.wanted, self.draw = wanted, draw
        self.trials = [Trial(dict(spec.hp)) for spec in wanted.first_trials()]
        self.first = [dict(trial.hp) for trial in self.trials]
        self.begin()

    def begin(self) -> None:
        """All is forgotten but what is on record, and states that were saved."""
        self.search = search = self.wanted.begin()
        assert isinstance(search, Population)
        for number, trial in enumerate(self.trials):
            search.enroll(number, self.first[number])
            for step, value in trial.values.items():
                search.report(number, step, value)
            for step, exploit in trial.taken:
                search.exploited(number, step, exploit)
            if trial.how:
                search.end(number, trial.how)
            else:
                search.ends_at(number, LENGTH, every=EVERY, done=trial.step // EVERY * EVERY)
        search.decide()

    def kill(self) -> None:
        for trial in self.trials:
            if not trial.how:
                trial.step, trial.state, hp = trial.saved
                trial.hp = hp or trial.hp
        self.begin()

    def save(self, trial: Trial) -> None:
        trial.saved = (trial.step, trial.state, dict(trial.hp))

    def run(self, kills: float) -> list:
        while not all(trial.how for trial in self.trials):
            if self.draw.random() < kills:
                self.kill()
            self.happen()
        return [(t.how, t.state, t.hp, t.values, t.taken) for t in self.trials]

    def happen(self) -> None:
        if self.search.due and all(self.waits(n) for n in self.concerned()):
            self.exploit()
            return
        able = [n for n, t in enumerate(self.trials) if not t.how and not self.waits(n)]
        assert able, "they wait for each other"
        self.advance(self.draw.choice(able))

    def concerned(self) -> set[int]:
        return {*self.search.due, *(exploit.source for exploit in self.search.due.values())}

    def waits(self, number: int) -> bool:
        trial = self.trials[number]
        rung = self.search.next_rung(number, max(1, -(-trial.step // EVERY)))
        return rung is not None and trial.step == rung * EVERY < LENGTH * EVERY

    def exploit(self) -> None:
        due = dict(self.search.due)
        states = {e.source: self.trials[e.source].state for e in due.values()}
        for number, exploit in due.items():
            trial = self.trials[number]
            assert trial.step == self.trials[exploit.source].step
            assert trial.hp == exploit.before
            trial.state, trial.hp = states[exploit.source], dict(exploit.hp)
            trial.taken.append((trial.step, exploit))
            self.save(trial)
        for number, exploit in due.items():
            self.search.exploited(number, self.trials[number].step, exploit)
        self.search.decide()
        assert not set(self.search.due) & set(due) or self.search.due != due

    def advance(self, number: int) -> None:
        trial, search = self.trials[number], self.search
        if trial.step == LENGTH * EVERY:
            trial.how = "finished"
            search.end(number, "finished", trial.values[trial.step])
        elif number == 5 and trial.step == 55:
            trial.how = "failed"
            search.end(number, "failed")
        else:
            trial.step += 5
            extra = {"a": 0.0, "b": 0.01, "c": 0.02}[trial.hp["kind"]]
            trial.state += trial.hp["lr"] * (1 + number / 7) - extra
            if trial.step % EVERY == 0:
                value = float("nan") if trial.state > 6 else abs(trial.state - 2)
                trial.values.setdefault(trial.step, value)
                search.report(number, trial.step, value)
            if self.draw.random() < 0.3:
                self.save(trial)
        search.decide()


@functools.cache
def undisturbed(name: str) -> str:
    """Each trial in turn: nobody is ahead of anybody."""
    world = World(ASKED[name], random.Random(0))
    world.draw.choice = lambda able: min(able, key=lambda n: world.trials[n].step)
    return repr(world.run(kills=0.0))


@pytest.mark.parametrize("name", ASKED)
def test_trials_do_go_on_from_each_other(name):
    world = World(ASKED[name], random.Random(0))
    world.run(kills=0.0)
    taken = [exploit for trial in world.trials for _, exploit in trial.taken]
    assert len(taken) > (LENGTH - 1) // ASKED[name].interval
    assert all(exploit.hp["own"] == exploit.before["own"] for exploit in taken)


@pytest.mark.parametrize("name", ASKED)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_results_do_not_depend_on_who_is_quicker(name, seed):
    assert repr(World(ASKED[name], random.Random(seed)).run(kills=0.0)) == undisturbed(name)


@pytest.mark.parametrize("name", ASKED)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_population_that_is_killed_again_and_again_goes_on_from_what_is_on_record(name, seed):
    assert repr(World(ASKED[name], random.Random(seed)).run(kills=0.05)) == undisturbed(name)


def test_a_clone_is_of_no_population():
    search = World(ASKED["each"], random.Random(0)).search
    assert not search.is_searched(99)
    assert search.next_rung(99) is None
    search.report(99, 10, 1.0)
    search.end(99, "finished")
    search.reopen(99)
    assert search.happened(99) == {}
