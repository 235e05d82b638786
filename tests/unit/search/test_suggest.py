"""Points that a sampler gives, and those of a search that goes on after it raised."""

from __future__ import annotations

import pytest

import shoal
from shoal.core.errors import SpecError
from shoal.search import Search
from shoal.search.suggest import Suggester

optuna = pytest.importorskip("optuna")

SPACE = {"lr": shoal.log_uniform(1e-4, 1e-1), "drop": shoal.uniform(0, 0.5)}
SIZE, TRIALS = 3, 9


class Fails(optuna.samplers.TPESampler):
    """Raises where it is asked for one trial, or told of it."""

    def __init__(self, *, ask: int = -1, tell: int = -1) -> None:
        super().__init__(seed=1, n_startup_trials=2)
        self.ask, self.tell = ask, tell

    def before_trial(self, study, trial):
        if trial.number == self.ask:
            raise RuntimeError("the server is away")
        super().before_trial(study, trial)

    def after_trial(self, study, trial, state, values):
        if trial.number == self.tell:
            raise RuntimeError("the server is away")
        super().after_trial(study, trial, state, values)


def go_on(points, sampler):
    """What a search comes to that has these ``points`` on record, all of which ended well."""
    search = Search(SIZE, None, Suggester(sampler, SPACE, "min"), TRIALS)
    for number, point in enumerate(points):
        enroll(search, number, point)
    points = list(points)
    try:
        while search.can_ask:
            for point in search.more():
                enroll(search, len(points), point)
                points.append(point)
    except SpecError as error:
        assert f"The {len(points)} trials that there are stay" in str(error)  # noqa: PT017
    assert search.differs_from is None
    return points


def enroll(search, number, point):
    search.enroll(number, point)
    search.end(number, "finished", point["drop"])


@pytest.mark.parametrize(("fault", "known"), [({"ask": 7}, 6), ({"tell": 1}, 6)])
def test_a_sampler_that_raised_within_a_generation_gives_the_same_points_again(fault, known):
    undisturbed = go_on([], Fails())
    points = go_on([], Fails(**fault))
    assert len(undisturbed) == TRIALS
    assert points == undisturbed[:known]  # none of the generation that it did not come to
    assert go_on(points, Fails()) == undisturbed
