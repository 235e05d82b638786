"""How a source is led to a position: one class for each way, but for loaders' orders.

Leading may draw random numbers of any kind; whoever asks for it puts the streams of the trial
in place afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from shoal.data.keeper import Keeper, Undo, ended_early
from shoal.data.orders import FirstBatchKeeper, LoaderKeeper
from shoal.data.position import Position, Trail
from shoal.data.reading import Reader
from shoal.data.sources import Rule, order_generators
from shoal.data.states import portable
from shoal.data.streams import global_streams, torch_stream
from shoal.data.trail import Recorder, follow
from shoal.recipes.recipe import Batch
from shoal.rng import capture_rng, restore_rng


class IndexKeeper(Keeper):
    """A list: nothing leads to a position but its index."""

    def __init__(self, rule: Rule, reader: Reader) -> None:
        self.rule, self._reader = rule, reader

    def open(self) -> Iterator[Batch]:
        return self._reader.open()

    def lead(self, position: Position) -> Iterator[Batch] | None:
        if not position.begun:
            return None
        iterator = self.open()
        passed = sum(1 for _ in itertools.islice(iterator, position.batch))
        if passed < position.batch:
            raise ended_early("the list of batches", passed, position.batch)
        return iterator


class StateKeeper(Keeper):
    """A source with ``state_dict()``, which is asked only when a position is."""

    def __init__(self, rule: Rule, source: Any, device: torch.device) -> None:
        self.rule, self._source, self._device = rule, source, device
        self._generators = order_generators(source)
        self._is_new = True

    def open(self) -> Iterator[Batch]:
        self._is_new = False
        iterator: Iterator[Batch] = iter(self._source)
        return iterator

    def settle(self) -> Keeper:
        self._state()  # what cannot be kept is said now, and not at the first checkpoint
        return self

    def fields(self, *, batch: int, begun: bool) -> dict[str, Any]:
        if self._is_new:
            return {}
        generators = {name: g.get_state() for name, g in self._generators.items()}
        return {"state": self._state(), "generators": generators}

    def _state(self) -> Any:
        rng = capture_rng(self._device)
        state = portable(self._source.state_dict())
        restore_rng(rng, self._device)
        return state

    def lead(self, position: Position) -> Iterator[Batch] | None:
        if position.state is None:
            return None
        self._source.load_state_dict(portable(position.state))
        iterator = None
        if position.begun:
            iterator = self.open()
        else:
            self._wake()
        for name, state in position.generators.items():
            self._generators[name].set_state(state)
        return iterator

    def _wake(self) -> None:
        """Have the source take up its state now, between two epochs.

        torchdata's loader makes an iterator of it before it makes the next epoch's. In ``next``
        that would draw from the trial's streams.
        """
        self._is_new = False
        self._source.state_dict()


class ReplayKeeper(Keeper):
    """Any source: it is read again from its first batch, with the numbers it drew."""

    def __init__(self, rule: Rule, source: Any, reader: Reader, device: torch.device) -> None:
        self.rule, self._reader = rule, reader
        self._own = {
            name: torch_stream(generator)
            for name, generator in order_generators(source).items()
            if generator is not torch.default_generator
        }
        self._streams = {**global_streams(device), **self._own}
        self._recorder = Recorder(self._streams, Trail(), within=False)

    def open(self) -> Iterator[Batch]:
        self._recorder.before()
        iterator = self._reader.open()
        self._recorder.made()
        return iterator

    def take(self, iterator: Iterator[Batch], index: int) -> Any:
        self._recorder.before()
        batch = self._reader.fetch(iterator)
        self._recorder.fetched(index)
        return batch

    def end_epoch(self, batches: int) -> None:
        self._recorder.end_epoch(batches)

    def fields(self, *, batch: int, begun: bool) -> dict[str, Any]:
        generators = {name: stream.get() for name, stream in self._own.items()}
        return {"trail": self._recorder.trail(batch, within=begun), "generators": generators}

    def undo(self, *, opening: bool) -> Undo:
        return self._recorder.undo

    def lead(self, position: Position) -> Iterator[Batch] | None:
        trail = position.trail or Trail()
        iterator = follow(trail, self._streams, self._reader, within=position.begun)
        self._recorder = Recorder(self._streams, trail, within=position.begun)
        for name, state in position.generators.items():
            self._own[name].set(state)  # something else may have drawn from it since
        return iterator


def keeper_of(rule: Rule, source: Iterable[Batch], reader: Reader, device: torch.device) -> Keeper:
    """What leads ``source`` to positions by ``rule``."""
    if rule.way == "index":
        return IndexKeeper(rule, reader)
    if rule.way == "state":
        return StateKeeper(rule, source, device)
    if isinstance(source, DataLoader) and rule.way in ("sampler", "epoch"):
        return LoaderKeeper(rule, source, reader, device)
    return ReplayKeeper(rule, source, reader, device)


def first_keeper(
    rule: Rule, source: Iterable[Batch], reader: Reader, device: torch.device
) -> Keeper:
    """The keeper for a source that nobody has read yet; its first batch may change the rule."""
    keeper = keeper_of(rule, source, reader, device)
    if isinstance(keeper, LoaderKeeper) and rule.way == "sampler":
        return FirstBatchKeeper(keeper, ReplayKeeper(rule, source, reader, device))
    return keeper
