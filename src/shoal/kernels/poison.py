"""What stands where a tensor was whose memory is elsewhere: NaN, so that a use of it is seen."""

from __future__ import annotations

import torch
from torch import Tensor


class Poison:
    """NaN, or 0, of any shape, in the memory of one number for each type and device.

    A GPU gives out 512 bytes at least, and no plan counts these: so not one for each parameter.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Of the shape and type of ``tensor``, there; None: where it is."""
        place = tensor.device if device is None else device
        key = tensor.dtype, place
        if key not in self._numbers:
            value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
            self._numbers[key] = torch.full((), value, dtype=tensor.dtype, device=place)
        return self._numbers[key].expand(tensor.shape)
