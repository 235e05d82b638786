"""The user's own optimizer, stepping some of its parameters at a time.

A *part* of an optimizer is an object of the same class that shares its state, with those groups
that have parameters of one shard or stage, holding only these. See
docs/design/0003-real-optimizer-on-subsets.md.

[Note: what steps change in groups]
An optimizer may count its steps in its groups (``group["k"] += 1``), and a group may be in several
parts. So each part of a step finds the options that the first one found; what they leave is the
same, as ``runtime/measuring/coupling.py`` has seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from shoal.core.errors import SpecError
from shoal.core.units import counted
from shoal.kernels.kernelstep import is_one_kernel, step_by_kernel
from shoal.recipes.several import members_of


class Subsets:
    """An optimizer's parameters by name, and one part of it for each of ``owned``.

    Of several optimizers as one, each has its parts, which step in the order of the optimizers.

    Raises:
        SpecError: the optimizer holds a tensor that is no parameter of the model.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, nn.Parameter],
        owned: Sequence[Sequence[str]],
    ) -> None:
        self._each = [_Subsets(member, params, owned) for member in members_of(optimizer)]
        self.grouped = [names for each in self._each for names in each.grouped]
        self.stepped = [
            list(dict.fromkeys(name for each in self._each for name in each.stepped[index]))
            for index in range(len(owned))
        ]

    def step(self, index: int, number: int) -> None:
        """``optimizer.step()`` as if the parameters of one part were all it had.

        ``number`` is that of the trial's step, which is the same for all parts.
        """
        for each in self._each:
            each.step(index, number)

    def begin_anew(self) -> None:
        """The groups' options were set: the next step finds those, whichever it is."""
        for each in self._each:
            each.begin_anew()

    def kept_beside(self) -> str:
        """The name of something that a step has left on a part, which is lost with the part."""
        return next((found for each in self._each if (found := each.kept_beside())), "")


class _Subsets:
    """Those of one optimizer.

    Two parts may step at a time, on two threads: each takes the options of the user's groups as
    they were before the whole step, and hands back what it changed in them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, nn.Parameter],
        owned: Sequence[Sequence[str]],
    ) -> None:
        self._optimizer, self._params = optimizer, params
        names = {id(parameter): name for name, parameter in params.items()}
        self.grouped = _group_names(optimizer, names)
        places = _places(self.grouped)
        self._chosen = [_choose(set(part), places) for part in owned]
        self.stepped = [[name for _, part in chosen for name in part] for chosen in self._chosen]
        self._steps_all = [len(names) == sum(map(len, self.grouped)) for names in self.stepped]
        self._parts: dict[int, torch.optim.Optimizer] = {}
        self._turn, self._turns = _Turn(-1, set(), []), threading.Lock()

    def begin_anew(self) -> None:
        """The groups' options were set."""
        self._turn = _Turn(-1, set(), [])

    def step(self, index: int, number: int) -> None:
        """``optimizer.step()`` as if the parameters of one part were all it had."""
        optimizer = self._optimizer
        if not self.stepped[index]:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # see below
            return
        if is_one_kernel(optimizer) and step_by_kernel(optimizer, self._of(index)):
            return
        if self._steps_all[index]:
            optimizer.step()
            return
        part = self._parts.get(index) or self._part(index)
        found = self._found_by(index, number)
        chosen = [group for group, _ in self._chosen[index]]
        for mine, group in zip(part.param_groups, chosen, strict=True):
            params = mine["params"]
            mine.clear()
            mine.update(found[group], params=params)
        part.state = optimizer.state
        type(part).step(part)
        if part.state is not optimizer.state:  # it has begun another one
            self._take_state(index, part.state)
        for mine, group in zip(part.param_groups, chosen, strict=True):
            _hand_back(mine, found[group], optimizer.param_groups[group])
        optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule asks for it

    def _found_by(self, index: int, number: int) -> list[dict[str, Any]]:
        """The options of all groups for a part of this step: those that its first part found."""
        with self._turns:
            turn = self._turn
            if turn.number != number or index in turn.stepped:
                found = [_options(group) for group in self._optimizer.param_groups]
                turn = self._turn = _Turn(number, set(), found)
            turn.stepped.add(index)
            return turn.options

    def _take_state(self, index: int, state: Mapping[Any, Any]) -> None:
        """What a part keeps of its parameters now is all that is kept of them."""
        for parameter in (self._params[name] for name in self.stepped[index]):
            self._optimizer.state.pop(parameter, None)
            if parameter in state:
                self._optimizer.state[parameter] = state[parameter]

    def _of(self, index: int) -> Iterator[tuple[dict[str, Any], list[nn.Parameter]]]:
        """The groups' settings, each with those of its parameters that one part has."""
        for group, names in self._chosen[index]:
            yield self._optimizer.param_groups[group], [self._params[name] for name in names]

    def kept_beside(self) -> str:
        """The name of something that a step has left on a part, which is lost with the part."""
        for part in self._parts.values():
            before = self._optimizer.__dict__
            for name, value in part.__dict__.items():
                if name not in ("state", "param_groups") and before.get(name) is not value:
                    return name
        return ""

    def _part(self, index: int) -> torch.optim.Optimizer:
        """The optimizer with the parameters of one part, made without its constructor."""
        own = self._optimizer.__dict__.get("step")
        if own is not None and getattr(own, "__wrapped__", None) is not type(self._optimizer).step:
            raise SpecError(
                f"the step of this {type(self._optimizer).__name__} was replaced on the object, "
                "so a shard cannot step alone. Put it into a subclass, or train with "
                "technique='resident'."
            )
        part: torch.optim.Optimizer = object.__new__(type(self._optimizer))
        part.__dict__.update(self._optimizer.__dict__)
        part.__dict__.pop("step", None)  # a schedule's wrapper, which is bound to the whole
        part.param_groups = [
            {"params": [self._params[name] for name in names]} for _, names in self._chosen[index]
        ]
        self._parts[index] = part
        return part


class _Turn(NamedTuple):
    """A step of all parts: its number, which of them have begun it, what the first one found."""

    number: int
    stepped: set[int]
    options: list[dict[str, Any]]


def _hand_back(mine: Mapping[str, Any], found: Mapping[str, Any], whole: dict[str, Any]) -> None:
    """What a part changed: another one, whose gradients are there, may have changed more."""
    for key in found.keys() - mine.keys():
        whole.pop(key, None)
    for key, value in mine.items():
        if key != "params" and not (key in found and value is found[key]):
            whole[key] = value


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def clip_factor(
    limit: float, norms: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> Tensor | None:
    """The factor of torch's clip_grad_norm_, of per-parameter norms in ``parameters()`` order.

    ``dtypes`` are those of the gradients: torch adds up by type, in an order of a hash table.
    """
    if not norms:
        return None
    ordered = list(norms)
    if len(set(dtypes)) > 1:
        like: list[Tensor | None] = [
            norm.new_empty(0, dtype=dtype) for norm, dtype in zip(norms, dtypes, strict=True)
        ]
        groups = _group_tensors_by_device_and_dtype([like], with_indices=True)
        ordered = [norms[index] for _, indices in groups.values() for index in indices]
    total = torch.linalg.vector_norm(torch.stack(ordered), 2.0)
    return torch.clamp(limit / (total + 1e-6), max=1.0)


def _group_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    grouped = []
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise SpecError(
                f"the optimizer holds {counted(len(unknown), 'tensor')} not among the model's "
                f"parameters, the first of shape {tuple(unknown[0].shape)}. Build it from the "
                "named parameters it is given; what a loss trains is to be a part of the model, "
                "and a forward is to write into a parameter (under torch.no_grad()), and not to "
                "put another one in its place."
            )
        grouped.append([names[id(parameter)] for parameter in group["params"]])
    return grouped


def _places(grouped: Sequence[Sequence[str]]) -> dict[str, list[tuple[int, int]]]:
    """Per name the groups that have it, and where in them."""
    found: dict[str, list[tuple[int, int]]] = {}
    for group, names in enumerate(grouped):
        for at, name in enumerate(names):
            found.setdefault(name, []).append((group, at))
    return found


def _choose(
    owned: set[str], places: Mapping[str, Sequence[tuple[int, int]]]
) -> list[tuple[int, list[str]]]:
    """Per group that has some: its index and those of its names that are in ``owned``."""
    ordered = sorted((place, name) for name in owned for place in places.get(name, ()))
    chosen: dict[int, list[str]] = {}
    for (group, _), name in ordered:
        chosen.setdefault(group, []).append(name)
    return list(chosen.items())
