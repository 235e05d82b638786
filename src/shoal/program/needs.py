"""What must be complete before each action of a device's list may start.

The middle column of the table in [Note: programs], as indices into the list. DROP, and
the order of a stream within itself, need no entry; the one exception is that a
unit needs the unit before it, so that a candidate for the device is ready when it could
really start. A RECV also needs its SEND, which is in another device's list: see
``matching_sends``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.program.ir import Action, Op, Part, Program, lone_part
from shoal.program.slots import SlotMap, is_unit

COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W, Op.STEP, Op.SYNC})
TOLD = (Part.NORM, Part.PARAM, Part.RNG, Part.SUM)
"""What a message may tell of, beside boundaries and gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Indices that one action waits for: in this run of the list, and in the run before."""

    now: tuple[int, ...]
    before: tuple[int, ...]


def computes(action: Action) -> bool:
    """Does this action run on the device's compute stream?"""
    return action.op in COMPUTE and action.place == "device"


def find_needs(actions: Sequence[Action], slots: SlotMap) -> tuple[Needs, ...]:
    """The needs of every action of one device's list.

    The list is walked twice: what the first walk leaves is what a second run of the
    program finds, so the second walk knows both columns.
    """
    size = len(actions)
    writers = _Writers()
    for index, action in enumerate(actions):
        writers.visit(index - size, action)
    needs, is_first_unit = [], True
    for index, action in enumerate(actions):
        found = writers.needed_by(action) | set(slots.waits[index])
        slot = slots.slots[index]
        if slots.is_first[index] and slot is not None and not action.late:
            found |= {tail - size for tail in slots.tails[slot]}
        if is_first_unit and is_unit(action):
            found |= {store - size for store in slots.stores_left}
            is_first_unit = False
        needs.append(_split(found, size))
        writers.visit(index, action)
    return tuple(needs)


def _split(found: set[int], size: int) -> Needs:
    return Needs(
        now=tuple(sorted(index for index in found if index >= 0)),
        before=tuple(sorted(index + size for index in found if index < 0)),
    )


def matching_sends(program: Program) -> dict[tuple[int, int], tuple[int, int]]:
    """(device, index) of every RECV, and that of its SEND: the same place in the same queue."""
    sends: dict[tuple[int | None, ...], list[tuple[int, int]]] = {}
    receives: dict[tuple[int | None, ...], list[tuple[int, int]]] = {}
    channel: tuple[int | None, ...]
    for device, actions in enumerate(program.devices):
        for index, action in enumerate(actions):
            if action.op is Op.SEND:
                channel = (device, action.peer, message_kind(action))
                sends.setdefault(channel, []).append((device, index))
            elif action.op is Op.RECV:
                channel = (action.peer, device, message_kind(action))
                receives.setdefault(channel, []).append((device, index))
    return {
        receive: send
        for channel, queue in receives.items()
        for receive, send in zip(queue, sends.get(channel, ()), strict=False)
    }


def message_kind(action: Action) -> int:
    """Which of the kinds a SEND or RECV moves: each has an order of its own."""
    parts = (Part.GRAD, *TOLD)
    return next((kind for kind, part in enumerate(parts, 1) if part in action.parts), 0)


_Name = tuple[object, ...]


@dataclass(slots=True)
class _Writers:
    """The last action that made each thing others wait for; negative in the run before."""

    last: dict[_Name, int] = field(default_factory=dict)

    def needed_by(self, action: Action) -> set[int]:
        found = (self.last.get(name) for name in _reads(action))
        return {index for index in found if index is not None}

    def visit(self, index: int, action: Action) -> None:
        for name in _writes(action):
            self.last[name] = index


def _reads(action: Action) -> list[_Name]:
    trial, shard = action.trial, action.shard
    if action.op is Op.DROP:
        return []
    if (part := lone_part(action)) is not None:
        if action.op is Op.STORE:
            return [_lone(action, part)]
        return [_away(action, part), ("compute", trial)]  # whose memory it may be given
    if action.op is Op.LOAD:
        home: list[_Name] = [("home", trial, shard, part) for part in action.parts]
        if Part.PARAM in action.parts:  # what it borrows may be stepped elsewhere
            home.append(("told", trial, Part.PARAM))
        is_new = action.own or action.late  # memory that a unit may have had
        return [*home, ("compute", trial)] if is_new else home
    if action.op is Op.STORE:
        return [("device", trial, shard, part) for part in action.parts]
    if computes(action):
        loads: list[_Name] = [("device", trial, shard, part) for part in Part]
        return [
            ("compute", trial),
            *_received(action),
            *(("told", trial, part) for part in TOLD),
            *([("summed", shard)] if action.op in (Op.STEP, Op.SYNC) else ()),
            *(loads if action.op is not Op.SYNC else ()),
        ]
    if action.op is Op.STEP:
        factor: list[_Name] = [("norm", trial), ("told", trial, Part.NORM)]
        return [("home", trial, shard, part) for part in Part] + factor
    if action.op is Op.SEND:
        if Part.NORM in action.parts:
            return [("compute", trial), ("summed", shard)]
        if Part.PARAM in action.parts:  # of spilled stages the host's copies are what is lent
            return [("compute", trial), ("stored", trial), ("stepped", trial)]
        return [("compute", trial)] if message_kind(action) > 1 else [_made(action)]
    return []


def _writes(action: Action) -> list[_Name]:
    trial, shard = action.trial, action.shard
    if (part := lone_part(action)) is not None and action.op is not Op.DROP:
        return [_lone(action, part) if action.op is Op.LOAD else _away(action, part)]
    if action.op is Op.LOAD:
        return [("device", trial, shard, part) for part in action.parts]
    if action.op is Op.STORE:
        written: list[_Name] = [("home", trial, shard, part) for part in action.parts]
        return [*written, ("stored", trial)] if Part.PARAM in action.parts else written
    if action.op is Op.SYNC:
        return [("compute", trial), ("norm", trial)]
    if action.op is Op.F:
        left: list[_Name] = [("compute", trial), ("boundary", trial, shard + 1, action.micro)]
        return [*left, _lone(action, Part.SAVED)] if Part.SAVED in action.parts else left
    if action.op in (Op.B, Op.I, Op.W):
        made: list[_Name] = [("compute", trial)]
        if action.op is not Op.I:
            made.append(("device", trial, shard, Part.GRAD))
        return made if action.op is Op.W else [*made, ("carry", trial, shard, action.micro)]
    if action.op is Op.STEP:
        place = "device" if action.place == "device" else "home"
        changed: list[_Name] = [(place, trial, shard, part) for part in Part]
        return [*changed, ("compute", trial) if place == "device" else ("stepped", trial)]
    if action.op is Op.RECV and Part.SUM in action.parts:
        return [("summed", shard)]  # whichever copy they are of
    if action.op is Op.RECV:
        told: list[_Name] = [("told", trial, part) for part in TOLD if part in action.parts]
        return told or [_made(action)]
    return []


def _lone(action: Action, part: Part) -> _Name:
    """What of one micro-batch is moved by itself, on the device."""
    return (str(part), action.trial, action.shard, action.micro)


def _away(action: Action, part: Part) -> _Name:
    """The same where it waits on the host."""
    return ("away", part, action.trial, action.shard, action.micro)


def _received(action: Action) -> list[_Name]:
    """What an F or B may have to receive from another device, or to load."""
    boundary = ("boundary", action.trial, action.shard, action.micro)
    if action.op is Op.F:
        return [boundary]
    carry = ("carry", action.trial, action.shard + 1, action.micro)
    saved = _lone(action, Part.SAVED)
    return [boundary, carry, saved] if action.op in (Op.B, Op.I) else []


def _made(action: Action) -> _Name:
    kind = "carry" if Part.GRAD in action.parts else "boundary"
    return (kind, action.trial, action.shard, action.micro)
