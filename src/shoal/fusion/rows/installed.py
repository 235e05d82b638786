"""Other tensors in a module's places for a while, and the buffers that its forward made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._C import _functorch as _stubbed

from shoal.fusion.declined import FROZEN, REPLACED, Declined
from shoal.fusion.likeness import same_bits
from shoal.fusion.rows.blend import HIDDEN
from shoal.fusion.rows.keptparts import Part, names_in, with_names, with_tensors

_functorch: Any = _stubbed  # its annotations lag behind it


class Place(NamedTuple):
    """Where a module keeps a tensor: ``store[key]``, which has the first name ``owner``."""

    store: dict[str, Any]
    key: str
    owner: str


class Kept(NamedTuple):
    """An attribute, ``store[key]``, that has parameters; ``form`` has their names instead."""

    store: dict[str, Any]
    key: str
    form: Any


class Places(NamedTuple):
    """All places of a module; ``recurrent`` are those that keep a list of weights besides."""

    parameters: Sequence[Place]
    buffers: Sequence[Place]
    recurrent: Sequence[nn.Module]
    kept: Sequence[Kept]

    @property
    def owners(self) -> list[str]:
        """The first names of all tensors that belong there."""
        named = [str(name) for kept in self.kept for name in names_in(kept.form)]
        return [*(place.owner for place in (*self.parameters, *self.buffers)), *named]


def places_of(
    module: nn.Module,
    owner_of: Mapping[str, str],
    prefix: str = "",
    parts: Mapping[int, Part] = MappingProxyType({}),
) -> Places:
    """The places of ``module``, whose names in ``owner_of`` begin with ``prefix``.

    ``parts``: the model's parameters by identity, where its attributes have these and no names.
    """
    parameters: list[Place] = []
    buffers: list[Place] = []
    recurrent: list[nn.Module] = []
    kept: list[Kept] = []
    for path, child in module.named_modules():
        settings = [(n, with_names(v, parts)) for n, v in vars(child).items() if n not in HIDDEN]
        kept += [Kept(vars(child), name, form) for name, form in settings if names_in(form)]
        lead = ".".join(part for part in (prefix, path) if part)
        for found, store in ((parameters, child._parameters), (buffers, child._buffers)):
            for key, tensor in store.items():
                if tensor is not None:
                    name = f"{lead}.{key}" if lead else key
                    found.append(Place(store, key, owner_of[name]))
        if hasattr(child, "_flat_weights_names"):
            recurrent.append(child)
    return Places(parameters, buffers, recurrent, kept)


@contextmanager
def installed(places: Places, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """``tensors`` by first name in their places; yields the buffers that were replaced.

    The mapping is filled at the end: a forward that assigns to a buffer instead of writing
    into it leaves the new value there, by its first name.

    Raises:
        Declined: parameters that were frozen are to be trained now, or others are in their places.
    """
    every = [*places.parameters, *places.buffers]
    before = [place.store[place.key] for place in every]
    values = [kept.store[kept.key] for kept in places.kept]
    lying = {place.owner: _memory(tensors[place.owner]) for place in places.buffers}
    replaced: dict[str, Tensor] = {}
    try:
        for place in every:
            place.store[place.key] = tensors[place.owner]
        for kept in places.kept:
            kept.store[kept.key] = with_tensors(kept.form, tensors)
        _refresh(places.recurrent)
        with weights_stay([tensors[place.owner] for place in places.parameters]):
            yield replaced
        if any(at.store.get(at.key) is not tensors[at.owner] for at in places.parameters):
            raise Declined(REPLACED)
        for place in places.buffers:
            now = place.store.get(place.key)
            if now is None:
                continue
            if now is not tensors[place.owner] or _memory(now) != lying[place.owner]:
                replaced[place.owner] = now
    finally:
        for place, tensor in zip(every, before, strict=True):
            place.store[place.key] = tensor
        for kept, value in zip(places.kept, values, strict=True):
            kept.store[kept.key] = value
        _refresh(places.recurrent)


def swap_buffers(module: nn.Module, by_id: Mapping[int, Tensor]) -> None:
    """Have others in the places of a module's buffers: for each ``id`` the one to be there."""
    for child in module.modules():
        for key, held in child._buffers.items():
            if held is not None:
                child._buffers[key] = by_id.get(id(held), held)


def _memory(tensor: Tensor) -> int:
    """Where a row of a tensor lies; 0 for all slots' at once, which stays there."""
    return 0 if _functorch.is_batchedtensor(tensor) else tensor.data_ptr()


@contextmanager
def frozen_stay(parameters: Iterable[Tensor]) -> Iterator[None]:
    """What is frozen is so afterwards: an array has no gradients for it.

    Raises:
        Declined: code inside was to train it.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    yield
    if freeze_again(frozen):
        raise Declined(FROZEN)


@contextmanager
def weights_stay(parameters: Iterable[Tensor]) -> Iterator[None]:
    """The same, and rows are where they were, or at least their values are.

    Raises:
        Declined: one has others now, in memory of its own, where nobody would find them again.
    """
    every = list(parameters)
    # ``SlotMode`` lets nobody set ``.data`` of what has all slots' values
    held = [(p, p.data) for p in every if not _functorch.is_batchedtensor(p)]
    with frozen_stay(every):
        yield
    for parameter, data in held:
        if parameter.data_ptr() != data.data_ptr() and not same_bits(parameter, data):
            parameter.data = data
            raise Declined(REPLACED)


def require_parameters(module: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Raise Declined if a module has others than these, which are an array's rows."""
    if list(map(id, module.parameters())) != list(map(id, parameters)):
        raise Declined(REPLACED)


def freeze_again(frozen: Iterable[Tensor]) -> bool:
    """Have these frozen; whether some were not."""
    thawed = [parameter for parameter in frozen if parameter.requires_grad]
    for parameter in thawed:
        parameter.requires_grad_(False)
    return bool(thawed)


def _refresh(recurrent: Sequence[nn.Module]) -> None:
    """As torch lists them; code that drops weights makes one of them in each forward alone."""
    for module in recurrent:
        names: Any = module._flat_weights_names
        vars(module)["_flat_weights"] = [getattr(module, name, None) for name in names]
