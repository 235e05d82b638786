"""Aids for measuring: gradients where there are none, and seconds of a step, shared out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from shoal.core.spec import JobMeasure, LayerMeasure, Narrow, ShardSpec
from shoal.core.units import Bytes, Seconds
from shoal.device.flops import narrow_step_factor
from shoal.recipes.several import each_kind


def fill_missing_gradients(model: nn.Module, *, frozen: bool = False) -> None:
    """Zeros where a backward left none; a sparse gradient has none of them.

    ``frozen``: of parameters too that are not trained by now.
    """
    sparse = {id(module.weight) for module in model.modules() if has_sparse_gradient(module)}
    for parameter in model.parameters():
        if not (parameter.requires_grad or frozen) or parameter.grad is not None:
            continue
        if id(parameter) in sparse:  # SparseAdam takes no other
            parameter.grad = torch.zeros_like(parameter).to_sparse(1)
            continue
        dtype = parameter.grad_dtype or parameter.dtype
        parameter.grad = torch.zeros_like(parameter, dtype=dtype)


def sparse_gradient_of(model: nn.Module) -> str:
    """The name of a parameter whose gradient is sparse, or will be; empty where none is."""
    told = {id(module.weight) for module in model.modules() if has_sparse_gradient(module)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = parameter.grad
        if id(parameter) in told or (grad is not None and grad.layout is not torch.strided):
            return name
    return ""


def has_sparse_gradient(module: nn.Module) -> bool:
    """Whether a module was told to have a sparse gradient."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and bool(module.sparse)


_DRAWN = 2**16  # to draw a billion normal values takes half a minute


def fill_gradients(parameters: Iterable[nn.Parameter], round_: int) -> None:
    """Random numbers, the same for the same round; those of a large tensor come again in it."""
    generator = torch.Generator().manual_seed(round_)
    for parameter in parameters:
        if parameter.requires_grad:
            size, dtype = parameter.numel(), parameter.grad_dtype or parameter.dtype
            drawn = torch.randn(min(size, _DRAWN), generator=generator)
            drawn = drawn.to(parameter.device, dtype)
            if size > _DRAWN:
                drawn = drawn.repeat(-(-size // _DRAWN))[:size]
            parameter.grad = drawn.reshape(parameter.shape)


def with_step(shard: ShardSpec, whole: ShardSpec, peak: Bytes, emulated: bool) -> ShardSpec:
    """A shard with its part of the whole step's seconds, and its own step's peak."""
    step_s = Seconds(whole.step_s * shard.owned_bytes / max(1, whole.owned_bytes))
    narrow = _narrow_with_step(
        shard.narrow, shard.owned_bytes, shard.state_bytes, step_s, emulated
    )
    return replace(shard, step_s=step_s, step_peak_bytes=peak, narrow=narrow)


def with_step_seconds(
    layers: Sequence[LayerMeasure], whole: JobMeasure, emulated: bool
) -> tuple[LayerMeasure, ...]:
    """A step's seconds, shared out by parameter bytes."""
    each = whole.shards[0].step_s / max(1, whole.shards[0].owned_bytes)
    found = []
    for layer in layers:
        step_s, owned = Seconds(each * layer.parameter_bytes), layer.parameter_bytes
        narrow = _narrow_with_step(layer.narrow, owned, layer.state_bytes, step_s, emulated)
        found.append(replace(layer, step_s=step_s, narrow=narrow))
    return tuple(found)


def _narrow_with_step(
    narrow: Narrow | None, owned: Bytes, state: Bytes, step_s: Seconds, emulated: bool
) -> Narrow | None:
    """With the seconds of its step; emulated ones follow from the bytes that a step touches."""
    if narrow is None:
        return None
    times = narrow_step_factor(owned, state, narrow) if emulated else 1.0
    return replace(narrow, step_s=Seconds(step_s * times))


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The class of each optimizer and which of torch's implementations it uses."""
    return each_kind(optimizer, _kind_of)


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0]
    chosen = [kind for kind in ("fused", "foreach", "capturable") if group.get(kind)]
    return " ".join([*chosen, type(optimizer).__name__])
