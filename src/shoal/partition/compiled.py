"""Modules that ``torch.compile`` has compiled: they train compiled, and are looked at eagerly.

[Note: compiled blocks]
Code that first runs while a mode sees every operator is never compiled afterwards, and code that
was compiled and runs so once is not compiled any more; neither is said. What shoal measures and
compares, it sees in such modes. So it looks at a model with compiled blocks eagerly, which says a
little too much of seconds and bytes rather than too little; and while they train nothing counts
their allocations, which kernels make that no mode sees. Parameters that are bound to other memory
do not make torch compile again.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import nn

_OF_MODULE = "_compiled_call_impl"  # what nn.Module.compile leaves, torch 2.10 to 2.13
_WRAPPER = "OptimizedModule"  # what torch.compile makes of a module; its class is not imported


def compiled_modules(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules whose call is compiled; of the model itself ``""``."""
    return tuple(
        name
        for name, module in model.named_modules()
        if module.__dict__.get(_OF_MODULE) is not None or type(module).__name__ == _WRAPPER
    )


def eagerly(model: nn.Module) -> AbstractContextManager[object]:
    """While it is entered compiled modules run as if they were not."""
    if not compiled_modules(model):
        return contextlib.nullcontext()  # torch's compiler takes a second to import
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
