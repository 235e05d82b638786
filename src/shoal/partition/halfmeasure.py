"""What the halves of a backward leave and take, run as a pipeline's stage runs them.

[Note: what came with it]
What enters a stage came in one message, and lies in one block of memory: a view of any tensor of
it keeps all. So what enters is copied here first, and counted by whether any of it is still there
between the halves; how large the message is, only the plan of a whole pipeline knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from shoal.core.spec import Halves
from shoal.core.units import Bytes, Seconds
from shoal.partition.chain import Chain, Micro
from shoal.partition.drive import Visit, as_before
from shoal.partition.halves import Half
from shoal.partition.preserve import drop_gradients
from shoal.partition.track import AllocationTracker
from shoal.partition.units import (
    BackwardResult,
    run_held_forward,
    run_held_inputs,
    run_last_inputs,
)
from shoal.partition.wires import Wires, storage_key

Timed = Callable[[Callable[[], object]], float]


def measure_halves(
    chain: Chain,
    micro: Micro,
    span: tuple[int, int],
    visit: Visit,
    after: BackwardResult,
    timed: Timed,
) -> Halves:
    """Run both halves of a range's backward under the clock, then twice under the tracker.

    ``visit`` is what its forward saw, ``after`` what later layers hand back. Parameters have
    gradients afterwards, which are the caller's to drop.
    """
    pair = _Pair(chain, micro, span)
    with as_before(chain, visit):
        first_s = timed(lambda: pair.first(visit.wires, after))
        both_s = timed(lambda: pair.first(visit.wires, after)[1].run())
        found = _counted(pair, visit.wires, after)
        drop_gradients(chain.model)
        making = _counted(pair, visit.wires, after)
    return Halves(
        left_bytes=Bytes(found.left),
        keeps_boundary=found.keeps_boundary,
        keeps_carry=found.keeps_carry,
        first_peak_bytes=Bytes(found.first_peak),
        second_peak_bytes=Bytes(found.second_peak),
        making_peak_bytes=Bytes(making.second_peak),
        first_s=Seconds(first_s),
        second_s=Seconds(max(both_s - first_s, 0.0)),
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """The halves of one range's backward, each with the forward that it needs."""

    chain: Chain
    micro: Micro
    span: tuple[int, int]

    def first(
        self,
        wires: Wires,
        after: BackwardResult,
        on_backward: Callable[[], None] = lambda: None,
    ) -> tuple[BackwardResult, Half]:
        """A forward, and the half of its backward that leads to the wires.

        ``on_backward`` is told that the forward is over, if that is an action of its own.
        """
        chain, micro, (start, stop) = self.chain, self.micro, self.span
        if stop == chain.num_layers:
            return run_last_inputs(chain, micro, start, wires, 1)
        held = run_held_forward(chain, micro, start, stop, wires)
        held.made.clear()
        on_backward()
        grads, tied = after.grads, after.tied
        return run_held_inputs(chain, micro, start, stop, held, grads=grads, tied=tied)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    left: int
    keeps_boundary: bool
    keeps_carry: bool
    first_peak: int
    second_peak: int


def _counted(pair: _Pair, wires: Wires, after: BackwardResult) -> _Counted:
    """One forward and both halves, every tensor counted."""
    with AllocationTracker() as tracker:
        entering = {wire: tensor.clone() for wire, tensor in wires.items()}
        coming = {wire: tensor.clone() for wire, tensor in after.grads.items()}
        given = tracker.current_bytes
        boundary, carry = _storages(entering.values()), _storages(coming.values())
        tracker.restart_peak()
        there = BackwardResult(grads=coming, tied=after.tied)
        result, half = pair.first(entering, there, tracker.restart_peak)
        first_peak = tracker.peak_bytes - given
        del entering, coming, there, result
        alive = {storage._cdata: storage.nbytes() for storage in tracker.alive()}
        left = sum(size for key, size in alive.items() if key not in boundary | carry)
        tracker.restart_peak()
        before = tracker.current_bytes
        half.run()
        second_peak = tracker.peak_bytes - before
    return _Counted(
        left=left,
        keeps_boundary=not boundary.isdisjoint(alive),
        keeps_carry=not carry.isdisjoint(alive),
        first_peak=first_peak,
        second_peak=second_peak,
    )


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {storage_key(tensor) for tensor in tensors}
