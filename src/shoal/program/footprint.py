"""Exact bytes of one device's actions, when memory is taken and given in list order.

[Note: what is on the device]
    kept        what is there before the first action and stays, each as large as it is
    slots       what was loaded: every slot as large as the largest content of any
    late slots  as large as the largest content of any, from the first LOAD into one to the end
    own         parameters loaded into memory of their own, from the LOAD until the DROP
    batch       from the first to the last unit of its micro-batch on this device
    boundaries  into shard s: from F(s - 1) or RECV until B(s) or SEND; in a program
                without backward until F(s); of a shard that nothing goes backward through, what
                no other shard reads until F(s), and the rest until the micro-batch's last B;
                less what of it waits on the host, from its DROP, or rather the unit that waits
                for its STORE, until its LOAD
    saved       by F(s) with gradients, until its B(s) or I(s); where that is the boundary into
                s + 1 too, it is counted here; less what of it waits on the host, likewise
    half        by I(s), until W(s): what it left, the message with the boundary, and that with the
                carry out of s, where the second half reads any of it
    stash       by any other F(s), until its B(s): what the recompute must find as it was
    carries     out of shard s: from B(s) or RECV until B(s - 1) or SEND
    gradients   not loaded into a slot: from B or W until STEP; or, when they are stored and
                dropped, until the unit that waits for the STORE (see [Note: slots]); that may
                be the first one of the next run, before which parameters are loaded
    the unit    the peak inside F, B or STEP, what it produces included
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.core.units import Bytes
from shoal.program.costs import Costs, moved_bytes, onward, part_bytes, unit_peak_bytes
from shoal.program.ir import Action, Kept, Op, Part, lone_part
from shoal.program.needs import message_kind
from shoal.program.slots import (
    NOTHING,
    Outside,
    ShardKey,
    SlotMap,
    assign_slots,
    is_unit,
    outside,
    tenants_before,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a device's list needs: bytes held between units, inside them, and moved.

    ``held_bytes`` are what is kept, the slots, and the most that lives outside them,
    ``unit_bytes`` the most that one unit needs on top. ``peak_bytes`` is the maximum of
    ``running_bytes``, which has one entry an action: during it for a unit, after it
    for the others.
    """

    kept_bytes: Bytes
    num_slots: int
    slot_bytes: Bytes
    held_bytes: Bytes
    unit_bytes: Bytes
    peak_bytes: Bytes
    up_bytes: Bytes
    down_bytes: Bytes
    running_bytes: tuple[Bytes, ...]

    @property
    def arena_bytes(self) -> Bytes:
        """What is kept, and the slots."""
        return Bytes(self.kept_bytes + self.num_slots * self.slot_bytes)


def footprint(actions: Sequence[Action], costs: Costs, *, start: Kept = NOTHING) -> Footprint:
    """The bytes of one device's actions, which must have passed the checks."""
    slots = assign_slots(actions, start=start)
    memory = _Memory.before(actions, costs, start, slots)
    outside = [memory.visit(index, action) for index, action in enumerate(actions)]
    first = next((index for index, action in enumerate(actions) if is_unit(action)), 0)
    left = memory.left(slots.stores_left)
    outside[:first] = [held + left for held in outside[:first]]
    most = max(memory.most, *outside[:first], 0)
    units = [unit_peak_bytes(a, costs[a.trial].shards[a.shard]) for a in actions]
    num_slots = slots.num_slots - slots.num_kept
    arena = memory.kept_bytes + num_slots * memory.slot_bytes
    running = [arena + held + unit for held, unit in zip(outside, units, strict=True)]
    return Footprint(
        kept_bytes=Bytes(memory.kept_bytes),
        num_slots=num_slots,
        slot_bytes=Bytes(memory.slot_bytes),
        held_bytes=Bytes(arena + most),
        unit_bytes=Bytes(max(units, default=0)),
        peak_bytes=Bytes(max(running, default=arena)),
        up_bytes=_moved(actions, costs, Op.LOAD),
        down_bytes=_moved(actions, costs, Op.STORE),
        running_bytes=tuple(map(Bytes, running)),
    )


def _moved(actions: Iterable[Action], costs: Costs, op: Op) -> Bytes:
    chosen = (action for action in actions if action.op is op)
    return Bytes(sum(moved_bytes(a, costs[a.trial].shards[a.shard]) for a in chosen))


@dataclass(slots=True)
class _Memory:
    """What is on the device while the list is walked: in slots, and outside of them."""

    costs: Costs
    has_backward: set[int]  # trials
    onward: set[ShardKey]  # that nothing goes backward through
    batch_ends: set[int]  # indices of the units that are their micro-batch's last
    waits: Sequence[Sequence[int]]  # per action: the STOREs that are complete when it starts
    loaded: dict[ShardKey, set[Part]] = field(default_factory=dict)
    stores: dict[Outside, int] = field(default_factory=dict)  # of what is outside the slots
    kept: dict[ShardKey, set[Part]] = field(default_factory=dict)
    own: set[ShardKey] = field(default_factory=set)  # whose parameters are in no slot
    late: dict[ShardKey, set[Part]] = field(default_factory=dict)  # what is in late slots
    late_bytes: int = 0  # of all late slots, once they are there
    kept_bytes: int = 0
    slot_bytes: int = 0
    outside: dict[Hashable, Bytes] = field(default_factory=dict)
    gone: set[Hashable] = field(default_factory=set)  # of that, what waits on the host
    total: int = 0
    most: int = 0

    @classmethod
    def before(
        cls,
        actions: Sequence[Action],
        costs: Costs,
        start: Kept,
        slots: SlotMap,
    ) -> _Memory:
        backward = {action.trial for action in actions if action.op in (Op.B, Op.I)}
        memory = cls(costs, backward, onward(actions, costs), _batch_ends(actions), slots.waits)
        memory.late_bytes = slots.num_late * _largest_late(actions, costs)
        for key, parts in tenants_before(actions, start).items():
            memory._stay(key, parts)
        return memory

    def visit(self, index: int, action: Action) -> int:
        """Bytes outside the slots: just before the peak of a unit, else after the action."""
        for store in self.waits[index]:
            self._give(("stored", store))
        if action.op in (Op.F, Op.B, Op.I):
            self._take(_batch(action), self.costs[action.trial].batch_bytes)
        before, more = self.total, self._first_gradients(action)
        self._move(index, action)
        if index in self.batch_ends:
            self._give(_batch(action))
        self.most = max(self.most, before, self.total)
        return before + more if is_unit(action) else self.total

    def left(self, stores: Iterable[int]) -> int:
        """After the last action: what these STOREs keep on the device until they are complete."""
        return sum(self.outside.get(("stored", store), 0) for store in stores)

    def _move(self, index: int, action: Action) -> None:
        key = (action.trial, action.shard)
        if (part := lone_part(action)) is not None:
            self._move_lone(index, action, part)
        elif action.op is Op.LOAD:
            self._enter(key, action)
        elif action.op is Op.STORE and Part.GRAD in action.parts:
            self.stores[outside(action)] = index
        elif action.op is Op.DROP:
            self._send_down(action)
            self._leave(key, action.parts)
        elif action.op is Op.STEP and action.place == "device":
            self._leave(key, (Part.GRAD,))
        elif action.op is Op.F:
            self._forward(action)
        elif action.op is Op.B:
            self._backward(action)
        elif action.op is Op.I:
            self._backward_of_inputs(action)
        elif action.op is Op.W:
            self._give(("half", *_of(action, action.shard)))
            self._take_gradient(action)
        elif action.op in (Op.SEND, Op.RECV):
            self._exchange(action)

    def _move_lone(self, index: int, action: Action, part: Part) -> None:
        """What of a boundary, or of what was saved, waits on the host: the rest of it stays."""
        shard = self.costs[action.trial].shards[action.shard]
        key = (str(part), *_of(action, action.shard))
        if action.op is Op.STORE:
            self.stores[outside(action)] = index
        elif action.op is Op.DROP:
            is_boundary = part is Part.BOUNDARY
            freed = self._boundary_freed(action) if is_boundary else self._saved_freed(action)
            self.gone.add(key)
            self._take(("stored", self.stores.pop(outside(action))), freed)
        else:
            self._give(key)
            self.gone.discard(key)
            if part is Part.BOUNDARY:
                self._take_boundary(action, action.shard)
            else:
                self._take(key, shard.saved_bytes or Bytes(0))

    def _boundary_freed(self, action: Action) -> Bytes:
        """Take the boundary to be gone; what that frees."""
        freed = self.costs[action.trial].shards[action.shard].private_bytes
        maker = ("saved", *_of(action, action.shard - 1))
        if maker in self.outside and maker not in self.gone:  # it holds its output
            before = self.costs[action.trial].shards[action.shard - 1]
            freed = Bytes(max(freed - before.saved_output_bytes, 0))
        self._resize(("boundary", *_of(action, action.shard)), -freed)
        return freed

    def _saved_freed(self, action: Action) -> Bytes:
        """Take what was saved to be gone; what that frees. The next shard's input stays there."""
        shard = self.costs[action.trial].shards[action.shard]
        freed, output = shard.movable_bytes or 0, ("boundary", *_of(action, action.shard + 1))
        self._resize(("saved", *_of(action, action.shard)), -freed)
        if output in self.outside and output not in self.gone:
            held = self.outside[output]
            self._give(output)
            self._take_boundary(action, action.shard + 1)
            freed -= self.outside[output] - held
        return Bytes(max(freed, 0))

    def _resize(self, key: Hashable, more: int) -> None:
        size = self.outside[key]
        self._give(key)
        self._take(key, Bytes(max(size + more, 0)))

    def _forward(self, action: Action) -> None:
        shard, counted = self.costs[action.trial].shards[action.shard], 0
        goes_on = (action.trial, action.shard) in self.onward
        if Part.SAVED in action.parts:
            self._take(("saved", *_of(action, action.shard)), shard.saved_bytes or Bytes(0))
            counted = shard.saved_output_bytes
        elif action.trial in self.has_backward and not goes_on:
            self._take(("stash", *_of(action, action.shard)), shard.stash_bytes)
        if action.shard + 1 < len(self.costs[action.trial].shards):
            self._take_boundary(action, action.shard + 1, counted)
        if action.trial not in self.has_backward:
            self._give(("boundary", *_of(action, action.shard)))
        elif goes_on and action.shard:  # what later shards read of it stays
            self._resize(("boundary", *_of(action, action.shard)), -shard.private_bytes)

    def _backward(self, action: Action) -> None:
        self._give(("saved", *_of(action, action.shard)))
        self._hand_back(action)
        self._take_gradient(action)

    def _backward_of_inputs(self, action: Action) -> None:
        """What its second half reads stays, also of a forward that was run again."""
        self._give(("saved", *_of(action, action.shard)))
        self._take(("half", *_of(action, action.shard)), self._left(action))
        self._hand_back(action)

    def _first_gradients(self, action: Action) -> int:
        """How much more half a backward needs while its parameters have no gradients yet.

        Those of one that could not be cut in two are made by its first half.
        """
        shard = self.costs[action.trial].shards[action.shard]
        halves, has = shard.halves, ("grad", action.trial, action.shard) in self.outside
        if halves is None or has or action.op not in (Op.I, Op.W):
            return 0
        if action.op is Op.W:
            return halves.making_peak_bytes - halves.second_peak_bytes
        return 0 if halves.making_peak_bytes else shard.gradient_bytes

    def _left(self, action: Action) -> Bytes:
        """What an I leaves for its W, with the messages that any of it came in."""
        costs = self.costs[action.trial]
        shard = costs.shards[action.shard]
        halves, left = shard.halves, shard.saved_bytes or 0
        if halves is not None:
            left = halves.left_bytes
            if halves.keeps_boundary:
                left += shard.boundary_bytes + costs.batch_bytes
            if halves.keeps_carry and action.shard + 1 < len(costs.shards):
                left += costs.shards[action.shard + 1].carry_bytes
        return Bytes(left)

    def _hand_back(self, action: Action) -> None:
        self._give(("boundary", *_of(action, action.shard)))
        self._give(("stash", *_of(action, action.shard)))
        self._give(("carry", *_of(action, action.shard + 1)))
        if (action.trial, action.shard - 1) in self.onward:
            for shard in range(1, action.shard):
                self._give(("boundary", *_of(action, shard)))
        elif action.shard:
            self._take_carry(action, action.shard)

    def _take_gradient(self, action: Action) -> None:
        key = (action.trial, action.shard)
        if Part.GRAD not in self.loaded.get(key, ()):
            gradient = self.costs[action.trial].shards[action.shard].gradient_bytes
            self._take(("grad", *key), gradient)

    def _exchange(self, action: Action) -> None:
        if message_kind(action) > 1:
            return
        is_carry = Part.GRAD in action.parts
        if action.op is Op.SEND:
            self._give(("carry" if is_carry else "boundary", *_of(action, action.shard)))
        elif is_carry:
            self._take_carry(action, action.shard)
        else:
            self._take_boundary(action, action.shard)

    def _take_boundary(self, action: Action, shard: int, counted: int = 0) -> None:
        size = self.costs[action.trial].shards[shard].boundary_bytes
        self._take(("boundary", *_of(action, shard)), Bytes(max(size - counted, 0)))

    def _take_carry(self, action: Action, shard: int) -> None:
        size = self.costs[action.trial].shards[shard].carry_bytes
        self._take(("carry", *_of(action, shard)), size)

    def _stay(self, key: ShardKey, parts: Collection[Part]) -> None:
        """What is there from the beginning; gradients are never in a slot of their shard."""
        shard = self.costs[key[0]].shards[key[1]]
        self.kept[key] = set(parts) - {Part.GRAD}
        self.loaded[key] = set(self.kept[key])
        self.kept_bytes += sum(part_bytes(shard, part) for part in self.kept[key])
        if Part.GRAD in parts:
            self._take(("grad", *key), shard.gradient_bytes)

    def _enter(self, key: ShardKey, action: Action) -> None:
        inside = self.loaded.setdefault(key, set())
        inside |= set(action.parts)
        shard = self.costs[key[0]].shards[key[1]]
        if action.own:
            self.own.add(key)
            self._take(("own", *key), shard.parameter_bytes)
        if action.late:
            self.late.setdefault(key, set()).update(action.parts)
            self._take("late", Bytes(self.late_bytes))
        slotted = inside - self.kept.get(key, set()) - self.late.get(key, set())
        if key in self.own:
            slotted -= {Part.PARAM}
        self.slot_bytes = max(self.slot_bytes, sum(part_bytes(shard, p) for p in slotted))

    def _leave(self, key: ShardKey, parts: Iterable[Part]) -> None:
        inside = self.loaded.get(key, set())
        if Part.GRAD in parts and Part.GRAD not in inside:
            self._give(("grad", *key))
        if Part.PARAM in parts and key in self.own:
            self.own.remove(key)
            self._give(("own", *key))
        inside -= set(parts)
        self.late.get(key, set()).difference_update(parts)

    def _send_down(self, action: Action) -> None:
        """Dropped gradients outside the slots stay until somebody waits for their STORE."""
        size = self.outside.get(("grad", action.trial, action.shard))
        if Part.GRAD in action.parts and size is not None and outside(action) in self.stores:
            self._take(("stored", self.stores.pop(outside(action))), size)

    def _take(self, key: Hashable, size: Bytes) -> None:
        if key not in self.outside:
            self.outside[key] = size
            self.total += size

    def _give(self, key: Hashable) -> None:
        self.total -= self.outside.pop(key, 0)
        self.gone.discard(key)


def _largest_late(actions: Iterable[Action], costs: Costs) -> int:
    """The largest content of a late slot."""
    late = [action for action in actions if action.late]
    return max((moved_bytes(a, costs[a.trial].shards[a.shard]) for a in late), default=0)


def _of(action: Action, shard: int) -> tuple[int, int, int | None, int]:
    return (action.trial, shard, action.micro, action.version)


def _batch(action: Action) -> Hashable:
    return ("batch", action.trial, action.micro, action.version)


def _batch_ends(actions: Sequence[Action]) -> set[int]:
    units = (Op.F, Op.B, Op.I)
    last = {_batch(a): index for index, a in enumerate(actions) if a.op in units}
    return set(last.values())
