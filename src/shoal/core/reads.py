"""Hyperparameters that note which of them are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shoal.core.spec import HyperParameters, Scalar

NAMES = object()
"""In ``Reads.seen``: which names there are was asked for."""

_ABSENT = object()


class Reads(HyperParameters):
    """A trial's hyperparameters, seen through a note of what was read of them.

    Attributes:
        seen: By name what was found there; under ``NAMES`` all names, where somebody asked for
            them. It is no part of ``vars``, by which what keeps hyperparameters is compared.
    """

    __slots__ = ("seen",)

    def __init__(self, of: Mapping[str, Scalar]) -> None:
        self._values = of
        self.seen: dict[Any, Any] = {}

    def __getitem__(self, name: str) -> Scalar:
        self._note(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name, default)
        self._note(name)
        return value

    def __contains__(self, name: object) -> bool:
        self._note(str(name))
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        self.seen[NAMES] = tuple(self._values)
        return iter(self._values)

    def __len__(self) -> int:
        self.seen[NAMES] = tuple(self._values)
        return len(self._values)

    def __repr__(self) -> str:
        return repr({name: self[name] for name in self})

    def __reduce__(self) -> tuple[Any, ...]:
        return HyperParameters, ({name: self[name] for name in self},)

    def _note(self, name: str) -> None:
        self.seen[name] = told(self._values, name)

    @contextmanager
    def apart(self) -> Iterator[set[str]]:
        """The names that are read meanwhile, whether or not they were before."""
        before, found = dict(self.seen), set[str]()
        self.seen.clear()
        try:
            yield found
        finally:
            found |= self._values.keys() & self.seen.keys()
            self.seen = before | self.seen

    @property
    def unread(self) -> frozenset[str]:
        """The names that nobody read; none where somebody asked which there are."""
        return frozenset() if NAMES in self.seen else frozenset(self._values) - self.seen.keys()

    @property
    def missing(self) -> frozenset[str]:
        """What was asked for and is not there."""
        return frozenset(name for name, value in self.seen.items() if value is _ABSENT)


def told(hp: Mapping[str, Scalar], name: str) -> object:
    """A value with its type: 1, 1.0 and True are three."""
    return (type(hp[name]), hp[name]) if name in hp else _ABSENT
