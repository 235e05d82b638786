"""Attributes by which a model reads a parameter's memory, and not the parameter.

A trial's parameters move: into the memory that is kept for them, to a device, into a row of an
array, to the host and back. What is made of one where the model is made (``self.tied =
layer.weight.data``, ``.t()``, ``.detach()``) would be left behind, with the first values.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.closures import closed_over
from shoal.core.codes import names_in
from shoal.core.errors import SpecError

DEEPEST = 4
MOST = 1000  # values of an attribute that are looked into


def refuse_aliases(model: nn.Module) -> None:
    """Raise SpecError for an attribute in a parameter's memory that the model's code reads.

    Of those that are trained: what is frozen has the first values anywhere.
    """
    spans = {name: _span(p) for name, p in model.named_parameters() if p.requires_grad}
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    read: Collection[str] | None = None
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _TORCHS or f"{key}_orig" in module._parameters:  # which its old norms set
                continue
            found = [_span(one) for one in _tensors_in(value) if id(one) not in own]
            name = next((n for n, span in spans.items() if any(map(span.meets, found))), None)
            if name is None:
                continue
            read = _names_read(model) if read is None else read
            if key in read:
                raise SpecError(
                    f"Recipe(model=...) returned a model whose code reads "
                    f"{f'{path}.{key}'.lstrip('.')!r}, which lies in the memory of its parameter "
                    f"{name!r} (by .data, .detach(), .numpy() or a view). A trial's parameters "
                    "get memory of their own, and it would be left behind with the first values. "
                    "Keep the parameter itself, and take that of it in the forward; or if the "
                    "first values are what is wanted, a copy (.clone())."
                )


_TORCHS = frozenset(vars(nn.Module()))
"""What torch keeps in each module."""


class _Span(NamedTuple):
    """From which byte to which something lies in memory."""

    start: int
    end: int

    def meets(self, other: _Span) -> bool:
        return self.start < other.end and other.start < self.end


def _span(value: Any) -> _Span:
    """That of a tensor or of an array of NumPy."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.device.type == "meta" or not value.numel():
            return _Span(0, 0)
        steps = zip(value.shape, value.stride(), strict=True)
        reach = (1 + sum((size - 1) * step for size, step in steps)) * value.element_size()
        return _Span(value.data_ptr(), value.data_ptr() + reach)
    start = int(value.__array_interface__["data"][0])
    return _Span(start, start + value.nbytes)


def _tensors_in(value: Any) -> Iterator[Any]:
    """Tensors and arrays in an attribute: in containers, closures and the user's objects."""
    waiting: list[tuple[Any, int]] = [(value, 0)]
    met: set[int] = set()
    while waiting and len(met) < MOST:
        one, depth = waiting.pop()
        if isinstance(one, Tensor | np.ndarray):
            yield one
        elif id(one) not in met and depth < DEEPEST:
            met.add(id(one))
            waiting += ((part, depth + 1) for part in _parts(one))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if type(value) is dict or type(value) is types.MappingProxyType:  # others may run code
        return list(value.values())
    if isinstance(value, types.FunctionType):
        return closed_over(value).values()
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return (*value.args, *value.keywords.values())
    is_code = isinstance(value, nn.Module | type | types.ModuleType)  # modules have their own turn
    try:
        kept: dict[str, Any] = {} if is_code else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return kept.values()


def _names_read(model: nn.Module) -> Collection[str]:
    """The names that code of the model's classes spells, but for what only makes them."""
    methods: dict[str, set[str]] = {"forward": set()}
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if kind.__module__.partition(".")[0] != "torch":
            for name, value in vars(kind).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    methods.setdefault(name, set()).update(names_in(function.__code__))
    making = _reached(["__init__"], methods)
    return _reached(["forward", *(methods.keys() - making)], methods)


def _reached(names: Iterable[str], methods: Mapping[str, Collection[str]]) -> set[str]:
    """These names, and those that methods of such names spell, and so on."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += methods.get(name, ())
    return found
