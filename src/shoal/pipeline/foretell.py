"""Random numbers of later stages, drawn ahead of them: so that a first stage need not wait.

[Note: foretelling]
The plain loop's micro-batch k + 1 goes on with the random state that k left at the end of the
model. The first stage would have to wait for that, and forwards would not overlap at all. But
what later stages draw does not depend on what they compute: their draws are recorded once per
form of a batch, as operators and shapes, and drawn again into nothing.

    stage 0   F0  draws of 1, 2    F1  draws of 1, 2    F2 ...   then, with B0: was it so?
    stage 1        F0                   F1
    stage 2             F0                   F1    -> its random state goes back to stage 0

Every state that was foretold is compared with the real one before the gradients of its
micro-batch are complete. Where the first batch shows that it cannot be done (a forward that
draws from Python's or NumPy's streams), stage 0 waits for the real state instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.partition.build import clone_batch
from shoal.partition.chain import Chain
from shoal.partition.preserve import preserved
from shoal.partition.units import run_forward
from shoal.recipe import Batch, autocast
from shoal.rng import capture_rng, restore_rng, same_rng

Form = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Like:
    """How a tensor looked that an operator drew into, or from."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """One like it, of ones: probabilities, or scales, that every operator takes."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        return made.fill_(1)


@dataclass(frozen=True, slots=True)
class _Draw:
    """One call of an operator that draws from the process's stream."""

    function: Callable[..., object]
    args: Any
    kwargs: Any

    def again(self) -> None:
        args, kwargs = pytree.tree_map(_real, (self.args, self.kwargs))
        self.function(*args, **kwargs)


def _real(leaf: Any) -> Any:
    return leaf.tensor() if isinstance(leaf, _Like) else leaf


def _likeness(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _Like(tuple(leaf.shape), leaf.stride(), leaf.dtype)


class _Recorder(TorchDispatchMode):
    """Notes the operators that draw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.draws: list[_Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self.draws.append(_Draw(func, *pytree.tree_map(_likeness, (args, kwargs))))
        return func(*args, **kwargs)


class Foretelling:
    """What stages after the first draw for a micro-batch.

    Args:
        chain: The model's; its later parameters may be gone: what they compute is not looked at.
        stop: The layer at which the second stage begins; 0 to foretell the first stage's too.
        whole: Has all of the model's weights there, of whatever values, while others' draws are
            recorded.
    """

    def __init__(
        self,
        chain: Chain,
        stop: int,
        whole: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._chain, self._stop, self._whole = chain, stop, whole
        self._known: dict[Form, list[_Draw]] = {}

    def works(self, batch: Batch) -> bool:
        """Does it come to the random state that the whole model comes to? Needs all weights."""
        before = capture_rng()
        draws = self._record(batch)  # leaves the state after it as it was
        with preserved(self._chain.model, self._chain.device):
            micro, wires = self._first_stage(batch)
            after_first = capture_rng()
            self._others(micro, wires)
            real = capture_rng()
        restore_rng(after_first)
        for draw in draws:
            draw.again()
        found = same_rng(real, capture_rng())
        restore_rng(before)
        return found

    def draw_on(self, batch: Batch) -> None:
        """Move the random state on as later stages do for this micro-batch."""
        with torch.no_grad():
            for draw in self._record(batch):
                draw.again()

    def _record(self, batch: Batch) -> list[_Draw]:
        form = _form_of(batch)
        if form not in self._known:
            recorder = _Recorder()
            with self._whole(), preserved(self._chain.model, self._chain.device):
                micro, wires = self._first_stage(batch)
                with recorder:
                    self._others(micro, wires)
            self._known[form] = recorder.draws
        return self._known[form]

    def _first_stage(self, batch: Batch) -> tuple[Any, Any]:
        micro = self._chain.begin(clone_batch(batch))
        wires = run_forward(self._chain, micro, 0, self._stop, {}) if self._stop else {}
        return micro, wires

    def _others(self, micro: Any, wires: Any) -> None:
        with torch.no_grad(), autocast(self._chain.recipe, self._chain.device):
            self._chain.loss(micro, self._stop, wires)


def _form_of(batch: Batch) -> Form:
    leaves = pytree.tree_leaves(batch)
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
