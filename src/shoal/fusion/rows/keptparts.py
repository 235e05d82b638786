"""Parameters that a model's attributes have as well: ``self.penalized = [self.a]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

DEEPEST = 6  # containers within containers that are looked into


class Part(str):
    """In the place of such a parameter: its name in the model."""

    __slots__ = ()


def named_parts(module: nn.Module) -> dict[int, Part]:
    """The names of its parameters, by identity."""
    return {id(parameter): Part(name) for name, parameter in module.named_parameters()}


def with_names(value: Any, names: Mapping[int, Part]) -> Any:
    """A setting with names for the model's own parameters; the same object where it has none."""
    return _changed(value, lambda one: names.get(id(one), one) if isinstance(one, Tensor) else one)


def with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The reverse."""
    return _changed(value, lambda one: tensors[one] if type(one) is Part else one)


def names_in(value: Any) -> list[Part]:
    """The names in it."""
    found = list[Part]()

    def note(one: Any) -> Any:
        if type(one) is Part:
            found.append(one)
        return one

    _changed(value, note)
    return found


def _changed(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    kind: Any = type(value)
    is_named = isinstance(value, tuple) and hasattr(kind, "_fields")
    if not (kind in (list, tuple, dict) or is_named) or depth > DEEPEST:
        return change(value)
    items = list(value.values() if kind is dict else value)
    made = [_changed(item, change, depth + 1) for item in items]
    if all(one is other for one, other in zip(items, made, strict=True)):
        return value
    if kind is dict:
        return dict(zip(value, made, strict=True))
    return kind(*made) if is_named else kind(made)
