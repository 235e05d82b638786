"""What torch computes in another way while a mode is on: it runs without it.

[Note: who asks for modes] Under a dispatch mode operations compute what they compute without.
Some of torch's derivatives do not: they ask whether any mode is on, and if so take a formula
that needs no number of a tensor, or writes nowhere in place. It is the same derivative with other
roundings. A step that is looked at would end on other bits than one that is not, and which are
looked at depends on leases. So the nodes of these derivatives put the mode aside, with its like
and those above it, and on again when they are through.

A few operations ask themselves: a product whose one batch has a single matrix, which is a product
of matrices then, and what needs singular values or eigenvalues alone. ``AskingForwards`` sees them
where they are called, before torch has taken them apart; not where code has kept them by a name of
its own (``from torch import matmul``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

NAMES = (
    "cumprod",
    "linalg_lstsq",
    "_linalg_det",
    "masked_fill",
    "max",
    "median",
    "min",
    "nanmedian",
    "prod",
)
"""Operations whose derivatives ask, the first ones or the second: those that end on other bits in
torch 2.13, of all that its own tests have samples of."""

ASKERS = frozenset(f"aten::{name}" for name in NAMES)
_OF_ASKER = re.compile(f"({'|'.join(n.title().replace('_', '') for n in NAMES)})Backward[0-9]+")

PLACES = (
    *((Tensor, "matmul"), (Tensor, "__matmul__"), (torch, "matmul"), (torch.linalg, "matmul")),
    *((torch.linalg, name) for name in ("svdvals", "eigvalsh", "lstsq", "cond", "matrix_rank")),
    *((torch.linalg, name) for name in ("norm", "matrix_norm")),
    *((torch, "svd"), (Tensor, "svd"), (torch, "nuclear_norm")),
)
"""Where code finds operations that ask themselves: the same samples have said so."""

Through = Callable[[Sequence[Any], Sequence[Any]], None]


class Askers:
    """What a mode has to do with such nodes.

    Args:
        mode: It is put aside while they run.
        through: Called after each, without the mode: with the gradients that it made, and those
            that it was given.
    """

    def __init__(self, mode: TorchDispatchMode, through: Through) -> None:
        self._mode, self._through = mode, through
        self._made: list[Tensor] = []  # by operations, before autograd gave them their nodes
        self._aside: list[list[TorchDispatchMode]] = []  # modes, of each node that runs

    def see(self, func: Any, output: Any) -> None:
        """An operation has run within the mode."""
        if func.name().partition(".")[0].removesuffix("_") in ASKERS:
            parts = output if isinstance(output, list | tuple) else (output,)
            self._made += [part for part in parts if isinstance(part, Tensor)]

    def prepare(self) -> None:
        """Nodes of what operations made before this one will put the mode aside."""
        if not self._made:
            return
        made, self._made = self._made, []
        for part in made:
            for one in (part, part._base):  # what is written through a view has the base's node
                if one is not None and one.grad_fn is not None:
                    self._prepare(one.grad_fn)

    def _prepare(self, node: Node) -> None:
        if _is_new(node, "shoal.prepared"):
            node.register_prehook(self._put_aside)
            node.register_hook(self._put_on)

    def _prepare_within(self, made: Sequence[Any]) -> None:
        """The nodes of gradients that were made without the mode, to be derived once more."""
        waiting = [part.grad_fn for part in made if isinstance(part, Tensor)]
        while waiting:
            node = waiting.pop()
            if node is None or not _is_new(node, "shoal.walked"):
                continue
            if _OF_ASKER.fullmatch(node.name()):
                self._prepare(node)
            waiting += [one for one, _ in node.next_functions]

    def restore(self) -> None:
        """The mode is on again, though a node did not come to its end."""
        aside, self._aside = self._aside, []
        for taken in reversed(aside):
            if not self.is_on():  # torch has put it on by itself where a node raised
                _push(taken)

    def is_on(self) -> bool:
        """Whether the mode is, in this thread."""
        return any(mode is self._mode for mode in _get_current_dispatch_mode_stack())

    def without(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``func`` returns without the mode, which is told of it as of a derivative."""
        self._put_aside(())
        made: Any = ()
        try:
            made = func(*args, **kwargs)
        finally:
            self._put_on(_tensors(made), _tensors((*args, *kwargs.values())))
        return made

    def _put_aside(self, given: Sequence[Any]) -> None:
        stack = _get_current_dispatch_mode_stack()
        likes = [number for number, mode in enumerate(stack) if type(mode) is type(self._mode)]
        self._aside.append([_pop_mode() for _ in stack[min(likes, default=len(stack)) :]])

    def _put_on(self, made: Sequence[Any], given: Sequence[Any]) -> None:
        taken = self._aside.pop()
        if any(mode is self._mode for mode in taken):
            self._prepare_within(made)
            self._through(made, given)
        _push(taken)


class AskingForwards:
    """Inside, operations that ask for modes run without that of ``askers``, where code finds them.

    A mode for torch's functions would see them too, and would be seen: modules of torch that have
    a kernel for all that they do take it where there is none.
    """

    def __init__(self, askers: Askers) -> None:
        self._askers = askers
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        for owner, name in PLACES:
            self._before.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, self._aside(getattr(owner, name)))

    def __exit__(self, *raised: object) -> None:
        for _ in PLACES:
            owner, name, before = self._before.pop()
            if before is None:  # it is inherited
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _aside(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        is_product = operation.__name__ in ("matmul", "__matmul__")

        @functools.wraps(operation)
        def run(*args: Any, **kwargs: Any) -> Any:
            every = _tensors((*args, *kwargs.values()))
            is_asked = self._askers.is_on() and not torch._C._are_functorch_transforms_active()
            is_asked = is_asked and not any(isinstance(one, FakeTensor) for one in every)
            if not is_asked or (is_product and not _is_spread(every)):
                return operation(*args, **kwargs)
            return self._askers.without(operation, args, kwargs)

        return run


def _is_spread(factors: Sequence[Tensor]) -> bool:
    """Whether one matrix is multiplied by all of a batch, and has a batch's form."""
    sizes = [factor.shape[0] for factor in factors[:2] if factor.dim() == 3]
    return len(sizes) == 2 and sizes[0] != sizes[1]


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [part for part in tree if isinstance(part, Tensor)] if isinstance(tree, tuple) else []


def _push(taken: list[TorchDispatchMode]) -> None:
    for mode in reversed(taken):
        _push_mode(mode)


def _is_new(node: Node, mark: str) -> bool:
    """Whether a node had no such mark, which it has from now on."""
    marks: Any = node.metadata
    return mark not in marks and not marks.update({mark: True})
