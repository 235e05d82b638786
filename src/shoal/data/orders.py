"""Loaders whose order is settled when an epoch begins: led by indices, or fetched again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from shoal.core.errors import TrialError
from shoal.data.inside import Inside, changed_number
from shoal.data.keeper import Keeper, Undo, ended_early
from shoal.data.position import Position
from shoal.data.reading import END, Reader
from shoal.data.sources import (
    Rule,
    draws_order_late,
    inside_of,
    name_of,
    order_generators,
    replay_rule,
)
from shoal.data.streams import Stream, torch_stream
from shoal.recipes.recipe import Batch
from shoal.rng import RngState, capture_rng, restore_rng


class LoaderKeeper(Keeper):
    """A DataLoader whose order is settled when an epoch begins, and whose epochs stand alone.

    Batches of the epoch are passed over by their indices alone where this process fetches
    them, and fetched again where others do, which have random streams of their own.
    """

    def __init__(
        self, rule: Rule, loader: DataLoader[Any], reader: Reader, device: torch.device
    ) -> None:
        self.rule, self.loader, self._reader, self._device = rule, loader, reader, device
        self._order = order_generators(loader)
        inside = inside_of(loader) if rule.way == "sampler" else Inside()
        order = {name: torch_stream(generator) for name, generator in self._order.items()}
        self._streams: dict[str, Stream] = {**order, **inside.generators}
        self._start: RngState | None = None
        self._order_then: Mapping[str, torch.Tensor] = {}

    def note_start(self) -> None:
        """An epoch begins in the random streams as they are."""
        self._start = capture_rng(self._device)
        self._order_then = self._order_now()

    def open(self) -> Iterator[Batch]:
        self.note_start()
        return self._reader.open()

    def take(self, iterator: Iterator[Batch], index: int) -> Any:
        return self._reader.fetch(iterator)

    def fields(self, *, batch: int, begun: bool) -> dict[str, Any]:
        generators = {name: s.pack(s.get()) for name, s in self._streams.items()}
        start = {"start": self._start, "order": self._order_then} if begun else {}
        return {"generators": generators, **start}

    def undo(self, *, opening: bool) -> Undo:
        if not opening:  # a fetch draws nothing in this process
            rng = capture_rng(self._device)
            return lambda: restore_rng(rng, self._device)
        start, order = self._start, self._order_then
        assert start is not None

        def put_back() -> None:
            restore_rng(start, self._device)
            self._set_order(order)

        return put_back

    def lead(self, position: Position) -> Iterator[Batch] | None:
        iterator = None
        if position.begun and position.start is not None:
            self._set_order(position.order)
            restore_rng(position.start, self._device)
            iterator = self.open()
            self._pass(iterator, position.batch)
            self._require_same_order(position.generators)
        self._put_generators(position.generators)
        return iterator

    def _pass(self, iterator: Iterator[Batch], count: int) -> None:
        """Pass over ``count`` batches, without the dataset if torch lets us."""
        indices = getattr(iterator, "_sampler_iter", None) if self.rule.way == "sampler" else None
        for index in range(count):
            passed = self._reader.fetch(iterator) if indices is None else next(indices, END)
            if passed is END:
                raise ended_early(name_of(self.loader), index, count)

    def _require_same_order(self, then: Mapping[str, Any]) -> None:
        now = self._order_now()
        differ = [name for name in now if not torch.equal(now[name], then[name])]
        if differ and draws_order_late(self.loader):
            raise TrialError(
                f"{name_of(self.loader)} draws its order as it goes from {differ[0]}, and so "
                "does something else. Give each loader a torch.Generator of its own."
            )

    def _put_generators(self, states: Mapping[str, Any]) -> None:
        missing = [name for name in states if name not in self._streams]
        if missing:
            raise TrialError(
                f"{name_of(self.loader)} had a generator at {missing[0]} and has none now. "
                "Recipe(data=...) must build the same source each time."
            )
        for name, state in states.items():
            self._streams[name].set(self._streams[name].unpack(state))

    def _set_order(self, states: Mapping[str, torch.Tensor]) -> None:
        for name, state in states.items():
            self._order[name].set_state(state)

    def _order_now(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self._order.items()}


class FirstBatchKeeper(Keeper):
    """A loader that an index leads to, if its dataset does not change with the first batch."""

    def __init__(self, index: LoaderKeeper, replay: Keeper) -> None:
        self.rule, self._index, self._replay = index.rule, index, replay
        self._inside = inside_of(index.loader)

    def open(self) -> Iterator[Batch]:
        self._index.note_start()
        return self._replay.open()

    def take(self, iterator: Iterator[Batch], index: int) -> Any:
        return self._replay.take(iterator, index)

    def fields(self, *, batch: int, begun: bool) -> dict[str, Any]:
        return self._index.fields(batch=batch, begun=begun)

    def settle(self) -> Keeper:
        changed = changed_number(self._inside, inside_of(self._index.loader))
        if changed is None:
            return self._index
        self._replay.rule = replay_rule(changed)
        return self._replay

    def lead(self, position: Position) -> Iterator[Batch] | None:
        return self._index.lead(position)
