"""shoal trains many models at once, each possibly larger than the device, exactly as alone.

The public names load on first use, so that ``import shoal`` costs milliseconds and the
command line never waits for torch unless something is to be trained.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.core import errors
    from shoal.core.errors import (
        CapacityError,
        PlanError,
        ProgramError,
        ShoalError,
        SpecError,
        StorageError,
        TransitionError,
        TrialError,
        WorkerError,
    )
    from shoal.core.plan import Plan
    from shoal.core.stale import Stale
    from shoal.core.technique import Captured, DataParallel, Pipelined, Resident, Spilled
    from shoal.hardware import Hardware
    from shoal.recipes.recipe import Recipe
    from shoal.recipes.wholeset import WholeSet
    from shoal.report import Report, TrialResult
    from shoal.search.pbt import PBT
    from shoal.search.space import choice, grid, integer, log_uniform, uniform
    from shoal.study import Study, open

__version__ = "0.1.0"

__all__ = [
    "PBT",
    "CapacityError",
    "Captured",
    "DataParallel",
    "Hardware",
    "Pipelined",
    "Plan",
    "PlanError",
    "ProgramError",
    "Recipe",
    "Report",
    "Resident",
    "ShoalError",
    "SpecError",
    "Spilled",
    "Stale",
    "StorageError",
    "Study",
    "TransitionError",
    "TrialError",
    "TrialResult",
    "WholeSet",
    "WorkerError",
    "choice",
    "errors",
    "grid",
    "integer",
    "log_uniform",
    "open",
    "uniform",
]

_HOMES = {
    "shoal.core": ("errors",),
    "shoal.core.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "shoal.core.plan": ("Plan",),
    "shoal.core.stale": ("Stale",),
    "shoal.core.technique": ("Captured", "DataParallel", "Pipelined", "Resident", "Spilled"),
    "shoal.hardware": ("Hardware",),
    "shoal.recipes.recipe": ("Recipe",),
    "shoal.report": ("Report", "TrialResult"),
    "shoal.search.pbt": ("PBT",),
    "shoal.search.space": ("choice", "grid", "integer", "log_uniform", "uniform"),
    "shoal.study": ("Study", "open"),
    "shoal.recipes.wholeset": ("WholeSet",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

_ELSEWHERE = {
    **dict.fromkeys(("randint", "qrandint", "suggest_int"), "integer"),
    **dict.fromkeys(("categorical", "suggest_categorical"), "choice"),
    **dict.fromkeys(("quniform", "suggest_float"), "uniform"),
    **dict.fromkeys(("qloguniform", "suggest_loguniform"), "log_uniform"),
    "grid_search": "grid",
    "lograndint": "integer(lo, hi, log=True)",
}
"""What other libraries call a name of a search space."""


def __getattr__(name: str) -> Any:
    """Import a public name from its home the first time it is asked for."""
    if name not in _HOME:
        import difflib  # only for a mistake

        close = difflib.get_close_matches(name, __all__, n=1)
        close = [_ELSEWHERE[name]] if name in _ELSEWHERE else close
        meant = f"; did you mean {', '.join(close)}?" if close else ""
        raise AttributeError(f"module 'shoal' has no attribute {name!r}{meant}")
    if name == "errors":
        return importlib.import_module("shoal.core.errors")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
