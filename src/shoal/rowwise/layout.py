"""Which rows of logits a tensor shows that is a view of them, or a copy of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

_VIEWS = frozenset(
    {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "narrow"}
    | {"transpose", "swapaxes", "permute", "movedim", "select", "__getitem__", "float", "to"}
)
"""Functions that show the same numbers in another shape, order or wider type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a tensor shows the rows of ``num_rows`` x ``classes`` numbers.

    ``like`` has the tensor's shape, strides and type, and no memory: torch's own view functions
    say what becomes of it. Were it real, its memory would hold rows one after another;
    ``table`` says which row of logits each of them is, None that they are in their own order.
    """

    like: Tensor
    num_rows: int
    classes: int
    table: Tensor | None = None

    @classmethod
    def of_all(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Of the logits as they are computed, of ``shape``."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        return cls(like=like, num_rows=like.numel() // shape[-1], classes=shape[-1])

    def through(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device,
    ) -> Layout | None:
        """The layout of ``func(tensor, *args, **kwargs)``; None when it is no such view.

        Raises what torch raises for a view that there is not.
        """
        name = getattr(func, "__name__", "")
        if not _is_view(name, args, kwargs, device):
            return None
        made = self._to(args, kwargs) if name == "to" else func(self.like, *args, **kwargs)
        if torch.promote_types(made.dtype, self.like.dtype) != made.dtype:
            return None
        if made.untyped_storage()._cdata != self.like.untyped_storage()._cdata:
            return self._copied(made, device)
        shown = Layout(like=made, num_rows=self.num_rows, classes=self.classes, table=self.table)
        return shown if shown.class_axis is not None and made.dtype == self.like.dtype else None

    @property
    def class_axis(self) -> int | None:
        """The one axis along which the classes lie, all of them; None when there is none."""
        axes = list(enumerate(zip(self.like.shape, self.like.stride(), strict=True)))
        found = [axis for axis, pair in axes if pair == (self.classes, 1)]
        strides = [stride for axis, (size, stride) in axes if size > 1 and axis not in found]
        whole = not any(n % self.classes for n in (self.like.storage_offset(), *strides))
        return found[0] if len(found) == 1 and whole else None

    @property
    def other_sizes(self) -> tuple[int, ...]:
        """The shape without the classes: that of a target of such logits."""
        return tuple(size for i, size in enumerate(self.like.shape) if i != self.class_axis)

    def rows(self, device: torch.device) -> Tensor | None:
        """Which row of logits each shown one is, in order; None when all are, in their order."""
        axis = self.class_axis
        strides = [s // self.classes for i, s in enumerate(self.like.stride()) if i != axis]
        offset = self.like.storage_offset() // self.classes
        every_row = torch.arange(self.num_rows, device=device)
        shown = every_row.as_strided(self.other_sizes, strides, offset)
        if shown.is_contiguous() and shown.numel() == self.num_rows:
            return self.table
        index = shown.reshape(-1)
        return index if self.table is None else self.table[index]

    def _to(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        return self.like if dtype is None else self.like.to(dtype)

    def _copied(self, made: Tensor, device: torch.device) -> Layout | None:
        """Of a copy, in which the shown rows lie one after another."""
        in_rows = made.is_contiguous() and made.dim() > 0 and made.shape[-1] == self.classes
        if not in_rows or self.class_axis != self.like.dim() - 1:
            return None
        count = made.numel() // self.classes
        return Layout(like=made, num_rows=count, classes=self.classes, table=self.rows(device))


def _is_view(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> bool:
    if name not in _VIEWS or "memory_format" in kwargs or "out" in kwargs:
        return False
    if name == "__getitem__":
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        return all(type(item) in (slice, int, EllipsisType, type(None)) for item in index)
    if name == "to":
        where, _, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        return layout is None and where in (None, device, torch.device(device.type))
    return True
