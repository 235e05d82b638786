"""Where a model's tensors lie in the host region of its trial."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import nn

from shoal.memory.layout import TensorSpec, TrialLayout, lay_out
from shoal.memory.store import describe
from shoal.partition.chain import Chain


def grads_of(model: nn.Module) -> list[TensorSpec]:
    """What the parameters' gradients look like: float32, where weights are rounded."""
    return [
        describe(name, p if p.grad_dtype in (None, p.dtype) else p.to("meta", p.grad_dtype))
        for name, p in model.named_parameters()
    ]


def layout_of(
    bounds: Sequence[int],
    chain: Chain | None,
    model: nn.Module,
    states: Mapping[str, Sequence[TensorSpec]],
) -> TrialLayout:
    """The host region of a model in shards; one shard when there is no chain."""
    parameters = {name: describe(name, p) for name, p in model.named_parameters()}
    grads = {spec.name: spec for spec in grads_of(model)}
    buffers = [describe(name, b) for name, b in model.named_buffers()]
    if chain is None:
        return lay_out([list(parameters)], [[]], parameters, states, buffers, grads)
    spans = list(itertools.pairwise(bounds))
    owned = [[n for layer in range(*span) for n in chain.parameters_of(layer)] for span in spans]
    borrowed = []
    for span, own in zip(spans, owned, strict=True):
        names = [n for layer in range(*span) for n in chain.borrowed_by(layer)]
        borrowed.append([n for n in dict.fromkeys(names) if n not in own])
    return lay_out(owned, borrowed, parameters, states, buffers, grads)
