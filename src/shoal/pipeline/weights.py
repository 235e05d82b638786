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

from shoal.kernels.kernelstep import put_back
from shoal.recipes.subsets import Subsets

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
        places: Where versions of the stepped parameters lie beside the parameters themselves, if
            it matters: one place with two versions, and one more with ``predict``.
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
        places: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        self._params, self._owned = params, list(owned)
        self._subsets = Subsets(optimizer, params, [owned])
        self._home = {name: params[name].data for name in self._subsets.stepped[0]}
        here = {name: params[name].data for name in [*owned, *borrowed]}
        self._masters = self._home if predict else {}
        self._banks = [here]
        if versions > 1:
            count = versions if predict else 1
            own = places or [_copies(self._home) for _ in range(count)]
            lent = {name: here[name] for name in borrowed}
            beside = [{**here, **own[i], **_copies(lent)} for i in range(count)]
            self._banks = beside if predict else [here, *beside]
        self._newest_at_rest = self._banks[1] if predict else here
        self._bound = -1
        self._summed: dict[int, Grads] = {}

    def resume(self, borrowed: Sequence[Mapping[str, Tensor]] = ()) -> None:
        """Call the newest version 1, and the older one 0, as ``rest`` left them.

        ``borrowed`` are the versions of what is borrowed, the older one first.
        """
        self._order()
        for version, values in enumerate(borrowed):
            self.borrow(version, values)

    def turn(self, newest: int) -> None:
        """Call version ``newest`` 1 from now on, and the one before it 0."""
        if newest % len(self._banks) != len(self._banks) - 1:
            self._banks.reverse()
        self._bound = -1

    def rest(self) -> None:
        """Bring versions 1 and 0 to where ``resume`` expects them.

        The newest parameters are where they were at first. The older version is in the first
        place; with predictions the older guess is, and the newer one in the second.
        """
        if self._banks[-1] is not self._newest_at_rest:
            newest, older = self._banks[-1], self._banks[0]
            for name in newest:  # borrowed ones too
                if newest[name] is not older[name]:
                    kept = newest[name].clone()
                    newest[name].copy_(older[name])
                    older[name].copy_(kept)
            self._order()
        self._point(self._home)
        self._bound = -1

    def _order(self) -> None:
        if self._banks[-1] is not self._newest_at_rest:
            self._banks.reverse()
        self._bound = -1

    def bind(self, version: int) -> None:
        """Have the parameters be of this version."""
        bank = version % len(self._banks)
        if bank != self._bound:
            self._point(self._banks[bank])
            self._bound = bank

    def bind_newest(self) -> None:
        """Have the parameters be the newest there are, as ``turn`` counts; guesses are none."""
        self._point(self._banks[-1])
        self._point(self._masters)
        self._bound = -1

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

    def gradients(self, step: int) -> Grads:
        """The gradients of a step, of the parameters that have one."""
        return self._summed[step]

    def replace_gradients(self, step: int, grads: Grads) -> None:
        """Step with these, which are owned from now on."""
        self._summed[step] = grads

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
            self._subsets.step(0, number)
        for name, master in self._masters.items():
            if bank[name].data_ptr() != master.data_ptr():  # a frozen one has no other place
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
            for name, parameter in zip(names, params, strict=True):
                put_back(name, parameter, where[name])
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
