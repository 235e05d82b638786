"""An array that is to be timed is still there when its moment comes."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from torch import nn

from shoal.core.spec import TrialSpec
from shoal.device import open_device
from shoal.fusion import Declined
from shoal.recipes.recipe import Recipe
from shoal.runtime.measuring.measure import Measurer
from shoal.runtime.wire.messages import MeasureArray, Refused, TimeArray, TimedArray
from shoal.testing import make_device

TRIALS = tuple(TrialSpec(number=number, hp={"lr": 0.1}, seed=number) for number in range(4))


def built() -> Measurer:
    recipe = Recipe(
        model=lambda hp: nn.Linear(8, 3),
        data=lambda hp: ([(torch.randn(8, 8), torch.zeros(8, dtype=torch.long))], None),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    )
    measurer = Measurer(recipe, open_device(make_device()))
    assert not measurer.answer(MeasureArray(TRIALS, 4, "eager")).found.declined
    return measurer


def timed(measurer: Measurer):
    order = TimeArray(TRIALS[0], time.monotonic(), (0.01, 0.01, 0.0, 0.0), 1)
    return measurer.answer(order)


def test_a_lease_that_comes_before_it_is_timed_does_not_take_it_away():
    measurer = built()
    measurer.forget()
    assert isinstance(timed(measurer), TimedArray)


def test_once_it_was_timed_a_lease_takes_its_place():
    measurer = built()
    assert isinstance(timed(measurer), TimedArray)
    measurer.forget()
    assert isinstance(timed(measurer), Refused)


def test_what_is_told_not_to_be_timed_is_let_go_of():
    """An array of another device may be declined; a lease that comes has the room then."""
    measurer = built()
    answer = measurer.answer(TimeArray(TRIALS[0], time.monotonic(), (), 0))
    assert answer == TimedArray(0, ())
    measurer.forget()
    assert isinstance(timed(measurer), Refused)


def test_code_that_raises_after_many_steps_on_one_batch_is_no_reason_against_an_array():
    """How many there are in a slice is a matter of how busy the machine is."""

    def finite(output, batch):
        if not output.isfinite().all():
            raise ValueError("not a number")
        return 1.0

    recipe = Recipe(
        model=lambda hp: nn.Linear(8, 3),
        data=lambda hp: ([(torch.ones(8, 8),)], [(torch.ones(8, 8),)]),
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda named, hp: torch.optim.SGD([p for _, p in named], lr=5.0),
        metrics={"finite": finite},
    )
    measurer = Measurer(recipe, open_device(make_device()))
    assert not measurer.answer(MeasureArray(TRIALS, 4, "eager")).found.declined
    for step in measurer._bench._works[:2]:
        for _ in range(40):  # as in a long slice
            step()
    order = TimeArray(TRIALS[0], time.monotonic(), (0.01,) * 4, 1)
    step_s, array_s, valid_s, array_valid_s = measurer.answer(order).rounds[0]
    assert step_s > 0 < array_s
    assert valid_s == array_valid_s == 0


def test_a_step_that_all_slots_fail_is_no_time_of_an_array():
    """It ends early: an array that does nothing would be the quickest."""

    def loss(output, batch):
        if not output.isfinite().all():
            raise ValueError("not a number")
        return output.square().mean()

    recipe = Recipe(
        model=lambda hp: nn.Linear(8, 3),
        data=lambda hp: ([(torch.ones(8, 8),)], None),
        loss=loss,
        optimizer=lambda named, hp: torch.optim.SGD([p for _, p in named], lr=5.0),
    )
    measurer = Measurer(recipe, open_device(make_device()))
    assert not measurer.answer(MeasureArray(TRIALS, 4, "eager")).found.declined
    array_step = measurer._bench._works[1]
    with pytest.raises(Declined, match="all of its slots raise: not a number"):
        list(iter(array_step, "never"))
    with pytest.raises(Declined, match=r"all of its slots raise$"):
        array_step()
    order = TimeArray(TRIALS[0], time.monotonic(), (0.01, 0.01, 0.0, 0.0), 1)
    assert measurer.answer(order).rounds[0][1] == 0


@pytest.mark.parametrize(("whole", "name"), [(True, "the model"), (False, "module '1'")])
def test_a_scripted_module_is_named_where_it_keeps_trials_from_an_array(whole, name):
    def model(hp):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            part = torch.jit.script(nn.Linear(8, 8))
        return part if whole else nn.Sequential(nn.Linear(8, 8), part)

    recipe = Recipe(
        model=model,
        data=lambda hp: ([(torch.ones(8, 8),)], None),
        loss=lambda output, batch: output.square().mean(),
    )
    measurer = Measurer(recipe, open_device(make_device()))
    found = measurer.answer(MeasureArray(TRIALS, 4, "eager")).found
    assert f"{name} is scripted (torch.jit), and an array runs modules' Python" in found.declined
