"""What a trial's model may not consist of."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.core.errors import SpecError
from shoal.core.units import counted


def check_model(model: nn.Module) -> None:
    """Look at every parameter and buffer of a model that was just made.

    Raises:
        SpecError: one has no shape yet, is no plain memory, is of a type that no file holds, or
            lies in the memory of another one.
    """
    _refuse_shapeless(model)
    _refuse_odd(model)
    _refuse_overlaps(model)


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
