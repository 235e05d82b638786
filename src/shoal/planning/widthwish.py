"""What a user asks of arrays: how wide, and how their passes run."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from shoal.core.errors import SpecError
from shoal.core.seats import ALONE
from shoal.core.spec import PassKind
from shoal.planner.narrower import Narrower
from shoal.planner.width import MOST

Wish = str | int | None
"""``"auto"`` measures, a number is a width, 0 is none; None is what the study has on record.
A width may say how passes run, ``"16 compiled"``, and in which arrays the last trials of a
generation go on where others are pruned: ``"16/4/1"``, each as soon as it holds them all."""

KINDS: tuple[PassKind, ...] = ("eager", "traced", "compiled", "branches")
ONE_WIDTH: tuple[PassKind, ...] = ("compiled", "branches")
"""Passes whose bits are their own: those who train so go on so."""
UNCUT = {"compiled": "compiled passes", "branches": "slots' own passes"}


class WidthWish(NamedTuple):
    """A width that was asked for, how passes are to run, and what the last trials go on in."""

    width: int
    kind: PassKind | None = None
    rest: tuple[Narrower, ...] = ()

    def for_most(self, trials: int | None) -> WidthWish:
        """The wish where never more ``trials`` train side by side; None: nobody knows.

        It begins with the narrowest of its widths that holds them all.
        """
        for narrow in self.rest[::-1]:
            if trials is not None and narrow.width != ALONE and trials <= narrow.most:
                rest = tuple(less for less in self.rest if less.width < narrow.width)
                return self._replace(width=narrow.width, rest=rest)
        return self


def refusal(wish: object, instead: str) -> SpecError:
    """Of words that are no wish; ``instead`` is what to write."""
    return SpecError(
        f"fuse is 'auto', 'off' (False), or the width of arrays from 1 to {MOST}, which may say "
        f"how passes run ('16-compiled') and to what widths those go on that a pruner leaves "
        f"('16/4/1'), got {wish!r}. {instead}"
    )


def width_wished(wish: Wish, at_once: int | None = None) -> WidthWish | None:
    """The width that was asked for, where so many trials train ``at_once``; None if none was.

    Raises:
        SpecError: the words are none of these.
    """
    if wish is None or wish == "auto":
        return None
    if isinstance(wish, int):
        return WidthWish(wish)
    told, blank, kind = wish.partition(" ")
    widths = [int(width) if width.isdecimal() else 0 for width in told.split("/")]
    is_number = len(widths) == 1 and not blank
    if min(widths) < 1 or is_number or bool(blank) != (kind in KINDS):
        raise refusal(wish, "Write one of these.")
    if any(wide <= less for wide, less in pairwise(widths)):
        raise refusal(wish, "Widths fall: those that go on are fewer.")
    if len(widths) > 1 and kind in ONE_WIDTH:
        raise SpecError(f"passes that are {kind} are of one width, got fuse={wish!r}.")
    known = next((known for known in KINDS if known == kind), None)
    rest = tuple(Narrower(width, width) for width in widths[1:])
    return WidthWish(widths[0], known, rest).for_most(at_once)
