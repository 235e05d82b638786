"""What a trial's own objects keep beside tensors that a state dict has.

A hidden state that goes from batch to batch, a count by which a weight falls, a moving average in
an optimizer's hook, a generator of a layer's own: alone they live as long as the process. A trial
may go on in another one, so what of them changed since they were built is a part of its state.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.pystate.packing import Giving, Known, Unkept, pack
from shoal.pystate.parts import STEPPED, Shown, hidden_of, hooks, hooks_of
from shoal.pystate.values import NOTHING, Look, Note, look_at
from shoal.recipes.libraries import is_library
from shoal.recipes.schedules import each_schedule, kept_of_model
from shoal.recipes.several import members_of

SCHEDULE = "the schedule"
MODE = "whether it is in the model's mode"
VALUES = 20_000
"""Values of one attribute that are looked at."""
ROOM = 64 * 2**20
"""Bytes that may be kept beside four times those of the model, and that are copied to compare."""


class Attributes:
    """What the modules, the optimizers and the schedule of one trial keep.

    Made when all are built, and nothing has run. Owns copies of small tensors. A model that is
    not to train has neither optimizer nor schedule.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, schedule: Any
    ) -> None:
        self._model, self._optimizer, self._schedule = model, optimizer, schedule
        self._before = self._notes(self.fixed())

    def changed(self) -> tuple[dict[str, Any], list[str]]:
        """By place what changed, packed; and the places of what cannot be packed.

        Torch's own modules keep nothing there that matters, if it cannot be packed.
        """
        found: dict[str, Any] = {}
        lost: list[str] = []
        torchs = {holder for holder, held in self._holders() if getattr(held, "is_torchs", False)}
        notes = self._notes(self.fixed())
        known = Known(self._before, notes)
        for place, note in notes.items():
            try:
                packed = pack(note, self._before.get(place, NOTHING), known, (place,))
            except Unkept:
                known.forget(place)
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

        ``scheduled``: what the schedule keeps as well, and modes, which else begin anew.
        """
        holders, giving = dict(self._holders()), Giving(device, self._before, self.looked_after())
        for place, value in packed.items():
            holder, _, name = place.rpartition(": ")
            attributes = holders.get(holder)
            if attributes is None or (holder.startswith((SCHEDULE, MODE)) and not scheduled):
                continue
            with suppress(Unkept):
                attributes[name] = giving.give(value, attributes.get(name), (place,))

    def _most(self) -> int:
        return ROOM + 4 * sum(p.nbytes for p in self._model.parameters())

    def _notes(self, fixed: Mapping[int, str]) -> dict[str, Note]:
        look, found = Look(fixed, room=ROOM), {}
        for holder, attributes in self._holders():
            for name, value in attributes.items():
                look.values = VALUES
                found[f"{holder}: {name}"] = look_at(value, look)
        return found

    def fixed(self) -> dict[int, str]:
        """What is looked after elsewhere: its name by identity."""
        return {id(one): name for one, name in self._looked_after()}

    def looked_after(self) -> dict[str, Any]:
        """The same objects by their names."""
        return {name: one for one, name in self._looked_after()}

    def _looked_after(self) -> Iterator[tuple[Any, str]]:
        model = self._model
        yield from ((one, f"module {name!r}") for name, one in model.named_modules())
        yield from ((one, f"tensor {name!r}") for name, one in model.named_parameters())
        yield from ((one, f"tensor {name!r}") for name, one in model.named_buffers())
        for number, one in enumerate(self._optimizers()):
            yield one, f"optimizer {number}"
        yield self._optimizer, "the optimizer"
        yield self._schedule, "the schedule"

    def _optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return () if self._optimizer is None else members_of(self._optimizer)

    def _holders(self) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
        """Attributes by what has them. A name may come to hold something else by assignment."""
        for path, module in self._model.named_modules():
            where = f"module {path!r}" if path else "the model"
            yield where, _ShownOf(module, hidden_of(module), is_library(type(module)))
            yield from _hooks(where, module)
        for path, parameter in self._model.named_parameters():
            yield from _hooks(f"parameter {path!r}", parameter)
        yield "whether it is trained", _trained(self._model)
        yield MODE, _modes(self._model)
        for number, optimizer in enumerate(self._optimizers()):
            where = f"optimizer {number}" if number else "the optimizer"
            yield where, _ShownOf(optimizer, STEPPED | hooks(), is_torchs=False)
            yield f"{where}, state of no parameter", _OfNone(optimizer)
            yield from _hooks(where, optimizer)
        for number, schedule in enumerate(each_schedule(self._schedule)):
            where = f"{SCHEDULE} {number}".removesuffix(" 0")
            yield where, _functions(schedule)
            if of_model := kept_of_model(schedule, self._model):
                named = vars(schedule)
                yield f"{where}, of the model", Shown(named, frozenset(named.keys() - of_model))


def in_words(place: str) -> str:
    """A place as errors call it."""
    holder, _, name = place.rpartition(": ")
    return f"{name!r} of {holder}"


class _OfNone(MutableMapping[str, Any]):
    """What an optimizer's ``state`` has under a name, and not for one of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def _state(self) -> MutableMapping[Any, Any]:
        return getattr(self._optimizer, "state", {})  # whose __init__ may not be torch's

    def __iter__(self) -> Iterator[str]:
        yield from [key for key in self._state if isinstance(key, str)]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        if name not in self._state:  # which may make what is not there
            raise KeyError(name)
        return self._state[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._state[name] = value

    def __delitem__(self, name: str) -> None:
        del self._state[name]


def _hooks(where: str, owner: Any) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    yield from ((f"{where}, {name}", hooks) for name, hooks in hooks_of(owner))


class _ShownOf(Shown):
    """Of torch's own modules not tensors inside of a graph: these they compute anew each time."""

    def __init__(self, owner: Any, hidden: frozenset[str], is_torchs: bool) -> None:
        super().__init__(vars(owner), hidden)
        self.is_torchs = is_torchs

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            value = self[name]
            if not (self.is_torchs and isinstance(value, Tensor) and value.grad_fn is not None):
                yield name


class _Flags(MutableMapping[str, bool]):
    """A flag of each of some parts of a model, by the part's name; of others it holds none."""

    def __init__(
        self,
        parts: Iterable[tuple[str, Any]],
        read: Callable[[Any], bool],
        write: Callable[[Any, bool], object],
    ) -> None:
        self._parts, self._read, self._write = dict(parts), read, write

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> bool:
        return self._read(self._parts[name])

    def __setitem__(self, name: str, value: bool) -> None:
        if name in self._parts:  # a forward may make a module that is not there before
            self._write(self._parts[name], value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("a flag is on or off")


def _trained(model: nn.Module) -> _Flags:
    """Which parameters are to be trained."""
    read: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")
    return _Flags(model.named_parameters(), read, Tensor.requires_grad_)


def _modes(model: nn.Module) -> _Flags:
    """Which modules are in the mode of the whole, training or evaluation."""

    def write(module: nn.Module, value: bool) -> None:
        module.training = model.training is value

    return _Flags(model.named_modules(), lambda module: module.training is model.training, write)


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
