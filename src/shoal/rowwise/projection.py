"""A large linear projection that is not computed yet, and the views of it that were taken."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import TrialError
from shoal.rowwise.layout import Layout

WIDE: Final = 4
"""More classes than so many times the features are a large vocabulary; no other layer has them."""


class Ambient(NamedTuple):
    """Under which gradient mode and autocast something was asked for."""

    grads: bool
    cast: torch.dtype | None

    @classmethod
    def here(cls, kind: str) -> Ambient:
        """What is in force now on devices of one ``kind``."""
        cast_on = torch.is_autocast_enabled(kind)
        return cls(torch.is_grad_enabled(), torch.get_autocast_dtype(kind) if cast_on else None)

    @contextmanager
    def restored(self, kind: str) -> Iterator[None]:
        """The same in force again."""
        with ExitStack() as stack:
            if self.cast != Ambient.here(kind).cast:
                on = self.cast is not None
                stack.enter_context(torch.autocast(kind, self.cast, enabled=on))
            stack.enter_context(torch.set_grad_enabled(self.grads))
            yield


class Tally:
    """What became of large projections: rows and classes of each.

    Of those in ``cut`` the loss was computed by rows; something else needed those in ``whole``.
    """

    def __init__(self) -> None:
        self.cut: list[tuple[int, int]] = []
        self.whole: list[tuple[int, int]] = []

    def describe(self, rows: int) -> str:
        """What came of losses by ``rows``, as a note for whoever asked for them."""
        if self.cut:
            shown = ", ".join(f"{c} classes for {r} rows" for r, c in dict.fromkeys(self.cut))
            return f"the loss over {shown} is computed {rows} rows at a time: loss_rows={rows}"
        why = (
            f"no F.linear of more than {rows} rows has more than {WIDE} times as many outputs as "
            "inputs"
        )
        if self.whole:
            count, classes = max(self.whole, key=lambda size: size[1])
            why = (
                f"{classes} logits for each of {count} rows go into something else than an "
                "unweighted F.cross_entropy with class labels"
            )
        return f"loss_rows={rows} took no effect: {why}"


class Projection:
    """A linear projection that has not been computed.

    Attributes:
        dtype: That the logits have.
        used: Whether a loss by rows read it, so that nothing need wait for its values.
        shown: Its views in the order in which they were made, as long as they are there.
    """

    def __init__(self, inputs: tuple[Tensor, Tensor, Tensor | None], rows: int, tally: Tally):
        self.inputs, self.rows, self.tally = inputs, rows, tally
        self.device = inputs[0].device
        self.ambient = Ambient.here(self.device.type)
        self.dtype = self.ambient.cast or inputs[0].dtype
        self.size = (inputs[0].numel() // inputs[0].shape[-1], inputs[1].shape[0])
        self.used = False
        self.shown: list[weakref.ref[Shown]] = []
        self._versions = self._versions_now()

    def compute(self) -> None:
        """Give each tensor that shows it the values, in the order in which they were made."""
        living = [shown for reference in self.shown if (shown := reference()) is not None]
        self.shown.clear()
        if not living:
            return
        self.tally.whole.append(self.size)
        logits = self.logits()
        for shown in living:
            shown.take(logits)

    def logits(self, inputs: Sequence[Tensor | None] | None = None) -> Tensor:
        """The plain projection as where it was asked for, of copies of its ``inputs`` if given."""
        self.require_unchanged()
        with self.ambient.restored(self.device.type):
            return F.linear(*(inputs or self.inputs))  # type: ignore[arg-type]

    def require_unchanged(self) -> None:
        """Raise TrialError where what it is made from is not as it was."""
        if self._versions_now() != self._versions:
            raise TrialError(
                f"logits of {self.size[0]} rows and {self.size[1]} classes were put off by "
                f"Recipe(loss_rows={self.rows}), and what they are made from was changed in place "
                "before they were read. Read them before that, or leave loss_rows out."
            )

    def _versions_now(self) -> list[int]:
        tensors = [tensor for tensor in self.inputs if tensor is not None]
        return [tensor._version for tensor in tensors if not tensor.is_inference()]


View = Callable[[Tensor], Tensor]


class Shown:
    """What one Deferred stands for: logits, or a view of what ``parent`` stands for.

    Attributes:
        real: The tensor, once it has been computed.
        views: What leads to it from the logits.
    """

    def __init__(
        self, projection: Projection, layout: Layout, parent: Shown | None, views: tuple[View, ...]
    ) -> None:
        self.projection, self.layout, self.views = projection, layout, views
        self.real: Tensor | None = None
        self._parent = parent
        self._ambient = Ambient.here(projection.device.type)
        projection.shown.append(weakref.ref(self))

    def take(self, logits: Tensor) -> None:
        """Have the values, which the parent has had before."""
        if self._parent is None:
            self.real = logits
            return
        assert self._parent.real is not None
        with self._ambient.restored(self.projection.device.type):
            self.real = self.views[-1](self._parent.real)
        self._parent = None

    def value(self) -> Tensor:
        """The tensor itself."""
        if self.real is None:
            self.projection.compute()
        assert self.real is not None
        return self.real

    def of(self, logits: Tensor) -> Tensor:
        """What this would be of other logits."""
        for view in self.views:
            logits = view(logits)
        return logits
