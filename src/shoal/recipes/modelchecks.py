"""What a trial's model may not consist of."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.core.errors import SpecError
from shoal.core.units import counted
from shoal.recipes.modelaliases import refuse_aliases, refuse_met


def check_model(model: nn.Module, recipe: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Look at every parameter and buffer of a model that was just made.

    Parameters in the memory of somebody else's tensor get memory of their own. ``recipe``
    has the code that runs beside the model, by field.

    Raises:
        SpecError: one has no shape yet, is no plain memory, is of a type that no file holds,
            lies in the memory of another one, or is an earlier model's; or code of the model, or
            beside it, reads a parameter by another tensor in its memory.
    """
    _refuse_shapeless(model)
    _refuse_odd(model)
    _refuse_overlaps(model)
    refuse_aliases(model)
    _refuse_used(model)
    _have_own_memory(model, recipe)


_MADE: dict[int, weakref.ref[nn.Parameter]] = {}
"""The parameters of models that were made in this process and are there, by identity."""


def _refuse_used(model: nn.Module) -> None:
    """Raises SpecError for a parameter that a model had which was made before.

    It would train in both, and have what the other trial's end left in it.
    """
    if torch.__future__.get_swap_module_params_on_conversion():
        return  # what is referred to cannot be swapped
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            continue
        number = id(parameter)
        if number in _MADE and _MADE[number]() is parameter:
            where = name.rpartition(".")[0] or "the model itself"
            raise SpecError(
                f"Recipe(model=...) returned a model whose parameter {name!r} an earlier call "
                f"returned too ({where!r} is kept from one call to the next). Each trial trains a "
                "model of its own: make that part in the function, or return a copy of it, "
                "copy.deepcopy(part)."
            )
        _MADE[number] = weakref.ref(parameter, functools.partial(_forget, number))


def _forget(number: int, _: object) -> None:
    _MADE.pop(number, None)


def _have_own_memory(model: nn.Module, recipe: Mapping[str, Any]) -> None:
    """Copy the parameters whose memory is held from outside of the model.

    Over a tensor or a NumPy array of the user's (``nn.Parameter(table)``,
    ``Embedding.from_pretrained``) steps would write into that, and the next model would be made
    of it.

    Raises:
        SpecError: code reads one of them by what holds it.
    """
    held = dict(_held_outside(model))
    refuse_met(held, recipe, model)
    for parameter in held.values():
        parameter.data = parameter.detach().clone()


def _held_outside(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters in the memory of something that is no part of the model."""
    inside: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.device.type == "meta":
            continue
        storage = parameter.untyped_storage()
        holders = torch._C._storage_Use_Count(storage._cdata) - 1  # one is ``storage``
        is_own = storage.resizable()  # and not NumPy's or a file's
        if is_own and holders > 1:
            inside = inside or _tensors_by_storage(model)
            is_own = holders <= len(inside[storage.data_ptr()])
        if not is_own:
            yield name, parameter


def _tensors_by_storage(model: nn.Module) -> dict[int, set[int]]:
    """Parameters, buffers and attributes of a model by the memory that they are in."""
    found: dict[int, set[int]] = defaultdict(set)
    for tensor in (*model.parameters(), *model.buffers(), *_attributes(model)):
        if tensor.layout == torch.strided:
            there = found[tensor.untyped_storage().data_ptr()]
            there |= {id(tensor)} if tensor._base is None else {id(tensor), id(tensor._base)}
    return found


def _attributes(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for value in vars(module).values():
            some = value.values() if isinstance(value, dict) else value
            several = isinstance(value, dict | list | tuple)
            yield from (one for one in (some if several else (value,)) if isinstance(one, Tensor))


def _refuse_shapeless(model: nn.Module) -> None:
    """Raises SpecError for lazy layers that have seen no batch."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if not lazy:
        return
    kind = type(model.get_submodule(lazy[0].rpartition(".")[0])).__name__
    raise SpecError(
        f"Recipe(model=...) returned a model with {counted(len(lazy), 'tensor')} that "
        f"{'has' if len(lazy) == 1 else 'have'} no shape yet, {lazy[0]!r} of {kind} first. What "
        "it takes, and its optimizer, need all shapes. Run one batch through the model in the "
        "factory before it is returned, such as model(torch.zeros(1, 784)), or use a layer that "
        "is told its number of inputs."
    )


def _refuse_odd(model: nn.Module) -> None:
    """Raises SpecError for tensors that are no plain memory, or of which no file has any."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype in (torch.complex128, torch.complex32):
            raise SpecError(
                f"Recipe(model=...) returned a model whose tensor {name!r} is of {tensor.dtype}, "
                "which no checkpoint can hold (safetensors). Keep it in torch.complex64, or as "
                "real numbers (torch.view_as_real)."
            )
        if tensor.layout != torch.strided:
            raise SpecError(
                f"Recipe(model=...) returned a model whose tensor {name!r} is {tensor.layout}, "
                "and a trial's parameters and buffers are plain memory. Register a dense one, "
                "or its indices and values, and make the sparse tensor in the forward."
            )


def _refuse_overlaps(model: nn.Module) -> None:
    """Raises SpecError for a parameter in whose memory another tensor lies that is not the same.

    Each has its own place where a trial's state is kept, so that they would go on apart.
    """
    kinds: dict[str, str] = {name: "buffer" for name, _ in model.named_buffers()}
    kinds |= {name: "parameter" for name, _ in model.named_parameters()}
    places: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "meta" and tensor.numel() and tensor.is_contiguous():
            here = places.setdefault(tensor.untyped_storage().data_ptr(), [])
            here.append((*_range(tensor), name))
    for some in places.values():
        for (_, past, one), (first, _, other) in itertools.pairwise(sorted(some)):
            if first < past and "parameter" in (kinds[one], kinds[other]):
                raise SpecError(
                    f"Recipe(model=...) returned a model whose {kinds[one]} {one!r} and "
                    f"{kinds[other]} {other!r} are two tensors in the same memory. Where a "
                    "trial's state is kept each has a place of its own, and they would part. Tie "
                    "them by the parameter itself (b.weight = a.weight, not .data), or copy one "
                    "of them (.clone())."
                )


def _range(tensor: Tensor) -> tuple[int, int]:
    """Of its storage the first byte that a contiguous tensor covers, and the one past the last."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first, first + int(tensor.nbytes)


def switches_by_code(module: nn.Module) -> bool:
    """Whether code of its own runs where it is put into training or evaluation mode."""
    return any(
        type(part).train is not nn.Module.train
        or type(part).eval is not nn.Module.eval
        or not vars(part).keys().isdisjoint(("train", "eval"))
        for part in module.modules()
    )
