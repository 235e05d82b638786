"""Settings of the whole process that a recipe's code sets: each trial has its own."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from shoal.core.codes import names_in
from shoal.kernels.kernelchoice import KernelChoice

SETTINGS = "settings"
_SETTERS = frozenset(
    (
        *("set_default_dtype", "set_default_tensor_type", "set_flush_denormal", "backends"),
        *("use_deterministic_algorithms", "set_deterministic_debug_mode", "cudnn", "mkldnn"),
        *("set_float32_matmul_precision", "set_anomaly_enabled", "set_detect_anomaly"),
        *("set_autocast_dtype", "set_autocast_cpu_dtype", "set_autocast_gpu_dtype"),
        *("set_autocast_cache_enabled", "check_sparse_tensor_invariants"),
        *("seterr", "setrecursionlimit", "getcontext", "setcontext", "setlocale"),
    )
)
"""What code names that changes one; to read all of them whenever trials alternate takes 50 us."""


class OfProcess(MutableMapping[str, KernelChoice]):
    """Under one name all settings by which this process computes; equal ones are one object.

    Attributes:
        of_study: Those that a trial finds which is made now. What a module sets as it is imported,
            from ``begin`` to ``end``, counts among them: that runs once.
    """

    def __init__(self) -> None:
        self._last = self.of_study = KernelChoice.here()

    def begin(self) -> None:
        """A trial is made from here on."""
        if self not in _waiting:
            _waiting.append(self)
        _importing._find_and_load = _noting_load

    def end(self) -> None:
        """It has been made."""
        if self in _waiting:
            _waiting.remove(self)
        if not _waiting:
            _importing._find_and_load = _load

    def set_by_import(self, before: KernelChoice, after: KernelChoice) -> None:
        """What is another one after than before."""
        self.of_study = after.without(self.of_study, before)

    def __getitem__(self, name: str) -> KernelChoice:
        if (here := KernelChoice.here()) != self._last:
            self._last = here
        return self._last

    def __setitem__(self, name: str, wanted: KernelChoice) -> None:
        wanted.take()
        self._last = wanted

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield SETTINGS

    def __len__(self) -> int:
        return 1

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def may_set(functions: Iterable[types.FunctionType]) -> bool:
    """Whether any of these names what sets one."""
    return any(not _SETTERS.isdisjoint(names_in(one.__code__)) for one in functions)


# Python asks this for each module that is not there yet, whichever way it is imported.
_importing: Any = importlib._bootstrap
_load = _importing._find_and_load
_waiting: list[OfProcess] = []
_depth = [0]


def _noting_load(*args: Any) -> Any:
    """Import a module, and tell who waits what that set."""
    before = None if _depth[0] else KernelChoice.here()
    _depth[0] += 1
    try:
        return _load(*args)
    finally:
        _depth[0] -= 1
        if before is not None and (after := KernelChoice.here()) != before:
            for one in list(_waiting):
                one.set_by_import(before, after)
