"""The random streams a trial owns: seeded, captured and put back together.

A trial draws from torch's CPU generator, its device's generator, Python's ``random``
and NumPy's legacy global stream. A worker that interleaves trials swaps all of them, so
that each trial sees the numbers it would see alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RngState:
    """A moment of all streams. ``cuda`` is None off the GPU."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cuda: Tensor | None = None


def seed_all(seed: int) -> None:
    """Seed torch (every device), ``random`` and NumPy from one number."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def capture_rng(device: torch.device | None = None) -> RngState:
    """The streams as they are now; the device's too when it is a GPU."""
    on_gpu = device is not None and device.type == "cuda"
    return RngState(
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(),  # type: ignore[arg-type]  # legacy=True gives the tuple
        torch.cuda.get_rng_state(device) if on_gpu and device else None,
    )


def restore_rng(state: RngState, device: torch.device | None = None) -> None:
    """Put the streams back to ``state``."""
    words = state.torch
    if words.storage_offset():  # of a view torch reads its storage's beginning
        words = words.clone()
    torch.set_rng_state(words)
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    if state.cuda is not None and device is not None:
        torch.cuda.set_rng_state(state.cuda, device)


def same_rng(first: RngState, second: RngState) -> bool:
    """Whether two moments are equal in every stream."""
    keys_equal = np.array_equal(first.numpy[1], second.numpy[1])
    cuda_equal = (first.cuda is None) == (second.cuda is None) and (
        first.cuda is None or second.cuda is None or torch.equal(first.cuda, second.cuda)
    )
    return (
        torch.equal(first.torch, second.torch)
        and first.python == second.python
        and keys_equal
        and first.numpy[2:] == second.numpy[2:]
        and cuda_equal
    )
