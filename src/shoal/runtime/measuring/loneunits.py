"""A trial alone, shard by shard, within a device's budget: what an array is held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.fusion.dryrun import TOLERANCE
from shoal.fusion.likeness import close
from shoal.fusion.member import Member, in_streams
from shoal.fusion.rows.installed import swap_buffers
from shoal.partition.chain import Chain
from shoal.partition.transplant import transplanted
from shoal.recipes.recipe import tensors_of, to_device
from shoal.rng import RngState
from shoal.runtime.measuring.meter import HOST, Meter, copied_to
from shoal.runtime.measuring.visiting import Visits
from shoal.runtime.units import ChainUnits
from shoal.spill.generate import Route


@dataclass(slots=True)
class LonePass:
    """What one micro-batch of a trial came to, on the host; by parameter and by buffer."""

    loss: float
    rng: RngState
    dtype: torch.dtype
    grads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def lone_pass_in_shards(
    member: Member,
    batch: Any,
    chain: Chain,
    spans: Sequence[tuple[int, int]],
    meter: Meter,
) -> LonePass:
    """A forward and a backward of a trial, whose module is used up; all of it is in host memory.

    Raises:
        torch.OutOfMemoryError: a unit needs more than the device has.
    """
    module, where = member.module, meter.device
    own = transplanted(chain, module, member.recipe)
    units = ChainUnits(own, member.recipe, spans, where, Route(len(spans)))
    home = {name: parameter.data for name, parameter in module.named_parameters()}
    module.train()
    with meter.hold(module.buffers(), tensors_of(batch)):
        swap_buffers(module, {id(b): b.to(where, copy=True) for b in module.buffers()})
        with in_streams(member, where):
            micro = units.begin(to_device(batch, where))
            visits = Visits(
                micro,
                own,
                spans,
                meter,
                parameters=lambda names: {name: home[name] for name in names},
                place=lambda placed: _point(module, placed),
                evict=lambda names: _point(module, {name: home[name] for name in names}),
            )
            loss, grads = _run(module, units, visits, micro, meter)
        found = LonePass(loss, member.rng, next(module.parameters()).dtype, grads)
        if member.recipe.precision != "fp32":
            found.dtype = torch.bfloat16
        found.buffers = copied_to(HOST, dict(module.named_buffers()))
    return found


def _run(
    module: nn.Module, units: ChainUnits, visits: Visits, micro: Any, meter: Meter
) -> tuple[float, dict[str, Tensor]]:
    last = units.num_shards - 1
    grads: dict[str, Tensor] = {}
    losses: list[float] = []
    for shard in range(last):
        with visits.of(shard), meter.counting():
            units.forward(shard, micro)
    for shard in reversed(range(last + 1)):
        with visits.of(shard):
            with meter.counting():
                loss = units.backward(shard, micro)
            if loss is not None:
                losses.append(float(loss.detach()))
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    grads[name], parameter.grad = parameter.grad.to(HOST), None
    return losses[0], grads


def _point(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        module.get_parameter(name).data = tensor


def unlike(
    alone: LonePass, loss: float, grads: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> str:
    """The first thing in which a slot of an array is not its trial alone; empty if nothing is."""
    limit = TOLERANCE.get(alone.dtype, 1e-3)
    if not close(torch.tensor(alone.loss), torch.tensor(loss), limit, 1.0):
        return f"the loss is {loss!r}, alone {alone.loss!r}"
    largest = [float(grad.abs().max()) for grad in alone.grads.values() if grad.numel()]
    scale = max(largest, default=1.0)
    for name in {**alone.grads, **grads}:
        if name not in alone.grads or name not in grads:
            return f"the gradient of {name!r} exists in one only"
        if not close(alone.grads[name], grads[name], limit, scale):
            return f"the gradient of {name!r} is another one"
    for name, buffer in alone.buffers.items():
        if not close(buffer, buffers[name], limit, 1e-3):
            return f"the buffer {name!r} is another one"
    return ""
