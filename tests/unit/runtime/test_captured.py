"""What is not captured, in words; and passes that fail."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import shoal
from shoal.runtime.capture.captures import Captures
from shoal.runtime.units import Micro, ResidentUnits

CPU = torch.device("cpu")
GLOBAL = {"scale": 1.0}


def captured(model, loss=None):
    recipe = shoal.Recipe(
        model=lambda hp: model,
        data=lambda hp: ([], None),
        loss=loss or (lambda output, batch: output.square().mean()),
    )
    return Captures(recipe, CPU).units(model)


def run(units, model, batches=3):
    for seed in range(batches):
        model.zero_grad(set_to_none=True)
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        units.backward(0, Micro(x))


class Odd(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how, self.calls = nn.Linear(4, 4), how, 0
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        x = self.layer(x)
        return getattr(self, self.how)(x)

    def counts(self, x):
        self.calls += 1
        return x

    def draws(self, x):
        return x * random.random()

    def replaces(self, x):
        self.seen = self.seen + x.detach().mean(0)
        return x

    def decides(self, x):
        return x if x.sum() > 0 else -x

    def reads(self, x):
        return x * x.detach().tolist()[0][0]

    def clips(self, x):
        self.layer.weight.data.mul_(0.99)
        return x

    def masks(self, x):
        return x[x > 0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("counts", "its forward changes the attribute 'calls'"),
        ("draws", "its forward draws from Python's or NumPy's generator"),
        ("replaces", "its forward puts a new tensor in the place of a buffer"),
        ("clips", "its forward writes to its parameters"),
        ("decides", "its code makes a Python value of a tensor"),
        ("reads", "its code reads a tensor's values (tolist)"),
        ("masks", "the data decides what shape index.Tensor makes"),
    ],
)
def test_what_a_pass_cannot_do_without_its_code(how, words):
    torch.manual_seed(0)
    model, alone = Odd(how), Odd(how)
    alone.load_state_dict(model.state_dict())
    units = captured(model)
    with pytest.warns(UserWarning, match="is not captured"):
        run(units, model, 1)
    run(units, model)
    assert units.why_not == words
    run(ResidentUnits(alone, captured(alone)._recipe, CPU), alone, 1)
    run(ResidentUnits(alone, captured(alone)._recipe, CPU), alone)
    if how != "draws":
        assert all(map(torch.equal, model.parameters(), alone.parameters()))
        assert all(map(torch.equal, model.buffers(), alone.buffers()))


def test_a_model_with_hooks_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_hook(lambda *_: None)
    assert captured(model).why_eager == "'1' has hooks"
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.register_hook(lambda gradient: gradient)
    assert captured(model).why_eager == "the parameter '0.weight' has hooks"


def test_settings_that_change_later_end_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    units = captured(model)
    run(units, model)
    assert units.is_captured
    model[1].p = 0.5
    with pytest.warns(UserWarning, match="the attribute '1.p' is another one than before"):
        run(units, model)
    assert not units.is_captured


def test_a_loss_whose_numbers_change_later_ends_it():
    class Weighted:
        def __init__(self):
            self.weight = 1.0

        def __call__(self, output, batch):
            return output.square().mean() * self.weight * GLOBAL["scale"]

    model, loss = nn.Sequential(nn.Linear(4, 4)), Weighted()
    units = captured(model, loss)
    run(units, model)
    assert units.is_captured
    loss.weight = 2.0
    with pytest.warns(UserWarning, match="'weight' of the recipe's loss"):
        run(units, model)

    other = captured(model, Weighted())
    run(other, model)
    try:
        GLOBAL["scale"] = 3.0
        with pytest.warns(UserWarning, match="'GLOBAL' of the recipe's loss"):
            run(other, model)
    finally:
        GLOBAL["scale"] = 1.0


def test_what_raises_says_where_in_the_models_code():
    model = nn.Embedding(5, 3)
    units = captured(model)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        units.backward(0, Micro(torch.tensor([1, 2])))
    assert units.is_captured
    with pytest.raises(IndexError) as caught:
        units.backward(0, Micro(torch.tensor([1, 7])))
    assert any("sparse.py" in str(entry.path) for entry in caught.traceback)


def test_no_memory_of_the_device_is_held_between_leases():
    model = nn.Sequential(nn.Linear(4, 4))
    units = captured(model)
    run(units, model)
    (kept,) = units._kept.values()
    assert kept.replay._plain
    units.let_go()
    assert not kept.replay._plain
    run(units, model)
    assert units.is_captured


def test_an_attention_with_dropout_is_captured_with_its_parts_side_by_side():
    """Its masks are drawn by other code, and its projection's gradients are not added up."""
    found = []
    for make in (captured, eager):
        torch.manual_seed(4)
        model = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        units, bits = make(model), []
        torch.manual_seed(5)
        for seed in range(4):
            model.zero_grad(set_to_none=True)
            x = torch.randn(8, 16, 8, generator=torch.Generator().manual_seed(seed))
            units.backward(0, Micro(x))
            bits += [p.grad.clone() for p in model.parameters()] + [torch.get_rng_state()]
        found.append(bits)
        assert not getattr(units, "why_not", "")
    assert all(map(torch.equal, *found))


def eager(model):
    return ResidentUnits(model, captured(model)._recipe, CPU)
