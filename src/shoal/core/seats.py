"""Where a trial trained from which step on, as its numerics key tells: slots, and by itself. Pure.

[Note: membership epochs]
A trial of an array whose others were pruned closes ranks with those that go on: into another slot,
an array of fewer slots, or none. Its bits depend on that, so its numerics key has all of it:

    slot 3 of 16; from step 120 slot 0 of 4; from step 360 alone

Each part is an epoch: it holds for the steps after the one that it names, until the next one's.
So does one that a user asked for when the study was resumed (``fuse=4, accept_numerics=True``):

    slot 3 of 16; as asked from step 75 slot 1 of 4

A trial that its array cannot train any further leaves it for good, at the step up to which it did:

    slot 3 of 16; for good from step 7 alone
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ALONE = 1
"""The width that stands for a trial by itself."""
OTHERS_PRUNED = "others were pruned"
"""Why a trial gets another seat; no reason to say anything of it."""
_PART = re.compile(
    r"(?:(?P<since>as asked |for good )?from step (?P<step>\d+) )?"
    r"(?:slot (?P<slot>\d+) of (?P<width>\d+)|alone)"
)


class Epoch(NamedTuple):
    """After ``step`` steps the trial is in this slot of an array of ``width``, or by itself.

    ``asked``: not since others were pruned, but by a user's wish. ``for_good``: since its array
    could not train it any further.
    """

    step: int
    slot: int
    width: int
    asked: bool = False
    for_good: bool = False

    def __str__(self) -> str:
        where = "alone" if self.width == ALONE else f"slot {self.slot} of {self.width}"
        since = f"from step {self.step} {where}" if self.step else where
        if not self.step:
            return since
        return f"{'as asked ' * self.asked}{'for good ' * self.for_good}{since}"


def epochs_of(numerics: Mapping[str, object]) -> tuple[Epoch, ...]:
    """What a numerics key tells; none of a trial that was in no array."""
    found = []
    for part in str(numerics.get("array", "")).split("; "):
        if (told := _PART.fullmatch(part)) is None:
            return ()
        step, slot = int(told["step"] or 0), int(told["slot"] or 0)
        width = int(told["width"] or ALONE)
        since = told["since"] or ""
        found.append(Epoch(step, slot, width, since == "as asked ", since == "for good "))
    return tuple(found)


def told(epochs: Sequence[Epoch]) -> str:
    """Epochs as a numerics key has them."""
    return "; ".join(map(str, epochs))


def is_alone(epochs: Sequence[Epoch]) -> bool:
    """Whether a trial trained by itself from its first step on: a key says nothing of that."""
    return all(epoch.width == ALONE for epoch in epochs)


def until(epochs: Sequence[Epoch], step: int) -> tuple[Epoch, ...]:
    """Those that had begun when so many steps were done."""
    return tuple(epoch for epoch in epochs if epoch.step <= step)


def with_epoch(epochs: Sequence[Epoch], new: Epoch) -> tuple[Epoch, ...]:
    """Epochs up to where a new one begins, and that, unless nothing changes there."""
    before = tuple(epoch for epoch in epochs if epoch.step < new.step)
    same = before and (before[-1].slot, before[-1].width) == (new.slot, new.width)
    return before if same else (*before, new)


def rebased(epochs: Sequence[Epoch], step: int) -> tuple[Epoch, ...]:
    """Of a trial that goes on after ``step``: what was asked for later on holds from there.

    Seats that it got where others were pruned it gets there again.
    """
    late = [index for index, epoch in enumerate(epochs) if epoch.asked and epoch.step > step]
    if not late:
        return tuple(epochs)
    seat = epochs[late[-1]]._replace(step=step, asked=step > 0)
    return (*with_epoch(epochs[: late[-1]], seat), *epochs[late[-1] + 1 :])


def base_of(epochs: Sequence[Epoch]) -> Epoch:
    """The seat that was asked for last, else the first one: others follow from it by rungs."""
    return next((epoch for epoch in reversed(epochs) if epoch.asked), epochs[0])


def longer(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of two keys of a trial the one that tells of more epochs; the first where neither does."""
    key, by = (str(numerics.get("array", "")) for numerics in (one, other))
    return other if epochs_of(other) and is_continued(key, by) else one


def is_continued(key: object, by: object) -> bool:
    """Whether one entry of a numerics key is a beginning of another one."""
    return f"{by}; ".startswith(f"{key}; ")
