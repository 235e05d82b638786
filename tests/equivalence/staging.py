"""Recipes for trials in stages, and what those of a study must end on.

Imported by tests and, by this name, by worker processes.
"""

from __future__ import annotations

import gc
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import traps
from pipelining import decay
from torch import nn
from torch.utils import _pytree as pytree

from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.recipes.recipe import Recipe
from shoal.runtime.gangs.pipelined import without_versions
from shoal.runtime.gangs.spilledstages import SpilledStage
from shoal.runtime.gangs.stage import Stage
from shoal.runtime.session import Session
from shoal.testing import assert_same, plain_2bw_loop, plain_loop
from shoal.verify import read_losses

# ------------------------------------------------------------------ recipes


def accuracy(output, batch):
    return (output.argmax(-1) == batch[1]).float().mean().item()


def trap(kind: type[nn.Module] = traps.Chain, accumulate: int = 3, **changes: Any) -> Recipe:
    """A model of ``traps``; with the default data an epoch's last step is short, and its batch."""
    settings: dict[str, Any] = {
        "model": traps.Build(kind),
        "data": traps.data,
        "loss": traps.loss,
        "optimizer": traps.adamw,
        "metrics": {"accuracy": accuracy},
        "accumulate": accumulate,
    }
    return Recipe(**(settings | changes))


def rich(accumulate: int = 4, **changes: Any) -> Recipe:
    """Dropout, clipping, a schedule of the rate, and validation."""
    settings = {"data": even, "clip_grad_norm": 0.01, "schedule": decay}
    return trap(traps.Chain, accumulate, **(settings | changes))


def even(hp):
    """Eight batches of four rows; three of validation, of which the last is short."""
    return traps.batches([4] * 8), traps.batches([4, 4, 3], 30)


def broad(hp):
    """Boundaries of half a mebibyte, which go through shared memory."""
    return nn.Sequential(nn.Linear(12, 2048), nn.Tanh(), nn.Linear(2048, 3))


def broad_rows(hp):
    """Batches of which some have fewer rows."""
    return traps.batches([64, 64, 40, 64, 16, 64, 64, 64]), traps.batches([64], 30)


class Reusing:
    """Fills one buffer again and again."""

    def __len__(self) -> int:
        return 8

    def __iter__(self):
        x, y = torch.empty(4, 12), torch.empty(4, dtype=torch.long)
        for new_x, new_y in even(None)[0]:
            x.copy_(new_x)
            y.copy_(new_y)
            yield x, y


def reusing(hp):
    return Reusing(), even(hp)[1]


class Counting:
    """Refuses to be read where more than one stage is on the device."""

    kind: type = Stage

    def __len__(self) -> int:
        return 8

    def __iter__(self):
        gc.collect()
        stages = [one for one in gc.get_objects() if type(one) is self.kind]
        if len(stages) > 1:
            raise RuntimeError(f"{len(stages)} stages are there")
        yield from even(None)[0]


def counting(hp):
    return Counting(), even(hp)[1]


class CountingSeats(Counting):
    """The same of spilled stages."""

    kind = SpilledStage


def counting_seats(hp):
    return CountingSeats(), even(hp)[1]


class Nameless:
    """A source without a length, of which the last step is short; ``noise``: it draws."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __iter__(self):
        for x, y in even(None)[0][:7]:
            if self.noise:
                x = x + self.noise * torch.rand(1) * random.random()
            yield x, y
        if self.noise:
            torch.rand(3)


def nameless(hp):
    return Nameless(0.5), even(hp)[1]


def quiet(hp):
    return Nameless(0.0), even(hp)[1]


def shuffled(hp):
    """Draws its order and its noise; 18 examples are five batches, the last one short."""
    return traps.shuffled_data(hp)[0], even(hp)[1]


def workers(hp):
    return traps.worker_data(hp)[0], even(hp)[1]


def odd_rows(hp):
    """The third batch cannot be cut in two."""
    return traps.batches([4, 4, 3 if hp.get("odd") else 4, 4]), None


def sgd(named_parameters, hp):
    """An optimizer without any state."""
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=hp["lr"])


def wide(hp):
    """Blocks of one size, a dozen of them."""
    layers: list[nn.Module] = [nn.Linear(12, 96)]
    for _ in range(6):
        layers += [nn.Linear(96, 96), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(96, 3))


def noisy(hp):
    """Weights of 6 MiB, and dropout in every block."""
    layers: list[nn.Module] = [nn.Linear(12, 512)]
    for _ in range(6):
        layers += [nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(512, 3))


def large() -> Recipe:
    """Weights, gradients and AdamW's state of nearly a MiB, and batches of more rows."""
    return rich(model=wide, data=many_rows)


def many_rows(hp):
    return traps.batches([64] * 8), traps.batches([64], 30)


class Counter(nn.Linear):
    """A last layer that counts its forwards; ``late``: only those of three rows in evaluation."""

    def __init__(self, late: bool) -> None:
        super().__init__(traps.WIDTH, 3)
        self.late = late
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if not self.late or (len(x) == 3 and not self.training):
            self.seen += 1
        return super().forward(x)


def counts(hp):
    model = traps.Chain()
    model.leave = Counter(bool(hp.get("late", 0)))
    return model


# ------------------------------------------------------------------ what goes wrong

MISHAPS = ("", "nan", "raise", "loss", "data", "metric")


@dataclass(frozen=True)
class Mishap:
    """What goes wrong in a worker; ``flag`` is a file that is there when it has once, if given.

    Every batch says in a third tensor what goes wrong with it.
    """

    flag: Path | None

    def now(self, what: str, code: torch.Tensor) -> bool:
        """Whether it is to go wrong so; but once, where there is a flag."""
        if not in_worker() or MISHAPS[int(code)] != what:
            return False
        if self.flag is not None and self.flag.exists():
            return False
        if self.flag is not None:
            self.flag.touch()
        return True

    def check(self, what: str, code: torch.Tensor, where: str) -> None:
        """Raise, if it is to go wrong so."""
        if self.now(what, code):
            raise RuntimeError(f"{where} has gone wrong")


def in_worker() -> bool:
    """Whether this is a device's process, and not the plain loop."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == "shoal.runtime.worker"


class Head(nn.Linear):
    """The last layer, which is told of every batch."""

    def __init__(self, mishap: Mishap) -> None:
        super().__init__(traps.WIDTH, 3)
        self.mishap = mishap

    def forward(self, x, code):
        self.mishap.check("raise", code, "the head")
        return super().forward(x)


class Faulty(traps.Chain):
    def __init__(self, mishap: Mishap) -> None:
        super().__init__()
        self.leave = Head(mishap)

    def forward(self, x, code):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x, code)


@dataclass(frozen=True)
class FaultyData:
    """Twelve batches, of which the tenth is the one; or the second of validation, for a metric."""

    mishap: Mishap
    code: int

    def __len__(self) -> int:
        return 12

    def __iter__(self):
        for number, batch in enumerate(traps.batches([4] * 12)):
            code = torch.tensor(self.code if number == 9 else 0)
            self.mishap.check("data", code, "the data")
            yield *batch, code


def failing(flag: Path | None) -> Recipe:
    """``hp["what"]`` goes wrong in the third step, or after the second."""
    mishap = Mishap(flag)

    def data(hp):
        code = MISHAPS.index(hp["what"].strip("-"))
        valid = [
            (*batch, torch.tensor(code if number == 1 and hp["what"] == "metric" else 0))
            for number, batch in enumerate(even(hp)[1])
        ]
        return FaultyData(mishap, 0 if hp["what"] == "metric" else code), valid

    def loss(output, batch):
        mishap.check("loss", batch[2], "the loss")
        factor = math.nan if mishap.now("nan", batch[2]) else 1.0
        return traps.loss(output, batch) * factor

    def metric(output, batch):
        mishap.check("metric", batch[2], "the metric")
        return accuracy(output, batch)

    return Recipe(
        model=lambda hp: Faulty(mishap),
        inputs=lambda batch: (batch[0], batch[2]),
        data=data,
        loss=loss,
        optimizer=traps.adamw,
        metrics={"accuracy": metric},
        accumulate=4,
        clip_grad_norm=0.01,
    )


# ------------------------------------------------------------------ what they end on


class Trained:
    """A finished trial as the plain loop knows it: without the versions of "2bw"."""

    def __init__(self, trial: Any) -> None:
        self.number, self.history = trial.number, trial.history
        self._trial = trial

    def load_state(self) -> Any:
        return without_versions(self._trial.load_state())


def assert_staged(report, recipe: Recipe, technique, trials=None, **loop: Any) -> None:
    """These trials, or all, ended on the bits of the loop that defines their schedule."""
    losses = read_losses(report.directory)
    for trial in report.trials if trials is None else trials:
        if trial.error:
            pytest.fail(f"{trial.error_line}\ntrial {trial.number}, {trial.hp}: {trial.error}")
        assert trial.state == "FINISHED"
        plain = defined(recipe, trial, technique, **loop)
        assert_same(plain, Trained(trial), losses=losses[trial.number])


def defined(recipe: Recipe, trial, technique, **loop: Any):
    """A trial trained by the loop that defines its schedule."""
    pieces = (technique.micro_batches or recipe.accumulate) // recipe.accumulate
    loop = {"copies": technique.width, **loop}
    if technique.schedule == "2bw":
        options = {"predict": technique.predict, "pieces": pieces, **loop}
        return plain_2bw_loop(recipe, trial.hp, trial.seed, **options)
    return plain_loop(recipe, trial.hp, trial.seed, pieces=pieces, **loop)


def numerics(report) -> list[dict[str, Any]]:
    """The numerics key of each trial."""
    return [dict(row.numerics) for row in rows(report)]


def rows(report) -> list[Any]:
    """What the record says of each trial."""
    return list(Snapshot.of(read_outline(report.directory)).trials)


# ------------------------------------------------------------------ memory of the device


def bytes_held(session: Session) -> int:
    """What a session refers to outside of its host region: parameters, buffers, state."""
    binding = getattr(session, "binding", None)
    if binding is None:
        return 0
    tensors = [*session.model.buffers()]
    tensors += [t for p in session.model.parameters() for t in (p.data, p.grad) if t is not None]
    tensors += pytree.tree_leaves(list(session.optimizer.state.values()))
    for placed in [*binding._bound.values(), *(one.placed for one in binding._settled.values())]:
        tensors += [placed.param_bytes, placed.state_bytes, *placed.params.values()]
    storages = {t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)}
    home = session.region.bytes.untyped_storage().data_ptr()
    held = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() != home}
    return sum(size for size in held.values() if size > 8)  # not a number in the place of each


class CountingHolders(Counting):
    """Refuses to be read where more than one trial refers to memory beside its region."""

    def __iter__(self):
        gc.collect()
        sessions = [one for one in gc.get_objects() if isinstance(one, Session)]
        held = {one.job.trial: bytes_held(one) for one in sessions}
        if sum(map(bool, held.values())) > 1:
            raise RuntimeError(f"trials hold these bytes of the device: {held}")
        yield from even(None)[0]


def counting_holders(hp):
    return CountingHolders(), even(hp)[1]
