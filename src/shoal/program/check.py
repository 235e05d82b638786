"""The proof that a program may run, and the exact bytes it needs.

``check`` walks the devices' lists in issue order, as far as each one gets, and holds
every action to the rules of [Note: programs]. A SEND is in flight once it is issued; a
RECV waits for its SEND. Devices that all wait are a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.errors import ProgramError
from shoal.program.costs import Costs, JobCosts
from shoal.program.footprint import Footprint, footprint
from shoal.program.ir import Action, Kept, Op, Part, Program
from shoal.program.rules import NAMES, apply, complaints
from shoal.program.slots import NOTHING
from shoal.program.world import World, sent

__all__ = ["Costs", "Footprint", "JobCosts", "check", "check_devices"]

CONTEXT = 3
"""Actions shown before and after the one that breaks a rule."""


def check(
    program: Program,
    costs: Costs,
    *,
    start: Kept | tuple[Kept, ...] = NOTHING,
    end: Kept | tuple[Kept, ...] = NOTHING,
) -> Footprint:
    """Prove that a program of one step is sound; what the device that needs most of it needs.

    ``start`` and ``end`` are the shards' parts that are on the device before and after (of
    every trial that a device's list names): those of a resident model, and of kept shards.
    A tuple has one for each device.

    Raises:
        ProgramError: a rule is broken; shows the action, the rule and the way out.
    """
    devices = check_devices(program, costs, start=start, end=end)
    return max(devices, key=lambda device: device.peak_bytes)


def check_devices(
    program: Program,
    costs: Costs,
    *,
    start: Kept | tuple[Kept, ...] = NOTHING,
    end: Kept | tuple[Kept, ...] = NOTHING,
    versions: int = 1,
    groups: tuple[int, ...] = (),
    begun: int = 0,
) -> tuple[Footprint, ...]:
    """As ``check``, of several steps too, with the footprint of every device.

    ``versions`` is how many of the newest weight versions the runtime keeps. ``groups`` is how
    many micro-batches each step takes, see [Note: several steps]; () for one step. ``begun`` is
    the newest version at the start.
    """
    starts, ends = (_per_device(program, kept) for kept in (start, end))
    world = World.of(program, costs, starts, versions, (0,) * begun + groups, begun)
    _walk(program, world)
    _expect_tidy_end(program, world, ends)
    return tuple(
        footprint(actions, costs, start=here)
        for actions, here in zip(program.devices, starts, strict=True)
    )


def _per_device(program: Program, kept: Kept | tuple[Kept, ...]) -> tuple[Kept, ...]:
    return kept if isinstance(kept, tuple) else (kept,) * len(program.devices)


def _walk(program: Program, world: World) -> None:
    heads = [0] * len(program.devices)
    moved = True
    while moved:
        before = tuple(heads)
        for device in range(len(heads)):
            _advance(program, world, device, heads)
        moved = before != tuple(heads)
    if any(head < len(program.devices[d]) for d, head in enumerate(heads)):
        raise _deadlock(program, heads)


def _advance(program: Program, world: World, device: int, heads: list[int]) -> None:
    """Issue a device's actions until one has to wait."""
    actions = program.devices[device]
    while heads[device] < len(actions):
        action = actions[heads[device]]
        for complaint in complaints(world, device, action):
            raise broken(program, device, heads[device], complaint)
        if world.must_wait(device, action):
            return
        apply(world, device, action)
        heads[device] += 1


def _expect_tidy_end(program: Program, world: World, ends: tuple[Kept, ...]) -> None:
    for device, index, complaint in _leftovers(program, world, ends):
        raise broken(program, device, index, complaint)


def _leftovers(
    program: Program, world: World, ends: tuple[Kept, ...]
) -> Iterator[tuple[int, int, str]]:
    """What a program must not leave behind: device, action and complaint."""
    for (device, made), maker in world.tensors.items():
        forward = made.trial not in world.has_backward or made[1:3] in world.onward
        user = "F" if made.kind == "boundary" and forward else "B"
        unit = f"{user} s{made.shard - (made.kind == 'carry')} m{made.micro}"
        unit += " saved" * (made.kind == "saved")
        index = program.devices[device].index(maker)
        yield device, index, f"{made} is never used. Add {unit}."
    for moved, store in world.away.items():
        device = _device_of(program, moved.trial, moved.shard)
        complaint = f"{moved} waits on the host and is never used. LOAD it before its B."
        yield device, program.devices[device].index(store), complaint
    for device, half in world.halves.values():
        complaint = "the gradients of its parameters are never computed. Add its W."
        yield device, program.devices[device].index(half), complaint
    for (source, target, _), queue in world.messages.items():
        for message in queue:
            complaint = f"{message} is sent to device {target}, which never receives it."
            index = _last_mention(program, source, message.trial, message.shard)
            yield source, index, f"{complaint} Add its RECV."
    for (device, trial, shard), copy in world.copies.items():
        for complaint in _residues(shard, copy.present, set(ends[device].get(shard, ()))):
            yield device, _last_mention(program, device, trial, shard), complaint
    for (trial, shard), home in world.homes.items():
        if home.has_gradients:
            device = _device_of(program, trial, shard)
            complaint = f"the gradients of s{shard} on the host are never used. Add its STEP."
            yield device, _last_mention(program, device, trial, shard), complaint


def _residues(shard: int, present: set[Part], expected: set[Part]) -> Iterator[str]:
    for part in sorted(present - expected):
        way_out = "Add the STEP that uses them" if part is Part.GRAD else "DROP them"
        yield f"the {NAMES[part]} of s{shard} are still on the device at the end. {way_out}."
    for part in sorted(expected - present):
        yield f"the {NAMES[part]} of s{shard} must be on the device at the end. Keep them there."


def _mentions(action: Action, trial: int, shard: int) -> bool:
    return action.trial == trial and action.shard == shard and action.op is not Op.SYNC


def _device_of(program: Program, trial: int, shard: int) -> int:
    for device, actions in enumerate(program.devices):
        if any(_mentions(action, trial, shard) for action in actions):
            return device
    return 0


def _last_mention(program: Program, device: int, trial: int, shard: int) -> int:
    actions = program.devices[device]
    named = [i for i, action in enumerate(actions) if _mentions(action, trial, shard)]
    return named[-1] if named else len(actions) - 1


def _deadlock(program: Program, heads: list[int]) -> ProgramError:
    """Every device that is not done waits at a RECV."""
    blocked = [d for d, head in enumerate(heads) if head < len(program.devices[d])]
    lines = []
    for device in blocked:
        action = program.devices[device][heads[device]]
        lines.append(f"device {device} waits at {action!s} for device {action.peer}")
        if not _is_sent_later(program, heads, device, action):
            complaint = (
                f"device {action.peer} never sends {sent(action)} here. Add its SEND, or remove "
                "the RECV."
            )
            return broken(program, device, heads[device], complaint)
    cycle = "; ".join(lines)
    complaint = f"deadlock: {cycle}. Put a SEND before the RECV on one of them."
    return broken(program, blocked[0], heads[blocked[0]], complaint)


def _is_sent_later(program: Program, heads: list[int], device: int, action: Action) -> bool:
    peer = action.peer or 0
    return any(
        other.op is Op.SEND and other.peer == device and sent(other) == sent(action)
        for other in program.devices[peer][heads[peer] :]
    )


def broken(program: Program, device: int, index: int, complaint: str) -> ProgramError:
    """The error: the action, the rule with the way out, and the program around it."""
    actions = program.devices[device]
    where = f"device {device}, action {index + 1} of {len(actions)}"
    return ProgramError(
        f"the program cannot run: at {actions[index]!s}, {complaint}\n"
        f"{where}:\n{excerpt(actions, index)}"
    )


def excerpt(actions: tuple[Action, ...], index: int) -> str:
    """The actions around ``index``, one a line, with an arrow on it."""
    first, stop = max(index - CONTEXT, 0), min(index + CONTEXT + 1, len(actions))
    lines = ["  ..."] if first else []
    for at in range(first, stop):
        lines.append(f"  {actions[at]!s}" + (" <-- here" if at == index else ""))
    return "\n".join(lines + (["  ..."] if stop < len(actions) else []))
