"""A loop that trains nothing: it fetches from a feed, draws between, and marks positions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shoal.data import Feed, Position
from shoal.data.sources import order_of
from shoal.rng import RngState, capture_rng, restore_rng, seed_all
from shoal.runtime.saving.packing import Packer, unpack

CPU = torch.device("cpu")
END = "end of epoch"


@dataclass
class Mark:
    """A moment of a run: what a checkpoint would hold, as it would hold it."""

    step: int
    record: Any
    tensors: dict[str, torch.Tensor]
    rng: RngState

    @property
    def position(self) -> Position:
        return Position.unpack(unpack(self.record, self.tensors))


@dataclass
class Run:
    """What a loop saw: batches and ends of epochs, and the random streams at its end."""

    seen: list[Any] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    rng: RngState | None = None


def draw_as_training_does(step: int) -> None:
    """Numbers from each stream that are not the data's."""
    torch.rand(5 * step % 7)
    if step % 3 == 0:
        random.random()
        np.random.rand(step)


def draw_much(step: int) -> None:
    """More numbers than a twister makes at a time."""
    torch.rand(100_000)
    np.random.rand(3000)


def draw_pairs(step: int) -> None:
    """Normal numbers: generators keep one of each pair for later."""
    torch.randn(3)
    random.gauss()
    np.random.randn()


def seed_anew(step: int) -> None:
    torch.manual_seed(step)
    np.random.seed(3)


Training = Callable[[int], None]


def go_on(feed: Feed, run: Run, steps: range, training: Training, marks: set[int]) -> Run:
    """Fetch and draw, step by step; a mark before each step in ``marks``."""
    for step in steps:
        if step in marks:
            run.marks.append(mark(feed, step))
        batch = feed.next()
        run.seen.append(END if batch is None else batch)
        training(step)
    run.rng = capture_rng(CPU)
    feed.close()
    return run


def mark(feed: Feed, step: int) -> Mark:
    tensors: dict[str, torch.Tensor] = {}
    record = json.loads(json.dumps(Packer(tensors).pack(feed.position().pack())))
    return Mark(step, record, tensors, capture_rng(CPU))


def validating(training: Training, source: Any) -> Training:
    """Training that now and then reads another loader, which shares ``source``'s generator."""
    generator = order_of(source).generator

    def train_and_validate(step: int) -> None:
        training(step)
        if step % 2 == 0:
            torch.rand(1, generator=generator)

    return train_and_validate


def uninterrupted(
    build: Callable[[], Any],
    steps: int,
    marks: set[int],
    training: Training = draw_as_training_does,
    *,
    shared: bool = False,
) -> Run:
    seed_all(7)
    source = build()
    training = validating(training, source) if shared else training
    return go_on(Feed(source, CPU), Run(), range(steps), training, marks)


def resumed(
    build: Callable[[], Any],
    at: Mark,
    steps: int,
    *,
    training: Training = draw_as_training_does,
    marks: Collection[int] = (),
    shared: bool = False,
) -> Run:
    """The rest of a run, by a source that is built anew in a process that did other things."""
    seed_all(7)
    source = build()
    training = validating(training, source) if shared else training
    feed = Feed(source, CPU)
    seed_all(1000 + at.step)
    feed.seek(at.position)
    restore_rng(at.rng, CPU)
    return go_on(feed, Run(), range(at.step, steps), training, set(marks))


def watched(build: Callable[[], Any], built: list[Any]) -> Callable[[], Any]:
    """``build`` that leaves its sources in ``built``."""

    def build_and_keep() -> Any:
        built.append(build())
        return built[-1]

    return build_and_keep


def plainly(build: Callable[[], Any], steps: int) -> Run:
    """The plain loop over the source, without a feed."""
    seed_all(7)
    run, source, iterator = Run(), build(), None
    for step in range(steps):
        iterator = iter(source) if iterator is None else iterator
        batch = next(iterator, None)
        run.seen.append(END if batch is None else batch)
        iterator = iterator if batch is not None else None
        draw_as_training_does(step)
    run.rng = capture_rng(CPU)
    return run
