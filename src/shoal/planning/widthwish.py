"""What a user asks of arrays: how wide, and how their passes run."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from shoal.core.errors import SpecError
from shoal.core.spec import PassKind
from shoal.planner.narrower import Narrower

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


def width_wished(wish: Wish) -> WidthWish | None:
    """The width that was asked for; None if none was.

    Raises:
        SpecError: the words are none of these.
    """
    if wish is None or wish == "auto":
        return None
    if isinstance(wish, int):
        return WidthWish(wish)
    told, blank, kind = wish.partition(" ")
    widths = [int(width) if width.isdecimal() else 0 for width in told.split("/")]
    falls = all(wide > less for wide, less in pairwise(widths))
    is_number = len(widths) == 1 and not blank
    if min(widths) < 1 or not falls or is_number or bool(blank) != (kind in KINDS):
        raise SpecError(
            f"fuse is 'auto', 'off', a width, '16-compiled', or widths that fall as trials are "
            f"pruned ('16/4/1'), got {wish!r}."
        )
    if len(widths) > 1 and kind in ONE_WIDTH:
        raise SpecError(f"passes that are {kind} are of one width, got fuse={wish!r}.")
    known = next((known for known in KINDS if known == kind), None)
    return WidthWish(widths[0], known, tuple(Narrower(width, width) for width in widths[1:]))
