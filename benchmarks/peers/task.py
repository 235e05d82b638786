"""What every arm trains: a GPT, its batches, its loss, its precision and its clipping."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shoal.recipes.recipe
from shoal.examples.gpt import GPT, VOCABULARY, next_byte_loss
from shoal.recipes.recipe import Recipe

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One training; a JSON text of it goes to the process of every arm."""

    device: str = "cpu"
    precision: str = "fp32"
    depth: int = 12
    width: int = 256
    heads: int = 4
    context: int = 128
    windows: int = 4
    dropout: float = 0.1
    warm_up: int = 2
    steps: int = 5
    threads: int = 1
    trials: int = 2
    lr: float = 1e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    budget: str = ""  # of shoal's device, such as 8GiB; a quarter of the state if it is not said

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Task:
        return Task(**json.loads(text))

    @property
    def all_steps(self) -> int:
        return self.warm_up + self.steps

    @property
    def tokens(self) -> int:
        return self.windows * self.context

    def model(self) -> nn.Module:
        return GPT(
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            context=self.context,
            dropout=self.dropout,
        )

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model().parameters())

    def batches(self) -> list[Batch]:
        """Random tokens, one batch a step, the same for every arm and seed."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.windows, self.context + 1)
        drawn = [
            torch.randint(VOCABULARY, shape, generator=generator) for _ in range(self.all_steps)
        ]
        return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in drawn]

    def recipe(self) -> Recipe:
        """The task for shoal; the optimizer is the recipe's default, a fused AdamW."""
        return Recipe(
            model=lambda hp: self.model(),
            data=lambda hp: (self.batches(), None),
            loss=next_byte_loss,
            clip_grad_norm=self.clip,
            precision=self.precision,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of shoal's recipe, for a loop of one's own."""
        return shoal.recipes.recipe.autocast(self.recipe(), torch.device(self.device))

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """The kernels that every arm steps with; shoal's default makes the same."""
        return torch.optim.AdamW(
            parameters, lr=self.lr, weight_decay=self.weight_decay, fused=True
        )


def loss_of(logits: Tensor, batch: Batch) -> Tensor:
    return next_byte_loss(logits, batch)
