"""Choices on paper: how many shards, cut where, and about what moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, log2

from shoal.core.spec import JobMeasure, LayerMeasure, ShardSpec
from shoal.core.technique import Spilled, as_they_travel
from shoal.core.units import Bytes, Seconds
from shoal.partition.cut import cut, shard_cost
from shoal.planner.guess import guess_most, guess_saves
from shoal.planner.keep import keep_most
from shoal.planner.lean import keep_lean
from shoal.planner.need import Need, Request, fits, need, sweeps, waiting_input_bytes
from shoal.planner.predict import predict_shards
from shoal.planner.price import Speeds
from shoal.planner.room import Room
from shoal.planner.spare import use_turn
from shoal.planner.stages import most_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """A technique with its cuts, before its shards are measured.

    ``cuts`` are the first layers of the second and later shards. ``other_s`` is about what a step
    takes whose micro-batches go in the other order, where that may be, or ``other_least``.
    """

    technique: Spilled
    cuts: tuple[int, ...]
    moved_bytes: Bytes
    active: int
    fits: bool = True  # on paper; False where the number of shards was asked for all the same
    other_s: Seconds | None = None
    other_least: bool = False


LESS = 0.95
"""More shards than necessary have to move at most so much of what the fewest move ..."""
A_DOUBLING = 0.01
"""... or, where they take no longer, so much less where they are twice as many."""


class Paper:
    """Choices of one measure, on paper: cuts, shards and bytes are worked out once."""

    def __init__(self, measure: JobMeasure, request: Request) -> None:
        self._measure, self._request = measure, request
        forced = request.technique
        self._counts_forced = isinstance(forced, Spilled) and forced.shards is not None
        self._cuts: dict[tuple[int, bool], tuple[int, ...] | None] = {}
        self._shards: dict[tuple[int, ...], tuple[ShardSpec, ...]] = {}
        self._needs: dict[tuple[tuple[int, ...], Spilled], Need] = {}
        self._rooms: dict[tuple[tuple[int, ...], Spilled, Bytes, int], Room] = {}

    def by_shards(self, technique: Spilled, budget: Bytes, active: int) -> Iterator[Cutting]:
        """Choices with more and more shards, from the first that should fit."""
        most = len(self._measure.layers)
        for count in [technique.shards] if technique.shards else range(2, most + 1):
            cuts = self._cut(count, technique)
            if cuts is None:
                continue
            open_ = replace(technique, shards=count)
            base = self._base(cuts, open_, budget, active)
            if base is not None and fits([base], budget, active):
                _, moved = guess_most(self._room(cuts, open_, budget, active), base)
                yield Cutting(technique=open_, cuts=cuts, moved_bytes=moved, active=active)
            elif self._counts_forced:
                yield Cutting(
                    technique=open_, cuts=cuts, moved_bytes=Bytes(0), active=active, fits=False
                )

    def best_counts(self, fewest: Cutting, budget: Bytes) -> list[Cutting]:
        """The choice with the number of shards that moves clearly less than fewer shards do.

        And the one that moves a little less yet, if there is one.
        """
        best, all_ = fewest, [fewest]
        for count in () if self._counts_forced else self._counts(len(fewest.cuts) + 1):
            technique = replace(fewest.technique, shards=count)
            for choice in self.by_shards(technique, budget, fewest.active):
                all_.append(choice)
                if choice.moved_bytes < LESS * best.moved_bytes:
                    best = choice
        return list(dict.fromkeys((best, min(all_, key=lambda one: weight(one, one.moved_bytes)))))

    def _counts(self, least: int) -> list[int]:
        """Numbers of shards to compare with ``least``."""
        most = len(self._measure.layers)
        return sorted({min(most, least * times // 2) for times in (3, 4, 6, 8, 12)} | {most})

    def refined(self, choice: Cutting, speeds: Speeds, budget: Bytes) -> Cutting:
        """The same settings with the number of shards that moves the fewest bytes in no more time.

        Worked out, not guessed: whole shards stay or travel, and a few more or less of them may
        leave a gap or fill it.
        """
        if self._counts_forced or choice.technique.keep is not None:
            return choice
        open_, active = replace(choice.technique, shards=None), choice.active
        first = next(self.by_shards(open_, budget, active), choice)
        least = len(first.cuts) + 1
        others = [choice]
        for count in sorted({least, least + 1, *self._counts(least)} - {len(choice.cuts) + 1}):
            others += self.by_shards(replace(open_, shards=count), budget, active)
        weights = [weight(other, self._moved(other, budget)) for other in others]
        most_s = self.step_s(choice, speeds, budget)
        for _, other in sorted(zip(weights, others, strict=True), key=lambda one: one[0]):
            if other is choice or self.step_s(other, speeds, budget) <= most_s:
                return other
        return choice

    def worked_out(self, choice: Cutting, budget: Bytes) -> Cutting:
        """The choice with the bytes that move, as a program has them, if it fits."""
        moved = self._moved(choice, budget)
        return choice if moved == inf else replace(choice, moved_bytes=Bytes(int(moved)))

    def _moved(self, choice: Cutting, budget: Bytes) -> float:
        """Bytes a step with as much kept as fits."""
        # What is named may be impossible with other numbers of shards.
        technique = replace(choice.technique, keep_activations=(), spill_activations=())
        room = self._room(choice.cuts, technique, budget, choice.active)
        kept = keep_most(room)
        if kept is None:
            return inf
        found = [one for one in (kept, keep_lean(room, kept)) if one is not None]
        return min(use_turn(room, one, fewer=False)[1].moved for one in found)  # quickly

    def step_s(self, choice: Cutting, speeds: Speeds, budget: Bytes) -> Seconds:
        """The price of a step, with as much kept as there should be room for."""
        open_, active = choice.technique, choice.active
        base = self._need(choice.cuts, open_)

        def guessed_s(technique: Spilled) -> Seconds:
            room = self._room(choice.cuts, technique, budget, active)
            found = guess_saves(room, guess_most(room, base)[0], base)
            return room.step_s(found, speeds)

        if open_.optimizer == "host" and open_.keep_turn is None:  # or more activations instead
            return min(guessed_s(open_), guessed_s(replace(open_, keep_turn=0)))
        return guessed_s(open_)

    def finer(self, choice: Cutting, budget: Bytes) -> Iterator[Cutting]:
        """The same settings with more shards, for when the measured shards did not fit."""
        if self._counts_forced:
            return
        open_ = replace(choice.technique, shards=None)
        for finer in self.by_shards(open_, budget, choice.active):
            if len(finer.cuts) > len(choice.cuts):
                yield finer

    def _base(
        self, cuts: tuple[int, ...], technique: Spilled, budget: Bytes, active: int
    ) -> Need | None:
        """What is needed with nothing kept but what is forced; None if it is surely too much."""
        shards = as_they_travel(self._of(cuts), technique)
        with_state = technique.optimizer == "device" and not self._request.clip
        if not technique.keep and not technique.keep_weights:
            slot = max(s.parameter_bytes + with_state * s.state_bytes for s in shards)
            slots = min(1 + (technique.lookahead or 0), len(shards)) * slot
            batch = self._measure.batch_bytes
            held = slots + _least_outside(shards, batch, technique, self._request)
            peak = max(held, slots + _least_inside(shards, batch, technique, self._request))
            if (active - 1) * held + peak > budget:
                return None
        return self._need(cuts, technique)

    def may_wait(self, choice: Cutting) -> bool:
        """Whether the host has room for the inputs of its shards that wait there."""
        most, micros = self._request.waiting_room, self._request.micro_batches
        waits = waiting_input_bytes(self._of(choice.cuts), choice.technique, micros)
        return most is None or waits <= most

    def room(self, choice: Cutting, budget: Bytes) -> Room:
        """The room of its shards."""
        return self._room(choice.cuts, choice.technique, budget, choice.active)

    def _room(self, cuts: tuple[int, ...], technique: Spilled, budget: Bytes, active: int) -> Room:
        key = (cuts, technique, budget, active)
        if key not in self._rooms:
            self._rooms[key] = Room(
                measure=self._measure,
                shards=self._of(cuts),
                technique=technique,
                request=self._request,
                budget=budget,
                active=active,
            )
        return self._rooms[key]

    def _need(self, cuts: tuple[int, ...], technique: Spilled) -> Need:
        least = replace(
            technique,
            keep=technique.keep or (),
            keep_turn=technique.keep_turn or 0,
            keep_gradients=technique.keep_gradients or 0,
            keep_activations=(),
            spill_activations=(),
        )
        if (cuts, least) not in self._needs:
            found = need(self._measure, self._of(cuts), least, self._request, proves=False)
            self._needs[cuts, least] = found
        return self._needs[cuts, least]

    def _of(self, cuts: tuple[int, ...]) -> tuple[ShardSpec, ...]:
        if cuts not in self._shards:
            self._shards[cuts] = predict_shards(self._measure.layers, cuts)
        return self._shards[cuts]

    def _cut(self, count: int, technique: Spilled) -> tuple[int, ...] | None:
        key = count, technique.optimizer == "device"
        if key not in self._cuts:
            self._cuts[key] = _cut(self._measure.layers, count, technique)
        return self._cuts[key]


def weight(choice: Cutting, moved: float) -> float:
    """``moved`` as it is compared with that of other numbers of shards."""
    return moved * (1 + A_DOUBLING * log2(len(choice.cuts) + 1))


def _least_outside(
    shards: Sequence[ShardSpec], batch: Bytes, technique: Spilled, request: Request
) -> int:
    """What is surely held outside the slots at some moment: inputs of shards, and gradients.

    After the backward of a shard its gradients are there, and those of the one before it are
    on their way to the host, unless it stepped them or that is waited for.
    """
    steps_at_once = technique.optimizer == "device" and not request.clip
    in_turns, at_once = sweeps(technique, request) > 1, _at_once(technique, request)
    in_flight = technique.lookbehind != 0 and (not steps_at_once or in_turns)
    waits = technique.boundaries == "host"
    most = inputs = 0
    for shard, behind in itertools.zip_longest(shards, shards[1:]):
        if shard.frozen:
            inputs += at_once * (shard.boundary_bytes - shard.private_bytes)
            continue
        stored = behind.gradient_bytes if behind is not None and in_flight else 0
        left = batch if shard.index else 0  # the first shard's backward is the last to read it
        most = max(most, left + inputs + shard.gradient_bytes + stored)
        inputs += at_once * (shard.boundary_bytes - (shard.private_bytes if waits else 0))
    return max(most, batch + inputs)


def _at_once(technique: Spilled, request: Request) -> int:
    """Micro-batches whose inputs of shards are there at the turn."""
    return request.micro_batches // sweeps(technique, request)


def _least_inside(
    shards: Sequence[ShardSpec], batch: Bytes, technique: Spilled, request: Request
) -> int:
    """What is surely needed outside the slots inside some backward: inputs, and what runs."""
    waits, at_once = technique.boundaries == "host", _at_once(technique, request)
    most = inputs = 0
    for shard in shards:
        leaves = waits or shard.frozen
        inputs += at_once * (shard.boundary_bytes - (shard.private_bytes if leaves else 0))
        if not shard.frozen:
            most = max(most, batch + inputs + shard.backward_peak_bytes)
    return most


def _cut(layers: Sequence[LayerMeasure], count: int, technique: Spilled) -> tuple[int, ...] | None:
    """Cuts that make the largest shard smallest; None when ``count`` shards cannot be made."""
    if count > most_pieces(layers):
        return None
    return cut(layers, count, shard_cost(layers, with_state=technique.optimizer == "device"))
