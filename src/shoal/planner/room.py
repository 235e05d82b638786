"""What a job's shards are given: the room of a device, and what was asked for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shoal.core.spec import JobMeasure, ShardSpec
from shoal.core.technique import Spilled
from shoal.core.units import Bytes, Seconds
from shoal.memory.layout import TrialLayout
from shoal.planner.need import Need, Request, fits, need
from shoal.planner.price import Speeds, price

Option = tuple[Spilled, Need]
"""A technique that leaves nothing open, and what a job needs with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Shards of a job, and the device that they share with ``active - 1`` jobs like it.

    ``technique`` is what was asked for: what it leaves open is to be chosen. Needs are those of
    ``layout`` where that is known. ``worked_out`` are those that were looked at.
    """

    measure: JobMeasure
    shards: Sequence[ShardSpec]
    technique: Spilled
    request: Request
    budget: Bytes
    active: int
    layout: TrialLayout | None = None
    worked_out: dict[Spilled, Need] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def need(self, technique: Spilled) -> Need:
        """What a technique needs that leaves nothing open."""
        if technique not in self.worked_out:
            args = (self.measure, self.shards, technique, self.request, self.layout)
            self.worked_out[technique] = need(*args, proves=False)
        return self.worked_out[technique]

    def tried(self, technique: Spilled) -> Option | None:
        """``technique`` and what it needs, if the device has room for that."""
        found = self.need(technique)
        return (technique, found) if fits([found], self.budget, self.active) else None

    def step_s(self, technique: Spilled, speeds: Speeds) -> Seconds:
        """The price of a step with a technique that leaves nothing open."""
        args = (self.shards, self.measure.batch_bytes, technique, self.request, speeds)
        return price(*args, self.active).step_s

    def beside(self, base: Need) -> int:
        """Bytes that each job has beyond ``base``; less than none where that does not fit."""
        return (self.budget - base.unit) // self.active - base.held

    def resolved(self) -> Spilled:
        """The technique with nothing open but what is kept: of all else what was asked for."""
        technique = self.technique
        return replace(
            technique,
            shards=len(self.shards),
            keep_head=technique.keep_head if technique.keep is not None else None,
            keep_activations=technique.keep_activations or (),
            spill_activations=technique.spill_activations or (),
            keep_turn=technique.keep_turn or 0,
            keep_gradients=technique.keep_gradients or 0,
        )

    @property
    def borrowers(self) -> list[int]:
        """Shards that read parameters of others: their copy goes stale when the lender steps."""
        return [s.index for s in self.shards if s.parameter_bytes > s.owned_bytes]


def most_of(tried: Callable[[int], Option | None], best: Option, few: int, many: int) -> Option:
    """What is ``tried`` with as much as fits: ``few``, which is ``best``, to ``many``."""
    while few < many:
        middle = (few + many + 1) // 2
        found = tried(middle)
        if found is None:
            many = middle - 1
        else:
            best, few = found, middle
    return best
