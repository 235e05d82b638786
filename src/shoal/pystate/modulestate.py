"""What the user's own modules hold where a study is run, as bytes for a worker.

A worker imports them anew. What has been assigned in them since they were imported, or changed in
place (``config.WIDTH = 128``, ``cfg.merge_from_file(...)``), is not there then, nor is what they
drew at random. Alone a model's code finds all that.

How it is pickled is ``statepickler``.
"""

from __future__ import annotations

import enum
import io
import pickle
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from shoal.pystate.bytype import ByTypes
from shoal.pystate.comparing import Fingerprints
from shoal.pystate.sendable import CODE, home_of, is_main_code, is_of_main, may_go
from shoal.pystate.standins import DECLARED, Own, declared_in, kept_by
from shoal.pystate.statepickler import ROOM, Asked, Compared, Sizes, StatePickler, TooLarge

_T = TypeVar("_T")
Place = tuple[str, str]
"""Of a value: its module, and its name there or ``class.name``."""


class ModuleState:
    """What modules hold, and the objects in it, by the numbers that ``numbers`` has for them.

    Args:
        size_by_value: How many bytes an object of the main file's is; None: it cannot go.
        named: Values of other modules, by where they are; behind ``DECLARED`` to be compared.
        whole: Of large values those that go, by identity.
        fingerprints: Of large values, with those that were taken before.
        chosen: The places of all that go; None: whatever may.

    Attributes:
        large: By identity, values of one part that do not go for their size.
        homes: By number, the module in which an object was met first.
        of_main: What is to go with it, in the order of its numbers.
        places: Of all that is in it.
    """

    def __init__(
        self,
        modules: Iterable[types.ModuleType],
        size_by_value: Callable[[Any], int | None] = lambda value: None,
        named: Iterable[tuple[types.ModuleType, str]] = (),
        *,
        whole: Collection[int] = (),
        fingerprints: Fingerprints | None = None,
        chosen: Collection[Place] | None = None,
    ) -> None:
        wanted = {module: list(values_of(module)) for module in modules}
        for module, name in named:
            value = vars(module)[name.removeprefix(DECLARED)]
            known = Compared(value) if name.startswith(DECLARED) else value
            wanted.setdefault(module, []).append((name, known))
        if chosen is not None:
            wanted = {
                module: [pair for pair in pairs if (module.__name__, pair[0]) in chosen]
                for module, pairs in wanted.items()
            }
        asked = Asked(_once(size_by_value), (fingerprints or Fingerprints()).of, whole=whole)
        asked = asked._replace(by_type=ByTypes(asked).of)
        values = _with_room(wanted, _once(Sizes(asked).of))
        self.places = [(module, name) for module, held in values.items() for name in held]
        file, homes = io.BytesIO(), list[str]()
        pickler = StatePickler(file, asked)
        pickler.dump(list(values))
        for name, held in values.items():
            pickler.dump(held)  # by the memo of those before: one object stays one
            homes += [name] * (len(pickler.met) - len(homes))
        met = list(pickler.met.values())
        pickler.dump(met)  # the objects themselves
        large = [one for _, one in pickler.whole.values()]
        self.packed = pickle.dumps(large, protocol=4) + file.getvalue()
        self.numbers = {id(value): number for number, value in enumerate(met)}
        self.homes, self.of_main = homes, [one for _, one in pickler.of_main.values()]
        self.large = pickler.large
        self._held = met  # no other object comes to such an identity


def _with_room(
    wanted: Mapping[types.ModuleType, list[tuple[str, Any]]],
    size_of: Callable[[Any], int | None],
) -> dict[str, dict[str, Any]]:
    """By module what there is room for, and ``TooLarge`` in the place of what else could go."""
    room, found, counted = ROOM, dict[str, dict[str, Any]](), set[int]()
    for module, pairs in wanted.items():
        held = dict[str, Any]()
        for name, value in pairs:
            size = 0 if id(value) in counted else size_of(value)
            if size is None:
                continue
            held[name] = value if size <= room else TooLarge(value)
            if size <= room:
                room -= size
                counted.add(id(value))
        if held:
            found[module.__name__] = held
    return found


def left_words(module: str, path: str, why: str) -> str:
    """That workers do not have a value."""
    what = f"what the module {module} holds as {path.removeprefix(DECLARED)!r}"
    return f"{what} cannot be sent to workers, which have of it what its import makes: {why}"


def _once(function: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """The same, asked once about each object: many modules may have it."""
    known: dict[int, tuple[Any, _T]] = {}

    def asked(value: Any) -> _T:
        if id(value) not in known:
            known[id(value)] = (value, function(value))
        return known[id(value)][1]

    return asked


def values_of(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """What may differ in a worker, by name; of classes that the module defines ``class.name``."""
    for name, value in list(vars(module).items()):
        if not _says_what_it_is(value):
            continue
        if isinstance(value, types.FunctionType) and home_of(value) == module.__name__:
            yield from _own(name, value)
        elif name.startswith("__") or isinstance(value, types.ModuleType) or is_main_code(value):
            continue
        elif isinstance(value, type) and value.__module__ == module.__name__:
            if value.__qualname__ == name and (declared := declared_in(value)):
                yield f"{name}.{DECLARED}", Compared(declared)
            if value.__qualname__ == name and not issubclass(value, enum.Enum):
                yield from _values_of_class(value)
        elif isinstance(value, Tensor) and value.grad_fn is not None:
            yield name, Compared(value)  # what it was computed from is of this process
        else:
            yield name, value


def _says_what_it_is(value: Any) -> bool:
    """Whether it can be asked: one that stands for another may raise where there is none."""
    try:
        return isinstance(value.__class__, type)
    except Exception:  # whatever its code raises
        return False


def _values_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    homes = (kind.__module__, f"namedtuple_{kind.__name__}")
    for key, one in list(vars(kind).items()):
        if not _says_what_it_is(one):
            continue
        function = one.__func__ if isinstance(one, staticmethod | classmethod) else one
        if isinstance(function, types.FunctionType):
            if home_of(function) in homes:
                yield from _own(f"{kind.__name__}.{key}", function)
        elif key.startswith("__") or isinstance(one, CODE):
            continue
        elif may_go(one) or is_of_main(one):
            yield f"{kind.__name__}.{key}", one


def _own(name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if parts := kept_by(function):
        yield name, Own(function, parts)
