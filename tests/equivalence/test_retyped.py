"""Layers whose output has another type in evaluation than in training, cut between them.

Under autocast on a CPU torch computes its encoder layers by one kernel in evaluation: they leave
bfloat16 there, and float32 in training.
"""

from __future__ import annotations

import pytest
import squads
import torch
import traps
from torch import nn

import shoal
from shoal import Pipelined
from shoal.core.errors import PlanError

LR = {"lr": 1e-2}


def layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


class Encoder(nn.Module):
    """torch's own, with what is padded."""

    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoder(layer(), 4, nn.LayerNorm(8), enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        padded = torch.arange(x.shape[1]) >= x.shape[1] - torch.arange(x.shape[0])[:, None] % 3
        return self.head(self.body(x, src_key_padding_mask=padded).mean(1))


class Fronted(nn.Module):
    """A layer before the blocks as well."""

    def __init__(self):
        super().__init__()
        self.front = layer()
        self.body = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.front(x)
        for block in self.body:
            x = block(x, torch.zeros(x.shape[1], x.shape[1]))
        return self.head(x.mean(1))


class Residual(Fronted):
    """The forward computes between the blocks."""

    def forward(self, x):
        for block in self.body:
            x = x + block(x)
        return self.head(x.mean(1))


class Typed(Fronted):
    """Looks at the type of what a block returns, before it has run."""

    def forward(self, x):
        for block in self.body:
            x = block(x, torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype))
        return self.head(x.mean(1))


def sequences(hp):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(4, 6, 8, generator=generator) for _ in range(7)]
    batches = [(x, x[:, 0].argmax(-1) % 3) for x in rows]
    return batches[:4], batches[4:]


def recipe_of(kind):
    return shoal.Recipe(
        model=traps.Build(kind),
        data=sequences,
        loss=traps.loss,
        optimizer=traps.adamw,
        precision="bf16",
        accumulate=2,
        clip_grad_norm=0.5,
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [Encoder, Fronted, Residual])
def test_in_shards_within_what_was_predicted(kind, watch):
    technique = shoal.Spilled(shards=3, optimizer="host", keep=())
    watch(recipe_of(kind), LR, technique, steps=4, exact=True)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("technique", [Pipelined(stages=2), Pipelined(stages=2, shards=4)])
@pytest.mark.parametrize("kind", [Encoder, Fronted])
def test_in_stages(kind, technique, run_staged):
    run_staged(recipe_of(kind), technique)


def test_a_look_at_the_type_between_them_is_refused_in_words(run_study):
    with pytest.raises(PlanError, match=r"'body\.0' returns torch\.bfloat16 .* and looked\. "):
        run_study(recipe_of(Typed), LR, technique=shoal.Spilled(shards=3), steps=2)


@pytest.mark.slow
def test_in_arrays_in_shards(run_study):
    recipe, space = recipe_of(Fronted), shoal.grid(lr=[0.01, 0.003])
    technique = shoal.Spilled(shards=3, optimizer="host")
    report = run_study(recipe, space, technique=technique, fuse=2, epochs=1, poison=True)
    assert squads.widths(report) == [2, 2]
    squads.assert_arrayed(report, report.trials, recipe, 2, epochs=1)
