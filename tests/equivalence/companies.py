"""Trials of any length that join an array, wait, meet bad batches and leave; and each one alone.

A trial's batches are a word, a letter for each: see ``made``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.core.errors import TrialError
from shoal.core.spec import HyperParameters
from shoal.fusion import Array, Member, backend_of
from shoal.fusion.batches import layout_of
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.ownstep import Modes
from shoal.recipes.recipe import Recipe, build_model, read_data
from shoal.recipes.schedules import build_schedule
from shoal.rng import capture_rng, restore_rng, seed_all
from shoal.runtime.capture.captures import Captures
from shoal.testing import array_loop, compare

INSIDE, CLASSES, ROWS = 3, 3, 4
CPU = torch.device("cpu")


class Net(nn.Module):
    """Statistics, masks, a root whose gradient at 0 is none, and a layer for full batches only."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(INSIDE, 4, bias=False), nn.BatchNorm1d(4)
        self.drop, self.extra, self.leave = (
            nn.Dropout(drop),
            nn.Linear(4, 4),
            nn.Linear(4, CLASSES),
        )
        self.shift = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, x):
        entered = self.enter(x)
        h = self.drop(self.norm(entered))
        if len(x) == ROWS:
            h = torch.tanh(self.extra(h))
        root = entered.square().sum(1, keepdim=True).sqrt()
        return self.leave(h) + root + self.shift * x[0, 0]


def batch_of(letter: str, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """u: usual; s: short; z: of zeros; m: whose first number is -0; n: NaN; b: no such class."""
    rows = 2 if letter == "s" else ROWS
    x = torch.randn(rows, INSIDE, generator=draws, dtype=torch.float64)
    y = torch.randint(CLASSES, (rows,), generator=draws)
    if letter == "z":
        x = torch.zeros_like(x)
    if letter == "m":
        x[0, 0] = -0.0
    if letter == "n":
        x[1] = torch.nan
    return x, y + 99 if letter == "b" else y


def data(hp):
    draws = torch.Generator().manual_seed(hp["data"])
    return [batch_of(letter, draws) for letter in hp["word"]], [batch_of("u", draws)]


def net(hp):
    return Net(hp["drop"]).double()


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(named, hp):
    parameters = [p for _, p in named]
    return torch.optim.SGD(parameters, lr=hp["lr"], momentum=0.9, weight_decay=0.1)


def adam(named, hp):
    return torch.optim.AdamW([p for _, p in named], lr=hp["lr"], fused=True)


def slow_adam(named, hp):
    return torch.optim.Adam([p for _, p in named], lr=hp["lr"], weight_decay=0.1)


def recipe(optimizer, accumulate: int, clip: float | None, on_nonfinite: str) -> Recipe:
    return Recipe(
        model=net,
        data=data,
        loss=loss,
        optimizer=optimizer,
        accumulate=accumulate,
        clip_grad_norm=clip,
        on_nonfinite=on_nonfinite,
    )


# -- a step of one's own ------------------------------------------------------------------


def nets(hp):
    return {"first": Net(hp["drop"]).double(), "second": Net(hp["drop"]).double()}


def by_turns(models, batch, optimizers, hp, number):
    """Which models a loss comes from differs from step to step, and from trial to trial."""
    x, y = batch
    once, then = models.first(x), models.second(x)
    losses = (
        F.cross_entropy(once, y),
        F.cross_entropy(then, y),
        F.cross_entropy(models.second(torch.tanh(once)), y),
        F.cross_entropy(once + then, y),
    )
    loss = losses[(number + hp["data"]) % 4]
    loss.backward()
    nn.utils.clip_grad_norm_([*models.first.parameters(), *models.second.parameters()], 0.5)
    optimizers.step()
    return loss


def own_recipe(optimizer) -> Recipe:
    return Recipe(model=nets, data=data, optimizer=optimizer, step=by_turns, evaluate=nothing)


def nothing(models, batch, hp):
    return 0.0


# -- alone and in company -----------------------------------------------------------------


@dataclass
class Trial:
    """``joins``: rounds until it comes; ``pauses``: rounds in which it takes no step."""

    slot: int
    hp: dict[str, Any]
    joins: int = 0
    pauses: frozenset[int] = frozenset()
    losses: list[float] = field(default_factory=list)
    failure: str = ""
    state: Any = None


def member_of(recipe: Recipe, hp: dict[str, Any], seed: int) -> Member:
    """A trial as its loop alone begins."""
    hp = HyperParameters(hp)
    seed_all(seed)
    model = build_model(recipe, hp)
    optimizer = build_optimizer_of(recipe, model, hp)
    return Member(
        recipe=recipe,
        hp=hp,
        module=model,
        optimizer=optimizer,
        schedule=build_schedule(recipe, optimizer, hp, ()),
        rng=capture_rng(),
        modes=Modes(recipe, model) if recipe.step else None,
    )


def groups_of(recipe: Recipe, trial: Trial) -> Iterator[list[Any]]:
    batches, size = list(read_data(recipe, HyperParameters(trial.hp))[0]), recipe.accumulate
    return (batches[at : at + size] for at in range(0, len(batches), size))


class Company:
    """The trials of one array; each slot's one after the other."""

    def __init__(self, recipe: Recipe, width: int, kind: str, trials: list[Trial]) -> None:
        self.recipe, self.width, self.kind = recipe, width, kind
        self.waiting = {slot: [t for t in trials if t.slot == slot] for slot in range(width)}
        self.here: dict[int, tuple[Trial, Iterator[list[Any]]]] = {}
        self.array: Array | None = None
        self.round = 0

    def run(self) -> None:
        outer = capture_rng()
        try:
            while self.here or any(self.waiting.values()):
                self.come()
                self.step()
                self.round += 1
        finally:
            restore_rng(outer)

    def come(self) -> None:
        for slot, queue in self.waiting.items():
            if slot in self.here or not queue or queue[0].joins > self.round:
                continue
            trial = queue.pop(0)
            self.place(slot, member_of(self.recipe, trial.hp, 7))
            self.here[slot] = trial, groups_of(self.recipe, trial)

    def place(self, slot: int, member: Member) -> None:
        if self.array is not None:
            self.array.refill(slot, member)
            return
        usual = layout_of(batch_of("u", torch.Generator()))
        launcher = Captures(self.recipe, CPU).launcher()
        backend = backend_of(self.kind, launcher=launcher)
        self.array = Array([member], backend=backend, usual=usual)
        self.array.widen(slot, self.width)

    def step(self) -> None:
        groups = {}
        for slot, (trial, batches) in list(self.here.items()):
            if self.round in trial.pauses:
                continue
            group = next(batches, None)
            if group is None:
                self.leave(slot)
            else:
                groups[slot] = group
        if not groups:
            return
        rows = [
            [groups[s][at] if at < len(groups.get(s, ())) else None for s in range(self.width)]
            for at in range(max(map(len, groups.values())))
        ]
        self.evaluate(groups)
        stepped = self.array.step(*rows)
        for slot in groups:
            trial = self.here[slot][0]
            failure = stepped.failures.get(slot)
            if failure is not None:
                trial.failure = f"{type(failure).__name__}: {failure}"
                self.leave(slot)
            else:
                trial.losses.append(stepped.losses[slot])

    def evaluate(self, groups: dict[int, list[Any]]) -> None:
        """Now and then a slot is evaluated, which leaves no trace."""
        slot = self.round % self.width
        if slot in groups and self.round % 2:
            with self.array.evaluating(), suppress(IndexError):
                batch = groups[slot][0]
                self.array.evaluate([batch if s == slot else None for s in range(self.width)])

    def leave(self, slot: int) -> None:
        trial, _ = self.here.pop(slot)
        trial.state = self.array.extract(slot)
        self.array.retire(slot)


def alone(recipe: Recipe, width: int, kind: str, trial: Trial) -> Any:
    """What its loop comes to, or in words why it fails."""
    loop: Callable[[], Any] = partial(
        array_loop, recipe, trial.hp, 7, slot=trial.slot, width=width, kind=kind, epochs=1
    )
    try:
        return loop()
    except (TrialError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


def assert_each_as_alone(recipe: Recipe, width: int, kind: str, trials: list[Trial]) -> None:
    Company(recipe, width, kind, trials).run()
    for trial in trials:
        expected = alone(recipe, width, kind, trial)
        if isinstance(expected, str):
            assert trial.failure == expected, (trial.hp, trial.failure, expected)
            continue
        assert not trial.failure, (trial.hp, trial.failure)
        found = compare(expected, trial.state, losses=trial.losses)
        assert found.equal, (trial.slot, trial.hp, found.first_difference)
