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
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import WorkerError
from shoal.pystate.modulestate import ATOMS, KEPT_ID, Lost, refill_raw
from shoal.pystate.parts import attributes_of, has_attributes
from shoal.pystate.values import FILLERS, PLAIN, STREAMS, Stream, filler_of, move
from shoal.source import undo_changes

ABSENT: Any = object()
"""Of what a worker has nothing, or leaves what it has."""
_MUTABLE = (dict, *FILLERS)


class Bringing:
    """Makes what there is in this process hold what came.

    An object here stands for one there, and is filled in place; one that has none of its type
    here is the one that came. So two names of one object are of one again.
    """

    def __init__(self) -> None:
        self._became: dict[int, Any] = {}  # by the identity of what came, which is held elsewhere
        self._taken: dict[int, Any] = {}

    def has(self, came: Any) -> bool:
        """Whether something stands for it already."""
        return id(came) in self._became

    def bring(self, came: Any, here: Any = ABSENT) -> Any:
        """What stands for ``came``, which would be in the place of ``here``."""
        if came is ABSENT or came is Lost or isinstance(came, Lost):
            return here
        if id(came) in self._became:
            return self._became[id(came)]
        kind = type(came)
        if kind is Stream:
            return self._bring_stream(came, here)
        if isinstance(came, tuple):
            return self._bring_tuple(came, here)
        if kind in ATOMS or not (isinstance(came, _MUTABLE) or _is_filled(came)):
            return came
        made = here if type(here) is kind and id(here) not in self._taken else came
        self._became[id(came)] = made
        self._taken[id(made)] = made
        if isinstance(came, Tensor | np.ndarray):
            made = self._became[id(came)] = _filled(made, came)
        else:
            self._fill(made, came)
        return made

    def _bring_stream(self, came: Stream, here: Any) -> Any:
        if isinstance(here, STREAMS) and id(here) not in self._taken:
            move(here, came.state)
            self._became[id(came)] = self._taken[id(here)] = here
        return here

    def _bring_tuple(self, came: Any, here: Any) -> Any:
        known = here if type(here) is type(came) and len(here) == len(came) else ()
        items = [one for one in self._items(came, known) if one is not ABSENT]
        if len(items) != len(came):
            return here
        make: Callable[[list[Any]], Any] = getattr(came, "_make", type(came))
        return make(items)

    def _items(self, came: Iterable[Any], known: Sequence[Any]) -> list[Any]:
        more = [*known, *[ABSENT] * len(list(came))]
        return [self.bring(one, there) for one, there in zip(came, more, strict=False)]

    def _fill(self, made: Any, came: Any) -> None:
        is_here = made is not came
        if isinstance(came, dict):
            pairs = {key: self.bring(one, _get(made, key, is_here)) for key, one in came.items()}
            refill_raw(made, {key: one for key, one in pairs.items() if one is not ABSENT})
        elif (filler := filler_of(came)) is not None:
            is_ordered = is_here and not isinstance(made, set)
            items = self._items(came, list(made) if is_ordered else ())
            items = [one for one in items if one is not ABSENT]
            if not (isinstance(made, set) and made == set(items)):
                filler(made, items)
        if has_attributes(type(came)):
            self._fill_attributes(attributes_of(made), attributes_of(came), is_here)

    def _fill_attributes(
        self, made: MutableMapping[str, Any], came: Mapping[str, Any], is_here: bool
    ) -> None:
        brought = {name: self.bring(one, _get(made, name, is_here)) for name, one in came.items()}
        for name in [name for name in made if name not in brought]:
            del made[name]
        for name, one in brought.items():
            if one is ABSENT:
                made.pop(name, None)
            elif name not in made or made[name] is not one:
                made[name] = one


def fits(came: Any, here: Any) -> bool:
    """Whether what came is whole, or there is something here that has the parts it lacks.

    An object that was made by and by in the study's process, and cannot travel, is made here too.
    """
    return _fits(came, here, False, set())


def _fits(came: Any, here: Any, in_place: bool, met: set[int]) -> bool:
    if came is ABSENT or came is Lost or isinstance(came, Lost):
        return in_place or here is not ABSENT
    kind = type(came)
    if id(came) in met or (kind in ATOMS and not isinstance(came, tuple)):
        return True
    met.add(id(came))
    is_here = type(here) is kind
    pairs: list[tuple[Any, Any]] = []
    if isinstance(came, dict):
        pairs += [(one, _get(here, key, is_here)) for key, one in came.items()]
    elif isinstance(came, tuple | list | set | deque):
        items = list(came)
        is_ordered = is_here and not isinstance(came, set) and len(here) == len(items)
        pairs += zip(items, here if is_ordered else [ABSENT] * len(items), strict=True)
    if _is_filled(came) and not isinstance(came, Tensor | np.ndarray):
        parts = attributes_of(here) if is_here else {}
        pairs += [(one, parts.get(n, ABSENT)) for n, one in attributes_of(came).items()]
    return all(_fits(one, there, is_here, met) for one, there in pairs)


def _get(made: Mapping[Any, Any], key: Any, is_here: bool) -> Any:
    """What an object of this process has there; of what came there is nothing to be kept."""
    return made.get(key, ABSENT) if is_here else ABSENT


def _is_filled(came: Any) -> bool:
    """Whether it is an object with attributes, or with numbers."""
    if isinstance(came, Tensor | np.ndarray):
        return True
    kind = type(came)
    return bool(has_attributes(kind)) and not isinstance(came, type | types.FunctionType)


def _filled(made: Any, came: Any) -> Any:
    if made is came or made.shape != came.shape or made.dtype != came.dtype:
        return came
    if isinstance(made, Tensor):
        with torch.no_grad():
            made.copy_(came)
        return made.requires_grad_(came.requires_grad)
    if not made.flags.writeable:
        return came
    made[...] = came
    return made


class _StateReader(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        assert pid == KEPT_ID
        return ABSENT

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return super().find_class(module, name)
        except Exception:  # whatever a module raises; a recipe's own import raises it again
            return Lost


class _Arrival(importlib.abc.MetaPathFinder):
    """What came, and who still waits for it: modules that are not imported yet."""

    def __init__(self, packed: bytes) -> None:
        reader = _StateReader(io.BytesIO(packed))
        self._values: dict[str, dict[str, Any]] = reader.load()
        self.met: list[Any] = reader.load()  # by the same memo
        self._bringing = Bringing()
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

    def _put(self, module: types.ModuleType, path: str, came: Any) -> None:
        of_class, _, name = path.rpartition(".")
        home: Any = getattr(module, of_class) if of_class else module
        here = vars(home).get(name, ABSENT)
        if not fits(came, here):
            return
        brought = self.bring(came, here)
        is_same = type(brought) is type(here) and type(here) in PLAIN and brought == here
        if brought is not here and brought is not ABSENT and not is_same:
            setattr(home, name, brought)

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
        if not self._arrival.has(came) and not fits(came, ABSENT):
            raise WorkerError(
                f"the recipe refers to an object, {type(came).__qualname__}, that a module of "
                "yours has in the study's process and not where it is imported, and a part of it "
                "cannot be sent to a worker (an open file, a lock, what your main file defines). "
                "Make that object where the module is imported, or inside Recipe(model=...)."
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
    return _RecipeReader(recipe, arrival).load()
