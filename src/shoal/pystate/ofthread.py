"""Values of a thread's own: context variables, and objects of ``threading.local``.

A study's process sets them in the thread that runs the study; a worker has them in the one where
its trials train.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator, MutableMapping
from typing import Any

OF_THREAD = (contextvars.ContextVar, threading.local)


class OfThread:
    """What such an object has in the thread that runs a study."""

    parts: dict[str, Any]

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def is_that_of(self, here: Any) -> bool:
        """Whether an object of this process is such a one."""
        return type(here) is self.kind


def parts_of_thread(value: Any) -> MutableMapping[str, Any]:
    """What this thread has in it."""
    if isinstance(value, contextvars.ContextVar):
        return _Variable(value)
    parts: dict[str, Any] = threading.local.__getattribute__(value, "__dict__")
    return parts


class _Variable(MutableMapping[str, Any]):
    """Its value, if it has been set; nobody can take it back."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def __iter__(self) -> Iterator[str]:
        yield from ["value"] * (self._variable in contextvars.copy_context())

    def __len__(self) -> int:
        return len(list(self))

    def __getitem__(self, name: str) -> Any:
        return contextvars.copy_context()[self._variable]

    def __setitem__(self, name: str, value: Any) -> None:
        self._variable.set(value)

    def __delitem__(self, name: str) -> None: ...
