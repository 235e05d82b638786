"""Small models that train as arrays in a study, and what their trials must end on.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shoal
from shoal.core.seats import epochs_of
from shoal.core.spec import PassKind
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.planning import array_kind, array_place, recorded_width
from shoal.recipes.recipe import Recipe
from shoal.testing import array_loop, assert_same, plain_loop
from shoal.verify import read_losses, verify_trials

WORDS, INSIDE, CLASSES = 19, 6, 3


# ------------------------------------------------------------------ models


def mlp(hp):
    """No bias where BatchNorm takes it away again: its gradient would be rounding alone."""
    inside, width = INSIDE, hp.get("width", 8)
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(inside, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
        layers += [nn.Dropout(hp["drop"])]
        inside = width
    return nn.Sequential(*layers, nn.Linear(inside, CLASSES)).double()


def normed(hp):
    """Its statistics forget at a rate of its own; some numbers are used in other ways too."""
    model = nn.Sequential(mlp(hp)[:-1], nn.LayerNorm(8, eps=hp["eps"]), nn.Linear(8, CLASSES))
    model = model.double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum, module.eps = hp["forget"], hp["eps"]
    return Powered(hp["power"], model)


class Powered(nn.Module):
    """Arithmetic with numbers that differ from trial to trial."""

    def __init__(self, power: float, body: nn.Module) -> None:
        super().__init__()
        self.power, self.body = power, body

    def forward(self, x):
        return self.body(x.abs() ** self.power / (self.power + 1) - 0.5 * self.power)


class Language(nn.Module):
    """Tied weights, and places that are not trained."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, 8)
        self.places = nn.Parameter(torch.randn(7, 8) * 0.1, requires_grad=False)
        layer = nn.TransformerEncoderLayer(8, 2, 16, drop, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        ahead = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.places.dtype)
        x = self.tokens(tokens) + self.places[:length]
        return self.head(self.body(x, mask=ahead, is_causal=True))


def language(hp):
    return Language(hp["drop"]).double()


class Recurrent(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, 6)
        self.body = nn.LSTM(6, 8, 2, batch_first=True, dropout=drop)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens):
        return self.head(self.body(self.tokens(tokens))[0])


def recurrent(hp):
    return Recurrent(hp["drop"]).double()


class Layered(nn.Module):
    """One LSTM after another, so that there is something to cut between."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(3))
        self.drop, self.head = nn.Dropout(drop), nn.Linear(8, WORDS)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = self.drop(layer(x)[0])
        return self.head(x)


def layered(hp):
    return Layered(hp["drop"]).double()


def conv(hp):
    """A convolution for the points, with statistics; wide enough to be worth a cut."""
    body = [nn.Unflatten(1, (1, INSIDE)), nn.Conv1d(1, 4, 3, padding=1, bias=False)]
    body += [nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6)]
    body += [nn.ReLU(), nn.Dropout(hp["drop"]), nn.Flatten(), nn.Linear(6 * INSIDE, CLASSES)]
    return nn.Sequential(*body).double()


def images(hp):
    """Narrow convolutions in float32, which lay images otherwise than a trial alone does."""
    body = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1, bias=False)]
    body += [nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 6, 3, padding=1, bias=False)]
    body += [nn.BatchNorm2d(6), nn.LeakyReLU(0.2), nn.Dropout(hp["drop"])]
    body += [nn.ConvTranspose2d(6, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(3, CLASSES))


def frozen(hp):
    model = mlp(hp)
    model[0].weight.requires_grad_(False)
    return model


class Restless(nn.Module):
    """Draws in evaluation mode too."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.enter, self.leave = nn.Linear(INSIDE, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = F.dropout(torch.tanh(self.enter(x)), self.drop, training=True)
        return self.leave(x)


def restless(hp):
    return Restless(hp["drop"]).double()


def single(hp):
    """In float32, which bf16 passes need, with norms that are given bfloat16."""
    *body, head = mlp(hp).float()
    return nn.Sequential(*body, nn.Linear(8, 8), nn.LayerNorm(8), head)


def tongue(hp):
    """In float32."""
    return Language(hp["drop"])


# ------------------------------------------------------------------ data


def points(count: int, offset: int = 0, dtype: torch.dtype = torch.float64) -> TensorDataset:
    draws = torch.Generator().manual_seed(30 + offset)
    x = torch.randn(count, INSIDE, generator=draws, dtype=torch.float64)
    return TensorDataset(x.to(dtype), (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


def shuffled(hp):
    """Five batches an epoch, the last one short; three of validation, the last one short."""
    return DataLoader(points(22), 5, shuffle=True), DataLoader(points(10, 1), 4)


def floats(hp):
    train, valid = points(22, dtype=torch.float32), points(10, 1, torch.float32)
    return DataLoader(train, 5, shuffle=True), DataLoader(valid, 4)


def unvalidated(hp):
    return shuffled(hp)[0], None


def uneven(hp):
    """As many rows as the hyperparameter says: trials of one shape, and of several lengths."""
    return DataLoader(points(hp["rows"]), 5, shuffle=True), DataLoader(points(10, 1), 4)


class Noisy(Dataset):
    def __init__(self, items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        x, y = self.items[index]
        return x + 0.1 * torch.randn(INSIDE, dtype=x.dtype), y


def loaded(hp):
    """Noise in every item, drawn by a process of the loader's own."""
    train, valid = DataLoader(Noisy(points(22)), 5, shuffle=True, num_workers=1), points(10, 1)
    return train, DataLoader(valid, 4)


def text(hp):
    draws = torch.Generator().manual_seed(8)
    tokens = torch.randint(WORDS, (22, 8), generator=draws)
    train, valid = TensorDataset(tokens[:15]), TensorDataset(tokens[15:])
    return DataLoader(train, 4, shuffle=True), DataLoader(valid, 4)


# ------------------------------------------------------------------ the rest of a recipe


def points_in(batch):
    return (batch[0],)


def text_in(batch):
    return (batch[0][:, :-1],)


def loss(output, batch):
    return F.cross_entropy(output.double(), batch[1])


class Smoothed(nn.Sequential):
    """Hands its own label smoothing on, beside its output."""

    def __init__(self, smoothing: float, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.smoothing = smoothing

    def forward(self, x):
        return super().forward(x), self.smoothing


def smoothed(hp):
    return Smoothed(hp["smoothing"], *mlp(hp))


def smooth_loss(output, batch):
    scores, smoothing = output
    return F.cross_entropy(scores, batch[1], label_smoothing=smoothing)


def text_loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch[0][:, 1:].flatten())


def accuracy(output, batch):
    return (output.argmax(1) == batch[1]).double().mean().item()


def drawn(output, batch):
    """A metric that looks at examples by chance."""
    chosen = torch.randint(len(output), (2,))
    return output[chosen].sum().item() + torch.rand(()).item()


def adam(named, hp):
    parameters = [p for _, p in named if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=hp["lr"], fused=True)


def sgd(named, hp):
    return torch.optim.SGD([p for _, p in named], lr=hp["lr"], momentum=0.9, weight_decay=0.01)


def steps_down(optimizer, hp):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)


def cosine(optimizer, hp):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def recipe(**changes: Any) -> Recipe:
    values = {"model": mlp, "data": shuffled, "loss": loss, "optimizer": adam}
    return Recipe(**(values | {"inputs": points_in} | changes))


# ------------------------------------------------------------------ what is tried


@dataclass(frozen=True)
class Case:
    """A study's recipe, space and length; ``near`` is how close it comes to the plain loop."""

    recipe: Recipe
    loop: dict[str, int] = field(default_factory=lambda: {"epochs": 2})
    space: dict[str, Any] = field(
        default_factory=lambda: shoal.grid(lr=[0.01, 0.003], drop=[0.0, 0.1, 0.4])
    )
    near: float = 1e-6


NORMS = shoal.grid(forget=[0.1, 0.3], eps=[1e-5, 1e-3], power=[1.0, 2.0], drop=[0.1], lr=[0.01])
WORDY = {"data": text, "inputs": text_in, "loss": text_loss}
CASES = {
    "mlp": Case(recipe(metrics={"accuracy": accuracy})),
    "label smoothing": Case(
        recipe(model=smoothed, loss=smooth_loss),
        space=shoal.grid(lr=[0.01, 0.003], smoothing=[0.0, 0.1, 0.3], drop=[0.1]),
    ),
    "numbers": Case(recipe(model=normed), space=NORMS),
    "language": Case(recipe(model=language, schedule=cosine, clip_grad_norm=0.5, **WORDY)),
    "lstm": Case(recipe(model=recurrent, **WORDY)),
    "accumulate": Case(
        recipe(accumulate=2, clip_grad_norm=0.1), loop={"steps": 7, "eval_every": 2}
    ),
    "bf16": Case(recipe(model=single, data=floats, precision="bf16", loss=loss), near=0.1),
    "language, bf16": Case(
        recipe(model=tongue, precision="bf16", clip_grad_norm=0.5, **WORDY), near=0.2
    ),
    "sgd": Case(recipe(optimizer=sgd, schedule=steps_down)),
    "images": Case(recipe(model=images, data=floats), near=1e-3),
    "frozen": Case(recipe(model=frozen, data=unvalidated), loop={"steps": 8}),
    "workers": Case(recipe(data=loaded)),
    "lengths": Case(
        recipe(data=uneven),
        space=shoal.grid(lr=[0.01, 0.003], drop=[0.2], rows=[7, 15, 22]),
        loop={"epochs": 3},
    ),
    "restless": Case(
        recipe(model=restless, data=uneven, metrics={"drawn": drawn}),
        space=shoal.grid(lr=[0.01, 0.003], drop=[0.2], rows=[7, 15, 22]),
        loop={"epochs": 3},
    ),
    "lengths, accumulate": Case(
        recipe(data=uneven, accumulate=3, schedule=cosine),
        space=shoal.grid(lr=[0.01, 0.003], drop=[0.2], rows=[7, 15, 22]),
        loop={"steps": 8, "eval_every": 3},
    ),
}

DEEP = {
    **{
        name: CASES[name] for name in ("mlp", "language", "accumulate", "numbers", "sgd", "frozen")
    },
    **{
        name: CASES[name] for name in ("bf16", "lengths", "lengths, accumulate", "label smoothing")
    },
    "language, bf16": CASES["language, bf16"],
    "images": CASES["images"],
    "layered": Case(recipe(model=layered, clip_grad_norm=0.5, **WORDY)),
    "conv": Case(recipe(model=conv, metrics={"accuracy": accuracy})),
}
"""Those that can be cut into shards."""


def assert_arrayed(
    report, trials, recipe: Recipe, width: int, kind: PassKind = "eager", **loop: int
) -> None:
    """These trials ended on the bits of their slots in an array of nobody else.

    Traced passes are held against eager ones.
    """
    losses, slots = read_losses(report.directory), slots_of(report)
    for trial in trials:
        if trial.error:
            pytest.fail(f"{trial.error_line}\ntrial {trial.number}, {trial.hp}: {trial.error}")
        slot, wide = slots[trial.number]
        assert wide == width
        plain = array_loop(recipe, trial.hp, trial.seed, slot=slot, width=width, kind=kind, **loop)
        assert_same(plain, trial, losses=losses[trial.number])


def assert_near(trials, recipe: Recipe, near: float, **loop: int) -> None:
    """These trials are those of the plain loop but for rounding."""
    for trial in trials:
        plain = plain_loop(recipe, trial.hp, trial.seed, **loop)
        found = trial.load_state()["model"]
        for name, tensor in plain.model.state_dict().items():
            torch.testing.assert_close(
                found[name], tensor.cpu(), rtol=near, atol=near, msg=lambda m, n=name: f"{n}: {m}"
            )


def slots_of(report) -> dict[int, tuple[int, int]]:
    """Slot and width of each trial that is in an array."""
    trials = Snapshot.of(read_outline(report.directory)).trials
    return {row.number: place for row in trials if (place := array_place(row.numerics))}


def widths(report) -> list[int]:
    """How wide the array of each trial was; 1 for those that were in none, or left it for good."""
    keys = [row.numerics for row in Snapshot.of(read_outline(report.directory)).trials]
    left = [any(epoch.for_good for epoch in epochs_of(key)) for key in keys]
    return [1 if gone else recorded_width(key) for key, gone in zip(keys, left, strict=True)]


def assert_verified(report, recipe: Recipe, *, failed: tuple[int, ...] = ()) -> None:
    """All trials are what ``verify`` trains again from what is on record, bit for bit.

    But for those that were to fail, and did.
    """
    rows = Snapshot.of(read_outline(report.directory)).trials
    assert all(rows[trial].state == "FAILED" for trial in failed)
    rows = [row for row in rows if row.number not in failed]
    verdicts = list(verify_trials(report.directory, rows, recipe=recipe))
    found = [v.first_difference or v.failure or v.skipped for v in verdicts]
    assert found == [""] * len(rows), found


def kinds(report) -> list[str]:
    """How the array of each trial ran its passes."""
    trials = Snapshot.of(read_outline(report.directory)).trials
    return [array_kind(row.numerics) for row in trials]
