"""FSDP2 around a block in such a way that the block's own code does not see it.

[Note: what torch's layers look at]
``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` have kernels of their own for
evaluation, which compute to other bits, and the attention multiplies query, key and value in one
where they are one tensor. They do not where the layer has hooks, where a weight is no plain
tensor, or where the three are several tensors. FSDP2 hooks its blocks, has DTensors in place of
weights that are not gathered, and gives a block each of its arguments anew. So while a block's
forward runs these hooks are out of sight, arguments that were one tensor are one again, and an
encoder that looks at its first layer's weights finds them gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils import _pytree as pytree

Hooks = dict[int, Callable[..., Any]]


def shard_unseen(block: nn.Module, mesh: DeviceMesh) -> None:
    """``fully_shard``, with whose result the block computes what it computed before."""
    before = set(block._forward_pre_hooks) | set(block._forward_hooks)
    # Of the hooks before the forward these are the first three: last made, first called.
    block.register_forward_pre_hook(_unite, prepend=True, with_kwargs=True)
    fully_shard(block, mesh=mesh)
    block.register_forward_pre_hook(_part, prepend=True, with_kwargs=True)
    own = (set(block._forward_pre_hooks) | set(block._forward_hooks)) - before
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        first, last = _taken(block._forward_pre_hooks, own), _taken(block._forward_hooks, own)
        try:
            return inner(*args, **kwargs)
        finally:
            block._forward_hooks.update(last)
            theirs = _taken(block._forward_pre_hooks, {*block._forward_pre_hooks})
            block._forward_pre_hooks.update(first | theirs)

    block.forward = forward


def show_first_layers(model: nn.Module) -> None:
    """Have torch's encoders find their first layer's weights gathered in evaluation."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and isinstance(module.layers[0], FSDPModule):
            module.register_forward_pre_hook(_gather_first)


def _gather_first(encoder: Any, args: Any) -> None:
    first = encoder.layers[0]
    if not first.training:
        first.unshard()  # its forward finds it so, and puts it away


def _taken(hooks: Hooks, keys: set[int]) -> Hooks:
    """Those of some keys, in their order, which are there no more."""
    return {key: hooks.pop(key) for key in [*hooks] if key in keys}


class _Again:
    """In place of a tensor that is the argument of this number too."""

    def __init__(self, number: int) -> None:
        self.number = number


def _part(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Have each tensor that needs a gradient among the arguments once."""
    if not torch.is_grad_enabled():
        return None
    leaves, tree = pytree.tree_flatten((args, kwargs))
    seen: dict[int, int] = {}
    parted: list[Any] = []
    for number, leaf in enumerate(leaves):
        known = number
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            known = seen.setdefault(id(leaf), number)
        parted.append(leaf if known == number else _Again(known))
    return _arguments(parted, tree)


def _unite(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Have it in all of its places again, as it is now."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    return _arguments([leaves[x.number] if isinstance(x, _Again) else x for x in leaves], tree)


def _arguments(leaves: list[Any], tree: Any) -> tuple[Any, Any]:
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    return args, kwargs
