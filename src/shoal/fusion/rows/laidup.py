"""What a forward lays up in a slot's own module, taken back after the slot's own passes.

[Note: who lays up what]
Stacked passes run one copy of the code (``template.py``); what they lay up is gone with the copy,
when somebody comes or leaves. A batch of another layout runs in its slot's own module. What that
lays up (``config.problem_type`` of transformers, a table that is made when it is first needed)
would be there in some slots and not in those that are filled later, and trials that are the same
by their code would differ. An array takes only models whose later forwards change nothing that the
first one left, so every forward of a slot's own may begin as the first one did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from shoal.fusion.rows.blend import HIDDEN

DEEPEST = 4  # objects within objects that are looked into
_WITHOUT = (bool, int, float, complex, str, bytes, type(None), tuple, Tensor, nn.Module, type)
_OTHERS = (FunctionType, MethodType, ModuleType)

Holders = Sequence[dict[Any, Any]]


def holders_of(module: nn.Module) -> Holders:
    """The dictionaries in which a model's attributes are, and those of objects in them."""
    found: dict[int, dict[Any, Any]] = {}
    for child in module.modules():
        _find(vars(child), found, 0)
    return list(found.values())


def _find(holder: dict[Any, Any], found: dict[int, dict[Any, Any]], depth: int) -> None:
    found[id(holder)] = holder
    if depth == DEEPEST:
        return
    for key, value in holder.items():
        if isinstance(value, (*_WITHOUT, *_OTHERS)) or (depth == 0 and key in HIDDEN):
            continue
        inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if type(inner) is dict and id(inner) not in found:
            _find(inner, found, depth + 1)


class Settings:
    """What the holders hold now; parameters, buffers and modes are not looked after."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._kept = [holder.copy() for holder in holders]

    def put_back(self) -> None:
        """Have them hold that again."""
        now = [*chain.from_iterable(map(dict.values, self._holders))]
        then = [*chain.from_iterable(map(dict.values, self._kept))]
        if len(now) != len(then) or not all(map(is_, now, then)):
            for holder, before in zip(self._holders, self._kept, strict=True):
                _restore(holder, before)


@contextmanager
def put_back(holders: Holders) -> Iterator[None]:
    """What the holders hold is as before afterwards."""
    settings = Settings(holders)
    try:
        yield
    finally:
        settings.put_back()


def _restore(holder: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in [key for key in holder if key not in before and key not in HIDDEN]:
        del holder[key]
    for key, value in before.items():
        if key not in HIDDEN and holder.get(key, holder) is not value:
            holder[key] = value
