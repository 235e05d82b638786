"""Copies of a pipeline side by side: one program, made of the list that each stage has alone.

[Note: copies]
With ``width`` w there are w copies of a pipeline of d stages; stage s of copy c is on device
c * d + s, and c is its trial in the program. The micro-batches of a step go to the copies in turn,
so the first copies may have one more. The first stage of copy 0 reads all of them, in the order of
the data, and hands the others theirs, a round ahead of its own turn. At the end of a step every
stage sends its gradients to the same stage of all other copies, and all add them up in the order
of the copies: ((g0 + g1) + g2). So all of them take the same step.

    copy 0  0   F0    F2       B0     B2 sum STEP        m0 and m2 of four
            1      B0    B2 sum ........ STEP            sends while stage 0 still computes
    copy 1  0   F1    F3       B1     B3 sum STEP
            1      B1    B3 sum ........ STEP

With "2bw" no stage waits for a sum: it steps right before it first reads the
new version, as it does for the clipping factor. What that factor is of, the norms of the sums,
goes out one backward after the step's last one. (Boundaries may wait behind a sum on their way;
``lag`` hides that.) Each copy has its own SYNC, of the same numbers.

Messages: (w - 1) times a stage's gradients from each of its copies, in one go. A ring would send
2 (w - 1) / w of them, as many with two copies, in 2 (w - 1) goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.program.ir import Action, Op, Part, Program
from shoal.program.world import is_batch

ROUNDS_AHEAD = 2
"""Rounds of micro-batches that are read before the turn of the first one: this and the next."""
_UNITS = (Op.F, Op.B, Op.I)


def shares(groups: Sequence[int], width: int) -> tuple[tuple[int, ...], ...]:
    """How many micro-batches of each step every copy takes."""
    return tuple(
        tuple(size // width + (copy < size % width) for size in groups) for copy in range(width)
    )


def micros_of(groups: Sequence[int], width: int, copy: int) -> tuple[int, ...]:
    """Which micro-batches a copy takes: of each step every ``width``-th, from its number on."""
    found: list[int] = []
    first = 0
    for size in groups:
        found += range(first + copy, first + size, width)
        first += size
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Which copies there are, and what each takes. ``late``: steps wait until they are needed."""

    stages: int
    groups: tuple[int, ...]
    width: int
    late: bool

    def others(self, device: int) -> list[int]:
        """The devices that have the same stage, in the order of their copies."""
        return [d for d in range(device % self.stages, self.devices, self.stages) if d != device]

    @property
    def devices(self) -> int:
        """How many devices they take."""
        return self.stages * self.width

    def place(self, device: int) -> tuple[int, int]:
        """Copy and stage of a device."""
        return divmod(device, self.stages)

    def micros(self, copy: int) -> tuple[int, ...]:
        """The micro-batches of a copy."""
        return micros_of(self.groups, self.width, copy)


def called(device: int, stages: int, width: int) -> str:
    """What errors call the stage of a device: of several copies, also which one it is of."""
    copy, stage = divmod(device, stages)
    return f"stage {stage} of copy {copy}" if width > 1 else f"stage {stage}"


def widened(alone: Sequence[Program], copies: Copies) -> Program:
    """The program of all copies, of that which each would have with its micro-batches alone."""
    micros = [copies.micros(copy) for copy in range(copies.width)]
    taken = {
        micros[copy][action.micro]: (copy, action.version)
        for copy, program in enumerate(alone)
        for action in program.devices[0]
        if action.micro is not None and action.op in _UNITS
    }
    lists = [
        tuple(_List(copies, copy, stage, taken).actions(actions))
        for copy, program in enumerate(alone)
        for stage, actions in enumerate(program.devices)
    ]
    return Program(tuple(lists))


def settles(action: Action) -> bool:
    """Does it need a step's gradients, all of them?"""
    return action.op in (Op.STEP, Op.SYNC) or (
        action.op in (Op.SEND, Op.RECV) and Part.NORM in action.parts
    )


class _List:
    """One stage's list, with what the copies send each other."""

    def __init__(
        self, copies: Copies, copy: int, stage: int, taken: Mapping[int, tuple[int, int]]
    ) -> None:
        self._copies, self._copy, self._stage = copies, copy, stage
        self._taken = taken  # micro-batch -> the copy that takes it, and with which version
        self._first = copy * copies.stages  # the device of the copy's first stage
        self._micros = copies.micros(copy)
        self._turns = {micro: turn for turn, micro in enumerate(self._micros)}
        self._dealt = 0  # micro-batches that were read so far
        self._summed = -1  # the newest step whose gradients were sent
        self._late: list[Action] = []  # what waits for the other copies' gradients
        self._has_norm = self._is_due = False  # of what is late: other stages need it soon

    def actions(self, alone: Iterable[Action]) -> Iterator[Action]:
        for action in map(self._here, alone):
            belongs = self._belongs(action)
            if self._late and not belongs and self._ends_waiting(action):
                yield from self._what_waited()
            if settles(action) and action.version > self._summed:
                self._summed = action.version
                yield from self._sums(Op.SEND)
                self._late = list(self._sums(Op.RECV))
                if not self._copies.late:
                    yield from self._what_waited()
                belongs = self._belongs(action)
            if self._late and belongs:
                self._late.append(action)
                self._has_norm |= action.op is Op.SEND and self._stage > 0 and _is_norm(action)
                continue
            yield from self._batches(action)
            yield action
            self._is_due |= self._has_norm and action.op in (Op.B, Op.W)
        yield from self._what_waited()

    def _here(self, alone: Action) -> Action:
        """An action in the numbers of all copies."""
        return replace(
            alone,
            trial=self._copy,
            micro=None if alone.micro is None else self._micros[alone.micro],
            peer=None if alone.peer is None else self._first + alone.peer,
        )

    def _sums(self, op: Op) -> Iterator[Action]:
        """The step's gradients to, or from, the same stage of each other copy."""
        mine = self._first + self._stage
        for other in self._copies.others(mine):
            whose = self._copy if op is Op.SEND else self._copies.place(other)[0]
            parts, version = (Part.SUM,), self._summed
            yield Action(op, self._stage, None, version, parts, peer=other, trial=whose)

    def _belongs(self, action: Action) -> bool:
        """Is it of the step whose gradients come?"""
        if action.op is Op.SEND and Part.PARAM in action.parts:
            return action.version == self._summed + 1
        is_factor = self._stage > 0 and action.op is Op.RECV
        return settles(action) and action.version == self._summed and not is_factor

    def _ends_waiting(self, action: Action) -> bool:
        """Does it need the step, or has another stage been kept waiting long enough?"""
        if self._is_due and action.op is not Op.SEND:
            return True
        is_factor = self._stage > 0 and action.op is Op.RECV and _is_norm(action)
        return action.version > self._summed or (is_factor and action.version == self._summed)

    def _what_waited(self) -> Iterator[Action]:
        yield from self._late
        self._late, self._has_norm, self._is_due = [], False, False

    def _batches(self, action: Action) -> Iterator[Action]:
        """What is read before a first stage's first unit of a micro-batch, and handed out."""
        is_first = action.op is Op.F or (action.op in _UNITS and self._copies.stages == 1)
        if self._stage or not is_first or action.micro is None:
            return
        if self._copy:
            yield _batch(Op.RECV, action.micro, action.version, 0, self._copy)
            return
        following = self._turns[action.micro] + ROUNDS_AHEAD
        is_near_end = following >= len(self._micros)
        stop = len(self._taken) if is_near_end else self._micros[following]
        for micro in range(self._dealt, stop):
            copy, version = self._taken[micro]
            if copy:
                yield _batch(Op.SEND, micro, version, copy * self._copies.stages, copy)
        self._dealt = stop


def _is_norm(action: Action) -> bool:
    return Part.NORM in action.parts


def _batch(op: Op, micro: int, version: int, peer: int, copy: int) -> Action:
    return Action(op, 0, micro, version, peer=peer, trial=copy)


# -- what a checker looks at ------------------------------------------------------------------


def as_alone(actions: Sequence[Action], copies: Copies, device: int) -> list[tuple[int, Action]]:
    """A device's list as its copy alone would have it, with the place of each action in it.

    An action of a micro-batch that is not the copy's is left as it is, past all that are.
    """
    copy, _ = copies.place(device)
    number: dict[int | None, int | None] = {None: None}
    number |= {micro: turn for turn, micro in enumerate(copies.micros(copy))}
    others = len(number)
    return [
        (index, replace(action, trial=0, micro=number.get(action.micro, others), peer=peer))
        for index, action in enumerate(actions)
        if not (is_batch(action) or Part.SUM in action.parts)
        for peer in [None if action.peer is None else action.peer - copy * copies.stages]
    ]


def unsummed(actions: Sequence[Action], copies: Copies, device: int) -> Iterator[tuple[int, str]]:
    """Each step's gradients go to every other copy once, and theirs come in order, before use."""
    others = copies.others(device)
    went: dict[int, list[int | None]] = {}
    came: dict[int, list[int | None]] = {}
    for index, action in enumerate(actions):
        if Part.SUM in action.parts:
            peers = went if action.op is Op.SEND else came
            peers.setdefault(action.version, []).append(action.peer)
            if peers is came and went.get(action.version) != others:
                yield index, "its own gradients go out before others come. Put their SEND before."
            continue
        if not settles(action) or (_is_norm(action) and action.op is Op.RECV):
            continue
        if _is_norm(action) and not copies.place(device)[1]:
            continue  # the factor
        for found, words in ((went, "sent to"), (came, "received from")):
            if found.get(action.version) != others:
                yield (
                    index,
                    f"the gradients of step {action.version} are to be {words} devices "
                    f"{_listed(others)} before, once each and in this order, and are "
                    f"{words} {_listed(found.get(action.version, [])) or 'none'}. Put the "
                    f"{'SEND' if found is went else 'RECV'} of each sum before.",
                )


def _listed(peers: Iterable[int | None]) -> str:
    return ", ".join(f"d{peer}" for peer in peers)


def undealt(actions: Sequence[Action], copies: Copies, device: int) -> Iterator[tuple[int, str]]:
    """Each first stage but that of copy 0 is handed each micro-batch before its first unit."""
    copy, stage = copies.place(device)
    if stage or not copy:
        return
    came: set[int | None] = set()
    for index, action in enumerate(actions):
        if is_batch(action):
            came.add(action.micro)
        elif action.op in _UNITS and action.micro not in came:
            words = (
                f"the batch of m{action.micro} is not here. Put RECV s0 m{action.micro} before."
            )
            yield index, words


def mean_in_order(parts: Sequence[Sequence[float]]) -> float:
    """The mean of a step's losses in the order of its micro-batches, of those of each copy."""
    total, width = 0.0, len(parts)
    amount = sum(map(len, parts))
    for micro in range(amount):
        total += parts[micro % width][micro // width]
    return total / amount
