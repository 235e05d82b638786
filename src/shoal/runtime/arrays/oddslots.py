"""Slots of an array in shards whose batch has another layout than the others': each by itself.

Each runs shard by shard as a trial alone does, on its rows of what is on the device.

[Note: two sums]
A whole array sums a slot's gradients of batches that ran together, apart from them those of
batches that ran by themselves, and adds the two at the end of the step. Floating-point sums depend
on their order, so here it is the same one: what a slot's own backward makes waits in host memory,
and becomes, or is added to, its row after the backward of the step's last micro-batch.

[Note: no gradient]
Code that goes by the shape of its batch may leave a parameter out of one slot's step and not of
another's. Alone an optimizer passes over a parameter without a gradient; one of zeros it would
step, with weight decay or momentum. Rows have no place for none: what a slot lacks is kept here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.fusion.crew import Crew
from shoal.fusion.passes.loop import alone
from shoal.fusion.rows.laidup import Settings
from shoal.partition.chain import Chain
from shoal.partition.transplant import transplanted
from shoal.runtime.units import ChainUnits, Micro
from shoal.spill.generate import Route

HOST = torch.device("cpu")


class OddSlots:
    """The units of slots by themselves, and their gradients of the step so far.

    Args:
        crew: Who is there now.
        chain: Of a model of the members' code.
        spans: Layers of each shard.
    """

    def __init__(
        self,
        crew: Callable[[], Crew],
        chain: Chain,
        spans: Sequence[tuple[int, int]],
        route: Route,
    ) -> None:
        self._crew, self._chain, self._spans, self._route = crew, chain, spans, route
        self._lone: dict[int, tuple[Any, ChainUnits]] = {}  # by slot, of which member
        self._sums: dict[int, dict[int, dict[str, Tensor]]] = {}  # by shard and slot
        self._together: set[int] = set()
        self._lacking: dict[int | None, set[str]] = {}  # by odd slot; None: of all others
        self._before: dict[int, Settings] = {}  # by slot that is within a pass
        self._under_way: Counter[int] = Counter()  # passes of each

    def restart(self) -> None:
        """A step begins."""
        self._under_way.clear()  # a pass that failed came to no end
        self._before.clear()
        self._sums.clear()
        self._together.clear()
        self._lacking = {}  # the host may be at the last step still

    def lacking(self, slot: int | None) -> AbstractSet[str]:
        """The parameters of which others have a gradient in this step, and a slot has none.

        None: any slot that was in no batch of its own.
        """
        return self._lacking.setdefault(slot if slot in self._lacking else None, set())

    def ran_together(self, slots: Iterable[int]) -> None:
        """These have gradients of this step among the stacked ones."""
        self._together.update(slots)

    def begin(self, slot: int, batch: Any) -> Micro:
        """Take up a slot's batch; what is wrong with it is raised."""
        micro = self._units(slot).begin(batch)
        if not self._under_way[slot]:
            self._before[slot] = Settings(self._crew().holders(slot))
        self._under_way[slot] += 1
        return micro

    def _end(self, slot: int) -> None:
        """A pass has come to its end: what the slot's module has laid up goes, as elsewhere."""
        self._under_way[slot] -= 1
        if not self._under_way[slot] and (before := self._before.pop(slot, None)):
            before.put_back()

    def forward(self, shard: int, slot: int, micro: Micro) -> tuple[Tensor, Any] | None:
        """A forward without gradients; loss and output when it is the last shard's."""
        with self._placed(shard, slot):
            found = self._units(slot).forward(shard, micro)
        if shard == len(self._spans) - 1:  # of an evaluation; a step ends with a backward
            self._end(slot)
        return found

    def private(self, shard: int, slot: int, micro: Micro) -> dict[Any, Tensor]:
        """Of a shard's input, what no other shard reads."""
        return self._units(slot).private(shard, micro)

    def backward(self, shard: int, slot: int, micro: Micro, *, is_last: bool) -> float | None:
        """A backward; the loss when it is the last shard's.

        Its gradients wait, in host memory if another micro-batch of the step is to come.
        """
        with self._placed(shard, slot):
            loss = self._units(slot).backward(shard, micro)
            sums = self._sums.setdefault(shard, {}).setdefault(slot, {})
            for name, parameter in self._parameters_of(shard, slot).items():
                grad, parameter.grad = parameter.grad, None
                if grad is None:
                    continue
                held = sums.get(name)
                if held is not None:
                    grad = held.add_(grad.to(held.device))
                sums[name] = grad if is_last else grad.to(HOST)
        if shard == self._route.frozen:
            self._end(slot)
        return None if loss is None else float(loss.detach())

    def settle(self, shard: int) -> None:
        """After the step's last backward of a shard: its slots' gradients come to their rows."""
        stacked = self._crew().stacked.parameters
        odd = self._sums.pop(shard, {})
        self._note_lacking(shard, odd)
        for slot, sums in odd.items():
            for name, grad in sums.items():
                block = stacked[name]
                is_only = block.grad is None or slot not in self._together
                if block.grad is None:
                    block.grad = torch.zeros_like(block.data)
                if is_only:
                    block.grad[slot].copy_(grad)
                else:
                    block.grad[slot].add_(grad.to(block.grad.device))

    def _note_lacking(self, shard: int, odd: Mapping[int, Collection[str]]) -> None:
        """``odd``: of which parameters slots by themselves have gradients."""
        if not odd:
            return
        stacked = self._crew().stacked.parameters
        names = self._chain.parameters_in(*self._spans[shard])
        shared = {name for name in names if stacked[name].grad is not None}
        every = shared.union(*odd.values())
        self._lacking.setdefault(None, set()).update(every - shared)
        for slot, own in odd.items():
            has = shared.union(own) if slot in self._together else set(own)
            self._lacking.setdefault(slot, set()).update(every - has)

    def _units(self, slot: int) -> ChainUnits:
        """Those of the slot's own module."""
        member = self._crew().members[slot]
        known = self._lone.get(slot)
        if known is None or known[0] is not member:
            chain = transplanted(self._chain, member.module, member.recipe).watched()
            units = ChainUnits(chain, member.recipe, self._spans, self._chain.device, self._route)
            self._lone[slot] = known = member, units
        return known[1]

    @contextmanager
    def _placed(self, shard: int, slot: int) -> Iterator[None]:
        """A slot's own random streams, and its rows of the shard as its module's parameters.

        Those of other shards may be under way on the host's thread.
        """
        crew = self._crew()
        mine = self._parameters_of(shard, slot)
        before = [(parameter, parameter.data) for parameter in mine.values()]
        try:
            for name, parameter in mine.items():
                parameter.data = crew.stacked.parameters[name].data[slot]
            with alone(crew, slot, is_whole=False):
                yield
        finally:
            for parameter, data in before:
                parameter.grad = None
                parameter.data = data

    def _parameters_of(self, shard: int, slot: int) -> dict[str, nn.Parameter]:
        module = self._crew().members[slot].module
        names = self._chain.parameters_in(*self._spans[shard])
        return {name: module.get_parameter(name) for name in names}
