"""Values that only their own type can take apart: tables, sparse tensors, a tokenizer's rules.

A pickle asks the type (``__reduce_ex__``), and has the parts that it names. So has what goes to a
worker, part by part, that what is one object stays one. A worker leaves what it has where a digest
of that is the same, and makes it of the parts elsewhere.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np

from shoal.pystate.sendable import goes_by_type, is_importable, is_table
from shoal.pystate.standins import ByType, name_of, parts_by_type
from shoal.pystate.statepickler import (
    COMPARED,
    KEPT,
    LARGE,
    LARGEST,
    NAMED,
    Asked,
    Counted,
    Counting,
    Full,
    Place,
)


class ByTypes:
    """What goes of such values; each is asked once, and what it gave is kept.

    Args:
        asked: What picklers ask of all others.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked._replace(by_type=self.of, whole=())
        self._known: dict[int, tuple[Any, ByType | str]] = {}

    def of(self, value: Any) -> ByType | str:
        """What of it goes, or its place in a pickle.

        That is LARGE of a table that is too large, COMPARED of others, and of what has a part
        that cannot go but can be looked at, and KEPT where nobody can tell what it is.
        """
        if id(value) not in self._known:
            self._known[id(value)] = value, KEPT
            self._known[id(value)] = value, self._found(value)
        return self._known[id(value)][1]

    def _found(self, value: Any) -> ByType | str:
        if callable(value) and is_importable(value):
            return NAMED
        if not goes_by_type(value):
            return KEPT
        too_large = LARGE if is_table(value) else COMPARED
        if isinstance(value, np.ndarray) and value.nbytes > LARGEST:
            return too_large
        digest = None
        try:
            if (parts := parts_by_type(value)) is None:
                return NAMED
            digest = self._asked.fingerprint(value).digest
            found = ByType(name_of(type(value)), digest)
            found.parts = parts
            self._known[id(value)] = value, found  # it may have itself in it
            _Trying(Counted(), self._asked).dump(value)
        except Full:
            return too_large
        except Exception:  # a lock in it, whatever its type's code raises
            return KEPT if digest is None else COMPARED
        return found


class _Trying(Counting):
    """One that raises where something cannot go."""

    def persistent_id(self, value: Any) -> Place | None:
        place = super().persistent_id(value)
        if isinstance(place, tuple) and place[0] in (LARGE, COMPARED):
            raise Full
        is_left = isinstance(value, FunctionType) and not is_importable(value)
        if place == KEPT or isinstance(place, int) or is_left:
            raise TypeError("a part of it cannot go")
        return place
