"""Trials that search over their loss and their clipping, and the loop that anyone would write.

Imported by tests and, by this name, by worker processes. ``hp`` has: lr, smoothing and weight of
the loss, clip (a norm, or None), drop (dropout), note (which nobody reads), and wide for float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.recipes.recipe import Recipe
from shoal.rng import seed_all
from shoal.testing import same_bits
from shoal.verify import read_losses

INSIDE, CLASSES, ROWS, BATCHES, ACCUMULATE = 6, 4, 5, 6, 2
STEPS = 6
SPACE = shoal.grid(
    lr=[1e-2], smoothing=[0.0, 0.3], weight=[0.25], clip=[None, 0.2], drop=[0.1], note=["a"]
)
"""Four trials, of which two are not clipped."""

SLOTS = [
    {"smoothing": 0.0, "weight": 0.25, "clip": 0.05, "note": "a"},
    {"smoothing": 0.1, "weight": 2.0, "clip": None, "note": "b"},
    {"smoothing": 0.3, "weight": 0.5, "clip": 0.4, "note": "c"},
    {"smoothing": 0.2, "weight": 1.0, "clip": 0.1, "note": "d"},
]
"""Nothing of what is read is the same in two of these."""


def points_of(settings: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """Points to be tried, with a learning rate and a dropout."""
    return [{"lr": 1e-2, "drop": 0.1, **one, **more} for one in settings]


def model(hp):
    layers: list[nn.Module] = [nn.Linear(INSIDE, 8)]
    for _ in range(4):
        layers.append(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(hp["drop"])))
    net = nn.Sequential(*layers, nn.Linear(8, CLASSES))
    return net.double() if hp.get("wide") else net


def rows(count: int, seed: int, hp: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if hp.get("wide") else torch.float32
    return [
        (
            torch.randn(ROWS, INSIDE, generator=draws, dtype=torch.float64).to(dtype),
            torch.randint(CLASSES, (ROWS,), generator=draws),
        )
        for _ in range(count)
    ]


def data(hp):
    return rows(BATCHES, 1, hp), rows(2, 2, hp)


def loss(output, batch, hp):
    fit = F.cross_entropy(output, batch[1], label_smoothing=hp["smoothing"])
    return fit + hp["weight"] * output.square().mean()


def excess(output, batch, hp):
    """A metric that reads what the loss does."""
    return hp["weight"] * output.abs().mean().item()


def limit(hp):
    return hp["clip"]


def adamw(named, hp):
    return torch.optim.AdamW([p for _, p in named], lr=hp["lr"], weight_decay=0.1, fused=True)


def recipe(**changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "model": model,
        "data": data,
        "loss": loss,
        "optimizer": adamw,
        "clip_grad_norm": limit,
        "accumulate": ACCUMULATE,
        "metrics": {"excess": excess},
    }
    return Recipe(**(settings | changes))


# -- the loop --------------------------------------------------------------------------------


def by_hand(hp, seed: int, accumulate: int = ACCUMULATE, steps: int = STEPS):
    """A model that was trained so, the losses of its steps, and what validation found.

    Nothing of shoal's is in it but the seeding.
    """
    seed_all(seed)
    net = model(hp)
    net.train()
    batches, _ = data(hp)
    optimizer = adamw(list(net.named_parameters()), hp)
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro in range(accumulate):
            x, y = batches[(step * accumulate + micro) % BATCHES]
            output = net(x)
            found = F.cross_entropy(output, y, label_smoothing=hp["smoothing"])
            found = found + hp["weight"] * output.square().mean()
            (found / accumulate).backward()
            total += float(found.detach())
        if hp["clip"] is not None:
            nn.utils.clip_grad_norm_(net.parameters(), hp["clip"])
        optimizer.step()
        losses.append(total / accumulate)
    return net, losses, validated(net, hp)


def validated(net, hp) -> dict[str, float]:
    net.eval()
    found: dict[str, list[float]] = {"valid_loss": [], "valid_excess": []}
    with torch.no_grad():
        for x, y in data(hp)[1]:
            output = net(x)
            fit = F.cross_entropy(output, y, label_smoothing=hp["smoothing"])
            found["valid_loss"].append(float(fit + hp["weight"] * output.square().mean()))
            found["valid_excess"].append(hp["weight"] * output.abs().mean().item())
    return {name: sum(values) / len(values) for name, values in found.items()}


def assert_by_hand(report, near: float = 0.0) -> None:
    """All trials ended on the bits of the loop, or near them."""
    losses = read_losses(report.directory)
    assert [trial.error for trial in report.trials] == [""] * len(report.trials)
    for trial in report.trials:
        net, expected, metrics = by_hand(trial.hp, trial.seed)
        state = trial.load_state()["model"]
        found = [losses[trial.number][step] for step in range(STEPS)]
        if near:
            torch.testing.assert_close(found, expected, rtol=near, atol=near)
        else:
            assert found == expected
        for name, tensor in net.state_dict().items():
            if near:
                torch.testing.assert_close(state[name], tensor, rtol=near, atol=near)
            else:
                assert same_bits(state[name], tensor), name
        for name, value in metrics.items():
            torch.testing.assert_close(
                trial.metrics[name], value, rtol=near or 0.0, atol=near or 0.0
            )


def furthest(one, other) -> float:
    """By how much two trained models differ."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p - q).abs().max().detach()) for p, q in pairs)


# -- losses that read otherwise --------------------------------------------------------------


def by_kind(output, batch, hp):
    """A string chooses the branch."""
    if hp["kind"] == "hard":
        return F.cross_entropy(output, batch[1])
    return F.cross_entropy(output, batch[1], label_smoothing=hp["smoothing"])


PARTS = ("wei", "ght")


def unspelled(output, batch, hp):
    """By a name that no string is."""
    return F.cross_entropy(output, batch[1]) + hp["".join(PARTS)] * output.square().mean()


def at_once(output, batch, hp):
    """By no name."""
    weight = dict(hp)["weight"]
    return F.cross_entropy(output, batch[1]) + weight * output.square().mean()


def absurd(hp):
    return -1.0 if hp["clip"] is None else hp["clip"]
