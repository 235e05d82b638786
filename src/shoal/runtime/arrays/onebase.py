"""What an array has once for all of its trials: nobody writes to it."""

from __future__ import annotations

from torch import Tensor

from shoal.core.errors import TrialError
from shoal.memory.store import same_bits


def require_untouched(name: str, parameter: Tensor, before: Tensor) -> None:
    """Raise TrialError where frozen weights of an array have other bits than ``before``."""
    if not same_bits(parameter, before):
        raise TrialError(
            f"{name!r} is frozen, and the trials of its array have it in memory once: something "
            "has written to it, for all of them. What was saved before is as it was. Train with "
            "fuse=False (--fuse off), or do not freeze what is written to."
        )
