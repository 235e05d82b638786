"""Shards, and the layers at which they begin, as a technique names them: read, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Set

from shoal.core.errors import SpecError
from shoal.core.values import items, optional_whole, plain


def ahead(name: str, value: int | None, most: int) -> int | None:
    """How many units ahead of the running one, or behind it.

    Raises:
        SpecError: more than ``most``, or no number.
    """
    found: int | None = plain(value)
    if found is not None and (type(found) is not int or not 0 <= found <= most):
        words = "0 or 1" if most == 1 else "0, 1 or 2"
        raise SpecError(f"{name} is {words}, got {value!r}.")
    return found


def number_of_shards(name: str, value: int | None) -> int | None:
    """How many shards, or None for as many as fit."""
    return optional_whole(f"{name} is a number of shards: it", value, 0)


def layers(cuts: Iterable[int]) -> tuple[int, ...]:
    """The layers at which later stages begin, as they were given; a set has no order.

    Raises:
        SpecError: they are no layers.
    """
    found = items("cuts", cuts, "cuts=(4, 8)")
    if not found or not all(type(cut) is int and cut >= 0 for cut in found):
        raise SpecError(
            f"cuts are the layers at which the later stages begin, whole numbers, got "
            f"{cuts!r}. Leave cuts= out to have them chosen."
        )
    return tuple(sorted(found)) if isinstance(cuts, Set) else found


def is_pair(value: object) -> bool:
    """Whether it is two whole numbers."""
    if not isinstance(value, tuple | list):
        return False
    return [type(plain(item)) for item in value] == [int, int]


def named_shards(
    name: str, shards: Iterable[int], count: int | None, kind: str = "Pipelined"
) -> tuple[int, ...]:
    """The shards that a setting names, ascending.

    Raises:
        SpecError: it names no shards of ``count``.
    """
    keep = items(f"{name} names shards: it", shards, f"{name}=(0, 2)")
    if count is None and keep:
        raise SpecError(
            f"{kind}({name}={keep}) names shards; say how many there are with shards=."
        )
    if not all(type(s) is int and 0 <= s < (count or 0) for s in keep):
        raise SpecError(
            f"{name} names shards from 0 to {(count or 0) - 1}, got {shards!r}. Leave it "
            "out to keep as many as fit."
        )
    return tuple(sorted(set(keep)))
