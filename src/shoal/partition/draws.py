"""What a forward draws at random, recorded as operators, and drawn again into nothing.

Which numbers a forward draws depends on what it computes; how many of them, as a rule, on the
form of its batch alone. So a recording of one forward moves the random state on as any other
forward of that form does, without computing anything. Whoever relies on that compares the state
with the real one: a forward may draw as many as its data says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernels.dispatched import run_operation
from shoal.recipes.recipe import Batch
from shoal.rng import capture_rng, same_rng

Form = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Like:
    """How a tensor looked that an operator drew into, or from."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        """One like it, of ones: probabilities, or scales, that every operator takes."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return made.fill_(1)


@dataclass(frozen=True, slots=True)
class Draw:
    """One call of an operator that draws from the process's stream."""

    function: Callable[..., object]
    args: Any
    kwargs: Any

    def again(self) -> None:
        """Draw as many numbers as that call did; they are nowhere afterwards."""
        args, kwargs = pytree.tree_map(_real, (self.args, self.kwargs))
        self.function(*args, **kwargs)


def _real(leaf: Any) -> Any:
    return leaf.tensor() if isinstance(leaf, _Like) else leaf


def _likeness(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _Like(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device)


class DrawRecorder(TorchDispatchMode):
    """Notes the operators that draw while it is on, which it may be several times.

    ``device`` is that whose stream there is beside the process's. An attention may draw, and does
    not if its dropout is 0.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.draws: list[Draw] = []
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator"):
            return run_operation(func, args, kwargs)
        drawn = Draw(func, *pytree.tree_map(_likeness, (args, kwargs)))
        before = capture_rng(self._device)
        made = run_operation(func, args, kwargs)
        if not same_rng(before, capture_rng(self._device)):
            self.draws.append(drawn)
        return made


class Recordings:
    """What forwards drew, by the form of their batch."""

    def __init__(self) -> None:
        self._known: dict[Form, list[Draw]] = {}

    def knows(self, batch: Batch) -> bool:
        """Whether a forward of a batch of this form was recorded."""
        return form_of(batch) in self._known

    def keep(self, batch: Batch, draws: Iterable[Draw]) -> None:
        """What a forward of this batch drew."""
        self._known[form_of(batch)] = list(draws)

    def draw_on(self, batch: Batch) -> None:
        """Move the random state on as a forward of this batch does, which is of a known form."""
        with torch.no_grad():
            for draw in self._known[form_of(batch)]:
                draw.again()


def form_of(batch: Batch) -> Form:
    """Equal for batches whose forwards draw alike: shapes, types, and what is no tensor."""
    found: list[object] = []
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found.append((leaf.shape, leaf.dtype))
        elif isinstance(leaf, Mapping):  # one that pytree does not know
            found += [tuple(leaf), form_of(dict(leaf))]
        else:
            found.append(repr(leaf))
    return tuple(found)
