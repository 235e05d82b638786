"""What may not decide about an array: a device without room for a dry run, and addresses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.core.spec import HyperParameters
from shoal.fusion import Member, dry_run
from shoal.fusion.effects.globals import identity
from shoal.fusion.likeness import close
from shoal.fusion.rules import RULES
from shoal.partition.track import AllocationTracker
from shoal.recipes.ownstep import Modes
from shoal.recipes.recipe import Recipe
from shoal.rng import capture_rng

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = 16


def loss(output, batch):
    return (output - batch[:, :4]).square().mean()


def step(model, batch, optimizer, hp):
    optimizer.zero_grad()
    found = loss(model(batch), batch)
    found.backward()
    optimizer.step()
    return found


def narrow(rate):
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(rate), nn.Tanh(), nn.Linear(16, 4))


def members(recipe, module_of=narrow):
    torch.manual_seed(0)
    made = []
    for rate in (0.1, 0.2, 0.3):
        module = module_of(rate)
        made.append(
            Member(
                recipe=recipe,
                hp=HyperParameters({"rate": rate}),
                module=module,
                optimizer=torch.optim.SGD(module.parameters(), 0.1),
                schedule=None,
                rng=capture_rng(torch.device("cpu")),
                modes=Modes(recipe, module),
            )
        )
    return made


@pytest.mark.parametrize("own", [None, step])
def test_a_dry_run_without_room_ends_in_that(own):
    how = {"step": own} if own else {"loss": loss}
    recipe = Recipe(model=lambda hp: None, data=lambda hp: ([], None), **how)
    made, batches = members(recipe), list(torch.randn(3, 64, 8))
    with AllocationTracker("cpu") as tracker:
        assert dry_run(made, batches) == ""

    for part in range(LIMITS):
        limit = tracker.peak_bytes * part // LIMITS
        with pytest.raises(torch.OutOfMemoryError), AllocationTracker("cpu", limit=limit):
            dry_run(made, batches)


def test_a_tensor_that_is_made_where_another_was_is_another():
    """Code that makes some anew in each forward was declined, or not, by their addresses."""
    assert len({identity([torch.zeros(3)]) for _ in range(100)}) == 100


def test_complex_gradients_may_round_otherwise_as_real_ones_may():
    """Compared as equal or not, the weights of a Fourier layer kept every array away."""
    alone = torch.complex(*torch.randn(2, 64))
    assert close(alone, alone * (1 + 1e-6), 1e-3, 1.0)
    assert close(alone.conj(), alone.conj().resolve_conj() * (1 + 1e-6), 1e-3, 1.0)
    assert not close(alone, alone.conj(), 1e-3, 1.0)
    assert not close(alone, alone * 1.1, 1e-3, 1.0)


class Rolled(nn.Module):
    """A layer, and a gate that begins at the same number in every trial."""

    def __init__(self, begins):
        super().__init__()
        torch.manual_seed(0)  # as trials of one seed begin
        self.layer, self.gate = nn.Linear(8, 4), nn.Parameter(torch.tensor(begins))

    def forward(self, x):
        return self.layer(x) + torch.roll(self.gate, 1)


@pytest.mark.parametrize("begins", [0.0, 1.0])
@pytest.mark.parametrize("own", [None, step])
def test_what_goes_from_slot_to_slot_is_found_where_all_begin_alike(own, begins, monkeypatch):
    monkeypatch.delitem(RULES, torch.roll)  # torch's batching rolls one number to the next slot
    how = {"step": own} if own else {"loss": loss}
    recipe = Recipe(model=lambda hp: None, data=lambda hp: ([], None), **how)

    words = dry_run(members(recipe, lambda rate: Rolled(begins)), [torch.ones(2, 8)] * 3)

    assert "one step as an array is not the step alone: slot 0: " in words
