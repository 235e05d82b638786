"""A recipe arrives in a worker, with what the user's modules held where the study is run.

[Note: when modules get what they held]
First the modules are imported that the recipe refers to, and those that the main file imports for
what they do when they are; then all that are here get what they held there, in place: whoever has
``from config import cfg`` sees it. One that comes later gets it right after its import. So code at
the top level of modules finds what it finds where a file first imports them and then changes
``cfg``. Objects of such modules that the recipe itself refers to are those of this process.
"""

from __future__ import annotations

import importlib
import importlib.abc
import io
import operator
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import WorkerError
from shoal.pystate.modulestate import (
    FIXED,
    KEPT_ID,
    NUMBERLESS,
    Code,
    Lost,
    Made,
    Stream,
    is_flat,
    new_fixed,
    refill_raw,
)
from shoal.pystate.parts import attributes_of, function_parts, has_attributes
from shoal.pystate.values import FILLERS, PLAIN, STREAMS, filler_of, move
from shoal.source import undo_changes

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
    """

    def __init__(self) -> None:
        self._became: dict[int, Any] = {}  # by the identity of what came, which is held elsewhere
        self._taken: dict[int, Any] = {}
        self._of_main: list[Any] | None = None
        self.is_partial = False  # whether a Later has been met
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

    def _bring_code(self, came: Code, here: Any) -> Any:
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
        if isinstance(came, Code):
            parts = function_parts(made, every_default=True)
            self._fill_attributes(parts, came.parts, is_here)
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
        if has_attributes(type(came)) and not isinstance(came, Code):
            self._fill_attributes(attributes_of(made), attributes_of(came), is_here)
        if self.is_partial:
            self._again.append((made, came))
        self.is_partial = outer

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
    Code: Bringing._bring_code,
    Made: Bringing._bring_made,
}


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
    is_missing = came is ABSENT or is_lost(came)
    if isinstance(came, Code) and not came.is_that_of(here):
        is_missing = True
    if isinstance(came, Stream) and came.kind is None and not isinstance(here, STREAMS):
        is_missing = True
    if is_missing:
        return may_lack or here is not ABSENT
    if id(came) in met:
        return True
    met.add(id(came))
    if type(came) in (dict, list, set) and is_flat(came):
        return True
    return all(_fits(*part, met) for part in _parts_of(came, here))


def _parts_of(came: Any, here: Any) -> Iterator[tuple[Any, Any, bool]]:
    """What came is made of, what is here in its place, and whether what is here may lack it."""
    is_here = type(here) is type(came)
    if isinstance(came, Made):
        known = came.parts_of(here)
        yield from ((one, known.get(name, ABSENT), False) for name, one in came.parts.items())
    elif isinstance(came, Code):
        kept = function_parts(here, every_default=True)
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


class _StateReader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._flat: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple):
            number, packed = pid
            return self._flat.setdefault(number, pickle.loads(packed) if packed else None)
        return ABSENT if pid == KEPT_ID else Later(pid)

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return super().find_class(module, name)
        except Exception:  # whatever a module raises; a recipe's own import raises it again
            return type(name, (Lost,), {"__module__": module})


def read_state(packed: bytes) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """What came by module, and the objects that have numbers.

    Raises:
        Exception: something of it cannot be made again.
    """
    reader = _StateReader(io.BytesIO(packed))
    names: list[str] = reader.load()
    values: dict[str, dict[str, Any]] = {name: reader.load() for name in names}
    return values, reader.load()  # all by one memo


class _Arrival(importlib.abc.MetaPathFinder):
    """What came, and who still waits for it: modules that are not imported yet."""

    def __init__(self, packed: bytes) -> None:
        self._values, self.met = read_state(packed)
        self._bringing = Bringing()
        self._again: list[tuple[types.ModuleType, str, Any]] = []
        self._waiting = set(self._values)
        self.bring, self.has = self._bringing.bring, self._bringing.has

    def fill_those_here(self) -> None:
        for name in self._values:
            if (module := sys.modules.get(name)) is not None:
                self.fill(module)

    def fill(self, module: types.ModuleType) -> None:
        name = module.__name__
        if name not in self._waiting:
            return
        self._waiting.remove(name)
        for path, came in self._values[name].items():
            with suppress(Exception):  # an object that lets nobody in, or is of another kind here
                self._put(module, path, came)

    def complete(self, of_main: list[Any]) -> None:
        """Put what the main file defines where it belongs."""
        self._bringing.complete(of_main)
        for place in self._again:
            with suppress(Exception):
                self._put(*place)
        self._again.clear()

    def _put(self, module: types.ModuleType, path: str, came: Any) -> None:
        of_class, _, name = path.rpartition(".")
        home: Any = vars(module)[of_class] if of_class else module
        here = vars(home).get(name, ABSENT)
        here = here.__func__ if isinstance(here, staticmethod | classmethod) else here
        if not fits(came, here):
            return
        self._bringing.is_partial = False
        brought = self.bring(came, here)
        if self._bringing.is_partial:
            self._again.append((module, path, came))
        is_same = type(brought) is type(here) and type(here) in PLAIN and brought == here
        if brought is here or brought is ABSENT or is_same:
            return
        if of_class:
            type.__setattr__(home, name, brought)
        else:
            vars(module)[name] = brought

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """As others find it, and filled when it has been imported."""
        if fullname not in self._waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """Another one, which is told when a module has been imported."""

    def __init__(self, loader: Any, arrival: _Arrival) -> None:
        self._loader, self._arrival = loader, arrival

    def create_module(self, spec: Any) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._arrival.fill(module)


class _RecipeReader(pickle.Unpickler):
    def __init__(self, packed: bytes, arrival: _Arrival) -> None:
        super().__init__(io.BytesIO(packed))
        self._arrival = arrival

    def persistent_load(self, pid: Any) -> Any:
        came = self._arrival.met[pid]
        if is_lost(came):
            importlib.import_module(type(came).__module__)  # raises why it cannot be
        if not self._arrival.has(came) and not fits(came, ABSENT):
            raise WorkerError(
                f"the recipe refers to an object, {type(came).__qualname__}, that a module of "
                "yours has in the study's process and not where it is imported, and a part of it "
                "cannot be sent to a worker (an open file, a lock). Make that object where the "
                "module is imported, or inside Recipe(model=...)."
            )
        return self._arrival.bring(came)


def arrive(arguments: Sequence[str], imports: Iterable[str], state: bytes, recipe: bytes) -> Any:
    """What ``recipe`` is, in a process whose modules hold what came with it.

    ``arguments`` are the command line's, which a module of the user's may read; ``imports`` the
    modules that come first.
    """
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _Arrival)]
    undo_changes()  # modules that are imported now are to find none
    sys.argv[:] = arguments
    for name in imports:
        with suppress(Exception, SystemExit):  # who needs it imports it again, and raises
            importlib.import_module(name)
    arrival = _Arrival(state)
    arrival.fill_those_here()
    sys.meta_path.insert(0, arrival)
    of_main, read = _RecipeReader(recipe, arrival).load()
    arrival.complete(of_main)
    return read
