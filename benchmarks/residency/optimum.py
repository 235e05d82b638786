"""The fewest bytes that any policy can move in a step, found by looking at every state.

[Note: states]
Between two units the device is in a state: which parts are on it, and which of them the host
has an older copy of (dirty). A unit needs its parts there; parts that are not needed may leave
before it. Loading a part costs its bytes, and so does the leaving of a dirty one. Nothing is
gained by loading before a unit needs it, by leaving before there is need of the room, or by
writing back what does not leave, so only the policies that wait are looked at.

State and gradients on the device are always dirty: the one has been stepped since it came,
the others were made there. So a state is one bit a part, and one more for parameters.

[Note: the best cycle]
Steps follow one another for ever, so what counts is the least mean cost of a cycle in the
graph of states at the beginning of a step. ``least`` takes the mean of some cycle off every
step and looks for a cycle of negative cost (Bellman and Ford): the predecessors of states then
close a circle. Its mean is the next guess. When no cost falls any more there is no better
cycle of whatever length, and the guess is proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from rules import lru
from touches import Access, Part, Step, fits

State = int
NOTHING: State = 0
Costs = dict[State, tuple[int, State]]
"""State -> the least cost to come to it, and the state in which the step began then."""


@dataclass(slots=True)
class Solver:
    """Looks at every state of a step; good for four to seven shards, more where few fit.

    Attributes:
        states: How many states at the beginning of a step have been looked at.
    """

    step: Step
    states: int = 0
    _bits: dict[Part, int] = field(init=False)
    _sizes: list[int] = field(init=False)
    _dirty_at: int = field(init=False)
    _bytes: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        numbers = range(len(self.step.shards))
        parts: list[Part] = [(s, name) for name in ("param", "state", "grad") for s in numbers]
        self._bits = {part: 1 << index for index, part in enumerate(parts)}
        self._sizes = [self.step.size(part) for part in parts]
        self._dirty_at = len(parts)  # the bit of shard 0's parameters; then the next shard's

    def least(self) -> Fraction | None:
        """Bytes a step, up and down; None where some unit does not fit."""
        if not all(fits(self.step, access) for access in self.step.accesses):
            return None
        mean = lru(self.step)
        while (better := self._better(mean)) is not None:
            mean = better
        return mean

    def _better(self, mean: Fraction) -> Fraction | None:
        """The mean of a cycle that costs less than ``mean`` a step; None if there is none."""
        costs: dict[State, int] = {NOTHING: 0}  # in bytes times the mean's denominator
        before: dict[State, tuple[State, int]] = {}
        changed: Mapping[State, int] = costs
        while changed:
            fallen: dict[State, int] = {}
            scale = mean.denominator
            for state, (bytes_, origin) in self._walk(changed, scale).items():
                cost = bytes_ - mean.numerator
                if cost < costs.get(state, cost + 1):
                    fallen[state] = cost
                    before[state] = (origin, (bytes_ - changed[origin]) // scale)
            costs |= fallen
            self.states = max(self.states, len(costs))
            found = _circle(before, fallen)
            if found is not None:
                return found
            changed = fallen
        return None

    def _walk(self, starts: Mapping[State, int], scale: int) -> Costs:
        """All states at the end of a step that begins in one of ``starts``, at these costs."""
        costs: Costs = {state: (cost, state) for state, cost in starts.items()}
        for access in self.step.accesses:
            costs = self._visit(access, costs, scale)
        return costs

    def _visit(self, access: Access, costs: Costs, scale: int) -> Costs:
        after: Costs = {}
        if access.kind == "STEP" and self.step.place == "host":
            for state, (cost, origin) in costs.items():
                left, stored = self._left_to_the_host(access, state)
                _keep(after, left, cost + stored * scale, origin)
        uses = self._mask(access.uses)
        makes = self._bits[access.shard, "grad"] if access.kind == "B" else 0
        there: Costs = {}
        for state, (cost, origin) in costs.items():
            loaded = self._total(uses & ~state & ~makes)
            _keep(there, state | uses, cost + loaded * scale, origin)
        for state, (cost, origin) in self._fitting(there, uses, access.room, scale).items():
            _keep(after, self._changed(access, state), cost, origin)
        return after

    def _left_to_the_host(self, access: Access, state: State) -> tuple[State, int]:
        """The shard steps on the host: what it needs goes there, and copies here are old."""
        parts = [self._bits[access.shard, name] for name in ("param", "state", "grad")]
        dirty = 1 << (self._dirty_at + access.shard)
        stored = self._total(state & (parts[1] | parts[2]))
        stored += self._total(state & parts[0]) if state & dirty else 0
        return state & ~(sum(parts) | dirty), stored

    def _changed(self, access: Access, state: State) -> State:
        """After a step parameters are dirty and gradients gone."""
        if access.kind != "STEP":
            return state
        dirty = 1 << (self._dirty_at + access.shard)
        return (state | dirty) & ~self._bits[access.shard, "grad"]

    def _fitting(self, costs: Costs, uses: int, room: int, scale: int) -> Costs:
        """Every way to let parts go, one by one, until the others fit."""
        fitting: Costs = {}
        present = (1 << self._dirty_at) - 1
        while costs:
            smaller: Costs = {}
            for state, (cost, origin) in costs.items():
                if self._total(state & present) <= room:
                    _keep(fitting, state, cost, origin)
                    continue
                rest = state & present & ~uses
                while rest:
                    bit = rest & -rest
                    rest ^= bit
                    left, stored = self._without(state, bit)
                    _keep(smaller, left, cost + stored * scale, origin)
            costs = smaller
        return fitting

    def _without(self, state: State, bit: int) -> tuple[State, int]:
        """A part leaves: the state then, and the bytes that it writes back."""
        index = bit.bit_length() - 1
        if index >= len(self.step.shards):  # state or gradients
            return state & ~bit, self._sizes[index]
        dirty = 1 << (self._dirty_at + index)
        return state & ~(bit | dirty), self._sizes[index] if state & dirty else 0

    def _mask(self, parts: Iterable[Part]) -> int:
        return sum(self._bits[part] for part in parts)

    def _total(self, mask: int) -> int:
        found = self._bytes.get(mask)
        if found is None:
            found = sum(size for i, size in enumerate(self._sizes) if mask >> i & 1)
            self._bytes[mask] = found
        return found


def _keep(costs: Costs, state: State, cost: int, origin: State) -> None:
    known = costs.get(state)
    if known is None or cost < known[0]:
        costs[state] = (cost, origin)


def _circle(before: Mapping[State, tuple[State, int]], fallen: Iterable[State]) -> Fraction | None:
    """The mean cost of a circle of predecessors, the least of those found; None without one."""
    done: set[State] = set()
    best: Fraction | None = None
    for start in fallen:
        path: dict[State, int] = {}
        state = start
        while state in before and state not in done and state not in path:
            path[state] = len(path)
            state = before[state][0]
        if state in path:
            circle = list(path)[path[state] :]
            mean = Fraction(sum(before[s][1] for s in circle), len(circle))
            best = mean if best is None or mean < best else best
        done |= path.keys()
    return best
