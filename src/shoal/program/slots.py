"""Which slot of the device's arena every action uses, decided before the first one runs.

[Note: slots]
A slot holds what was loaded of one (trial, shard), from the LOAD that takes it to the
DROP that leaves none of it loaded. A second LOAD of the same shard joins its slot.
Gradients that a B makes without a LOAD of ``grad`` live outside the slots, and so do boundaries,
what forwards saved, and parameters that a LOAD brings into memory of their own. What stays on the
device between programs has a place of its own, numbered before the slots; of a shard whose
parameters alone stay, the state takes a slot as any other shard does. Late slots, for LOADs that
say so, are numbered by themselves: memory that is there from the first of these LOADs to the
end of the program, while activations are not.

    LOAD s0 param        slot 0 -------------+
    LOAD s1 param        slot 1 ----------+  |
    F s0 m0              reads slot 0     |  |
    DROP s0 param                         |  +-- slot 0 is free in list order
    LOAD s2 param        slot 0: waits until F s0 m0 is complete
    F s1 m0              reads slot 1 ----+

A DROP takes no time and is not waited for; what frees the memory is that the units and
STOREs before it are complete. ``waits`` says so, twice:

- a LOAD waits for the actions of the slot's previous tenant;
- a unit waits for the STOREs of what is outside the slots and was dropped
  before the unit before it. So only what was dropped after the last unit is still on its way
  down while a unit runs; the footprint counts it until a unit waits for it. Of what is dropped
  ``now`` nothing is: the next unit waits.

A program that follows another finds the slots as that one left them: its first LOAD into a
slot waits for the slot's ``tails``, its first unit for ``stores_left``, those of late slots among
them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from shoal.program.ir import Action, Kept, Op, Part, lone_part

ShardKey = tuple[int, int]
"""(trial, shard)."""

Outside = tuple[Part, int, int, int | None]
"""Part, trial, shard and, where it is of one, micro-batch of what lives outside the slots."""


def outside(action: Action) -> Outside:
    """What of one micro-batch a LOAD, STORE or DROP moves, or else the shard's gradients."""
    if (part := lone_part(action)) is not None:
        return (part, action.trial, action.shard, action.micro)
    return (Part.GRAD, action.trial, action.shard, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMap:
    """The slots of one device's actions. All indices are positions in the action list."""

    num_slots: int
    num_kept: int  # the first of them: those of the shards that are here before the first action
    num_late: int  # beside them
    slots: tuple[int | None, ...]  # per action; of a late LOAD the late slot
    waits: tuple[tuple[int, ...], ...]  # per action: what must be complete before it starts
    is_first: tuple[bool, ...]  # per action: a LOAD into a slot nobody used before in this list
    tails: tuple[tuple[int, ...], ...]  # per slot: what its last tenant leaves to wait for
    stores_left: tuple[int, ...]  # of what was dropped and no unit here waits for


NOTHING: Kept = {}


def assign_slots(actions: Sequence[Action], *, start: Kept = NOTHING) -> SlotMap:
    """The lowest free slot for every LOAD of a shard that has none.

    ``start`` is what every trial named here has on the device before the first action; its
    shards have the first slots, in order of trial and shard.
    """
    book = _Book(waits=[()] * len(actions), is_first=[False] * len(actions))
    here = tenants_before(actions, start)
    for key, parts in here.items():
        book.stay(key, set(parts) - {Part.GRAD})
    slots = tuple(book.visit(index, action) for index, action in enumerate(actions))
    return SlotMap(
        num_slots=len(book.slots.tails),
        num_kept=len(here),
        num_late=len(book.late.tails),
        slots=slots,
        waits=tuple(book.waits),
        is_first=tuple(book.is_first),
        tails=tuple(map(tuple, book.slots.tails)),
        stores_left=tuple(book.stores_left(actions)),
    )


def tenants_before(actions: Sequence[Action], start: Kept) -> Mapping[ShardKey, Collection[Part]]:
    """What is on the device before the first action, of every trial that computes there."""
    there = (action for action in actions if action.op not in (Op.SEND, Op.RECV))
    trials = sorted({action.trial for action in there}) if start else ()
    return {(trial, shard): start[shard] for trial in trials for shard in sorted(start)}


def is_unit(action: Action) -> bool:
    """Does this action compute on the device with a shard's parts?"""
    on_device = action.op is Op.STEP and action.place == "device"
    return on_device or action.op in (Op.F, Op.B, Op.I, Op.W)


@dataclass(slots=True)
class _Tenant:
    """What was loaded of one shard, and the actions that use its slot."""

    slot: int
    parts: set[Part]
    loads: list[int] = field(default_factory=list)  # that no unit has waited for yet
    users: list[int] = field(default_factory=list)  # units and STOREs


@dataclass(slots=True)
class _Slots:
    """Slots of one kind, and who is in them."""

    tails: list[list[int]] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    tenants: dict[ShardKey, _Tenant] = field(default_factory=dict)

    def enter(self, key: ShardKey) -> _Tenant:
        slot = heappop(self.free) if self.free else len(self.tails)
        if slot == len(self.tails):
            self.tails.append([])
        self.tenants[key] = _Tenant(slot, set())
        return self.tenants[key]

    def leave(self, key: ShardKey) -> None:
        heappush(self.free, self.tenants.pop(key).slot)


@dataclass(slots=True)
class _Book:
    """The slots while the list is walked."""

    waits: list[tuple[int, ...]]
    is_first: list[bool]
    slots: _Slots = field(default_factory=_Slots)
    late: _Slots = field(default_factory=_Slots)
    kept: dict[ShardKey, _Tenant] = field(default_factory=dict)  # here from the beginning
    stores: dict[Outside, int] = field(default_factory=dict)  # of what is outside the slots
    dropped: dict[int, list[int]] = field(default_factory=dict)  # per trial, since its last unit
    overdue: dict[int, list[int]] = field(default_factory=dict)  # per trial, before that

    def stay(self, key: ShardKey, parts: Collection[Part]) -> None:
        self.kept[key] = _Tenant(len(self.slots.tails), set(parts))
        self.slots.tails.append([])

    def stores_left(self, actions: Sequence[Action]) -> list[int]:
        late = [[i for i in tail if actions[i].op is Op.STORE] for tail in self.late.tails]
        unmet = [*self.overdue.values(), *self.dropped.values(), *late]
        return sorted(index for indices in unmet for index in indices)

    def _tenants(self, key: ShardKey) -> list[tuple[_Slots, _Tenant]]:
        """All that was loaded of a shard and is in slots; what stays is in the first of them."""
        kept = [(self.slots, self.kept[key])] if key in self.kept else []
        loaded = [
            (kind, kind.tenants[key]) for kind in (self.slots, self.late) if key in kind.tenants
        ]
        return kept + loaded

    def visit(self, index: int, action: Action) -> int | None:
        if lone_part(action) is not None:
            self._outside(index, action)
            return None
        if action.op is Op.LOAD:
            return None if action.own else self._load(index, action)
        if is_unit(action):
            return self._unit(index, action)
        if action.op in (Op.STORE, Op.DROP):
            return self._store_or_drop(index, action)
        return None

    def _load(self, index: int, action: Action) -> int:
        key, kind = (action.trial, action.shard), self.late if action.late else self.slots
        tenant = kind.tenants.get(key)
        if tenant is None:
            known = len(kind.tails)
            tenant = kind.enter(key)
            self.is_first[index] = tenant.slot == known
            self.waits[index] = tuple(kind.tails[tenant.slot])
        tenant.parts |= set(action.parts)
        tenant.loads.append(index)
        return tenant.slot

    def _unit(self, index: int, action: Action) -> int | None:
        self.waits[index] = tuple(self.overdue.get(action.trial, ()))
        self.overdue[action.trial] = self.dropped.pop(action.trial, [])
        key, slot = (action.trial, action.shard), None
        for kind, tenant in self._tenants(key):
            tenant.loads.clear()
            tenant.users.append(index)
            slot = tenant.slot if kind is self.slots else slot
            if action.op is Op.STEP:
                self._leave(kind, key, tenant, {Part.GRAD})
        return slot

    def _store_or_drop(self, index: int, action: Action) -> int | None:
        key, slot = (action.trial, action.shard), None
        tenants = self._tenants(key)
        if Part.GRAD in action.parts and not any(Part.GRAD in t.parts for _, t in tenants):
            self._outside(index, action)
        for kind, tenant in tenants:
            inside = tenant.parts & set(action.parts)
            if not inside:
                continue
            slot = tenant.slot if kind is self.slots else slot
            if action.op is Op.STORE:
                tenant.users.append(index)
            else:
                self._leave(kind, key, tenant, inside)
        return slot

    def _outside(self, index: int, action: Action) -> None:
        if action.op is Op.STORE:
            self.stores[outside(action)] = index
        elif action.op is Op.DROP and outside(action) in self.stores:
            store = self.stores.pop(outside(action))
            book = self.overdue if action.now else self.dropped
            book.setdefault(action.trial, []).append(store)

    def _leave(self, kind: _Slots, key: ShardKey, tenant: _Tenant, parts: set[Part]) -> None:
        tenant.parts -= parts
        if tenant.parts:
            return
        kind.tails[tenant.slot] = tenant.users + tenant.loads
        if self.kept.get(key) is tenant:
            del self.kept[key]
        else:
            kind.leave(key)
