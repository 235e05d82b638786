"""Schedules that count steps where epochs were meant."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shoal.planning.paced import Length, length_of, pace_warnings, too_short
from shoal.recipes.schedules import as_one_schedule
from shoal.runtime.measuring.paces import paces_of
from shoal.runtime.wire.messages import Noticed, Pace

EIGHT = Length(80, 8, 10)
"""Epochs of ten steps."""


def optimizer():
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def noticed(*paces):
    return {0: Noticed(paces=paces)}


def warned(pace, length=EIGHT):
    return " ".join(pace_warnings(noticed(pace), {0: length}))


def test_what_torchs_schedules_count_is_seen_where_they_are_stepped_each_step():
    sgd = optimizer()
    cosine = lr_scheduler.CosineAnnealingLR(sgd, T_max=8)
    stairs = lr_scheduler.MultiStepLR(sgd, [3, 6])
    inside = lr_scheduler.SequentialLR(sgd, [lr_scheduler.StepLR(sgd, 2), cosine], [4])
    found = [Pace("CosineAnnealingLR", "T_max", 8), Pace("MultiStepLR", "milestones", 6, 0.1)]
    assert list(paces_of(lr_scheduler.ChainedScheduler([cosine, stairs]))) == found
    assert list(paces_of(as_one_schedule([cosine, stairs]))) == found
    assert paces_of(lr_scheduler.StepLR(sgd, 3)) == (Pace("StepLR", "step_size", 3, 0.1),)
    assert paces_of(inside) == (found[0],)
    assert paces_of(None) == paces_of(object()) == ()
    (cycle,) = paces_of(lr_scheduler.OneCycleLR(sgd, 0.1, epochs=2, steps_per_epoch=4))
    assert cycle == Pace("OneCycleLR", "total_steps", 8)
    assert paces_of(lr_scheduler.StepLR(sgd, "3")) == ()


def test_falls_that_are_to_take_all_of_a_trial_are_seen_and_warm_ups_are_not():
    sgd, s = optimizer(), lr_scheduler
    cycle = s.OneCycleLR(sgd, 0.1, total_steps=8)
    found = {
        s.ExponentialLR(sgd, 0.9): (Pace("ExponentialLR", "gamma", 0.9, 0.9),),
        s.PolynomialLR(sgd, 8): (Pace("PolynomialLR", "total_iters", 8),),
        s.LinearLR(sgd, 1.0, 0.1, 8): (Pace("LinearLR", "total_iters", 8),),
        s.CosineAnnealingWarmRestarts(sgd, 8): (Pace("CosineAnnealingWarmRestarts", "T_0", 8),),
        s.LinearLR(sgd, 0.1, 1.0, 8): (),
        s.ConstantLR(sgd, 0.1, 8): (),
        s.SequentialLR(sgd, [s.ConstantLR(sgd), cycle], [4]): (),
    }
    for schedule, paces in found.items():
        assert paces_of(schedule) == paces


def test_how_long_a_trial_is():
    assert length_of(19, 2, None, 80) == EIGHT
    assert length_of(19, 2, 50, 50) == Length(50, 0, 0)
    assert length_of(None, 1, None, None) == Length(0, 0, 0)


def test_a_schedule_that_ends_before_the_trial_is_refused_with_the_numbers():
    one = noticed(Pace("OneCycleLR", "total_steps", 8))
    assert too_short(one, {0: EIGHT}) == {
        0: "the schedule of trial 0 is OneCycleLR(total_steps=8), which can be stepped 8 times, "
        "and the trial trains for 80 steps, 8 epochs of 10. A schedule is stepped after each "
        "step, not after each epoch. Make it with total_steps=80, or say that it counts "
        "epochs, with schedule_interval='epoch'."
    }
    assert "trains for 9 steps. A" in too_short(one, {0: Length(9, 0, 0)})[0]
    assert not too_short(one, {0: Length(8, 0, 0)})
    assert not too_short(one, {0: Length(0, 0, 0)})
    assert not too_short(noticed(Pace("CosineAnnealingLR", "T_max", 8)), {0: EIGHT})


def test_what_goes_by_epochs_is_held_against_those():
    length = length_of(19, 2, None, 80, by_epochs=True)
    assert length == length_of(19, 2, 80, 80, by_epochs=True) == Length(80, 8, 10, by_epochs=True)
    assert not too_short(noticed(Pace("OneCycleLR", "total_steps", 8)), {0: length})
    refusal = too_short(noticed(Pace("OneCycleLR", "total_steps", 7)), {0: length})[0]
    assert refusal.endswith("is stepped after each epoch. Make it with total_steps=8.")
    assert not warned(Pace("CosineAnnealingLR", "T_max", 8), length)
    assert not warned(Pace("StepLR", "step_size", 80, 0.1), length)
    assert warned(Pace("CosineAnnealingLR", "T_max", 80), length) == (
        "the schedule of trial 0 is CosineAnnealingLR(T_max=80), and it is stepped after each "
        "epoch, 8 times: T_max seems to count steps. Count epochs, or leave out "
        "schedule_interval='epoch'."
    )


def test_a_count_of_epochs_is_warned_of_with_what_to_write():
    assert warned(Pace("CosineAnnealingLR", "T_max", 8)) == (
        "the schedule of trial 0 is CosineAnnealingLR(T_max=8), and it is stepped after each "
        "step, not after each epoch: the trial trains for 80 steps, 8 epochs of 10. If T_max "
        "counts epochs, say so with Recipe(schedule_interval='epoch'), or multiply by the steps "
        "of one: T_max=8 * 10."
    )
    assert "steps of one: step_size=3 * 10." in warned(Pace("StepLR", "step_size", 3, 0.1))
    stairs = warned(Pace("MultiStepLR", "milestones", 6, 0.1))
    assert "MultiStepLR(milestones=[..., 6])" in stairs
    assert stairs.endswith("milestones=[10 * epoch for epoch in ...].")


def test_a_rate_that_falls_to_nothing_is_warned_of_with_what_to_write():
    pace = Pace("ExponentialLR", "gamma", 0.8, 0.8)
    assert warned(pace) == (
        "the schedule of trial 0 is ExponentialLR(gamma=0.8), and it is stepped after each step, "
        "not after each epoch: the trial trains for 80 steps, 8 epochs of 10, and its last rate "
        "is 2e-08 of the first one. If gamma is meant for an epoch, say so with "
        "Recipe(schedule_interval='epoch'), or take its root: gamma=0.8 ** (1 / 10)."
    )
    assert warned(pace, Length(80, 0, 0)).endswith("or take one that is nearer to 1.")
    assert "its last rate is nothing of the first one" in warned(pace, Length(8000, 8, 1000))
    for_polynomial = warned(Pace("PolynomialLR", "total_iters", 8))
    assert for_polynomial.endswith("the steps of one: total_iters=8 * 10.")
    assert "T_0=4 * 10" in warned(Pace("CosineAnnealingWarmRestarts", "T_0", 4))


def test_trials_that_are_alike_in_that_are_warned_of_once():
    pace, shorter = Pace("StepLR", "step_size", 3, 0.1), Pace("StepLR", "step_size", 2, 0.1)
    found = {1: Noticed(paces=(shorter,)), 0: Noticed(paces=(pace,))}
    (line,) = pace_warnings(found, dict.fromkeys(found, EIGHT))
    assert line.startswith("the schedule of trial 0 is StepLR(step_size=3)")


@pytest.mark.parametrize(
    ("pace", "length"),
    [
        (Pace("CosineAnnealingLR", "T_max", 80), EIGHT),
        (Pace("CosineAnnealingLR", "T_max", 9), EIGHT),
        (Pace("CosineAnnealingLR", "T_max", 8), Length(80, 0, 0)),
        (Pace("CosineAnnealingLR", "T_max", 8), Length(16, 8, 2)),
        (Pace("StepLR", "step_size", 30, 0.1), EIGHT),
        (Pace("StepLR", "step_size", 1, 0.99), EIGHT),
        (Pace("StepLR", "step_size", 1, 1.05), EIGHT),
        (Pace("MultiStepLR", "milestones", 60, 0.1), EIGHT),
        (Pace("MultiStepLR", "milestones", 5, 10.0), EIGHT),
        (Pace("MultiStepLR", "milestones", 0, 0.1), EIGHT),
        (Pace("ExponentialLR", "gamma", 0.95, 0.95), EIGHT),
        (Pace("ExponentialLR", "gamma", 0.8, 0.8), Length(80, 8, 10, by_epochs=True)),
        (Pace("ExponentialLR", "gamma", 1.1, 1.1), EIGHT),
        (Pace("PolynomialLR", "total_iters", 80), EIGHT),
    ],
)
def test_what_may_well_count_steps_is_no_matter(pace, length):
    assert not warned(pace, length)
