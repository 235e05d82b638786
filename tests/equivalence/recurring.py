"""A recurrent model, and data whose source ends its process once, in the middle of an epoch.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import zoo
from torch import Tensor, nn

EPOCH = 9  # batches, the last one short
KILLED_AT = 15  # batches that were read: the second epoch is under way


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reads = nn.LSTM(6, 8, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x_BTI: Tensor) -> Tensor:
        return self.head(self.reads(x_BTI)[0][:, -1])


def reader(hp: Any) -> nn.Module:
    return Reader()


class Batches:
    """Batches of sequences; the process ends while it is read, if there is no such file yet."""

    def __init__(self, flag: str) -> None:
        self._flag, self._read = Path(flag), 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(3)
        for index in range(EPOCH):
            rows = 2 if index == EPOCH - 1 else 4
            x = torch.randn(rows, 5, 6, generator=draw)
            y = torch.randint(3, (rows,), generator=draw)
            self._read += 1
            if self._read == KILLED_AT and self._flag.name and not self._flag.exists():
                self._flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield x, y


def sequences(hp: Any) -> tuple[Batches, None]:
    return Batches(hp.get("flag", "")), None


SETTINGS: dict[str, Any] = {
    "model": reader, "data": sequences, "loss": zoo.loss, "optimizer": zoo.adamw,
}  # fmt: skip
