"""The floats that a graph of a trial's code would hold as they are.

Two trials with the same ones have one graph. A dropout rate is none of them: masks are drawn
outside, so that all a graph holds is whether there are any.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shoal.core.closures import contents_of
from shoal.fusion.matching.signature import DEEPEST, is_number, named_items
from shoal.fusion.rows.blend import HIDDEN
from shoal.recipes.recipe import Recipe

RATES: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), "p"),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.MultiheadAttention), "dropout"),
}
"""Modules of torch's own whose rate goes nowhere but to the masks."""


def constants_of(recipe: Recipe, module: nn.Module, *, rates: bool = False) -> str:
    """All of them, as a digest that two processes agree on; ``rates``: and what masks have."""
    told = hashlib.sha256()
    for path, child in module.named_modules():
        rate = RATES.get(type(child))
        for name, value in vars(child).items():
            if name in HIDDEN or name.endswith("_hooks"):
                continue
            words = repr(value) if rates and name == rate else _words(name, value, rate)
            told.update(f"{path}.{name}={words};".encode())
    for name in ("loss", "inputs"):
        told.update(f"{name}={' '.join(_floats(getattr(recipe, name)))};".encode())
    return told.hexdigest()[:12]


def _words(name: str, value: Any, rate: str | None) -> str:
    if name == rate and isinstance(value, int | float):
        return "drops" if value else "keeps"
    return " ".join(_floats(value, name=name))


def _floats(value: Any, depth: int = 0, name: object = "") -> Iterator[str]:
    """Every float inside, in order; ``name`` is what the value is called, if it has a name."""
    if isinstance(value, float) or is_number(name, value):
        yield repr(float(value))
        return
    if depth > DEEPEST or isinstance(value, Tensor | type | types.ModuleType | str | bytes):
        return
    if (settings := _settings(value)) is not None:
        of_all = name if isinstance(value, dict) else ""
        for _, called, item in named_items(of_all, settings):
            yield from _floats(item, depth + 1, called)
        return
    inside: list[Any] = []
    if isinstance(value, list | tuple):
        inside = [*iter(value)]  # not its length, which a type may have none of
    elif isinstance(value, functools.partial):
        inside = [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        inside = [value.__func__, value.__self__]
    elif isinstance(value, types.FunctionType):
        cells = contents_of(value.__closure__)
        inside = [cells, value.__defaults__, value.__kwdefaults__]
    for item in inside:
        yield from _floats(item, depth + 1)


def _settings(value: Any) -> Mapping[Any, Any] | None:
    """What a dict, a module beside the model (a loss) or a plain object holds, by name."""
    if isinstance(value, dict):
        return value
    if isinstance(value, nn.Module):
        return {name: item for name, item in vars(value).items() if name not in HIDDEN}
    if isinstance(value, list | tuple | functools.partial | types.MethodType | types.FunctionType):
        return None
    return vars(value) if hasattr(value, "__dict__") else None
