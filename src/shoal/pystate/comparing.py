"""Fingerprints of any values, whatever they are made of: a worker compares with its own."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from shoal.pystate.fingerprints import (
    LEAST,
    MOST,
    MOST_OF_ALL,
    Checked,
    Fingerprint,
    in_words,
    of_numbers,
    of_simple,
)
from shoal.pystate.sendable import FLAT, goes_by_type, is_flat, is_of_main, is_table
from shoal.pystate.standins import Own
from shoal.pystate.statepickler import FLAT_ID, KEPT, Asked, Full, Place, StatePickler

_MOST_COMPARED = 100_000  # objects in one value


class Fingerprints:
    """Those of the values of one study, each taken once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Fingerprint]] = {}
        self._room = MOST_OF_ALL

    def of(self, value: Any) -> Fingerprint:
        """As ``fingerprint_of``; of less of it where there were many."""
        if id(value) not in self._known:
            size = 0 if goes_by_type(value) else min(MOST, getattr(value, "nbytes", 0))
            most = MOST if size <= self._room else LEAST
            self._room -= min(size, most)
            self._known[id(value)] = value, fingerprint_of(value, most)
        return self._known[id(value)][1]


def fingerprint_of(value: Any, most: int = MOST) -> Fingerprint:
    """Of any value that may go; of one that has parts of the main file's nobody can tell."""
    if type(value) is Own:  # of which a worker has but the function
        return Fingerprint("what the function keeps", None)
    words = in_words(value)
    try:
        if goes_by_type(value):
            return Fingerprint(words, crc_by_type(value))
        if isinstance(value, Tensor | np.ndarray):
            return of_numbers(value, most)
        if type(value) in (str, bytes) or (type(value) in FLAT and is_flat(value)):
            return of_simple(value)
        return Fingerprint(words, _crc_of(value))
    except Exception:  # whatever its code raises, a ring
        return Fingerprint(words, None)


class Comparing(StatePickler):
    """One whose bytes are equal of equal values, whichever of their parts are one object."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, Asked(lambda value: None, fingerprint_of))
        self.fast = True

    def persistent_id(self, value: Any) -> Place | None:
        if self.num_objects > _MOST_COMPARED:
            raise Full
        if is_of_main(value):
            raise ValueError("nobody has that in a worker")
        if type(value) in (set, frozenset):  # in another order in each process
            if len(value) > _MOST_COMPARED:
                raise ValueError("which of them come first nobody can tell")
            return "set", sum(map(_crc_of, value))
        return super().persistent_id(value)

    def _has_too_many(self, value: Any) -> bool:
        return False  # it stops where it has seen enough

    def _place_of_flat(self, value: Any) -> Place:
        return FLAT_ID, of_simple(value).digest

    def _place_by_type(self, value: Any) -> Place | None:
        """Of a table what is in it; of others nobody knows whether it is the same twice."""
        if is_table(value):
            with suppress(Exception):  # a lock in it, whatever its type's code raises
                return "table", crc_by_type(value)
        return KEPT


class _Throughout(Comparing):
    """One that goes into all there is, or raises."""

    def persistent_id(self, value: Any) -> Place | None:
        if (numbers := _numbers_of(value)) is not None:
            return numbers
        place = super().persistent_id(value)
        if place == KEPT:
            raise TypeError("this has no pickle")
        return place

    def _place_by_type(self, value: Any) -> Place | None:
        return None if goes_by_type(value) else KEPT


def _numbers_of(value: Any) -> Place | None:
    """Of a dense tensor or an array, also of a class of its own; None: it is none of numbers."""
    if isinstance(value, Tensor) and not goes_by_type(value):
        return type(value).__name__, *of_numbers(value)[:2], value.requires_grad
    if not isinstance(value, np.ndarray) or value.dtype == object:
        return None
    mask = np.ma.getmaskarray(value) if isinstance(value, np.ma.MaskedArray) else None
    masked = None if mask is None else of_numbers(mask, LEAST).digest
    return type(value).__name__, *of_numbers(value.view(np.ndarray), LEAST)[:2], masked


def crc_by_type(value: Any) -> int:
    """The same of what only its type can take apart.

    Raises:
        Exception: of something in it nobody can tell.
    """
    try:
        return _crc_throughout(value, fast=True)
    except (ValueError, RecursionError):  # it has itself in it: which parts are one object counts
        return _crc_throughout(value, fast=False)


def _crc_throughout(value: Any, *, fast: bool) -> int:
    file = Checked()
    pickler = _Throughout(file)
    pickler.fast = fast
    with suppress(Full):
        pickler.dump(value)
    return file.crc


def _crc_of(value: Any) -> int:
    file = Checked()
    with suppress(Full):  # what comes first counts
        Comparing(file).dump(value)
    return file.crc
