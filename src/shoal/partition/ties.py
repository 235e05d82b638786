"""Gradients of parameters that several shards use, summed as one backward would sum them.

[Note: casts]
Under bf16 autocast a weight is cast once a forward, and all uses add their gradients to
that one cast, in bf16; only the sum reaches the parameter, in float32:

    plain      head --g2--+
                          cast (bf16: g2 + g1) --float32--> parameter
               block -g1--+
    sharded    head --g2--> cast | carried in bf16 |--> cast of the block's shard + g1 --> ...

So where an earlier layer casts the same parameter, a shard's part is taken off at the
cast and enters the earlier shard's backward as one more root at its own cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shoal.partition.chain import Chain

Root = tuple[GradientEdge, Tensor]


def cast_key(name: str) -> str:
    """Under which the part of a parameter's cast is carried."""
    return f"{name} (cast)"


class TiedParts:
    """Keeps borrowed parameters' gradients apart from ``.grad`` during a backward.

    Call ``watch_casts`` in the shard's autocast region before its forward, and ``arrive`` with
    the parts of later shards before its backward. Inside the ``with``, a borrowed parameter has
    no ``.grad``; what it then gets is ``carried``, and the earlier ``.grad`` is put back.

    ``find`` gives a parameter by name, where it is not the model's own.
    """

    def __init__(
        self,
        chain: Chain,
        start: int,
        stop: int,
        find: Callable[[str], Tensor] | None = None,
    ) -> None:
        self._parameter: Callable[[str], Tensor] = find or chain.model.get_parameter
        layers = range(start, stop)
        self._chain, self._start, self._stop = chain, start, stop
        owned = {name for layer in layers for name in chain.parameters_of(layer)}
        uses = {name for layer in layers for name in chain.borrowed_by(layer)}
        self._borrowed = {
            name: parameter
            for name in sorted(uses - owned)
            if (parameter := self._parameter(name)).requires_grad
        }
        self._here = owned | uses
        self.carried: dict[str, Tensor] = {}
        self.roots: list[Root] = []
        self._casts: dict[str, GradientEdge] = {}
        self._set_aside: dict[str, Tensor | None] = {}
        self._hooks: list[Any] = []

    @property
    def is_idle(self) -> bool:
        """Does no gradient of a parameter come from, or go to, another shard here?"""
        return not (self._borrowed or self.roots or self._casts)

    def watch_casts(self) -> None:
        """Cast the parameters that other shards cast too."""
        casts = self._chain.shared_casts
        here = {name for layer in range(self._start, self._stop) for name in casts[layer]}
        before = {name for layer in range(self._start) for name in casts[layer]}
        after = {name for layer in range(self._stop, len(casts)) for name in casts[layer]}
        for name in sorted(here & (before | after)):
            edge = _cast_edge(self._parameter(name))
            if edge is not None:
                self._casts[name] = edge

    def arrive(self, parts: Mapping[str, Tensor]) -> None:
        """Take in the parts of later shards, and see to it that earlier ones get theirs."""
        self.carried = {name: part for name, part in parts.items() if name not in self._here}
        self.roots = [
            (get_gradient_edge(self._parameter(name)), part)
            for name, part in parts.items()
            if name in self._here
        ]
        casts = self._chain.shared_casts
        before = {name for layer in range(self._start) for name in casts[layer]}
        for name, edge in self._casts.items():
            part = self.carried.pop(cast_key(name), None)
            if part is not None:
                self.roots.append((edge, part))
            if name in before:
                self._hooks.append(edge.node.register_prehook(self._take_off(cast_key(name))))

    def _take_off(self, key: str) -> Any:
        def take(grads: tuple[Tensor, ...]) -> tuple[None]:
            self.carried[key] = grads[0]
            return (None,)

        return take

    def __enter__(self) -> None:
        for name, parameter in self._borrowed.items():
            self._set_aside[name] = parameter.grad
            parameter.grad = None

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for name, parameter in self._borrowed.items():
            if parameter.grad is not None:
                self.carried[name] = parameter.grad
            parameter.grad = self._set_aside[name]
        self._set_aside.clear()


def _cast_edge(parameter: Tensor) -> GradientEdge | None:
    """Where gradients enter this autocast region's cast of ``parameter``; None without one.

    A product with nothing makes autocast cast it now; later uses find the cast in its cache.
    """
    if not parameter.requires_grad or parameter.dim() == 0:
        return None
    nothing = parameter.new_zeros(parameter.shape[-1], 0)
    node = torch.matmul(parameter, nothing).grad_fn
    while node is not None and node.name() != "ToCopyBackward0":
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return None if node is None else GradientEdge(node, 0)
