"""What is compared with: least recently used, and everything in and out at every unit."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from touches import Access, Part, Step

from shoal.core.spec import Place, ShardSpec


def lru(step: Step) -> Fraction:
    """Bytes a step, up and down, when what was used longest ago leaves first.

    With the step on the host every shard steps there, and its copies on the device are
    forgotten. Steps are walked until one begins as an earlier one did; the mean of those
    between counts.
    """
    cache = _Lru(step)
    seen: dict[tuple[tuple[Part, bool], ...], int] = {}
    moved: list[int] = []
    while (state := tuple(cache.dirty.items())) not in seen:
        seen[state] = len(moved)
        moved.append(sum(cache.visit(access) for access in step.accesses))
    again = moved[seen[state] :]
    return Fraction(sum(again), len(again))


class _Lru:
    """What is on the device, the part that was used longest ago first, and whether dirty."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.dirty: dict[Part, bool] = {}

    def visit(self, access: Access) -> int:
        """Bytes that move for a unit."""
        shard = access.shard
        if access.kind == "STEP" and self.step.place == "host":
            self.dirty.pop((shard, "param"), None)
            return self._leave((shard, "grad")) if (shard, "grad") in self.dirty else 0
        moved = 0
        for part in access.uses:
            made = access.kind == "B" and part[1] == "grad"
            if part not in self.dirty and not made:
                moved += self.step.size(part)
            self.dirty[part] = self.dirty.pop(part, made)
        while sum(map(self.step.size, self.dirty)) > access.room:
            moved += self._leave(next(p for p in self.dirty if p not in access.uses))
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
