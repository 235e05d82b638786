"""A loader's batch in one piece where it is nothing but rows of tensors.

A ``DataLoader`` over a ``TensorDataset`` takes every example out by itself and stacks them again;
of a narrow model that is more than a step. The rows at the same indices, taken at once, are the
same batch, bit for bit. Order, generators and everything else are the loader's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from shoal.recipe import Batch


class _Rows:
    """In the place of the loader's fetcher."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def fetch(self, indices: Sequence[int]) -> list[Tensor]:
        """What ``default_collate`` makes of the examples: a list with a tensor for each column."""
        rows = torch.tensor(indices)
        try:
            return [tensor.index_select(0, rows) for tensor in self._tensors]
        except (IndexError, RuntimeError):  # one from the end, or a type that it has no kernel for
            return [tensor[rows] for tensor in self._tensors]


def take_rows_at_once(iterator: Iterator[Batch], source: Iterable[Batch]) -> Iterator[Batch]:
    """The iterator of a loader, which from now on fetches whole batches where that is the same."""
    if isinstance(source, DataLoader) and is_rows_only(source):
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        if getattr(fetcher, "dataset", None) is source.dataset:
            vars(iterator)["_dataset_fetcher"] = _Rows(source.dataset.tensors)
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
