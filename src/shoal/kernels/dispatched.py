"""An operation that a dispatch mode saw, run as it would have been without the mode.

[Note: casts within an operation]
Under autocast most operations are cast where they are called. A few kernels call others that
are: torch's fused encoder layer and attention, which it evaluates with, and whatever is made by
``torch.library.custom_op``. When Python is told of an operation, torch has put autocast aside
for it and all that it does, so that under a mode such a kernel would compute in float32 what it
computes in bfloat16 without one. These run with autocast as it was when they were called. An
operation that an autocast rule has called on its way does not: there it is aside in any case.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_CASTS = (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA)
_CALL_OTHERS = ("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention")
_TORCHS = ("aten", "prims", "prim")


def run_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """``func(*args, **kwargs)`` within ``__torch_dispatch__``."""
    keys = _casts_within(func)
    if not keys:
        return func(*args, **(kwargs or {}))
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # as when called
        before = torch._C._dispatch_tls_local_exclude_set()
    aside = torch._C._dispatch_tls_local_exclude_set()
    for key in keys:
        if not before.has(key):
            aside = aside.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), aside):
        return func(*args, **(kwargs or {}))


@functools.cache
def _casts_within(func: Any) -> tuple[torch._C.DispatchKey, ...]:
    """The kinds of autocast under which an operation casts only what it calls itself."""
    name = func.name()
    if func.namespace in _TORCHS:
        return _CASTS if name.partition(".")[0] in _CALL_OTHERS else ()
    has_rule = torch._C._dispatch_has_kernel_for_dispatch_key
    return tuple(key for key in _CASTS if not has_rule(name, key.name))
