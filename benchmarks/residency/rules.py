"""What is compared with: pools that evict as they run, and all in and out at every unit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from fractions import Fraction

from touches import Access, Part, Step

from shoal.core.spec import Place, ShardSpec


def lru(step: Step) -> Fraction:
    """Bytes a step, up and down, when what was used longest ago leaves first.

    With the step on the host every shard steps there, and its copies on the device are
    forgotten.
    """
    return _pool(step, lambda present, _: next(iter(present)))


def belady(step: Step) -> Fraction:
    """Bytes a step of a pool that knows what comes: what is used last leaves first.

    The least of several pools: the part whose next use is farthest leaves, whatever it costs, or
    the farthest of those that are clean as long as there is one; and, with the step on the host,
    of so many shards at either end that step on the device.

    Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer (1966).
    """
    return min(
        _pool(step, farthest, stay)
        for stay in _staying(step)
        for farthest in _farthest(step, stay)
    )


def _staying(step: Step) -> Iterable[frozenset[int]]:
    """Which shards step on the device: all, or with the step on the host some at either end."""
    shards = len(step.shards)
    if step.place == "device":
        return [frozenset(range(shards))]
    counts = range(0, shards + 1, max(1, shards // 24))
    ends = [range(count) for count in counts]
    ends += [range(shards - count, shards) for count in counts]
    fitting = {a.shard for a in step.accesses if a.kind == "STEP" and step.needs(a) <= a.room}
    return dict.fromkeys(frozenset(end) for end in ends if set(end) <= fitting)


Leaves = Callable[[dict[Part, bool], int], Part]
"""Who leaves: of these parts (dirty or not), while the unit at this place of the step runs."""


def _farthest(step: Step, stay: Collection[int]) -> tuple[Leaves, Leaves]:
    """The part whose next use is farthest; and the same, clean ones before dirty ones."""
    uses: dict[Part, list[float]] = {}
    ends: dict[Part, list[int]] = {}
    for place, access in enumerate(step.accesses):
        if access.kind == "STEP" and access.shard not in stay:
            ends.setdefault((access.shard, "param"), []).append(place)
            uses.setdefault((access.shard, "grad"), []).append(math.inf)
            continue
        for part in access.uses:
            uses.setdefault(part, []).append(place)

    def next_use(part: Part, now: int) -> float:
        found = uses[part]
        after = bisect_right(found, now)
        away = found[after] if after < len(found) else found[0] + len(step.accesses)
        over = ends.get(part, ())
        forgotten = bisect_right(over, now)
        # What the host's step makes old is not used again: it is loaded.
        return math.inf if forgotten < len(over) and over[forgotten] < away else away

    def farthest(present: dict[Part, bool], now: int) -> Part:
        return max(present, key=lambda part: next_use(part, now))

    def clean_first(present: dict[Part, bool], now: int) -> Part:
        return max(present, key=lambda part: (not present[part], next_use(part, now)))

    return farthest, clean_first


def _pool(step: Step, leaves: Leaves, stay: Collection[int] | None = None) -> Fraction:
    """Bytes a step. Steps are walked until one begins as an earlier one did, or 200 of them."""
    if stay is None:
        stay = range(len(step.shards)) if step.place == "device" else ()
    pool = _Pool(step, leaves, stay)
    seen: dict[tuple[tuple[Part, bool], ...], int] = {}
    moved: list[int] = []
    while (state := tuple(pool.dirty.items())) not in seen and len(moved) < 200:
        seen[state] = len(moved)
        moved.append(sum(pool.visit(at, access) for at, access in enumerate(step.accesses)))
    again = moved[seen.get(state, len(moved) // 2) :]
    return Fraction(sum(again), len(again))


class _Pool:
    """What is on the device, the part that was used longest ago first, and whether dirty."""

    def __init__(self, step: Step, leaves: Leaves, stay: Collection[int]) -> None:
        self.step = step
        self.leaves = leaves
        self.stay = stay
        self.dirty: dict[Part, bool] = {}

    def visit(self, at: int, access: Access) -> int:
        """Bytes that move for a unit."""
        shard = access.shard
        if access.kind == "STEP" and shard not in self.stay:
            self.dirty.pop((shard, "param"), None)
            return self._leave((shard, "grad")) if (shard, "grad") in self.dirty else 0
        moved = 0
        for part in access.uses:
            made = access.kind == "B" and part[1] == "grad"
            if part not in self.dirty and not made:
                moved += self.step.size(part)
            self.dirty[part] = self.dirty.pop(part, made)
        while sum(map(self.step.size, self.dirty)) > access.room:
            others = {p: dirty for p, dirty in self.dirty.items() if p not in access.uses}
            moved += self._leave(self.leaves(others, at))
        if access.kind == "STEP":
            del self.dirty[shard, "grad"]
            self.dirty[shard, "param"] = self.dirty[shard, "state"] = True
        return moved

    def _leave(self, part: Part) -> int:
        return self.step.size(part) if self.dirty.pop(part) else 0


def hydra(shards: Sequence[ShardSpec], *, place: Place, clip: bool) -> int:
    """Bytes a step, up and down, when all that a unit uses comes in and goes out with it.

    F: parameters in, and out. B: parameters in, and out; gradients out where they are used
    by another unit. With the step on the device B and STEP are one unit without clipping,
    parameters and state in, and out; with clipping STEP is a unit of its own, parameters,
    state and gradients in, parameters and state out. The last shard has no F, as in shoal.
    """
    params = sum(shard.parameter_bytes for shard in shards)
    state = sum(shard.state_bytes for shard in shards)
    grads = sum(shard.gradient_bytes for shard in shards)
    forward = 2 * (params - shards[-1].parameter_bytes)
    if place == "host":
        return forward + 2 * params + grads
    if not clip:
        return forward + 2 * params + 2 * state
    return forward + 2 * params + grads + 2 * params + 2 * state + grads
