"""What is saved of a schedule, and that one made anew goes on from it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, SequentialLR

from shoal.core.errors import SpecError
from shoal.recipes.recipe import Recipe
from shoal.recipes.schedules import Schedules, build_schedule, give_state, state_of_schedule


class WarmUp(LRScheduler):
    """As public warm-ups are written: an attribute holds the schedule that comes afterwards."""

    def __init__(self, optimizer, after):
        self.after, self.begun = after, False
        super().__init__(optimizer)

    def get_lr(self):
        return [rate * self.last_epoch / 2 for rate in self.base_lrs]

    def step(self):
        self.begun = self.begun or self.last_epoch == 2
        self.after.step() if self.begun else super().step()


def made():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    warm = WarmUp(optimizer, CosineAnnealingLR(optimizer, 5))
    late = WarmUp(optimizer, CosineAnnealingLR(optimizer, 7))
    return model, optimizer, Schedules({"a": SequentialLR(optimizer, [warm, late], [4])})


def walk(optimizer, schedule, steps):
    rates = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_schedule_in_an_attribute_of_another_goes_on():
    model, optimizer, schedule = made()
    walk(optimizer, schedule, 3)
    state = state_of_schedule(schedule, model)

    _, other, anew = made()
    give_state(anew, state)
    other.load_state_dict(optimizer.state_dict())

    assert "CosineAnnealingLR" not in repr(state)
    assert walk(other, anew, 5) == walk(optimizer, schedule, 5)


class Stateless:
    """As one is written that is never saved."""

    def step(self):
        pass


@pytest.mark.parametrize("given", [Stateless(), [Stateless()]])
def test_one_without_a_state_is_refused_before_anything_trains(given):
    recipe = Recipe(
        model=lambda hp: made()[0],
        data=lambda hp: ([], None),
        schedule=lambda optimizer, hp: given,
    )
    with pytest.raises(SpecError, match="a Stateless, which has no state_dict and no load_state_"):
        build_schedule(recipe, made()[1], {}, [])
