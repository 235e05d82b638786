"""Trials on texts that are padded to the longest of their batch, and so of many lengths.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import shoal

WORDS = 20


class Skipping(nn.Module):
    """Beside a model: a part for long texts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(8, 8)

    def forward(self, ids):
        return super().forward(ids) + (self.late.weight.sum() if ids.shape[1] > 9 else 0.0)


@functools.cache
def rows():
    """Words of each text, and its class."""
    draws = torch.Generator().manual_seed(11)
    lengths = torch.randint(4, 13, (44,), generator=draws).tolist()
    ids = [torch.randint(1, WORDS, (length,), generator=draws) for length in lengths]
    return [(row, int(row.sum()) % 2) for row in ids]


def padded(some):
    longest = max(len(ids) for ids, _ in some)
    ids = torch.stack([F.pad(ids, (0, longest - len(ids))) for ids, _ in some])
    return ids, torch.tensor([label for _, label in some])


def data(hp):
    train = DataLoader(rows(), batch_size=4, shuffle=True, collate_fn=padded)
    return train, DataLoader(rows()[:16], batch_size=4, collate_fn=padded)


def recipe(model, **changes):
    """Of a model of word numbers that tells two classes apart."""
    options = {
        "data": data,
        "loss": lambda output, batch: F.cross_entropy(output, batch[1]),
        "metrics": {"sum": lambda output, batch: float(output.sum())},
    }
    return shoal.Recipe(model=lambda hp: model(), **(options | changes))
