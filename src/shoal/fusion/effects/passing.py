"""Attributes that a forward hands on to itself: written before they are read, each time.

RevIN keeps the mean that it takes away at a model's start until its end adds it again. No forward
finds what another one has left there. What is written and never read is for somebody else to find,
and a trial's to keep. Where a forward may go another way with the next batch, to see one tells
nothing: ``if begins: self.h = zeros`` writes first in the first batch of an epoch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.fusion.passes.mode import ASKING, READING


class _Watch:
    """Of some attributes of a module: which were read before they were written, which after."""

    def __init__(self, names: Set[str]) -> None:
        self.names, self.written = names, set[str]()
        self.early, self.late = set[str](), set[str]()

    def wrote(self, name: str) -> None:
        self.written.add(name)

    def read(self, name: str) -> None:
        if name in self.names:
            (self.late if name in self.written else self.early).add(name)


def handed_on(
    module: nn.Module,
    places: Set[tuple[str, str]],
    training: Callable[[], object],
    evaluating: Callable[[], object],
) -> set[tuple[str, str]]:
    """Those of these attributes, each a path and a name, that no forward finds of another one.

    ``training`` and ``evaluating`` run one each; the first one of all may be another than those
    that follow. Each attribute is written in one of them at least; where that cannot be watched it
    is not among them, and where a tensor's values are asked for none is.
    """
    found, read = set(places), set[tuple[str, str]]()
    for run in (training, training, evaluating):
        with _watching(module, places) as watches, _Asks() as asks:
            run()
        if asks.has_asked:
            return set()
        for path, watch in watches.items():
            found -= {(path, name) for name in watch.early}
            read |= {(path, name) for name in watch.late}
    return found & read


@contextmanager
def _watching(module: nn.Module, places: Set[tuple[str, str]]) -> Iterator[dict[str, _Watch]]:
    paths = {path for path, _ in places}
    watches = {path: _Watch({name for of, name in places if of == path}) for path in paths}
    with ExitStack() as stack:
        for path, watch in watches.items():
            stack.enter_context(_watched(module.get_submodule(path), watch))
        yield watches


class _Asks(TorchFunctionMode):
    """Whether code has Python's values of a tensor's, by which it may go another way."""

    has_asked = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The operation itself."""
        self.has_asked |= func in ASKING or func in READING
        return func(*args, **(kwargs or {}))


class _Unseen:
    """Before a class among another one's bases: what that does with its subclasses is not done."""

    def __init_subclass__(cls) -> None:
        """A watch is none to be registered."""


@contextmanager
def _watched(owner: nn.Module, watch: _Watch) -> Iterator[None]:
    """The module is of a class that tells; a class that allows none is one that reads all."""
    kind: Any = type(owner)

    def get(self: Any, name: str) -> Any:
        watch.read(name)
        return kind.__getattribute__(self, name)

    def put(self: Any, name: str, value: Any) -> None:
        kind.__setattr__(self, name, value)
        watch.wrote(name)

    def drop(self: Any, name: str) -> None:
        watch.read(name)
        kind.__delattr__(self, name)

    told = {"__getattribute__": get, "__setattr__": put, "__delattr__": drop}
    told |= {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    try:
        owner.__class__ = type(kind.__name__, (_Unseen, kind), told)
    except TypeError:
        watch.early |= set(watch.names)
        yield
        return
    try:
        yield
    finally:
        owner.__class__ = kind
