"""How long a study is foretold to take."""

from types import SimpleNamespace

import pytest

from shoal.launch import duration
from shoal.launch.duration import foretold_s
from shoal.search.rules import likely_part

SETTINGS = SimpleNamespace(steps=None, epochs=9, eval_every=None)


def planned(seconds, devices=2, batches=10):
    jobs = [
        SimpleNamespace(trial=n, takes_s=s, gang=1, micro_batches=1) for n, s in enumerate(seconds)
    ]
    plan = SimpleNamespace(jobs=jobs, devices=[None] * devices)
    return SimpleNamespace(plan=plan, num_batches={job.trial: batches for job in jobs})


def search(part=lambda evaluations: 1.0, trials=None, is_adaptive=False):
    return SimpleNamespace(likely_part=part, total=trials, is_adaptive=is_adaptive)


def test_all_steps_of_all_trials_over_the_devices():
    assert foretold_s(planned([0.1] * 4), SETTINGS, search(), {}, 4) == pytest.approx(18.0)


def test_steps_that_were_made_before_are_not_made_again():
    found = foretold_s(planned([0.1] * 4), SETTINGS, search(), {0: 90, 1: 45}, 4)
    assert found == pytest.approx((4 * 9 - 9 - 4.5) / 2)


def test_the_longest_trial_is_not_cut_by_devices_or_a_pruner():
    found = foretold_s(planned([0.1, 1.0]), SETTINGS, search(lambda e: 0.1), {}, 2)
    assert found == pytest.approx(90.0)


def test_where_it_is_known_how_many_go_on_so_many_are_taken_to():
    halving = search(lambda evaluations: likely_part(evaluations, 1))
    # of nine evaluations one, two more for a third, six more for a ninth
    assert foretold_s(planned([0.1] * 9), SETTINGS, halving, {}, 9) == pytest.approx(
        max(9 * (1 + 2 / 3 + 6 / 9) / 2, 9.0)
    )


def test_the_part_that_trials_do_is_a_mean_and_all_where_nobody_knows():
    halving = search(lambda evaluations: likely_part(evaluations, 1))
    part = duration.likely_part(planned([0.1] * 3), SETTINGS, halving)
    assert part == pytest.approx((1 + 2 / 3 + 6 / 9) / 9)
    assert duration.likely_part(planned([0.1], batches=None), SETTINGS, halving) == 1.0
    assert duration.likely_part(planned([]), SETTINGS, halving) == 1.0


def test_trials_that_are_suggested_later_are_taken_to_be_like_these():
    sampled = search(trials=12, is_adaptive=True)
    assert foretold_s(planned([0.1] * 4), SETTINGS, sampled, {}, 4) == pytest.approx(3 * 18.0)
    assert foretold_s(planned([0.1] * 4), SETTINGS, sampled, {}, 12) == pytest.approx(18.0)


def test_trials_of_no_known_length_and_no_trials_take_nothing():
    assert foretold_s(planned([0.1], batches=None), SETTINGS, search(), {}, 1) == 0.0
    assert foretold_s(planned([]), SETTINGS, search(), {}, 0) == 0.0
