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


class Begun(nn.Module):
    """Code that goes by the numbers with which every trial begins."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.how = nn.Linear(8, 4), how
        self.gate, self.unit = nn.Parameter(torch.zeros(())), nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        return GOES_BY[self.how](self, self.layer(x))


def stands_on_the_unit_sphere(net, y):
    assert abs(float(net.unit.detach().norm()) - 1) < 1e-4
    return y * net.unit


GOES_BY = {
    "truth": lambda net, y: y if net.gate == 0 else y * net.gate,
    "number": lambda net, y: y + net.gate if net.gate.item() == 0 else y,
    "assertion": stands_on_the_unit_sphere,
    "domain": lambda net, y: y * torch.acosh(2 * net.unit + 1e-3),
}


@pytest.mark.parametrize("how", GOES_BY)
@pytest.mark.parametrize("own", [None, step])
def test_code_that_goes_by_what_all_begin_with_trains_as_one(own, how):
    recipe = Recipe(
        model=lambda hp: None,
        data=lambda hp: ([], None),
        **({"step": own} if own else {"loss": loss}),
    )

    assert dry_run(members(recipe, lambda rate: Begun(how)), [torch.ones(2, 8)] * 3) == ""


@pytest.mark.parametrize("own", [None, step])
def test_where_other_numbers_fail_those_are_compared_with_which_trials_begin(own, monkeypatch):
    def rolled(net, y):
        assert net.gate == 0
        return y + torch.roll(y.detach().mean(), 1)

    monkeypatch.setitem(GOES_BY, "rolled", rolled)
    monkeypatch.delitem(RULES, torch.roll)
    how = {"step": own} if own else {"loss": loss}
    recipe = Recipe(model=lambda hp: None, data=lambda hp: ([], None), **how)
    batches = [torch.full((2, 8), number) for number in (1.0, 2.0, 3.0)]

    words = dry_run(members(recipe, lambda rate: Begun("rolled")), batches)

    assert "one step as an array is not the step alone: slot 0: " in words


def test_a_model_may_have_a_method_that_is_called_as_one_of_torch_s():
    class Keyed(nn.Linear):
        def get_parameter(self, key, default=None):
            raise KeyError(key)

    recipe = Recipe(model=lambda hp: None, data=lambda hp: ([], None), step=step)

    assert dry_run(members(recipe, lambda rate: Keyed(8, 4)), [torch.ones(2, 8)] * 3) == ""
