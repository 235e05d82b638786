"""Where a model's tensors lie in the host region of its trial."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shoal.memory.layout import TensorSpec, TrialLayout, lay_out
from shoal.memory.store import describe
from shoal.partition.chain import Chain


def grads_of(model: nn.Module, *, frozen: bool = False) -> list[TensorSpec]:
    """What the parameters' gradients look like: float32, where weights are rounded.

    Those that are frozen have none, unless ``frozen`` says that they may be trained later.
    """
    return [
        describe(name, p if p.grad_dtype in (None, p.dtype) else p.to("meta", p.grad_dtype))
        for name, p in model.named_parameters()
        if p.requires_grad or frozen
    ]


def layout_of(
    bounds: Sequence[int],
    chain: Chain | None,
    model: nn.Module,
    states: Mapping[str, Sequence[TensorSpec]],
) -> TrialLayout:
    """The host region of a model in shards; one shard when there is no chain.

    Without a chain no gradient comes to the host: the model steps where its backward was.
    """
    parameters = {name: describe(name, p) for name, p in model.named_parameters()}
    buffers = [describe(name, b) for name, b in model.named_buffers()]
    if chain is None:
        return lay_out([list(parameters)], [[]], parameters, states, buffers, {})
    grads = {spec.name: spec for spec in grads_of(model)}
    spans = list(itertools.pairwise(bounds))
    owned = [[n for layer in range(*span) for n in chain.parameters_of(layer)] for span in spans]
    borrowed = []
    for span, own in zip(spans, owned, strict=True):
        names = [n for layer in range(*span) for n in chain.borrowed_by(layer)]
        borrowed.append([n for n in dict.fromkeys(names) if n not in own])
    return lay_out(owned, borrowed, parameters, states, buffers, grads)


def sum_whole(params: Mapping[str, nn.Parameter], layout: TrialLayout) -> None:
    """Have gradients added up in float32 where a weight travels as bfloat16."""
    for shard in layout.shards:
        loaded = {field.spec.name: field.spec.dtype for field in shard.loaded.fields}
        for grad in (field.spec for field in shard.grad.fields):
            if loaded[grad.name] != grad.dtype:
                params[grad.name].grad_dtype = getattr(torch, grad.dtype)
