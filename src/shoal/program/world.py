"""What is where while a program is walked: shards, boundaries, messages, versions."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from shoal.program.costs import Costs, onward
from shoal.program.ir import Action, Kept, Op, Part, Program
from shoal.program.needs import message_kind
from shoal.program.slots import tenants_before

PARAM, STATE, GRAD, HEAD = Part.PARAM, Part.STATE, Part.GRAD, Part.HEAD
BACKWARDS, SUMMING = (Op.B, Op.I), (Op.B, Op.W)  # what hands gradients back; what adds to them
KINDS = ("boundary", "carry", "norm", "weights", "rng", "sum")


class Tensor(NamedTuple):
    """A boundary into, or a carry out of, a shard for one micro-batch; or another message.

    Or ``saved``, what the shard's forward saved.
    """

    kind: str
    trial: int
    shard: int
    micro: int | None
    version: int

    def __str__(self) -> str:
        if self.kind == "norm":
            return f"the norm that s{self.shard} has to tell for step {self.version}"
        if self.kind == "weights":
            return f"version {self.version} of the parameters that s{self.shard} borrows"
        if self.kind == "rng":
            return f"the random state after s{self.shard} of m{self.micro}"
        if self.kind == "sum":
            return f"the sum of the gradients of s{self.shard} for step {self.version}"
        if self.kind == "saved":
            return f"what F s{self.shard} m{self.micro} saved"
        direction = "into" if self.kind == "boundary" else "out of"
        return f"the {self.kind} {direction} s{self.shard} of m{self.micro}"


@dataclass(slots=True)
class Copy:
    """One shard on one device: which parts are there, and which differ from the host's."""

    present: set[Part] = field(default_factory=set)
    dirty: set[Part] = field(default_factory=set)
    own: bool = False  # are the parameters in memory of their own?
    late: bool = False  # is the state in a late slot?


@dataclass(slots=True)
class Home:
    """One shard on the host: which parts are current, and whether gradients await a step."""

    current: set[Part] = field(default_factory=lambda: {PARAM, STATE, HEAD})
    has_gradients: bool = False
    version: int = 0  # optimizer steps so far


@dataclass(slots=True)
class World:
    """Where everything is, after the actions so far."""

    costs: Costs
    kept_versions: int
    num_devices: int
    has_backward: set[int]  # trials
    onward: set[tuple[int, int]]  # (trial, shard) that nothing goes backward through
    has_sync: set[int]  # trials
    backwards_left: Counter[tuple[int, int, int]]  # (trial, shard, group)
    ends: tuple[int, ...] = ()  # of the groups, in micro-batches; () if versions say it all
    begun: int = 0  # the newest version at the start
    copies: dict[tuple[int, int, int], Copy] = field(default_factory=dict)  # device, trial, shard
    homes: dict[tuple[int, int], Home] = field(default_factory=dict)  # trial, shard
    syncs: Counter[int] = field(default_factory=Counter)
    units: dict[tuple[Op, int, int, int | None], int] = field(default_factory=dict)  # -> version
    last_micro: dict[tuple[int, int, int], int] = field(default_factory=dict)
    tensors: dict[tuple[int, Tensor], Action] = field(default_factory=dict)  # device -> maker
    away: dict[Tensor, Action] = field(default_factory=dict)  # on the host -> its STORE
    saved: dict[tuple[int, int, int], set[int | None]] = field(default_factory=dict)
    halves: dict[tuple[int, int, int | None], tuple[int, Action]] = field(default_factory=dict)
    summed: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # groups with gradients
    stepped_on: dict[int, set[tuple[int, int]]] = field(default_factory=dict)  # device -> shards
    sync_on: dict[int, int] = field(default_factory=dict)  # trial -> device
    told: set[tuple[int, Tensor]] = field(default_factory=set)  # device, what it was told
    messages: dict[tuple[int, int, int], deque[Tensor]] = field(default_factory=dict)
    dealt: set[tuple[int, int | None]] = field(default_factory=set)  # trial, micro: a batch comes

    @classmethod
    def of(
        cls,
        program: Program,
        costs: Costs,
        starts: tuple[Kept, ...],
        versions: int,
        groups: tuple[int, ...] = (),
        begun: int = 0,
    ) -> World:
        """``begun`` steps were before the program; their groups are empty."""
        world = cls(
            costs,
            versions,
            len(program.devices),
            {action.trial for action in program if action.op in BACKWARDS},
            onward(program, costs),
            {action.trial for action in program if action.op is Op.SYNC},
            Counter(),
            tuple(accumulate(groups)),
            begun,
        )
        world.syncs.update(dict.fromkeys(world.has_sync, begun))
        world.backwards_left.update(
            (a.trial, a.shard, world.group_of(a)) for a in program if a.op in SUMMING
        )
        world.dealt = {(a.trial, a.micro) for a in program if a.op is Op.RECV and is_batch(a)}
        for device, (actions, start) in enumerate(zip(program.devices, starts, strict=True)):
            steps = (a for a in actions if a.op is Op.STEP)
            world.stepped_on[device] = {(a.trial, a.shard) for a in steps}
            world.sync_on |= {a.trial: device for a in actions if a.op is Op.SYNC}
            for (trial, shard), parts in tenants_before(actions, start).items():
                world.copies[device, trial, shard] = Copy(set(parts), set(parts))
                world.home(trial, shard).current -= set(parts)
        return world

    def group_of(self, action: Action) -> int:
        """The step whose gradients a unit adds to; its version, if there are no groups."""
        if not self.ends or action.micro is None:
            return action.version
        return bisect_right(self.ends, action.micro)

    def done_first(self, version: int) -> int:
        """The last group that STEP takes when it starts from ``version``."""
        return version if self.ends else version - self.kept_versions + 1

    def saved_by(self, device: int, action: Action) -> set[int | None]:
        """Micro-batches whose forward of the action's shard was saved on this device."""
        return self.saved.setdefault((device, action.trial, action.shard), set())

    def bound_by(self, device: int, action: Action) -> set[int | None]:
        """Those that need the parameters where they are: what is stored finds them again."""
        stored = {
            moved.micro
            for moved in self.away
            if moved[:3] == ("saved", action.trial, action.shard)
        }
        return self.saved_by(device, action) - stored

    def copy(self, device: int, action: Action) -> Copy:
        return self.copies.setdefault((device, action.trial, action.shard), Copy())

    def home(self, trial: int, shard: int) -> Home:
        return self.homes.setdefault((trial, shard), Home(version=self.begun))

    def goes_back(self, action: Action) -> bool:
        """Whether something goes backward through the action's shard."""
        key = action.trial, action.shard
        return action.trial in self.has_backward and key not in self.onward

    def is_last(self, action: Action) -> bool:
        return action.shard == len(self.costs[action.trial].shards) - 1

    def inputs(self, action: Action) -> Iterator[Tensor]:
        """What an F or B reads that other shards' units leave."""
        if action.shard or (action.trial, action.micro) in self.dealt:
            yield tensor("boundary", action, action.shard)
        if action.op in BACKWARDS and not self.is_last(action):
            yield tensor("carry", action, action.shard + 1)
        if action.op in BACKWARDS and Part.SAVED in action.parts:
            yield tensor("saved", action, action.shard)

    def must_wait(self, device: int, action: Action) -> bool:
        """Is this a RECV whose SEND has not been issued yet?"""
        if action.op is not Op.RECV or action.peer is None:
            return False
        return not self.messages.get((action.peer, device, message_kind(action)))


def tensor(kind: str, action: Action, shard: int) -> Tensor:
    """The tensor of this kind that belongs to the action's trial, micro-batch and version."""
    return Tensor(kind, action.trial, shard, action.micro, action.version)


def is_batch(action: Action) -> bool:
    """Is this a message with what enters the first shard: a micro-batch of another copy?"""
    return action.op in (Op.SEND, Op.RECV) and not (action.parts or action.shard)


def sent(action: Action) -> Tensor:
    """What a SEND or RECV names: a carry if it says ``grad``, a boundary if it says nothing."""
    return tensor(KINDS[message_kind(action)], action, action.shard)
