"""What the benchmark trains: a small GPT, with so many tokens that the host's step takes as long.

In a module of its own, so that the workers import it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hydrasrule
import torch
from torch import Tensor, nn

import shoal
from shoal.core.profile import PROFILES, Profile
from shoal.examples.gpt import GPT, next_byte_loss

SHARDS, CONTEXT, STEPS = 32, 32, 5
SERIAL_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A profile, slow enough for one core, and a model with so many tokens a step."""

    profile: str
    scale: float
    width: int

    @property
    def slowed(self) -> Profile:
        return PROFILES[self.profile].slowed(self.scale)

    def model(self) -> GPT:
        return GPT(width=self.width, depth=SHARDS, heads=1, context=CONTEXT, dropout=0.0)

    def about(self) -> int:
        """Windows a step for which the host's step takes about as long as the kernels.

        Tensors' padding and what a first shard saves are left out.
        """
        parameters = sum(parameter.numel() for parameter in self.model().parameters())
        seconds = self.slowed.kernel_seconds(8 * parameters * CONTEXT)
        return max(1, round(self.slowed.host_seconds(40 * parameters) / seconds))


CASES = {
    "h200": Case(profile="h200", scale=12000, width=32),
    "rtx4090": Case(profile="rtx4090", scale=12000, width=20),
}


class _Gate:
    """Where the serial arm waits: its data for its schedule, which is stepped on the host."""

    def __init__(self) -> None:
        self.steps, self.changed = 0, threading.Condition()

    def open(self, steps: int) -> None:
        with self.changed:
            self.steps = steps
            self.changed.notify_all()

    def wait(self, steps: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.steps >= steps, SERIAL_WAIT_S):
                raise RuntimeError(f"step {steps} of the host did not end")


_gate = _Gate()


class _Counting(torch.optim.lr_scheduler.ConstantLR):
    """Changes no learning rate; says when the host's steps are over."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        _gate.open(self.last_epoch)


class _Batches:
    """Random tokens, again and again the first few batches.

    ``serial``: a batch is there when the host's step before it is over.
    """

    def __init__(self, windows: int, *, count: int = STEPS, serial: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        drawn = [torch.randint(256, (windows, CONTEXT + 1), generator=draw) for _ in range(STEPS)]
        self._batches = [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in drawn]
        self._count, self._serial = count, serial

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self._count):
            if self._serial and number:
                _gate.wait(number)
            yield self._batches[number % STEPS]


def recipe_of(
    case: Case, windows: int, *, serial: bool = False, by_hydra: bool = False
) -> shoal.Recipe:
    """``by_hydra``: a worker that reads it goes by Hydra's rule from then on."""

    def model(hp: Any) -> nn.Module:
        if by_hydra:
            hydrasrule.install()
        return case.model()

    def data(hp: Any) -> tuple[_Batches, None]:
        return _Batches(windows, serial=serial), None

    def schedule(optimizer: torch.optim.Optimizer, hp: Any) -> Any:
        return _Counting(optimizer, factor=1.0)

    return shoal.Recipe(
        model=model,
        data=data,
        loss=next_byte_loss,
        clip_grad_norm=1.0,
        schedule=schedule if serial else None,
    )


# -- mixes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One trial of a mix: blocks, width, windows of tokens a step, steps, and whether it clips."""

    depth: int
    width: int
    windows: int
    steps: int
    clip: bool

    def model(self) -> GPT:
        return GPT(width=self.width, depth=self.depth, heads=1, context=CONTEXT, dropout=0.0)

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.model().parameters())

    def host_s(self, profile: Profile) -> float:
        """About what the host's part of a step takes."""
        return profile.host_seconds(40 * self.parameters)

    def compute_s(self, profile: Profile) -> float:
        """About what the kernels of a step take: of each token the weights, and its window."""
        a_token = 2 * self.parameters + 4 * CONTEXT * self.width * self.depth
        return profile.kernel_seconds(4 * a_token * CONTEXT * self.windows)


def recipe_of_mix(members: Sequence[Member]) -> shoal.Recipe:
    """``hp["member"]`` is a trial's number; it trains for an epoch."""

    def model(hp: Any) -> nn.Module:
        return members[hp["member"]].model()

    def data(hp: Any) -> tuple[_Batches, None]:
        one = members[hp["member"]]
        return _Batches(one.windows, count=one.steps), None

    def limit(hp: Any) -> float | None:
        return 1.0 if members[hp["member"]].clip else None

    return shoal.Recipe(model=model, data=data, loss=next_byte_loss, clip_grad_norm=limit)
