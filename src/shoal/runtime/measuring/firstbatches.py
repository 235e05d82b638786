"""A trial's first batches, as whoever measures it reads them, and a few rows of one."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from shoal.core.errors import SpecError
from shoal.fusion.batches import changed_by
from shoal.recipes.recipe import Batch, epoch_length, tensors_of

FEW_ROWS = 2
"""Of a batch, where a GPU's model is looked at on the CPU; with one BatchNorm refuses."""

LONG_READ_S = 1.0
"""Who waited so long for a batch waits for no other one to know how long."""


def first_batch(source: Any, what: str = "training") -> Batch:
    """The first batch of a source.

    Raises:
        SpecError: there is none.
    """
    batch = next(iter(source), None)
    if batch is None:
        raise SpecError(
            f"the {what} data yielded no batch. Recipe(data=...) must return a source that "
            f"yields at least one batch each time it is read{', or None' * (what != 'training')}."
        )
    return batch


def first_batches(source: Any, most: int) -> list[Batch]:
    """Up to so many of a source as it begins, but for the last of an epoch, which may be short.

    Whoever trains meets what the source raises after the first one.

    Raises:
        SpecError: there is none.
    """
    batches, length = iter(source), epoch_length(source)
    found = [first_batch(batches)]
    with suppress(Exception):
        while len(found) < (most if length is None else min(most, length - 1)):
            found.append(next(batches))
    return found[:-1] if length is None and len(found) > 1 else found


def read_one(source: Any) -> tuple[Batch, float]:
    """The first batch, and the seconds of reading one; none where other processes read ahead.

    They are the second one's, if there is another: the first may be the first use of something.

    Raises:
        SpecError: there is none.
    """
    batches, seconds = iter(source), 0.0
    began = time.perf_counter()
    batch = first_batch(batches)
    if not getattr(source, "num_workers", 0):
        seconds, began = time.perf_counter() - began, time.perf_counter()
        with suppress(Exception):  # who trains meets it, and has retries
            if seconds < LONG_READ_S and next(batches, None) is not None:
                seconds = time.perf_counter() - began
    return batch, seconds


def rows_of(batch: Batch) -> int | None:
    """How many rows all tensors of a batch have; None where they differ, or there are none."""
    rows = {tensor.shape[0] if tensor.ndim else None for tensor in tensors_of(batch)}
    return rows.pop() if len(rows) == 1 else None


def first_rows(batch: Batch, count: int) -> Batch:
    """No more than so many rows of a batch, where all of its tensors have equally many."""
    rows = rows_of(batch)
    if rows is None or rows <= count:
        return batch
    return changed_by(lambda tensor: tensor[:count], batch)
