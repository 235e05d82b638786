"""A program as its seat plays it: made once for all the times that it runs."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.profile import Profile
from shoal.core.spec import ShardSpec
from shoal.device.flops import host_step_bytes, step_bytes
from shoal.program.costs import unit_seconds
from shoal.program.ir import Action, Kept, Op, Program
from shoal.program.slots import SlotMap, assign_slots

COMPUTE = (Op.F, Op.B, Op.SYNC)


@dataclass(frozen=True, slots=True)
class Score:
    """A program with all that is the same each time it runs."""

    program: Program  # kept, so that its identity stays its own
    actions: tuple[Action, ...]
    texts: tuple[str, ...]
    computes: tuple[bool, ...]  # per action: does it need the device's compute stream?
    slots: SlotMap
    waits: bool  # whether an action may have to wait for one that is not just before it


def score_of(program: Program, start: Kept) -> Score:
    """``start``: what of the trial is on the device before the first action."""
    actions = program.devices[0]
    computes = tuple(a.op in COMPUTE or (a.op is Op.STEP and a.place == "device") for a in actions)
    slots = assign_slots(actions, start=start)
    waits = any(slots.waits) or any(action.op is Op.LOAD for action in actions)
    return Score(program, actions, tuple(map(str, actions)), computes, slots, waits)


def emulated_seconds(action: Action, shard: ShardSpec, profile: Profile | None) -> float | None:
    """How long an action of a shard takes on an emulated device; None: as long as it does."""
    if profile is None:
        return None
    if action.op is Op.STEP:
        if action.place == "host":
            return profile.host_seconds(host_step_bytes(shard))
        return profile.memory_seconds(step_bytes(shard))
    return unit_seconds(action, shard) if action.op in (Op.F, Op.B, Op.I, Op.W) else None


def is_sampled(step: int) -> bool:
    """Whether every allocation of the step after this one is counted: 100, 1000, 10000, ...

    Counting makes a step several times slower. The first steps of a lease and batches larger
    than any before are counted too.
    """
    while step >= 1000 and step % 10 == 0:
        step //= 10
    return step == 100
