"""Shards that are measured visit the device one after another; the host has everything else.

[Note: a visit]
A shard's parameters, and of what other shards left the tensors that it reads, are brought to the
device; its unit runs and is counted; what it made goes to host memory, and the parameters are
gone. So an array is measured on a device that has room for no more than a unit of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shoal.partition.chain import Chain
from shoal.runtime.measuring.meter import HOST, Meter, copied_to
from shoal.runtime.units import Micro


class Visits:
    """Brings what the units of one micro-batch read, and takes what they leave.

    Args:
        parameters: A shard's by name, copies in host memory.
        place: Has parameters be those on the device.
        evict: Has them be gone.
    """

    def __init__(
        self,
        micro: Micro,
        chain: Chain,
        spans: Sequence[tuple[int, int]],
        meter: Meter,
        *,
        parameters: Callable[[Sequence[str]], Mapping[str, Tensor]],
        place: Callable[[Mapping[str, Tensor]], None],
        evict: Callable[[Sequence[str]], None],
    ) -> None:
        self._micro, self._chain, self._spans, self._meter = micro, chain, spans, meter
        self._parameters, self._place, self._evict = parameters, place, evict
        self._resting: set[int] = set()  # identities of tensors in host memory

    @contextmanager
    def of(self, shard: int) -> Iterator[None]:
        """The shard is on the device inside, with what its unit reads."""
        names = self._chain.parameters_in(*self._spans[shard])
        home, micro = self._parameters(names), self._micro
        entering, stash = self._entering(shard), dict(micro.buffers.get(shard, {}))
        coming = (entering, micro.grads, micro.tied, stash)
        tensors = [tensor for some in coming for tensor in some.values()]
        with self._meter.hold([*home.values(), *tensors]):
            micro.wires |= self._brought(entering)
            micro.grads, micro.tied = self._brought(micro.grads), self._brought(micro.tied)
            if stash:
                micro.buffers[shard] = self._brought(stash)
            self._place(self._brought(home))
            del home, entering, stash, coming, tensors
            try:
                yield
            finally:
                self._evict(names)
                self._take_home()

    def _entering(self, shard: int) -> dict[Any, Tensor]:
        """The tensors of earlier shards that it reads."""
        start, micro = self._spans[shard][0], self._micro
        alive = self._chain.live_wires(start, micro.context) if start else ()
        return {wire: micro.wires[wire] for wire in alive}

    def _brought(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        return copied_to(self._meter.device, tensors)

    def _take_home(self) -> None:
        micro = self._micro
        micro.wires, micro.grads = self._rested(micro.wires), self._rested(micro.grads)
        micro.tied = self._rested(micro.tied)
        micro.buffers = {shard: self._rested(stash) for shard, stash in micro.buffers.items()}
        held: Iterable[Mapping[Any, Tensor]] = (micro.wires, micro.grads, micro.tied)
        every = [*held, *micro.buffers.values()]
        self._resting = {id(tensor) for some in every for tensor in some.values()}

    def _rested(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        here = {k: tensor for k, tensor in tensors.items() if id(tensor) not in self._resting}
        return {**tensors, **copied_to(HOST, here)}
