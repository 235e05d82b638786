"""What stands for logits that are not computed: a tensor of their shape without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from shoal.rowwise.loss import Cut, cross_entropy_by_rows
from shoal.rowwise.projection import Ambient, Shown
from shoal.rowwise.questions import is_identity, is_question


class Deferred(Tensor):
    """Logits that are not there, or a view of them: shape, type and device are.

    For every other use it is replaced by the tensor itself.
    """

    shown: Shown

    @classmethod
    def standing_for(cls, shown: Shown) -> Deferred:
        """A new one; a gradient that reaches it would flow on as from the tensor itself."""
        with torch.set_grad_enabled(shown.projection.ambient.grads and torch.is_grad_enabled()):
            made: Deferred = _Standing.apply(*shown.projection.inputs, shown)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        made.shown = shown
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        this = args[0] if args else None
        if isinstance(this, Deferred):
            if is_identity(func) or (this.shown.real is None and is_question(func)):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if this.shown.real is None:
                found = _loss(this, args, kwargs) if func is F.cross_entropy else None
                found = found if found is not None else _view(this, func, args[1:], kwargs)
                if found is not None:
                    return found
        args, kwargs = pytree.tree_map_only(Deferred, lambda it: it.shown.value(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Deferred, _bare, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Standing(torch.autograd.Function):
    """Makes a Deferred. Its backward is for functions that torch shows to nobody."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        shown: Shown = inputs[-1]
        ctx.shown = shown
        like = shown.layout.like
        return Tensor._make_wrapper_subclass(
            Deferred,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=shown.projection.device,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        projection, wanted = ctx.shown.projection, ctx.needs_input_grad[:3]
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(is_wanted)
            for tensor, is_wanted in zip(projection.inputs, wanted, strict=True)
        ]
        with torch.enable_grad():
            value = ctx.shown.of(projection.logits(leaves))
        sources = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(value, sources, grad))
        return (*(next(found) if is_wanted else None for is_wanted in wanted), None)


def _bare(deferred: Deferred) -> Tensor:
    """The values, for an operator that autograd has seen already."""
    shown = deferred.shown
    if shown.real is None:
        with torch._C.DisableTorchFunction():
            return shown.of(shown.projection.logits())
    return shown.real.detach()


def _view(this: Deferred, func: Any, args: tuple[Any, ...], kwargs: Any) -> Deferred | None:
    """A view of a Deferred; None where ``func`` is something else."""
    shown = this.shown
    layout = shown.layout.through(func, args, kwargs, shown.projection.device)
    if layout is None:
        return None
    views = (*shown.views, lambda tensor: func(tensor, *args, **kwargs))
    return Deferred.standing_for(Shown(shown.projection, layout, shown, views))


def _loss(this: Deferred, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
    """The loss by rows, where ``F.cross_entropy`` is asked for one that there is."""
    asked = _Asked(*args, **kwargs)
    return asked.compute() if asked.is_known() else None


class _Asked:
    """A call of ``F.cross_entropy``."""

    def __init__(
        self,
        input: Deferred,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        self.shown, self.target = input.shown, target
        self.grads = input.requires_grad and torch.is_grad_enabled()
        self.is_weighted = weight is not None
        self.is_old = size_average is not None or reduce is not None
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.reduction: Any = reduction

    def is_known(self) -> bool:
        """Are there rows of classes, and a right one for each?"""
        layout, target = self.shown.layout, self.target
        return (
            not (self.is_weighted or self.is_old)
            and self.reduction in ("mean", "sum", "none")
            and 0 <= self.label_smoothing <= 1
            and layout.class_axis == 1
            and type(target) is Tensor
            and target.dtype == torch.int64
            and target.shape == layout.other_sizes
            and target.device == self.shown.projection.device
        )

    def compute(self) -> Tensor:
        """The loss, of the type that the uncut one would have."""
        projection, layout = self.shown.projection, self.shown.layout
        projection.require_unchanged()
        given, weight, bias = projection.inputs
        rows = layout.rows(projection.device)
        dtype = layout.like.dtype
        cut = Cut(
            rows=projection.rows,
            logits=projection.dtype,
            wide=torch.promote_types(dtype, torch.float32),
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )
        with torch.set_grad_enabled(self.grads):
            features_RC = given.reshape(-1, given.shape[-1])
            if rows is not None:
                features_RC = features_RC.index_select(0, rows)
            loss = cross_entropy_by_rows(features_RC, weight, bias, self.target.reshape(-1), cut)
        projection.used = True
        projection.tally.cut.append((features_RC.shape[0], layout.classes))
        loss = loss.reshape(self.target.shape) if self.reduction == "none" else loss
        return loss if Ambient.here(projection.device.type).cast else loss.to(dtype)
