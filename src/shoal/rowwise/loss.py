"""The cross-entropy of a linear projection, some rows at a time.

Tensor names carry shapes: R rows in all, N of them at a time, C features, V classes.

[Note: gradients with the forward]
The logits of N rows are gone when the next ones are made, so their part of the gradients is made
while they are there:

    rows      0..N          N..2N
    forward   logits -> loss, slope -> part of the gradients    (once more for each N rows)
    backward  the gradients, times what the loss counts for

A mean or a sum counts for one number, known only in the backward, by which finished gradients
may be multiplied. So the projection is computed once, as by an uncut loss. What is kept for the
backward is a gradient of the weight and one of the features, that an uncut backward makes too.
With ``reduction="none"`` each row counts for a number of its own: then, and in a second backward
of one graph, logits are computed again.

Gradients of the weight are summed in float32 or wider, and are at the end what a product in the
logits' type could give: of bfloat16 logits numbers of bfloat16, as autocast's casts have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Reduction = Literal["mean", "sum", "none"]
Wanted = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How the losses of R rows are computed.

    ``rows`` are those computed at a time; ``logits`` is the type of the logits, ``wide`` that
    of their logarithms and sums. The others are as in ``F.cross_entropy``.
    """

    rows: int
    logits: torch.dtype
    wide: torch.dtype
    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def parts(self, num_rows: int) -> Iterator[slice]:
        """The rows of each turn; the last one may have fewer."""
        for start in range(0, num_rows, self.rows):
            yield slice(start, min(start + self.rows, num_rows))

    def weigh(self, kept_R: Tensor) -> Tensor:
        """What each row's loss counts for in the result; nothing where it is ignored."""
        counts_R = kept_R.to(self.wide)
        return counts_R / counts_R.sum().clamp(min=1) if self.reduction == "mean" else counts_R


def cross_entropy_by_rows(
    features_RC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, target_R: Tensor, cut: Cut
) -> Tensor:
    """``F.cross_entropy(F.linear(features, weight, bias), target)``, of ``cut.wide`` type.

    Never holds the logits of more than ``cut.rows`` rows. Each row's loss is that of the uncut
    one; sums over rows are taken in another order.
    """
    loss: Tensor = _LossByRows.apply(features_RC, weight_VC, bias_V, target_R, cut)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss


class _LossByRows(torch.autograd.Function):
    """See the note: ``ready`` are the gradients that the forward has made."""

    @staticmethod
    def forward(
        ctx: Any,
        features_RC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        target_R: Tensor,
        cut: Cut,
    ) -> Tensor:
        ctx.save_for_backward(features_RC, weight_VC, bias_V, target_R)
        ctx.cut, ctx.ready = cut, None
        with torch.autocast(features_RC.device.type, enabled=False):
            head = _Head(features_RC, weight_VC, bias_V, cut)
            labels = _Labels(target_R, cut)
            counts_R = cut.weigh(labels.kept_R)
            if any(ctx.needs_input_grad) and cut.reduction != "none":
                ctx.ready = _Sums(head, ctx.needs_input_grad[:3])
            losses_R = features_RC.new_empty(len(target_R), dtype=cut.wide)
            for part in cut.parts(len(target_R)):
                logs_NV = head.log_probabilities(part)
                losses_R[part] = labels.losses(logs_NV, part)
                if ctx.ready is not None:
                    ctx.ready.add(part, labels.slope(logs_NV, part, counts_R[part]))
            if cut.reduction == "none":
                return losses_R
            total = losses_R.sum()
            return total / labels.kept_R.sum() if cut.reduction == "mean" else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ready, ctx.ready = ctx.ready, None
        if ready is None:
            made = _recomputed(ctx.saved_tensors, ctx.cut, ctx.needs_input_grad[:3], grad)
            return (*made.finished(None), None, None)
        return (*ready.finished(grad), None, None)


def _recomputed(
    saved: tuple[Tensor, Tensor, Tensor | None, Tensor], cut: Cut, wanted: Wanted, grad: Tensor
) -> _Sums:
    """The gradients from logits that are computed again; ``grad`` is one number or R."""
    features_RC, weight_VC, bias_V, target_R = saved
    head, labels = _Head(features_RC, weight_VC, bias_V, cut), _Labels(target_R, cut)
    counts_R = cut.weigh(labels.kept_R) * grad
    sums = _Sums(head, wanted)
    for part in cut.parts(len(target_R)):
        sums.add(part, labels.slope(head.log_probabilities(part), part, counts_R[part]))
    return sums


class _Head:
    """The projection: its inputs in the type that the logits have."""

    def __init__(
        self, features_RC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, cut: Cut
    ) -> None:
        self.given = (features_RC, weight_VC, bias_V)
        self.cut = cut
        self.weight_VC = weight_VC.to(cut.logits)
        self._bias_V = None if bias_V is None else bias_V.to(cut.logits)

    def features(self, part: slice) -> Tensor:
        return self.given[0][part].to(self.cut.logits)

    def log_probabilities(self, part: slice) -> Tensor:
        logits_NV = F.linear(self.features(part), self.weight_VC, self._bias_V)
        return F.log_softmax(logits_NV, dim=-1, dtype=self.cut.wide)


class _Labels:
    """The classes that are right, and what follows for losses and their slopes."""

    def __init__(self, target_R: Tensor, cut: Cut) -> None:
        self.kept_R = target_R != cut.ignore_index
        self._class_R = torch.where(self.kept_R, target_R, 0)
        self._smoothing = cut.label_smoothing

    def losses(self, logs_NV: Tensor, part: slice) -> Tensor:
        """The loss of each row, 0 where it is ignored."""
        losses_N = -logs_NV.gather(1, self._class_R[part, None]).squeeze(1)
        if self._smoothing:
            smooth_N = -logs_NV.sum(1) / logs_NV.shape[1]
            losses_N = (1 - self._smoothing) * losses_N + self._smoothing * smooth_N
        return torch.where(self.kept_R[part], losses_N, 0.0)

    def slope(self, logs_NV: Tensor, part: slice, counts_N: Tensor) -> Tensor:
        """How the result grows with each logit; overwrites ``logs_NV``."""
        counts_N1, class_N1 = counts_N[:, None], self._class_R[part, None]
        slope_NV = logs_NV.exp_().mul_(counts_N1)
        if self._smoothing:
            slope_NV.sub_(counts_N1 * (self._smoothing / slope_NV.shape[1]))
        right_N1 = slope_NV.gather(1, class_N1) - (1 - self._smoothing) * counts_N1
        return slope_NV.scatter_(1, class_N1, right_N1)


class _Sums:
    """Gradients on their way, of those that are wanted: features, weight, bias."""

    def __init__(self, head: _Head, wanted: Wanted) -> None:
        features_RC, weight_VC, bias_V = head.given
        wide = head.cut.wide
        self._head = head
        self._features_RC = torch.empty_like(features_RC) if wanted[0] else None
        self._weight_VC = _zeros(weight_VC, wide) if wanted[1] else None
        self._bias_V = _zeros(bias_V, wide) if wanted[2] and bias_V is not None else None

    def add(self, part: slice, slope_NV: Tensor) -> None:
        """Count in the rows of one turn."""
        slope_NV = slope_NV.to(self._head.cut.logits)
        if self._features_RC is not None:
            self._features_RC[part] = slope_NV @ self._head.weight_VC
        if self._weight_VC is not None:
            _add_product(self._weight_VC, slope_NV.t(), self._head.features(part))
        if self._bias_V is not None:
            self._bias_V += slope_NV.sum(0, dtype=self._bias_V.dtype)

    def finished(self, factor: Tensor | None) -> Gradients:
        """The gradients, times ``factor``, in the types of what they belong to; only once."""
        narrow = self._head.cut.logits
        features_RC, weight_VC, bias_V = self._head.given
        return (
            _finish(self._features_RC, factor, None, features_RC),
            _finish(self._weight_VC, factor, narrow, weight_VC),
            _finish(self._bias_V, factor, narrow, bias_V),
        )


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the same shape; no operator reads ``like``, so that it counts as only cast."""
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    if total.dtype == first.dtype:
        torch.addmm(total, first, second, out=total)
    else:
        total += first @ second


def _finish(
    total: Tensor | None, factor: Tensor | None, narrow: torch.dtype | None, owner: Tensor | None
) -> Tensor | None:
    if total is None or owner is None:
        return None
    if factor is not None:
        total.mul_(factor)
    return total.to(narrow or total.dtype).to(owner.dtype)
