"""Settings of the whole process that a recipe's code sets: each trial has its own."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from shoal.core.codes import names_in
from shoal.kernelchoice import KernelChoice
from shoal.libraries import is_installed, is_library

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
    """Under one name all settings by which this process computes; equal ones are one object."""

    def __init__(self) -> None:
        self._last = self._of_study = KernelChoice.here()
        self._modules = set(sys.modules)

    def of_study(self) -> KernelChoice:
        """Those that a trial is to find which is made now.

        What the import of a module of the user's set, which runs once, stays.
        """
        new, self._modules = sys.modules.keys() - self._modules, set(sys.modules)
        if any(map(_sets_at_import, new)):
            self._of_study = self[SETTINGS]
        return self._of_study

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


def _sets_at_import(name: str) -> bool:
    module = sys.modules.get(name)
    if not isinstance(module, types.ModuleType) or is_library(module) or _is_package(module):
        return False
    loader: Any = getattr(module.__spec__, "loader", None)
    try:
        code = loader.get_code(name)
    except Exception:  # no loader, or one of another kind
        return False
    return isinstance(code, types.CodeType) and not _SETTERS.isdisjoint(code.co_names)


def _is_package(module: types.ModuleType) -> bool:
    """Whether it is installed, or shoal's."""
    is_ours = module.__name__.partition(".")[0] == __name__.partition(".")[0]
    return is_ours or is_installed(str(getattr(module, "__file__", None) or ""))


def may_set(functions: Iterable[types.FunctionType]) -> bool:
    """Whether any of these names what sets one."""
    return any(not _SETTERS.isdisjoint(names_in(one.__code__)) for one in functions)
