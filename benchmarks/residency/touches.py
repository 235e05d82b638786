"""What a training step touches, in which order, and how many bytes parts may take meanwhile.

Every arm that is compared here walks the same list: the units of ``shoal.spill.generate``, in
its order, with the same shards and the same bytes beside them.

    F s      uses the parameters of shard s
    B s      uses them, and makes its gradients
    STEP s   uses parameters, state and gradients; ends the gradients, changes the others

Without clipping a STEP comes right after its B. With clipping all come after the last B, when
the norm is known, in order of shards. ``room`` is what a device has for parts while a unit
runs, those of the unit included: its budget, less all that is no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shoal.core.spec import Place, ShardSpec

Kind = Literal["F", "B", "STEP"]
Name = Literal["param", "state", "grad"]
Part = tuple[int, Name]
"""(shard, name): the shards of all trials have numbers of their own."""

USES: dict[Kind, tuple[Name, ...]] = {
    "F": ("param",),
    "B": ("param", "grad"),
    "STEP": ("param", "state", "grad"),
}


@dataclass(frozen=True, slots=True)
class Access:
    """One unit of a step; ``room`` in bytes."""

    kind: Kind
    shard: int
    room: int

    @property
    def uses(self) -> tuple[Part, ...]:
        """The parts that must be on the device while it runs there."""
        return tuple((self.shard, name) for name in USES[self.kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of one trial or of several, over and over again.

    ``place`` "host": a shard steps on the host, or on the device where that moves less.
    """

    shards: tuple[ShardSpec, ...]
    accesses: tuple[Access, ...]
    place: Place

    def size(self, part: Part) -> int:
        """Bytes of a part."""
        shard = self.shards[part[0]]
        sizes = {"param": shard.parameter_bytes, "state": shard.state_bytes}
        return sizes.get(part[1], shard.gradient_bytes)

    def needs(self, access: Access) -> int:
        """Bytes of the parts that a unit uses."""
        return sum(self.size(part) for part in access.uses)


def fits(step: Step, access: Access) -> bool:
    """Whether there is room for the parts of a unit; one may step on the host instead."""
    if access.kind == "STEP" and step.place == "host":
        return True
    return step.needs(access) <= access.room


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Bytes that are no part while a unit runs: held between units, and inside this one."""

    held: int
    unit: int


def one_trial(
    shards: Sequence[ShardSpec],
    budget: int,
    *,
    place: Place,
    clip: bool,
    batch: int = 0,
    lend: bool = False,
) -> Step:
    """The step of a trial that is alone on a device of ``budget`` bytes.

    With ``lend`` parts may have the room of activations whenever those are not there; else
    that of the step's worst moment is set aside, as an arena does.
    """
    order = list(_units(len(shards), clip))
    beside = [_beside(shards, kind, shard, batch) for kind, shard in order]
    return _step([tuple(shards)], [order], [beside], budget, place, lend)


def in_turns(
    shards: Sequence[ShardSpec],
    trials: int,
    budget: int,
    *,
    place: Place,
    clip: bool,
    batch: int = 0,
) -> Step:
    """Equal trials that share a device, unit by unit in turns: all begin a step together."""
    order = list(_units(len(shards), clip))
    beside = [_beside(shards, kind, shard, batch) for kind, shard in order]
    return _step([tuple(shards)] * trials, [order] * trials, [beside] * trials, budget, place)


def _units(shards: int, clip: bool) -> Iterator[tuple[Kind, int]]:
    yield from (("F", shard) for shard in range(shards - 1))
    for shard in reversed(range(shards)):
        yield "B", shard
        if not clip:
            yield "STEP", shard
    if clip:
        yield from (("STEP", shard) for shard in range(shards))


def _beside(shards: Sequence[ShardSpec], kind: Kind, shard: int, batch: int) -> Beside:
    """What a trial holds that is no part, and what a unit of a shard needs on top.

    Boundaries stay until the backward of the shard that they enter, which finds the carry of
    the shard behind it and leaves its own. Gradients are parts: a backward's peak counts
    without them.
    """
    entering = sum(other.boundary_bytes for other in shards[: shard + 1])
    if kind == "F":
        return Beside(held=batch + entering, unit=shards[shard].forward_peak_bytes)
    if kind == "B":
        carry = shards[shard + 1].carry_bytes if shard + 1 < len(shards) else 0
        inside = shards[shard].backward_peak_bytes - shards[shard].gradient_bytes
        return Beside(held=batch + entering + carry, unit=max(inside, 0))
    return Beside(held=0, unit=shards[shard].step_peak_bytes)


def _step(
    shards: list[tuple[ShardSpec, ...]],
    orders: list[list[tuple[Kind, int]]],
    beside: list[list[Beside]],
    budget: int,
    place: Place,
    lend: bool = False,
) -> Step:
    """Units of all trials in turns; what the others hold meanwhile is held as well."""
    accesses: list[Access] = []
    for turn in range(len(orders[0])):
        held = sum(of_trial[turn].held for of_trial in beside)
        for trial, order in enumerate(orders):
            kind, shard = order[turn]
            room = budget - held - beside[trial][turn].unit
            accesses.append(Access(kind, trial * len(shards[0]) + shard, room))
    if not lend:
        least = min(access.room for access in accesses)
        accesses = [replace(access, room=least) for access in accesses]
    return Step(shards=sum(shards, ()), accesses=tuple(accesses), place=place)
