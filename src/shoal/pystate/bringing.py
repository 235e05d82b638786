"""What came from the study's process is brought into what a worker has, in place.

``fits`` says whether what came can be had here at all; ``Bringing`` then fills what is here.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.pystate.comparing import fingerprint_of
from shoal.pystate.ofthread import OfThread, parts_of_thread
from shoal.pystate.parts import attributes_of, function_parts, has_attributes, hooks
from shoal.pystate.sendable import FIXED, FLAT, NUMBERLESS, is_flat
from shoal.pystate.standins import (
    ByType,
    Code,
    Large,
    Lost,
    Made,
    Stream,
    Weights,
    name_of,
    new_fixed,
    refill_raw,
    weights_of,
)
from shoal.pystate.values import FILLERS, STREAMS, filler_of, move

ABSENT: Any = object()
"""Of what a worker has nothing, or leaves what it has."""
_MUTABLE = (dict, *FILLERS)


class Later:
    """In the place of what the main file defines, until the recipe has been read."""

    def __init__(self, number: int) -> None:
        self.number = number


class Bringing:
    """Makes what there is in this process hold what came.

    An object here stands for one there, and is filled in place; one that has none of its type
    here is the one that came. So two names of one object are of one again.

    Attributes:
        is_partial: Whether something of the main file's is still to come.
        lacking: Why parts could not come that have nothing alike here in their place.
        differing: The same where another value is here, in words of both.
    """

    def __init__(self) -> None:
        self._became: dict[int, Any] = {}  # by the identity of what came, which is held elsewhere
        self._taken: dict[int, Any] = {}
        self._of_main: list[Any] | None = None
        self.is_partial = False
        self.lacking: list[str] = []
        self.differing: list[str] = []
        self._again: list[tuple[Any, Any]] = []

    def has(self, came: Any) -> bool:
        """Whether something stands for it already."""
        return id(came) in self._became

    def complete(self, of_main: list[Any]) -> None:
        """Put what the main file defines where it belongs."""
        self._of_main = of_main
        for made, came in self._again:
            self._fill(made, came)
        self._again.clear()

    def bring(self, came: Any, here: Any = ABSENT) -> Any:
        """What stands for ``came``, which would be in the place of ``here``."""
        if came is ABSENT or is_lost(came):
            return here
        if id(came) in self._became:
            return self._became[id(came)]
        kind = type(came)
        if kind in _SPECIAL:
            return _SPECIAL[kind](self, came, here)
        if isinstance(came, tuple | frozenset):
            return self._bring_fixed(came, here)
        if not (isinstance(came, _MUTABLE) or _is_filled(came)):
            return came
        is_alike = type(here) is kind and id(here) not in self._taken
        return self._bring_into(here if is_alike else came, came)

    def _bring_into(self, made: Any, came: Any) -> Any:
        self._became[id(came)] = made
        self._taken[id(made)] = made
        if isinstance(came, Tensor | np.ndarray):
            made = self._became[id(came)] = _filled(made, came)
        else:
            self._fill(made, came)
        return made

    def _bring_later(self, came: Later, here: Any) -> Any:
        if self._of_main is None:
            self.is_partial = True
            return came if here is ABSENT else here
        return self._of_main[came.number]

    def _bring_stream(self, came: Stream, here: Any) -> Any:
        if not (isinstance(here, STREAMS) and id(here) not in self._taken):
            here = came.made()
        if here is not None:
            move(here, came.state)
            self._became[id(came)] = self._taken[id(here)] = here
        return ABSENT if here is None else here

    def _bring_large(self, came: Large, here: Any) -> Any:
        theirs = came.fingerprint
        if came.is_sure and (theirs.digest is None or here is ABSENT or _is_nothing(here)):
            other = ", or cannot be taken apart" if theirs.digest is None else ""
            self.lacking.append(f"{theirs.words} is too large{other}")
            return here
        if not came.is_sure and theirs.digest is None:
            return here
        mine = fingerprint_of(here, theirs.most)
        if mine != theirs:
            other = "other contents" if mine.words == theirs.words else mine.words
            told = self.differing if came.is_sure else self.lacking
            told.append(f"{theirs.words}, and workers have {other}")
        return here

    def _bring_by_type(self, came: ByType, here: Any) -> Any:
        is_alike = name_of(type(here)) == came.kind and id(here) not in self._taken
        if is_alike and came.digest is not None and fingerprint_of(here).digest == came.digest:
            self._became[id(came)] = self._taken[id(here)] = here
            return here
        function, arguments = self.bring(came.parts["func"]), self.bring(came.parts["args"])
        if function is ABSENT or arguments is ABSENT:
            self.lacking.append(f"they cannot import all of a {came.kind}")
            return here
        made = self._became[id(came)] = came.begun(function, arguments)
        self._taken[id(made)] = made
        rest = {n: self.bring(one) for n, one in came.parts.items() if n not in ("func", "args")}
        came.complete(made, rest)
        return made

    def _bring_weights(self, came: Weights, here: Any) -> Any:
        if not came.is_that_of(here):
            self.lacking.append(f"the {came.kind} is another module there")
            return here
        self._became[id(came)] = self._taken[id(here)] = here
        tensors = weights_of(here)
        for name, one in came.parts.items():
            if name.endswith(" "):
                here.get_submodule(name.removesuffix(" ")).training = one
            elif self.bring(one, tensors[name]) is not tensors[name]:
                self.lacking.append(f"{name!r} of the {came.kind} is another tensor there")
        return here

    def _bring_code(self, came: Code | OfThread, here: Any) -> Any:
        if came.is_that_of(here):
            self._bring_into(here, came)
        return here

    def _bring_made(self, came: Made, here: Any) -> Any:
        outer, self.is_partial = self.is_partial, False
        known = came.parts_of(here)
        parts = {
            name: self.bring(one, known.get(name, ABSENT)) for name, one in came.parts.items()
        }
        if self.is_partial:
            return came if here is ABSENT else here
        self.is_partial = outer
        if any(one is ABSENT for one in parts.values()):
            return here
        is_same = known and all(one is known[name] for name, one in parts.items())
        made = self._became[id(came)] = here if is_same else came.made(parts)
        return made

    def _bring_fixed(self, came: Any, here: Any) -> Any:
        is_alike = type(here) is type(came) and isinstance(came, tuple) and len(here) == len(came)
        items = [one for one in self._items(came, here if is_alike else ()) if one is not ABSENT]
        if len(items) != len(came):
            return here
        for one in (here, came):
            if type(one) is type(came) and _are_same(items, list(one)):
                return one
        return new_fixed(type(came), items)

    def _items(self, came: Iterable[Any], known: Sequence[Any]) -> list[Any]:
        more = [*known, *[ABSENT] * len(list(came))]
        return [self.bring(one, there) for one, there in zip(came, more, strict=False)]

    def _present(self, came: Any, made: Any) -> list[Any]:
        is_ordered = made is not came and not isinstance(made, set)
        items = self._items(came, list(made) if is_ordered else ())
        return [one for one in items if one is not ABSENT]

    def _fill(self, made: Any, came: Any) -> None:
        outer, self.is_partial = self.is_partial, False
        is_here = made is not came
        if isinstance(came, Code | OfThread):
            self._fill_attributes(_kept_in(came, made), came.parts, is_here)
        elif type(came) is dict and is_flat(came):
            refill_raw(made, came)
        elif isinstance(came, dict):
            pairs = [
                (self.bring(key), self.bring(one, _get(made, key, is_here)))
                for key, one in dict.items(came)
            ]
            refill_raw(made, {k: one for k, one in pairs if k is not ABSENT and one is not ABSENT})
        elif (filler := filler_of(came)) is not None:
            items = self._present(came, made) if not is_flat(came) else list(came)
            if not (isinstance(made, set) and made == set(items)):
                filler(made, items)
        if is_here and isinstance(came, nn.Module):
            self._rename_hooks(attributes_of(made), attributes_of(came))
        if has_attributes(type(came)) and not isinstance(came, Code | OfThread):
            self._fill_attributes(attributes_of(made), attributes_of(came), is_here)
        if self.is_partial:
            self._again.append((made, came))
        self.is_partial = outer

    def _rename_hooks(self, made: Mapping[str, Any], came: Mapping[str, Any]) -> None:
        """Have hooks the numbers that they have here: each process counts its own.

        Else one that cannot be sent (of the old ``weight_norm``) would be none of those here.
        """
        for name in hooks() & came.keys():
            here, there = made.get(name), came[name]
            if isinstance(here, dict) and len(here) == len(there):
                renamed = dict(zip(here, there.values(), strict=True))
                there.clear()
                there.update(renamed)
            elif any(one is ABSENT for one in there.values()):
                self.lacking.append(f"they have others of its {name.strip('_')}")

    def _fill_attributes(
        self, made: MutableMapping[str, Any], came: Mapping[str, Any], is_here: bool
    ) -> None:
        brought = {
            name: self.bring(one, made.get(name, ABSENT) if is_here else ABSENT)
            for name, one in came.items()
        }
        for name in [name for name in made if name not in brought and not _is_fixed(name)]:
            del made[name]
        for name, one in brought.items():
            if one is ABSENT:
                made.pop(name, None)
            elif name not in made or made[name] is not one:
                made[name] = one


_SPECIAL: dict[type, Callable[[Bringing, Any, Any], Any]] = {
    Later: Bringing._bring_later,
    Stream: Bringing._bring_stream,
    ByType: Bringing._bring_by_type,
    Weights: Bringing._bring_weights,
    Large: Bringing._bring_large,
    Code: Bringing._bring_code,
    OfThread: Bringing._bring_code,
    Made: Bringing._bring_made,
}


def _is_nothing(here: Any) -> bool:
    """Whether it may be filled by and by, as the study's process has filled its own."""
    return here is None or (isinstance(here, FIXED + _MUTABLE) and not here)


def _kept_in(came: Code | OfThread, here: Any) -> MutableMapping[str, Any]:
    """What a function of this process keeps, or an object that has other values in each thread."""
    if isinstance(came, OfThread):
        return parts_of_thread(here)
    return function_parts(here, every_default=True)


def is_lost(came: Any) -> bool:
    """Whether it is of a module that cannot be imported here, or is such a class."""
    return isinstance(came, Lost) or (isinstance(came, type) and issubclass(came, Lost))


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def fits(came: Any, here: Any) -> bool:
    """Whether what came is whole, or there is something here that has the parts it lacks.

    An object that was made by and by in the study's process, and cannot travel, is made here too.
    """
    return _fits(came, here, False, set())


def _fits(came: Any, here: Any, may_lack: bool, met: set[int]) -> bool:
    is_missing = came is ABSENT or is_lost(came) or isinstance(came, Large | Weights)
    if isinstance(came, Code | OfThread) and not came.is_that_of(here):
        is_missing = True
    if isinstance(came, Stream) and came.kind is None and not isinstance(here, STREAMS):
        is_missing = True
    if is_missing:
        return may_lack or here is not ABSENT
    if id(came) in met:
        return True
    met.add(id(came))
    if type(came) in FLAT and is_flat(came):
        return True
    return all(_fits(*part, met) for part in _parts_of(came, here))


def _parts_of(came: Any, here: Any) -> Iterator[tuple[Any, Any, bool]]:
    """What came is made of, what is here in its place, and whether what is here may lack it."""
    is_here = type(here) is type(came)
    if isinstance(came, Made):
        known = came.parts_of(here)
        yield from ((one, known.get(name, ABSENT), False) for name, one in came.parts.items())
    elif isinstance(came, Code | OfThread):
        kept = _kept_in(came, here)
        yield from ((one, kept.get(name, ABSENT), True) for name, one in came.parts.items())
    elif isinstance(came, dict):
        yield from ((key, ABSENT, False) for key in dict.keys(came))
        yield from ((one, _get(here, key, is_here), is_here) for key, one in dict.items(came))
    elif isinstance(came, _ORDERED) and is_here and len(here) == len(came):
        yield from ((one, there, False) for one, there in zip(came, here, strict=True))
    elif isinstance(came, (*_ORDERED, set, frozenset)):
        yield from ((one, ABSENT, False) for one in came)
    if _is_filled(came):
        parts = attributes_of(here) if is_here else {}
        yield from ((one, parts.get(n, ABSENT), is_here) for n, one in attributes_of(came).items())


def _is_fixed(name: str) -> bool:
    """Whether a function always has such a part: a default, and what it closes over."""
    return name.endswith(("=", " "))


_ORDERED = (tuple, list, deque)


def _get(made: Any, key: Any, is_here: bool) -> Any:
    """What a dictionary of this process has there; of what came there is nothing to be kept."""
    return dict.get(made, key, ABSENT) if is_here else ABSENT


def _is_filled(came: Any) -> bool:
    """Whether it is an object with attributes, or with numbers."""
    if isinstance(came, Tensor | np.ndarray):
        return True
    kind = type(came)
    if kind in _SPECIAL or isinstance(came, (*_SCALARS, *NUMBERLESS)):
        return False
    return has_attributes(kind)


_SCALARS = tuple(kind for kind in FIXED if kind not in (tuple, frozenset))


def _filled(made: Any, came: Any) -> Any:
    if made is came or made.shape != came.shape or made.dtype != came.dtype:
        return came
    if isinstance(made, Tensor):
        try:
            with torch.no_grad():
                made.copy_(came)
            return made.requires_grad_(came.requires_grad)
        except RuntimeError:  # an expanded one, one of inference, one with a history
            return came
    if not made.flags.writeable:
        return came
    made[...] = came
    return made
