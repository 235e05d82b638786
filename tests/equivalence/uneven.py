"""Trials whose batches have several layouts, or which meet with one that is none.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import squads
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import shoal
from shoal.recipes.recipe import Recipe

SHORT = {  # batches of a step of three, by the positions of the short ones
    "first": (2, 5, 5),
    "middle": (5, 2, 5),
    "last": (5, 5, 2),
    "first two": (2, 3, 5),
    "ends": (2, 5, 3),
    "last two": (5, 2, 3),
    "all": (2, 3, 2),
}


def sizes_of(position: str) -> list[int]:
    """A step as usual, the one with short batches, and one as usual again."""
    return [5, 5, 5, *SHORT[position], 5, 5, 5]


def loaded(hp):
    """A loader that makes batches of these sizes; in trials that say so the usual ones."""
    sizes = sizes_of("last" if hp.get("usual") else hp["short"])
    if hp.get("usual"):
        sizes = [5] * len(sizes)
    rows = squads.points(sum(sizes))
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    some = [list(range(s, s + n)) for s, n in zip(starts, sizes, strict=True)]
    return DataLoader(rows, batch_sampler=some), DataLoader(squads.points(10, 1), 4)


def short(**changes) -> Recipe:
    return squads.recipe(**({"data": loaded, "accumulate": 3, "clip_grad_norm": 0.1} | changes))


class Long(nn.Linear):
    """A layer for batches of three and more, which others pass by."""

    def forward(self, x):
        return super().forward(x) if len(x) > 2 else x


def with_a_layer_for_long_batches(hp):
    layers = [nn.Linear(squads.INSIDE, 8), nn.Tanh(), Long(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, squads.CLASSES)).double()


def left_out(**changes) -> Recipe:
    """Some steps have no gradient for some weights; decay would change these all the same."""
    return short(model=with_a_layer_for_long_batches, optimizer=squads.sgd, **changes)


# ------------------------------------------------------------------ batches that are none

BAD_STEP = 4


class Label:
    """Travels with a batch; a bad one cannot be moved, or told from others."""

    def __init__(self, how: str = "") -> None:
        self.how = how

    def to(self, device):
        if self.how == "moved":
            raise ValueError("the label is lost")
        return self

    def __repr__(self) -> str:
        if self.how == "told":
            raise ValueError("the label is gone")
        return "a label"


def labelled(hp):
    """Batches of which one trial's fifth is bad in some way."""
    draws = torch.Generator().manual_seed(11)
    found = []
    for at in range(8):
        bad = hp["bad"] if at == BAD_STEP else ""
        x = torch.randn(4, squads.INSIDE, generator=draws, dtype=torch.float64)
        y = torch.randint(squads.CLASSES, (4,), generator=draws)
        if bad == "shape":
            x = x[:, :4]
        if bad in ("short", "short target"):
            x, y = x[:2], y[:2]
        if bad == "short target":
            y = y + 99
        found.append((x, y, Label(bad if bad in ("moved", "told") else "")))
    return found, None


def fussy_loss(output, batch):
    """Gives up on short batches."""
    if len(batch[1]) == 2:
        raise ValueError("the loss gave up")
    return F.cross_entropy(output, batch[1])


def bad_batches(**changes) -> Recipe:
    return squads.recipe(**({"data": labelled, "loss": fussy_loss} | changes))


# ------------------------------------------------------------------ neighbours


def unending(hp):
    """One trial's last batch is not finite, or 0; another's last step has fewer batches."""
    count = 5 if hp["kind"] == "ends early" else 6
    draws = torch.Generator().manual_seed(21)
    found = [
        (
            torch.randn(4, squads.INSIDE, generator=draws, dtype=torch.float64),
            torch.randint(squads.CLASSES, (4,), generator=draws),
        )
        for _ in range(count)
    ]
    if hp["kind"] in ("nan", "zero"):
        found[-1][0].fill_(torch.nan if hp["kind"] == "nan" else 0.0)
    return found, None


def plain(hp):
    """Without statistics or masks, which batches would share."""
    layers = [nn.Linear(squads.INSIDE, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, squads.CLASSES)).double()


class Rooted(nn.Linear):
    """Its output at 0 is 0, and its gradient there is none."""

    def forward(self, x):
        return super().forward(x).square().sum(1, keepdim=True).sqrt() + x


def rooted(hp):
    layers = [Rooted(squads.INSIDE, squads.INSIDE, bias=False) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(squads.INSIDE, squads.CLASSES)).double()


class Named(nn.Linear):
    """Lays up, in its first forward, what later ones read: as a classifier of transformers."""

    def __init__(self):
        super().__init__(squads.INSIDE, squads.INSIDE)
        self.config = SimpleNamespace(kind=None)

    def forward(self, x):
        if self.config.kind is None:
            self.config.kind, self.factor = "rows", torch.full((1,), 0.5, dtype=x.dtype)
        return super().forward(x).relu() * self.factor + x


def named(hp):
    layers = [Named() for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(squads.INSIDE, squads.CLASSES)).double()


def neighbours(**changes) -> Recipe:
    return squads.recipe(**({"model": plain, "data": unending, "accumulate": 2} | changes))


# ------------------------------------------------------------------ what metrics are given


@dataclass(frozen=True)
class Scored:
    """What a model may return: tensors and numbers in an object of its own."""

    scores: torch.Tensor
    smoothing: float
    note: None = None


class Objects(squads.Smoothed):
    def forward(self, x):
        scores, smoothing = super().forward(x)
        return Scored(scores, smoothing)


def objects(hp):
    return Objects(hp["smoothing"], *squads.mlp(hp))


class Tuples(squads.Smoothed):
    def forward(self, x):
        scores, smoothing = super().forward(x)
        return None, scores, smoothing


def tuples(hp):
    return Tuples(hp["smoothing"], *squads.mlp(hp))


def scores_of(output):
    return (output.scores, output.smoothing) if isinstance(output, Scored) else output[1:]


def smooth_loss(output, batch):
    scores, smoothing = scores_of(output)
    return F.cross_entropy(scores, batch[1], label_smoothing=smoothing)


def smoothing(output, batch):
    """The number itself, which has to be a float that behaves like any other."""
    scores, number = scores_of(output)
    assert type(number) is float
    return number + 0.0 * float(scores.sum())


def largest(output, batch):
    return float(scores_of(output)[0].abs().max())


METRICS = {"smoothing": smoothing, "largest": largest}
SMOOTHINGS = shoal.grid(lr=[0.01], smoothing=[0.0, 0.1, 0.3], drop=[0.1])


# ------------------------------------------------------------------ activations that do not fit


class Settling(nn.Module):
    """Many small operations with the same few weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        for _ in range(16):
            x = torch.tanh(self.linear(x) + x)
        return x


def settling(hp):
    return nn.Sequential(*[Settling() for _ in range(6)], nn.Linear(16, squads.CLASSES))


class Unsized:
    """Batches of which nobody knows how many there are, so that no trial is too short."""

    def __init__(self, found) -> None:
        self.found = found

    def __iter__(self):
        return iter(self.found)


def unsized(hp):
    draws = torch.Generator().manual_seed(3)
    return Unsized(
        [
            (
                torch.randn(8, 16, generator=draws),
                torch.randint(squads.CLASSES, (8,), generator=draws),
            )
            for _ in range(4)
        ]
    ), None


def plain_sgd(named, hp):
    return torch.optim.SGD([p for _, p in named], lr=hp["lr"])


def settled() -> Recipe:
    return squads.recipe(model=settling, data=unsized, optimizer=plain_sgd)
