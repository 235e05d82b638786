"""A loader's batch in one piece where it is nothing but rows of tensors.

A ``DataLoader`` over a ``TensorDataset`` takes every example out by itself and stacks them again;
of a narrow model that is more than a step. The rows at the same indices, taken at once, are the
same batch, bit for bit. Order, generators and everything else are the loader's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from shoal.recipes.recipe import Batch


class RowsIterator:
    """In the place of a loader's iterator, whose indices it takes; unseen by profilers."""

    def __init__(self, iterator: Any, tensors: Sequence[Tensor]) -> None:
        self._sampler_iter: Iterator[Any] = iterator._sampler_iter  # keepers pass over some
        self._fetcher, self._tensors = iterator._dataset_fetcher, tensors
        self._pins = bool(iterator._pin_memory)  # not where there is no GPU

    def __iter__(self) -> RowsIterator:
        return self

    def __next__(self) -> list[Tensor]:
        """What ``default_collate`` makes of the examples: a list with a tensor for each column."""
        batch = self._fetched(next(self._sampler_iter))
        return [tensor.pin_memory() for tensor in batch] if self._pins else batch

    def _fetched(self, indices: Any) -> list[Tensor]:
        if type(indices) is not list or not indices or not set(map(type, indices)) <= INTEGERS:
            return self._fetcher.fetch(indices)  # type: ignore[no-any-return]  # example by example
        rows = _as_tensor(indices)
        try:
            return [tensor.index_select(0, rows) for tensor in self._tensors]
        except (IndexError, RuntimeError):  # one from the end, or a type that it has no kernel for
            return [tensor[rows] for tensor in self._tensors]


INTEGERS = {int, np.int64, np.int32}
"""Of which a row each is taken; an index may be anything that a tensor takes, such as a slice."""


def _as_tensor(indices: list[int]) -> Tensor:
    """[rows], int64. Through an array: ``torch.tensor`` asks each for its type, which is slow."""
    return torch.frombuffer(array("q", indices), dtype=torch.int64)


def take_rows_at_once(iterator: Iterator[Batch], source: Iterable[Batch]) -> Iterator[Batch]:
    """The iterator of a loader, or one that fetches whole batches where that is the same."""
    if isinstance(source, DataLoader) and is_rows_only(source):
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        has_all = hasattr(iterator, "_sampler_iter") and hasattr(iterator, "_pin_memory")
        if has_all and getattr(fetcher, "dataset", None) is source.dataset:
            return RowsIterator(iterator, source.dataset.tensors)
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
