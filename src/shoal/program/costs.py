"""What the actions of a program cost: bytes moved, bytes needed, seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from shoal.core.spec import NO_BYTES, NO_SECONDS, Halves, ShardSpec
from shoal.core.units import Bytes, Seconds
from shoal.program.ir import Action, Op, Part

Durations = Callable[[Action], Seconds | None]
"""Seconds of an action where they are known better than the costs say; None where not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCosts:
    """Exact bytes of one trial's shards and batch, and how fast its links are.

    The seconds of F, B and STEP, also of STEP@host, are in the shards. Links:
    ``up`` host to device, ``down`` device to host. What messages to other devices take is known
    to ``Durations`` alone.
    """

    shards: tuple[ShardSpec, ...]
    batch_bytes: Bytes = NO_BYTES
    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf


Costs = Mapping[int, JobCosts]
"""The costs of every trial that a program names."""


def part_bytes(shard: ShardSpec, part: Part) -> Bytes:
    """What a part of a shard takes on the device; borrowed parameters included."""
    if part is Part.PARAM:
        return Bytes(shard.parameter_bytes - _head_bytes(shard, part))
    if part is Part.STATE:
        return Bytes(shard.state_bytes - _head_bytes(shard, part))
    if part is Part.BOUNDARY:
        return shard.private_bytes
    if part is Part.SAVED:
        return shard.movable_bytes or NO_BYTES
    return shard.head_bytes if part is Part.HEAD else shard.gradient_bytes


def _head_bytes(shard: ShardSpec, part: Part) -> int:
    """What of a part does not travel."""
    return shard.head_bytes if shard.head_of_state == (part is Part.STATE) else 0


def moved_bytes(action: Action, shard: ShardSpec) -> Bytes:
    """Bytes over the link for a LOAD, STORE, SEND or RECV; 0 for other actions.

    A STORE of parameters writes back the owned ones only: borrowed ones are written
    by the shard that owns them.
    """
    if action.op is Op.LOAD:
        return Bytes(sum(part_bytes(shard, part) for part in action.parts))
    if action.op is Op.STORE:
        return Bytes(sum(_stored_bytes(shard, part) for part in action.parts))
    if action.op in (Op.SEND, Op.RECV):
        return _sent_bytes(action, shard)
    return Bytes(0)


def _sent_bytes(action: Action, shard: ShardSpec) -> Bytes:
    """Norms and random states are small, and count as nothing."""
    if Part.PARAM in action.parts:
        return Bytes(shard.parameter_bytes - shard.owned_bytes)
    if Part.SUM in action.parts:
        return shard.gradient_bytes
    if Part.NORM in action.parts or Part.RNG in action.parts:
        return Bytes(0)
    return shard.carry_bytes if Part.GRAD in action.parts else shard.boundary_bytes


def _stored_bytes(shard: ShardSpec, part: Part) -> Bytes:
    if part is Part.PARAM:
        return Bytes(shard.owned_bytes - _head_bytes(shard, part))
    return part_bytes(shard, part)


def unit_peak_bytes(action: Action, shard: ShardSpec) -> Bytes:
    """What runs inside a unit on the device, its outputs included; 0 for other actions."""
    saved = shard.saved_bytes or 0 if Part.SAVED in action.parts else 0
    if action.op in (Op.I, Op.W) and shard.halves is not None:
        return _half_peak_bytes(action, shard, shard.halves)
    if action.op is Op.F:
        return shard.saving_peak_bytes if Part.SAVED in action.parts else shard.forward_peak_bytes
    if action.op in (Op.B, Op.I, Op.W):
        return Bytes(shard.backward_peak_bytes - saved)
    if action.op is Op.STEP and action.place == "device":
        return shard.step_peak_bytes
    return Bytes(0)


def _half_peak_bytes(action: Action, shard: ShardSpec, halves: Halves) -> Bytes:
    """Inside half a backward; the first may run its forward again, or find what that saved."""
    if action.op is Op.W:
        return halves.second_peak_bytes
    if Part.SAVED in action.parts:
        return Bytes(max(halves.first_peak_bytes - (shard.saved_bytes or 0), 0))
    return Bytes(max(halves.first_peak_bytes, shard.saving_peak_bytes))


def unit_seconds(action: Action, shard: ShardSpec) -> Seconds:
    """How long an F, B, I or W computes; a B whose forward was saved does not run it again.

    Of a backward I and W take half each where that was not measured, nor known (``Durations``).
    """
    if action.op is Op.F:
        return shard.forward_s
    again = shard.forward_s if Part.SAVED in action.parts else 0.0
    if action.op is Op.B:
        return Seconds(max(shard.backward_s - again, 0.0))
    if shard.halves is not None:
        first_s = max(shard.halves.first_s - again, 0.0)
        return Seconds(first_s) if action.op is Op.I else shard.halves.second_s
    half = max(shard.backward_s - shard.forward_s, 0.0) / 2
    return Seconds(half + shard.forward_s - again if action.op is Op.I else half)


def action_seconds(action: Action, costs: JobCosts) -> Seconds:
    """How long an action takes once it has started; others than these take none."""
    shard = costs.shards[action.shard]
    if action.op in (Op.F, Op.B, Op.I, Op.W):
        return unit_seconds(action, shard)
    if action.op is Op.STEP:
        return shard.step_s
    speeds = {Op.LOAD: costs.up_bytes_per_s, Op.STORE: costs.down_bytes_per_s}
    if action.op in speeds:
        return Seconds(moved_bytes(action, shard) / speeds[action.op])
    return NO_SECONDS


def onward(actions: Iterable[Action], costs: Costs) -> set[tuple[int, int]]:
    """Trials and their frozen shards that go forward only, where the trial goes backward."""
    forward, backward = set[tuple[int, int]](), set[tuple[int, int]]()
    for action in actions:
        if action.op is Op.F:
            forward.add((action.trial, action.shard))
        elif action.op in (Op.B, Op.I):
            backward.add((action.trial, action.shard))
    training = {trial for trial, _ in backward}
    frozen = {
        (trial, shard.index) for trial in costs for shard in costs[trial].shards if shard.frozen
    }
    return {key for key in (forward - backward) & frozen if key[0] in training}
