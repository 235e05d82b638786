"""What the LOADs, STOREs and DROPs of one trial copy: which bytes, and where they lie.

When a copy may run, and on which stream, is decided in ``interpret``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.core.profile import Direction
from shoal.core.technique import asks_by_shard
from shoal.core.turns import Upload
from shoal.device import Device
from shoal.memory.layout import Arena
from shoal.partition.savedset import Cell
from shoal.program.ir import Action, Part, kept
from shoal.runtime.compute import Compute
from shoal.runtime.placing.placed import Placed, place_in_slot, place_what_stays, without_head
from shoal.runtime.placing.waitingroom import (
    WaitingRoom,
    aligned,
    input_of,
    planned_places,
    saved_of,
)
from shoal.runtime.tenant import Tenant
from shoal.runtime.units import Micro

Copy = tuple[Tensor, Tensor]
"""Target and source; never empty."""


class Copies:
    """A trial's region on its device, and the tensors of each shard in it.

    Args:
        region: The trial's own; ``arena`` says what is where in it.
        host: Per shard its tensors in the host store.
        compute: Told which shards are on the device, and which gradients.
    """

    def __init__(
        self,
        region: Tensor,
        arena: Arena,
        session: Tenant,
        host: Sequence[Placed],
        compute: Compute,
    ) -> None:
        self.region, self._arena, self._host = region, arena, host
        self._layout, self._binding = session.layout, session.binding
        self._compute, self._specs = compute, session.job.shards
        self.kept = kept(*(_spots(arena, part) for part in ("state", "param", "head")))
        self._host = [self._as_it_travels(shard) for shard in range(len(host))]
        self._placed: dict[tuple[int, int], Placed] = {}  # slot, shard; made once
        self._own: dict[int, tuple[Tensor, Placed]] = {}  # shard -> parameters in no slot
        self._late: Tensor | None = None  # the late slots, while there are any
        self._under: dict[int, Placed] = {}  # of shards in late slots: what was placed before
        self._units, self._device = session.units, session.device
        self._by_shard = asks_by_shard(session.job.technique)
        is_cuda = self._device.type == "cuda"
        self._room = WaitingRoom(planned_places(session.job), pin=is_cuda)
        self._moved: dict[int, list[tuple[Cell, Tensor]]] = {}  # shard -> what, and its copy there

    def load(self, action: Action, slot: int | None) -> tuple[list[Copy], Tensor | None]:
        """Take a slot, or memory outside; returns the copies, and bytes that nobody else uses."""
        shard = action.shard
        if action.late:
            return self._load_late(action, slot or 0)
        if slot is None:
            layout = self._layout.shards[shard]
            size = layout.loaded.num_bytes + layout.borrowed_bytes
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            placed = place_in_slot(memory, layout, ())
            self._own[shard] = memory, placed
            self._compute.placed[shard] = placed
            return self._up(action, placed), None
        placed = self._in_slot(slot, shard)
        joins = self._compute.placed.get(shard) is placed
        if shard in self._under:  # its state came first, into a late slot
            self._under[shard] = placed
        else:
            self._compute.placed[shard] = placed
        return self._up(action, placed), None if joins else self._bytes(slot)

    def _load_late(self, action: Action, slot: int) -> tuple[list[Copy], Tensor | None]:
        """Take a late slot, for what goes beside the parameters where those are."""
        shard, size = action.shard, self._arena.late_bytes
        if self._late is None:
            total = size * self._arena.num_late
            self._late = torch.empty(total, dtype=torch.uint8, device=self._device)
        memory, here = self._late[slot * size : (slot + 1) * size], self._compute.placed[shard]
        placed = place_in_slot(memory, self._layout.shards[shard], action.parts, here)
        self._under[shard], self._compute.placed[shard] = here, placed
        return self._up(action, placed), memory

    def end_program(self) -> None:
        """Give the late slots back; what is on its way down from them keeps them until then."""
        self._late = None

    def store(self, action: Action) -> list[Copy]:
        """The copies to the host store; gradients are noted to be there from now on."""
        shard, host = action.shard, self._host[action.shard]
        copies: list[Copy] = []
        if Part.PARAM in action.parts:
            copies.append((host.param_bytes, self._compute.placed[shard].param_bytes))
        if Part.STATE in action.parts:
            copies.append((host.state_bytes, self._compute.placed[shard].state_bytes))
        if Part.HEAD in action.parts:
            copies += _pair(host.head, self._spot(shard).head)
        if Part.GRAD in action.parts:
            grads = self._compute.grads.get(shard, {})
            self._compute.has_grad[shard] = set(grads)
            copies += [(host.grads[name], grad) for name, grad in grads.items()]
        return _some(copies)

    def drop(self, action: Action) -> None:
        """Forget what is dropped; parameters that are gone are poisoned."""
        shard, placed = action.shard, self._compute.placed
        if Part.GRAD in action.parts:
            self._compute.grads.pop(shard, None)
        under = self._under.pop(shard, None) if Part.STATE in action.parts else None
        if under is not None:
            self._binding.evict_state(shard)
        if Part.PARAM in action.parts:
            self._binding.evict(shard, placed.pop(shard))
            self._own.pop(shard, None)
            if Part.HEAD in self.kept.get(shard, ()) and Part.HEAD not in action.parts:
                placed[shard] = self._spot(shard)
        elif Part.HEAD in action.parts:
            placed.pop(shard, None)
        elif Part.PARAM in self.kept.get(shard, ()) and shard in placed:
            placed[shard] = self._spot(shard)
        elif under is not None:
            placed[shard] = under
        elif shard in self._own:
            placed[shard] = self._own[shard][1]

    def store_boundary(self, action: Action, micro: Micro) -> list[Copy]:
        """The copies of a shard's input to the host, into memory that is used step after step."""
        shard, place = action.shard, (action.micro or 0) if self._by_shard else 0
        micro.away[shard], copies, at = {}, [], 0
        private = self._units.private(shard, micro)
        size = sum(aligned(_extent(tensor)) for tensor in private.values())
        room = self._room.place(input_of(shard, place), size)
        for wire, tensor in private.items():
            host = room[at : at + _extent(tensor)]
            at += aligned(_extent(tensor))
            waiting = host.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
            micro.away[shard][wire] = waiting
            copies.append((waiting, tensor))
        return _some(copies)

    def drop_boundary(self, action: Action, micro: Micro) -> None:
        """Forget a shard's input that waits on the host, less what others turned out to read."""
        private = self._units.private(action.shard, micro)
        for wire in micro.away[action.shard].keys() & private.keys():
            micro.forget_wire(wire)

    def load_boundary(self, action: Action, micro: Micro) -> list[Copy]:
        """The copies of a shard's input back to the device, into memory of its own."""
        copies = []
        for wire, source in micro.away.pop(action.shard).items():
            if micro.has_wire(wire):
                continue
            back = torch.empty_strided(
                source.size(), source.stride(), dtype=source.dtype, device=self._device
            )
            micro.put_wire(wire, back)
            copies.append((back, source))
        return _some(copies)

    def store_saved(self, action: Action, micro: Micro) -> list[Copy]:
        """The copies of what a forward saved to the host, into memory that is used each time."""
        cells, at = self._units.movable(action.shard, micro), 0
        size = sum(cell.num_bytes for cell in cells)
        host = self._room.place(saved_of(action.shard), size)
        self._moved[action.shard] = moved = []
        for cell in cells:
            moved.append((cell, host[at : at + cell.num_bytes]))
            at += cell.num_bytes
        return [(place, cell.bytes_now()) for cell, place in moved]

    def drop_saved(self, action: Action, micro: Micro) -> None:
        """Let go of what is on the host."""
        for cell, _ in self._moved[action.shard]:
            cell.leave()

    def load_saved(self, action: Action, micro: Micro) -> list[Copy]:
        """The copies of what a forward saved back to the device, into memory of its own."""
        copies = []
        for cell, source in self._moved.pop(action.shard):
            cell.memory = torch.empty(cell.num_bytes, dtype=torch.uint8, device=self._device)
            copies.append((cell.memory, source))
        return copies

    def own_memory(self) -> list[Tensor]:
        """What was loaded and is not in the region."""
        late = [] if self._late is None else [self._late]
        return [memory for memory, _ in self._own.values()] + late

    def copy_kept(self) -> None:
        """Make the host copies of what stays here current; all others always are."""
        for shard in self.kept.keys() & self._compute.placed.keys():
            host, placed = self._host[shard], self._compute.placed[shard]
            if Part.PARAM in self.kept[shard]:
                host.param_bytes.copy_(placed.param_bytes)
            if Part.STATE in self.kept[shard]:
                host.state_bytes.copy_(placed.state_bytes)
            for target, source in _pair(host.head, placed.head):
                target.copy_(source)

    def close(self) -> None:
        """Let go of the region."""
        self._placed.clear()
        self._own.clear()
        self._under.clear()
        self._late = None
        self._moved.clear()
        self._room.close()
        self._compute.placed.clear()
        self.region = torch.empty(0)

    def _up(self, action: Action, placed: Placed) -> list[Copy]:
        shard, host = action.shard, self._host[action.shard]
        copies: list[Copy] = []
        if Part.PARAM in action.parts:
            copies.append((placed.param_bytes, host.param_bytes))
            copies += [(_once(t), _once(host.borrowed[n])) for n, t in placed.borrowed.items()]
        if Part.STATE in action.parts:
            copies.append((placed.state_bytes, host.state_bytes))
        if Part.HEAD in action.parts:
            copies += _pair(placed.head, host.head)
        if Part.GRAD in action.parts:
            names = self._compute.has_grad.get(shard, set())
            grads = {name: grad for name, grad in placed.grads.items() if name in names}
            copies += [(grad, host.grads[name]) for name, grad in grads.items()]
            self._compute.grads[shard] = grads
        return _some(copies)

    def _as_it_travels(self, shard: int) -> Placed:
        """The shard's tensors in the host store, less the head that stays here."""
        spec, host = self._specs[shard], self._host[shard]
        if not spec.head_bytes:
            return host
        return without_head(host, spec.head_bytes, of_state=spec.head_of_state)

    def _bytes(self, slot: int) -> Tensor:
        start, size = self._arena.place(slot)
        return self.region[start : start + size]

    def _in_slot(self, slot: int, shard: int) -> Placed:
        key = (slot, shard)
        if shard in self._own:  # the memory is another one each time
            layout, placed = self._layout.shards[shard], self._own[shard][1]
            return place_in_slot(self._bytes(slot), layout, self._arena.parts_of(shard), placed)
        if key not in self._placed:
            layout, region = self._layout.shards[shard], self._bytes(slot)
            if slot < len(self.kept):
                made = place_what_stays(region, layout, self._arena.kept[shard].parts)
            else:
                stays = self._spot(shard) if shard in self.kept else None
                made = place_in_slot(region, layout, self._arena.parts_of(shard), stays)
            self._placed[key] = made
        return self._placed[key]

    def _spot(self, shard: int) -> Placed:
        """What stays of a shard, where it stays."""
        return self._in_slot(list(self._arena.kept).index(shard), shard)


def copying(
    device: Device,
    copies: Sequence[Copy],
    way: Direction,
    fresh: Tensor | None = None,
    *,
    upload: Upload | None = None,
    passes: bool = False,
) -> Callable[[], None]:
    """The work of a copy stream; memory that is ``fresh`` is poisoned before."""

    def work() -> None:
        if fresh is not None:
            device.poison(fresh)
        for target, source in copies:
            device.copy(target, source, way, upload=upload, passes=passes)

    return work


def _once(tensor: Tensor) -> Tensor:
    """One of an array's rows, where all are the same memory; else all of it."""
    return tensor[0] if len(tensor.shape) > 0 and tensor.stride(0) == 0 else tensor


def _spots(arena: Arena, part: str) -> list[int]:
    return [shard for shard, spot in arena.kept.items() if part in spot.parts]


def _pair(target: Tensor | None, source: Tensor | None) -> list[Copy]:
    return [] if target is None or source is None else [(target, source)]


def _extent(tensor: Tensor) -> int:
    """The bytes from its first element to its last."""
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _some(copies: list[Copy]) -> list[Copy]:
    return [(target, source) for target, source in copies if source.numel()]
