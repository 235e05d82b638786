"""What ``torch.compile`` has compiled: it trains compiled, and is looked at eagerly.

[Note: compiled code]
Code that first runs while a mode sees every operator is never compiled afterwards, and code that
was compiled and runs so once is not compiled any more; neither is said. What shoal measures and
compares, it sees in such modes. So it looks eagerly at a model whose user compiles anything, which
says a little too much of seconds and bytes rather than too little; and while it trains nothing
counts its allocations, which kernels make that no mode sees. Parameters that are bound to other
memory do not make torch compile again.

torch gives up on a function that was compiled eight times. A worker has many trials, each a model
of its own, where the plain loop has one in a process of its own, so here it never gives up.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shoal.core.units import counted

_OF_MODULE = "_compiled_call_impl"  # what nn.Module.compile leaves, torch 2.10 to 2.13
_WRAPPER = "OptimizedModule"  # what torch.compile makes of a module; its class is not imported
_NO_LIMIT = 1_000_000
_asked: list[str] = []  # whether anything was compiled in this process


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this module runs compiled code: it, and not its parts, is compiled."""
    return module.__dict__.get(_OF_MODULE) is not None or type(module).__name__ == _WRAPPER


def compiled_modules(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules whose call is compiled; of the model itself ``""``."""
    return tuple(name for name, module in model.named_modules() if is_compiled(module))


def watch_compiling() -> None:
    """Note from now on, in this process, when anything is compiled, modules or not."""
    compile_ = torch.compile
    if hasattr(compile_, "__wrapped__"):  # a worker that is used again
        return

    @functools.wraps(compile_)
    def noted(*args: Any, **options: Any) -> Any:
        result = compile_(*args, **options)
        if not _asked:
            _asked.append("torch.compile")
            _never_give_up()
        return result

    torch.compile = noted


def compiles(model: nn.Module) -> bool:
    """Whether some of what training this model runs may be compiled."""
    return bool(_asked) or bool(compiled_modules(model))


def eagerly() -> AbstractContextManager[object]:
    """While it is entered, compiled code runs as if it were not."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()  # nothing is compiled; it takes a second to import
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _never_give_up() -> None:
    import torch._dynamo

    settings: Any = torch._dynamo.config
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(settings, name):
            setattr(settings, name, _NO_LIMIT)


def compiled_notes(model: nn.Module) -> tuple[str, ...]:
    """What a plan says of a model that is compiled."""
    if not compiles(model):
        return ()
    count = len(compiled_modules(model))
    what = (
        counted(count, "module is", "modules are")
        if count
        else "torch.compile was called, so code may be"
    )
    return (
        f"{what} compiled: measured as if they were not, and nothing counts allocations while "
        "they train",
    )
