"""What is searched: real data, small models, 64 hyperparameter settings; ordinary PyTorch.

Every arm trains these with these settings and these seeds, so that only how the 64 trainings are
run differs.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TRIALS = 64


def settings(count: int | None = None) -> list[dict[str, float]]:
    """The settings to try, drawn once."""
    draw, count = random.Random(7), TRIALS if count is None else count
    return [
        {"lr": 10 ** draw.uniform(-4, -1.5), "weight_decay": 10 ** draw.uniform(-5, -1)}
        for _ in range(count)
    ]


class Task(ABC):
    """A data set, a model, a loss; ``epochs`` each."""

    epochs = 20
    batch = 64

    @abstractmethod
    def model(self, hp: Any) -> nn.Module: ...

    @abstractmethod
    def tensors(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Examples and what they are, to train on and to validate with."""

    def data(self, hp: Any) -> tuple[Any, Any]:
        """Batches to train on, shuffled each epoch, and to validate with."""
        train, valid = (torch.utils.data.TensorDataset(*pair) for pair in self.tensors())
        shuffled = torch.utils.data.DataLoader(train, self.batch, shuffle=True, drop_last=True)
        return shuffled, torch.utils.data.DataLoader(valid, len(valid))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1])

    def optimizer(self, named: Any, hp: Any) -> torch.optim.Optimizer:
        parameters = [parameter for _, parameter in named]
        lr, decay = hp["lr"], hp["weight_decay"]
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=True)


class Digits(Task):
    """1,797 images of 8 by 8 pixels, ten classes."""

    def model(self, hp: Any) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def tensors(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        from sklearn.datasets import load_digits

        return _split(*load_digits(return_X_y=True))


class Table(Task):
    """569 rows of 30 columns, two classes."""

    epochs, batch = 40, 32

    def model(self, hp: Any) -> nn.Module:
        return nn.Sequential(
            nn.Linear(30, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2),
        )  # fmt: skip

    def tensors(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        from sklearn.datasets import load_breast_cancer

        return _split(*load_breast_cancer(return_X_y=True))


class Text(Task):
    """The next byte of real text, with a Transformer of two layers."""

    epochs, batch, context, width = 4, 8, 32, 32

    def __init__(self, file: str) -> None:
        self.file = file

    def model(self, hp: Any) -> nn.Module:
        return _ByteModel(self.context, self.width)

    def tensors(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        raw = Path(self.file).read_bytes()[: 600 * (self.context + 1)]
        text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
        rows = text.view(-1, self.context + 1)
        cut = len(rows) * 2 // 3
        return (rows[:cut, :-1], rows[:cut, 1:]), (rows[cut:, :-1], rows[cut:, 1:])

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


class _ByteModel(nn.Module):
    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", torch.full((context, context), -torch.inf).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.bytes(tokens) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask)
        return self.head(hidden)


def _split(inputs: Any, classes: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Four fifths to train on; columns of mean 0 and spread 1."""
    x, y = torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(classes)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y, cut = x[order], y[order], len(x) * 4 // 5
    mean, spread = x[:cut].mean(0), x[:cut].std(0).clamp(min=1e-6)
    x = (x - mean) / spread
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def task_of(name: str, text: str) -> Task:
    return {"digits": Digits, "table": Table}[name]() if name != "text" else Text(text)


def train(task: Task, hp: dict[str, float], seed: int, report: Any = None) -> float:
    """One training, as anybody writes it; the validation loss at its end."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = task.model(hp)
    loader, valid = task.data(hp)
    optimizer = task.optimizer(model.named_parameters(), hp)
    value = float("nan")
    for epoch in range(task.epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            task.loss(model(batch[0]), batch).backward()
            optimizer.step()
        model.eval()
        state = torch.get_rng_state()
        with torch.no_grad():
            value = sum(float(task.loss(model(b[0]), b)) for b in valid) / len(valid)
        torch.set_rng_state(state)
        if report is not None:
            report(epoch + 1, value)
    return value
