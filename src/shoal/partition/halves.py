"""A backward in two: first what the shard before waits for, later the parameters' gradients.

[Note: the seam]
A node of the graph that lies on a way to the boundary and also feeds parameters is at the seam:

    loss <- addmm <- gelu <- addmm <- boundary
              |                |
           weight, bias     weight, bias

The first half runs the nodes on the way and keeps the gradients that come to those at the seam.
The second runs each of these again, towards its parameters alone; no product is computed twice,
as a node computes only the gradients that somebody asked for. A parameter below two seams
would get its parts in another order than plain autograd's, and hooks of a tensor at the seam would
be called twice: then the first half is all of it.

[Note: what waits between the halves]
The graph, of which nodes at the seam and those below them run again. What the other ones on the
way saved (the gelu's input, an attention's queries and keys, the softmax of the loss) nobody reads
any more. autograd frees a node's saved tensors after it has run, or keeps those of all
(``retain_graph``). So they are let go one by one: a saved tensor may be given hooks, which pack it
into something else, here into nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

_HOOKED = "shoal: has hooks of a tensor"
Root = tuple[GradientEdge, Tensor]
Node = Any
"""A node of autograd's graph: torch has no public type that its C++ nodes share."""


@dataclass(slots=True)
class _Seam:
    """What comes to a node at the seam, and the parameters below it."""

    node: Node
    parameters: list[Tensor]
    grads: tuple[Tensor | None, ...] = ()

    def run(self) -> None:
        pairs = [(i, grad) for i, grad in enumerate(self.grads) if grad is not None]
        if pairs:
            edges = [GradientEdge(self.node, index) for index, _ in pairs]
            torch.autograd.backward(edges, [g for _, g in pairs], inputs=self.parameters)


@dataclass(slots=True)
class Half:
    """The half of a backward that is still to be run; it holds of the graph what that reads."""

    seams: list[_Seam] = field(default_factory=list)

    def run(self) -> None:
        """Add the gradients of the parameters; once."""
        while self.seams:
            self.seams.pop(0).run()


@contextmanager
def noting_hooks() -> Iterator[None]:
    """A forward whose graph remembers which tensors of it were given hooks.

    A node that runs again would call them twice, and autograd does not say where there are any.
    Those of ``register_multi_grad_hook``, as what counts operations has them, change no gradient.
    """
    register: Any = Tensor.register_hook

    def noted(tensor: Tensor, hook: Any) -> Any:
        by = getattr(getattr(hook, "func", hook), "__module__", "")
        if tensor.grad_fn is not None and by != torch.autograd.graph.__name__:
            node: Any = tensor.grad_fn
            node.metadata[_HOOKED] = True
        return register(tensor, hook)

    Tensor.register_hook = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = register  # type: ignore[method-assign]


def backward_of_inputs(roots: Sequence[Root], anchors: Sequence[Tensor]) -> Half:
    """The half of the backward of ``roots`` that leads to ``anchors``, leaves of the graph."""
    if not roots:
        return Half()
    graph = _Graph(anchors)
    for edge, _ in roots:
        graph.walk(edge.node)
    seams = None if graph.checkpoints else graph.seams()
    if seams is None or not all(graph.leads[edge.node] for edge, _ in roots):
        torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
        return Half()
    met: list[_Seam] = []
    handles = [seam.node.register_prehook(_catch(seam, met)) for seam in seams]
    try:
        edges, grads = [edge for edge, _ in roots], [grad for _, grad in roots]
        torch.autograd.backward(edges, grads, inputs=list(anchors), retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    again = {seam.node for seam in met}
    _let_go(node for node, leads in graph.leads.items() if leads and node not in again)
    return Half(met)


def _catch(seam: _Seam, met: list[_Seam]) -> Any:
    def note(grads: tuple[Tensor | None, ...]) -> None:
        seam.grads = grads
        met.append(seam)

    return note


def _let_go(nodes: Iterable[Node]) -> None:
    """Free what nodes saved that will not run again; see [Note: what waits between the halves]."""
    for node in nodes:
        kind: Any = type(node)
        for name in _saved_by(kind):
            for saved in _raw(node, name):
                try:
                    saved.register_hooks(_nothing, _is_gone)
                except RuntimeError:  # nothing is saved there, or hooks of the user's have it
                    continue


@functools.lru_cache(maxsize=1024)
def _saved_by(kind: type) -> tuple[str, ...]:
    """Under which names nodes of a kind have what they saved."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _raw(node: Node, name: str) -> Iterator[Any]:
    try:
        found = getattr(node, name)
    except RuntimeError:  # it is free already
        return
    yield from found if isinstance(found, tuple) else (found,)


def _nothing(saved: Tensor) -> None:
    """What a saved tensor is packed into that nobody reads any more."""


def _is_gone(packed: object) -> NoReturn:
    raise AssertionError("the second half of a backward read what only its first half needed")


class _Graph:
    """The nodes below the roots: which lead to an anchor, and to which parameters."""

    def __init__(self, anchors: Iterable[Tensor]) -> None:
        self._anchors = {id(anchor) for anchor in anchors}
        self.leads: dict[Node, bool] = {}
        self._order: list[Node] = []

    @property
    def checkpoints(self) -> bool:
        """Whether it runs a forward again with use_reentrant=True, which takes no ``inputs``."""
        return any(type(node).__name__ == "CheckpointFunctionBackward" for node in self._order)

    def walk(self, root: Node) -> None:
        """Visit all nodes below; children come before parents in the order."""
        stack = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                self._finish(node)
            elif node not in self.leads:
                self.leads[node] = False
                stack.append((node, True))
                stack.extend((child, False) for child in _children(node))

    def _finish(self, node: Node) -> None:
        variable = getattr(node, "variable", None)
        is_anchor = variable is not None and id(variable) in self._anchors
        self.leads[node] = is_anchor or any(self.leads[child] for child in _children(node))
        self._order.append(node)

    def seams(self) -> list[_Seam] | None:
        """The nodes at the seam; None: a parameter is below two of them, or hooks are there."""
        below = self._parameters_below()
        seams: list[_Seam] = []
        seen: set[int] = set()
        for node in reversed(self._order):
            if not self.leads[node]:
                continue
            sides = [below[child] for child in _children(node) if not self.leads[child]]
            found = {key: tensor for side in sides for key, tensor in side.items()}
            if found.keys() & seen:
                return None
            seen |= found.keys()
            if found and _HOOKED in node.metadata:
                return None
            if found:
                seams.append(_Seam(node, list(found.values())))
        return seams

    def _parameters_below(self) -> Mapping[Node, dict[int, Tensor]]:
        below: dict[Node, dict[int, Tensor]] = {}
        for node in self._order:
            found: dict[int, Tensor] = {}
            variable = getattr(node, "variable", None)
            if variable is not None:
                found[id(variable)] = variable
            elif not self.leads[node]:
                for child in _children(node):
                    found |= below[child]
            below[node] = found
        return below


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]
