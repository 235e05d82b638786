"""What a trial's own objects keep beside tensors that a state dict has.

A hidden state that goes from batch to batch, a count by which a weight falls, a moving average in
an optimizer's hook, a generator of a layer's own: alone they live as long as the process. A trial
may go on in another one, so what of them changed since they were built is a part of its state.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.pystate.values import NOTHING, Look, Note, Unkept, give, look_at, pack
from shoal.several import each_schedule, members_of
from shoal.spelled import is_library

TENSORS = frozenset(("_parameters", "_buffers", "_modules", "training"))
RECURRENT = frozenset(("_flat_weights", "_flat_weight_refs"))  # lists of a layer's own parameters
STEPPED = frozenset(("state", "param_groups", "defaults", "step"))  # a schedule wraps the last
"""Attributes that are looked after elsewhere."""

SCHEDULE = "the schedule"
VALUES = 100_000
"""Values that are looked at."""
ROOM = 64 * 2**20
"""Bytes that may be kept beside four times those of the model."""


class Attributes:
    """What the modules, the optimizers and the schedule of one trial keep.

    Made when all are built, and nothing has run. Owns copies of small tensors.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        self._model, self._optimizer, self._schedule = model, optimizer, schedule
        self._before = self._notes()

    def changed(self) -> tuple[dict[str, Any], list[str]]:
        """By place what changed, packed; and the places of what cannot be packed.

        Torch's own modules keep nothing there that matters, if it cannot be packed.
        """
        found: dict[str, Any] = {}
        lost: list[str] = []
        torchs = {holder for holder, held in self._holders() if getattr(held, "is_torchs", False)}
        for place, note in self._notes().items():
            try:
                packed = pack(note, self._before.get(place, NOTHING))
            except Unkept:
                lost += [place] if place.rpartition(": ")[0] not in torchs else []
                continue
            if packed is not None:
                found[place] = packed
        while sum(map(_num_bytes, found.values())) > self._most():
            largest = max(found, key=lambda place: _num_bytes(found[place]))
            lost.append(largest)  # what forwards leave there to be looked at
            del found[largest]
        return found, lost

    def give(
        self, packed: Mapping[str, Any], device: torch.device, *, scheduled: bool = True
    ) -> None:
        """Have what was built anew keep what was packed; what is not there is left out.

        ``scheduled``: what the schedule keeps as well.
        """
        holders = dict(self._holders())
        for place, value in packed.items():
            holder, _, name = place.rpartition(": ")
            attributes = holders.get(holder)
            if attributes is None or (holder.startswith(SCHEDULE) and not scheduled):
                continue
            with suppress(Unkept):
                attributes[name] = give(value, attributes.get(name), device)

    def _most(self) -> int:
        return ROOM + 4 * sum(p.nbytes for p in self._model.parameters())

    def _notes(self) -> dict[str, Note]:
        look = Look(self._fixed(), values=VALUES)
        return {
            f"{holder}: {name}": look_at(value, look)
            for holder, attributes in self._holders()
            for name, value in attributes.items()
        }

    def _fixed(self) -> set[int]:
        """What is looked after elsewhere, by identity."""
        model, members = self._model, members_of(self._optimizer)
        ours = [*model.modules(), *model.parameters(), *model.buffers(), *members]
        return set(map(id, (*ours, self._optimizer, self._schedule)))

    def _holders(self) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
        """Attributes by what has them. A name may come to hold something else by assignment."""
        for path, module in self._model.named_modules():
            where = f"module {path!r}" if path else "the model"
            hidden = TENSORS | (RECURRENT if isinstance(module, nn.RNNBase) else frozenset())
            yield from _attributes(where, module, hidden, is_library(type(module)))
        yield "whether it is trained", _Flags(self._model)
        for number, optimizer in enumerate(members_of(self._optimizer)):
            where = f"optimizer {number}" if number else "the optimizer"
            yield from _attributes(where, optimizer, STEPPED, is_torchs=False)
        for number, schedule in enumerate(each_schedule(self._schedule)):
            yield f"{SCHEDULE} {number}".removesuffix(" 0"), _functions(schedule)


def in_words(place: str) -> str:
    """A place as errors call it."""
    holder, _, name = place.rpartition(": ")
    return f"{name!r} of {holder}"


def _attributes(
    where: str, owner: Any, hidden: frozenset[str], is_torchs: bool
) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """An object's attributes, and its hooks: these by their order, since their keys are counts.

    Of torch's own modules not tensors inside of a graph: these they compute anew each time.
    """
    yield where, _Shown(owner, hidden, is_torchs)
    for name, value in vars(owner).items():
        if "_hooks" in name and isinstance(value, dict) and value:
            hooks: dict[str, Any] = {str(n): hook for n, hook in enumerate(value.values())}
            yield f"{where}, {name}", hooks


class _Shown(MutableMapping[str, Any]):
    """Those attributes of an object that may be state."""

    def __init__(self, owner: Any, hidden: frozenset[str], is_torchs: bool) -> None:
        self._all, self._hidden, self.is_torchs = vars(owner), hidden, is_torchs

    def __iter__(self) -> Iterator[str]:
        for name, value in list(self._all.items()):
            inside = self.is_torchs and isinstance(value, Tensor) and value.grad_fn is not None
            if name not in self._hidden and "_hooks" not in name and not inside:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return self._all[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._all[name] = value

    def __delitem__(self, name: str) -> None:
        del self._all[name]


class _Flags(MutableMapping[str, Any]):
    """Which parameters are to be trained, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, name: str) -> bool:
        return self._parameters[name].requires_grad

    def __setitem__(self, name: str, value: bool) -> None:
        self._parameters[name].requires_grad_(value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("a parameter is trained or not")


def _functions(schedule: Any) -> dict[str, Any]:
    """The functions by which a schedule goes, which no state dict has; by name and order."""
    return {
        f"{name} {number}": value
        for name, kept in getattr(schedule, "__dict__", {}).items()
        for number, value in enumerate(kept if isinstance(kept, list) else [kept])
        if isinstance(value, FunctionType | functools.partial)
    }


def _num_bytes(packed: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(packed) if isinstance(leaf, Tensor))
