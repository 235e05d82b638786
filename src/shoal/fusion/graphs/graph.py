"""A pass as a graph of torch's operations: forward, backward, and the writing of buffers.

[Note: what a graph is given]
Parameters and buffers, the batch, the weight of each slot's loss, and the masks of its dropouts,
all stacked. It leaves the losses [N], the gradients, and whether its checks hold; buffers it
writes where they are. Nothing that may change from step to step is inside: what would be, a float
of the code, is told by ``constants.py``. Run operation by operation it does what the eager pass
does, by the same kernels in the same order, hence with the same bits, without the Python between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from shoal.fusion.declined import Untraceable
from shoal.fusion.graphs.tracing import trace
from shoal.fusion.likeness import same_bits
from shoal.fusion.passes.sidebyside import put_side_by_side

Run = Callable[..., Sequence[Tensor]]
Code = Callable[[Mapping[str, Tensor], Sequence[Tensor], Sequence[Tensor]], "Left"]
"""The pass: blocks by name, tensors of the batch, masks; in the state that it is captured in."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a pass leaves: losses [N], checks, and what is wanted besides (outputs)."""

    losses: Tensor
    checks: Sequence[Tensor]
    others: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a graph runs on; ``weights`` [N] of the losses, None where there is no backward."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    leaves: Sequence[Tensor]
    masks: Sequence[Tensor]
    weights: Tensor | None

    def flat(self) -> list[Tensor]:
        """In the order of the graph's arguments."""
        weights = [] if self.weights is None else [self.weights]
        held = (*self.parameters.values(), *self.buffers.values())
        return [*(t.detach() for t in held), *weights, *self.leaves, *self.masks]

    def copied(self) -> Inputs:
        """The same with buffers of its own, which a run may write to."""
        buffers = {name: block.clone() for name, block in self.buffers.items()}
        return replace(self, buffers=buffers)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run of a graph left; ``holds`` is false where one of its checks failed."""

    losses: Tensor
    gradients: Mapping[str, Tensor]
    others: Sequence[Tensor]
    holds: bool


@dataclass(slots=True)
class Graph:
    """A pass that was captured. ``run`` takes ``Inputs.flat()``."""

    run: Run
    module: fx.GraphModule
    names: tuple[str, ...]  # parameters that have a gradient
    checks: int
    writes: tuple[str, ...]  # buffers that it writes
    nodes: int
    fix: tuple[int, ...] = field(default=())  # gradients that do not lie as their parameters

    def __call__(self, inputs: Inputs) -> Ran:
        """Run it. Buffers are written also where a check does not hold."""
        with torch.no_grad():
            found = list(self.run(*inputs.flat()))
        losses, checks = found[0], found[1 : 1 + self.checks]
        gradients = found[1 + self.checks :][: len(self.names)]
        others = found[1 + self.checks + len(self.names) :]
        for at in self.fix:
            gradients[at] = _laid(gradients[at], inputs.parameters[self.names[at]])
        holds = all(map(bool, checks))
        return Ran(losses, dict(zip(self.names, gradients, strict=True)), others, holds)

    def quicken(self) -> None:
        """Leave out what its operations need not do, to the same bits."""
        put_side_by_side(self.module.graph)
        self.module.graph.eliminate_dead_code()
        self.module.recompile()
        self.run, self.nodes = self.module.forward, len(self.module.graph.nodes)

    def look(self, inputs: Inputs) -> None:
        """Find, by a run, which gradients do not lie as their parameters or share memory.

        Or have none: zeros that torch knows of without it.
        """
        with torch.no_grad():
            found = list(self.run(*inputs.copied().flat()))[1 + self.checks :]
        taken = {t.untyped_storage().data_ptr() for t in inputs.flat()}
        fix = []
        for at, name in enumerate(self.names):
            if found[at]._is_zerotensor():
                fix.append(at)
                continue
            place = found[at].untyped_storage().data_ptr()
            if place in taken or found[at].stride() != inputs.parameters[name].stride():
                fix.append(at)
            taken.add(place)
        self.fix = tuple(fix)


def capture(code: Code, inputs: Inputs) -> Graph:
    """The graph of ``code``, which is run once, on copies of what it writes.

    Raises:
        Untraceable: it cannot be told from one run what another one does; says why.
    """
    names: list[str] = []
    counts = {"checks": 0}
    parameters, buffers = list(inputs.parameters), list(inputs.buffers)

    def traced(*flat: Tensor) -> list[Tensor]:
        held, rest = list(flat[: len(parameters)]), list(flat[len(parameters) :])
        with_gradient = []
        for name, tensor in zip(parameters, held, strict=True):
            if inputs.weights is not None and inputs.parameters[name].requires_grad:
                tensor.requires_grad_()
                with_gradient.append((name, tensor))
        blocks = dict(zip(parameters, held, strict=True))
        blocks |= dict(zip(buffers, rest, strict=False))
        rest = rest[len(buffers) :]
        weights = [] if inputs.weights is None else [rest.pop(0)]
        count = len(inputs.leaves)
        left = code(blocks, rest[:count], rest[count:])
        found: list[Tensor] = []
        if weights:
            found = _gradients(left.losses, weights, with_gradient, names)
        counts["checks"] = len(left.checks)
        return [left.losses.detach(), *left.checks, *found, *left.others]

    given = inputs.copied()
    versions = {name: block._version for name, block in given.buffers.items()}
    try:
        with torch.set_grad_enabled(inputs.weights is not None):
            module = trace(traced, *[t.detach() for t in given.flat()])
    except Untraceable:
        raise
    except Exception as error:
        words = (str(error).splitlines() or [""])[0][:160]
        raise Untraceable(f"{type(error).__name__}: {words}") from error
    writes = tuple(
        name
        for name, block in given.buffers.items()
        # BatchNorm's kernel writes its statistics and does not say so.
        if block._version != versions[name] or not same_bits(block, inputs.buffers[name])
    )
    _tidy(module)
    return Graph(
        run=module.forward,
        module=module,
        names=tuple(names),
        checks=counts["checks"],
        writes=writes,
        nodes=len(module.graph.nodes),
    )


def _gradients(
    losses: Tensor,
    weights: Sequence[Tensor],
    named: Sequence[tuple[str, Tensor]],
    names: list[str],
) -> list[Tensor]:
    """Those that there are; ``names`` becomes whose."""
    if not losses.requires_grad:
        raise Untraceable("its loss has no gradient")
    found = torch.autograd.grad(
        [losses], [tensor for _, tensor in named], list(weights), allow_unused=True
    )
    pairs = [(name, g) for (name, _), g in zip(named, found, strict=True) if g is not None]
    names[:] = [name for name, _ in pairs]
    return [gradient for _, gradient in pairs]


def _tidy(module: fx.GraphModule) -> None:
    """Drop what nobody reads, and ``detach``, which without autograd is nothing."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    module.graph.eliminate_dead_code()
    module.recompile()


def _laid(gradient: Tensor, like: Tensor) -> Tensor:
    """A copy that lies in memory as its parameter does."""
    return torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=like.device
    ).copy_(gradient)
