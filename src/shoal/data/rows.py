"""A loader's batch in one piece where it is nothing but rows of tensors.

A ``DataLoader`` over a ``TensorDataset`` takes every example out by itself and stacks them again;
of a narrow model that is more than a step. The rows at the same indices, taken at once, are the
same batch, bit for bit. Order, generators and everything else are the loader's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from shoal.recipe import Batch


class RowsIterator:
    """In the place of a loader's iterator, whose indices it takes; unseen by profilers."""

    def __init__(
        self, indices: Iterator[Sequence[int]], tensors: Sequence[Tensor], *, pins: bool
    ) -> None:
        self._sampler_iter = indices  # the name it has in torch's, by which keepers pass over some
        self._tensors, self._pins = tensors, pins

    def __iter__(self) -> RowsIterator:
        return self

    def __next__(self) -> list[Tensor]:
        """What ``default_collate`` makes of the examples: a list with a tensor for each column."""
        rows = _as_tensor(next(self._sampler_iter))
        try:
            batch = [tensor.index_select(0, rows) for tensor in self._tensors]
        except (IndexError, RuntimeError):  # one from the end, or a type that it has no kernel for
            batch = [tensor[rows] for tensor in self._tensors]
        return [tensor.pin_memory() for tensor in batch] if self._pins else batch


def _as_tensor(indices: Sequence[int]) -> Tensor:
    """[rows], int64. Through an array: ``torch.tensor`` asks each for its type, which is slow."""
    try:
        return torch.frombuffer(array("q", indices), dtype=torch.int64)
    except (TypeError, ValueError):  # what has no __index__; and nothing at all
        return torch.tensor(indices)


def take_rows_at_once(iterator: Iterator[Batch], source: Iterable[Batch]) -> Iterator[Batch]:
    """The iterator of a loader, or one that fetches whole batches where that is the same."""
    if isinstance(source, DataLoader) and is_rows_only(source):
        indices = getattr(iterator, "_sampler_iter", None)
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        if indices is not None and getattr(fetcher, "dataset", None) is source.dataset:
            pins = bool(getattr(iterator, "_pin_memory", False))  # not where there is no GPU
            return RowsIterator(indices, source.dataset.tensors, pins=pins)
    return iterator


def is_rows_only(loader: DataLoader[Any]) -> bool:
    """Whether its batches are rows of tensors, copied and stacked as torch does it."""
    dataset = loader.dataset
    return (
        type(loader) is DataLoader
        and loader.num_workers == 0
        and loader.batch_sampler is not None
        and loader.collate_fn is default_collate
        and default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn
        and type(dataset) is TensorDataset
        and not any(name in vars(dataset) for name in ("__getitems__", "__getitem__"))
        and all(_is_plain(tensor) for tensor in dataset.tensors)
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not (tensor.is_conj() or tensor.is_neg())
    )
