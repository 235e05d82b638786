"""A stage's weights: the versions there are, which one is bound, and the step to the next.

[Note: two banks]
The module keeps its ``nn.Parameter`` objects; what changes with the version is where they point:

    bank 0   W(0)  W(0)  W(2)  W(2)  ...      W(t+1) is written where W(t-1) was, by the user's
    bank 1    -    W(1)  W(1)  W(3)  ...      own optimizer, which steps a copy of W(t) there

A graph refers to the parameter object and reads it again in the backward, so the version of a
forward is bound again before its backward. autograd counts the writes to a parameter, and the
step writes to another bank than the graphs in flight refer to: it is not counted.

[Note: prediction]
What is computed with version t will be subtracted from version t + 1. With ``predict`` the
bank holds a guess of that, W(t) + (W(t) - W(t-1)), and W(t) is kept beside: a third copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shoal.subsets import Subsets

Grads = dict[str, Tensor]


class Weights:
    """What one stage owns and borrows, on one device.

    Args:
        params: All of the model's, by name.
        optimizer: The user's, over all of them.
        owned: Names that this stage steps.
        borrowed: Names that it reads, and another stage steps.
        versions: How many are kept: 1 or 2.
        predict: Compute with a guess of the next version; with two versions only.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        owned: Sequence[str],
        borrowed: Sequence[str],
        *,
        versions: int = 1,
        predict: bool = False,
    ) -> None:
        self._params, self._owned = params, list(owned)
        self._subsets = Subsets(optimizer, params, [owned])
        here = {name: params[name].data for name in [*owned, *borrowed]}
        self._banks = [here]
        self._banks += [_copies(here) for _ in range(versions - 1)]
        stepped = {name: here[name] for name in self._subsets.stepped[0]}
        self._masters = _copies(stepped) if predict else {}
        self._bound = 0
        self._summed: dict[int, Grads] = {}

    def bind(self, version: int) -> None:
        """Have the parameters be of this version."""
        bank = version % len(self._banks)
        if bank != self._bound:
            self._point(self._banks[bank])
            self._bound = bank

    def _point(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._params[name].data = tensor

    def harvest(self, step: int) -> None:
        """A step's gradients are complete: the next ones are summed afresh."""
        self._summed[step] = self._take_grads()

    def _take_grads(self) -> Grads:
        found = {}
        for name in self._owned:
            parameter = self._params[name]
            if parameter.grad is not None:
                found[name], parameter.grad = parameter.grad, None
        return found

    def norms(self, step: int) -> Grads:
        """The norm of each gradient of a step."""
        grads = self._summed[step]
        norms = torch._foreach_norm(list(grads.values())) if grads else ()
        return dict(zip(grads, norms, strict=True))

    def step(self, number: int, factor: Tensor | None = None) -> None:
        """The step from version ``number`` with the gradients of that step."""
        grads = self._summed.pop(number)
        if factor is not None and grads:
            torch._foreach_mul_(list(grads.values()), factor)
        names = self._subsets.stepped[0]
        bank = self._banks[(number + 1) % len(self._banks)]
        before = self._banks[number % len(self._banks)]
        with self._stepping(names, grads, self._masters or bank):
            if len(self._banks) > 1:
                for name in names:
                    bank[name].copy_((self._masters or before)[name])
            self._subsets.step(0)
        for name, master in self._masters.items():
            bank[name].neg_().add_(master, alpha=2)

    @contextmanager
    def _stepping(
        self, names: Sequence[str], grads: Grads, where: Mapping[str, Tensor]
    ) -> Iterator[None]:
        """Parameters point at what is stepped, with these gradients; afterwards as before."""
        later = self._take_grads()  # of the next step, as far as they are summed
        params = [self._params[name] for name in names]
        places = [parameter.data for parameter in params]
        for name, parameter in zip(names, params, strict=True):
            parameter.data, parameter.grad = where[name], grads.get(name)
        try:
            with _unsafe_preserve_version_counter(tuple(params)):
                yield
        finally:
            for parameter, place in zip(params, places, strict=True):
                parameter.data, parameter.grad = place, None
            for name, grad in later.items():
                self._params[name].grad = grad

    def lend(self, version: int, names: Sequence[str]) -> Grads:
        """Owned parameters of a version, for a stage that borrows them."""
        bank = self._banks[version % len(self._banks)]
        return {name: bank[name] for name in names}

    def borrow(self, version: int, values: Mapping[str, Tensor]) -> None:
        """Take a version of borrowed parameters."""
        bank = self._banks[version % len(self._banks)]
        for name, value in values.items():
            bank[name].copy_(value)

    def newest(self, version: int) -> None:
        """Leave the parameters at the version that training ended with."""
        self._point(self._masters or self._banks[version % len(self._banks)])
        self._bound = -1


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
