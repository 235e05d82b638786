"""Blocks whose output has another floating type in evaluation than in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.partition.build import build_chain
from shoal.partition.drive import every_layer, sharded_evaluation
from shoal.partition.evaluated import may_stand_for
from shoal.partition.pilot import pilot
from shoal.partition.preserve import evaluating
from shoal.recipes.recipe import autocast, compute_loss

CPU = torch.device("cpu")


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Encoders(nn.Module):
    """torch has one kernel for such a layer, which it takes in evaluation alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(encoder_layer() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.mask(x))
        return self.head(x.mean(1))

    def mask(self, x):
        return None


class Sized(Encoders):
    """Asks for a size between its blocks."""

    def mask(self, x):
        return torch.zeros(x.shape[1], x.size(1))


class Typed(Encoders):
    """Asks for a type."""

    def mask(self, x):
        return torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)


class Fronted(Encoders):
    """One more before its blocks, which is to be computed by that kernel, too."""

    def __init__(self):
        super().__init__()
        self.front = encoder_layer()

    def forward(self, x):
        return super().forward(self.front(x))


class Modular(Encoders):
    """Hands a block's output to a module that looks at its type."""

    def __init__(self):
        super().__init__()
        self.masks = Masks()

    def mask(self, x):
        return self.masks(x)


class Masks(nn.Module):
    def forward(self, x):
        return torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, 8, generator=generator), torch.arange(4)


@pytest.mark.parametrize("kind", [Encoders, Sized, Fronted])
def test_an_evaluation_in_pieces_takes_the_kernels_of_a_whole_one(kind, make_recipe):
    model = kind()
    recipe = make_recipe(model, precision="bf16")

    report = pilot(model, recipe, batch(), CPU)

    assert (report.bitwise, report.notes) == (True, ())
    chain = report.chain
    assert [block.retyped for block in chain.skeleton.blocks] == [frozenset({0})] * 3
    with evaluating(model):
        loss, _ = sharded_evaluation(chain, batch(), every_layer(chain))
        with torch.no_grad(), autocast(recipe, CPU):
            assert model.layers[0](batch()[0]).dtype == torch.bfloat16
            assert loss == compute_loss(recipe, model(batch()[0]), batch())


@pytest.mark.parametrize("kind", [Typed, Modular])
def test_a_forward_that_looks_at_the_type_between_blocks_is_refused(kind, make_recipe):
    model = kind()

    report = pilot(model, make_recipe(model, precision="bf16"), batch(), CPU)

    assert report.chain is None
    assert "block 'layers.0' returns torch.bfloat16 where the forward" in report.notes[0]
    assert "torch.backends.mha.set_fastpath_enabled(False)" in report.notes[0]


@pytest.mark.parametrize("kind", [Typed, Modular])
def test_and_without_that_kernel_it_is_not(kind, make_recipe):
    model = kind()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        report = pilot(model, make_recipe(model, precision="bf16"), batch(), CPU)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)

    assert (report.bitwise, report.notes) == (True, ())


def test_in_fp32_a_block_is_not_asked_what_it_evaluates_to(make_recipe):
    model = Encoders()

    chain = build_chain(model, make_recipe(model), batch(), CPU)

    assert not any(block.watched for block in chain.skeleton.blocks)


class Widening(nn.Linear):
    """Returns more bytes in evaluation than were measured in training."""

    def forward(self, x):
        y = super().forward(x)
        return y if self.training else y.float()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Widening(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


def test_an_output_that_is_larger_in_evaluation_is_refused(make_recipe):
    model = Wide()

    report = pilot(model, make_recipe(model, precision="bf16"), batch(), CPU)

    assert report.chain is None
    assert "'layers.0' behaves unlike in the pilot: an output is no torch.b" in report.notes[0]


class Untested(Encoders):
    """Has no output in evaluation."""

    def forward(self, x):
        if not self.training:
            raise RuntimeError("not for evaluation")
        return super().forward(x)


def test_a_model_that_cannot_be_evaluated_is_cut_without_that(make_recipe):
    model = Untested()

    report = pilot(model, make_recipe(model, precision="bf16"), batch(), CPU)

    assert report.bitwise
    assert model.training


@pytest.mark.parametrize(
    ("found", "told", "may"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, False),
        (torch.int32, torch.float32, False),
        (torch.bfloat16, torch.int64, False),
        (torch.int64, torch.int64, True),
    ],
)
def test_one_floating_type_stands_for_another_that_is_no_smaller(found, told, may):
    assert may_stand_for(found, told) == may
