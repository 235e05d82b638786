"""A trial alone beside an array does what the trial would do that trains."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.core.spec import TrialSpec
from shoal.core.units import Bytes
from shoal.fusion import Declined
from shoal.recipes.ownstep import OwnStep
from shoal.recipes.recipe import Recipe
from shoal.runtime.capture.captures import Captures
from shoal.runtime.measuring import lonebench
from shoal.runtime.measuring.crowd import Crowd
from shoal.runtime.measuring.lonebench import one_that_can
from shoal.runtime.measuring.meter import Meter
from shoal.testing import plain_loop

CPU = torch.device("cpu")
HP = {"lr": 0.01}
BATCH = torch.arange(12.0).reshape(4, 3) / 12
CALLS = 3  # beyond the two with which it is placed


def models(hp):
    return {"one": nn.Linear(3, 3), "other": nn.Linear(3, 1)}


def step(models, batch, optimizers, hp):
    loss = models.other(models.one(batch)).square().mean()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return loss


OWN = Recipe(model=models, data=lambda hp: ([BATCH] * 9, None), step=step)
USUAL = Recipe(
    model=lambda hp: nn.Linear(3, 2),
    data=lambda hp: ([(BATCH, torch.tensor([0, 1, 1, 0]))] * 9, None),
    loss=lambda output, batch: F.cross_entropy(output, batch[1]),
)


def lone(recipe):
    crowd = Crowd(recipe, [TrialSpec(number=0, hp=HP, seed=0)], CPU)
    crowd.grow(1)
    return one_that_can(crowd.members, crowd.batches, crowd.valid, Meter(CPU, Bytes(1 << 30)))


@pytest.mark.parametrize("recipe", [OWN, USUAL], ids=["own step", "usual"])
def test_its_steps_are_those_of_the_plain_loop(recipe):
    found = lone(recipe)
    for _ in range(CALLS):
        found.step()
    alone = plain_loop(recipe, HP, 0, steps=2 + CALLS)
    for mine, its in zip(found.member.module.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_step_of_its_own_is_made_once_as_a_session_makes_it(monkeypatch):
    made = []

    class Counted(OwnStep):
        def __init__(self, *args, by_kernel):
            made.append(args)
            super().__init__(*args, by_kernel=by_kernel)

    monkeypatch.setattr(lonebench, "OwnStep", Counted)
    found = lone(OWN)
    for _ in range(CALLS):
        found.step()
    ((recipe, model, optimizer, _, modes),) = made
    member = found.member
    assert (recipe, model, optimizer, modes) == (
        member.recipe,
        member.module,
        member.optimizer,
        member.modes,
    )


def test_a_step_of_its_own_is_never_captured():
    found = lone(OWN)
    found.capture(Captures(OWN, CPU))
    assert found.units is None


def test_of_one_that_could_do_no_step_nothing_is_left():
    """What stayed was measured beside the trials until Python looked for cycles."""
    steps = weakref.WeakSet()

    class Fails(torch.optim.SGD):
        def step(self):
            steps.add(self)
            raise ValueError("no step")

    def failing(named, hp):
        return Fails([p for _, p in named], hp["lr"])

    gc.disable()
    try:
        with pytest.raises(Declined, match="ValueError: no step"):
            lone(dataclasses.replace(USUAL, optimizer=failing))
        assert len(steps) == 0
    finally:
        gc.enable()
