"""Which of torch's functions ask for no more than how a tensor looks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_ATTRIBUTES = frozenset(
    {"shape", "dtype", "device", "layout", "ndim", "requires_grad", "_version", "names"}
    | {"is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize"}
)
_QUESTIONS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__"}
    | {"is_contiguous", "is_floating_point", "is_complex", "element_size", "get_device"}
)


def name_of(func: Any) -> tuple[str, str]:
    """The name of a function; of a property its own, and how it is accessed."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", ""), name
    return name, ""


def is_identity(func: Any) -> bool:
    """Does it ask which object this is?"""
    return func is Tensor.__hash__


def is_question(func: Any) -> bool:
    """Can it be answered without the values?"""
    name, access = name_of(func)
    return name in _ATTRIBUTES if access == "__get__" else not access and name in _QUESTIONS
