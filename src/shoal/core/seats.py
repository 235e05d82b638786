"""Where a trial trained from which step on, as its numerics key tells: slots, and by itself. Pure.

[Note: membership epochs]
A trial of an array whose others were pruned closes ranks with those that go on: into another slot,
an array of fewer slots, or none. Its bits depend on that, so its numerics key has all of it:

    slot 3 of 16; from step 120 slot 0 of 4; from step 360 alone

Each part is an epoch: it holds for the steps after the one that it names, until the next one's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ALONE = 1
"""The width that stands for a trial by itself."""
_PART = re.compile(r"(?:from step (?P<step>\d+) )?(?:slot (?P<slot>\d+) of (?P<width>\d+)|alone)")


class Epoch(NamedTuple):
    """After ``step`` steps the trial is in this slot of an array of ``width``, or by itself."""

    step: int
    slot: int
    width: int

    def __str__(self) -> str:
        where = "alone" if self.width == ALONE else f"slot {self.slot} of {self.width}"
        return f"from step {self.step} {where}" if self.step else where


def epochs_of(numerics: Mapping[str, object]) -> tuple[Epoch, ...]:
    """What a numerics key tells; none of a trial that was in no array, or left it unplanned."""
    found = []
    for part in str(numerics.get("array", "")).split("; "):
        if (told := _PART.fullmatch(part)) is None:
            return ()
        step, slot = int(told["step"] or 0), int(told["slot"] or 0)
        found.append(Epoch(step, slot, int(told["width"] or ALONE)))
    return tuple(found)


def told(epochs: Sequence[Epoch]) -> str:
    """Epochs as a numerics key has them."""
    return "; ".join(map(str, epochs))


def until(epochs: Sequence[Epoch], step: int) -> tuple[Epoch, ...]:
    """Those that had begun when so many steps were done."""
    return tuple(epoch for epoch in epochs if epoch.step <= step)


def with_epoch(epochs: Sequence[Epoch], new: Epoch) -> tuple[Epoch, ...]:
    """Epochs up to where a new one begins, and that, unless nothing changes there."""
    before = tuple(epoch for epoch in epochs if epoch.step < new.step)
    same = before and (before[-1].slot, before[-1].width) == (new.slot, new.width)
    return before if same else (*before, new)


def longer(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of two keys of a trial the one that tells of more epochs; the first where neither does."""
    key, by = (str(numerics.get("array", "")) for numerics in (one, other))
    return other if epochs_of(other) and is_continued(key, by) else one


def is_continued(key: object, by: object) -> bool:
    """Whether one entry of a numerics key is a beginning of another one."""
    return f"{by}; ".startswith(f"{key}; ")
