"""Weights in bfloat16 alone, rounded stochastically after each step: ``precision="bf16-sr"``.

[Note: stochastic rounding]
A step changes most weights by less than the spacing of bfloat16, so rounding to nearest would
throw it away. Rounded up with the probability of what is cut off, a weight is right on average:

    step      weight bfloat16 -> float32, the optimizer's own step on it, state in float32
    round     add 16 random bits below the bits that stay, then cut them off

The random bits belong to (seed, step, name of the parameter). So they are the same whatever else
draws, whichever shard steps first, and after a resume. Gradients are float32. Parameters of one
dimension (norms, biases) and buffers stay as they are. Source of the idea: Gupta et al., Deep
Learning with Limited Numerical Precision (ICML 2015).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

NAME = "bf16-sr"
_PIECE = 1 << 16
_LOW_HALF, _HIGH_HALF = (1 << 16) - 1, -(1 << 16)  # of the bits of a float32


def lower(model: nn.Module) -> None:
    """Round float32 parameters of two or more dimensions to bfloat16, gradients in float32."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and parameter.dim() > 1:
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.grad_dtype = torch.float32


class Rounding:
    """The steps of one model whose weights were lowered.

    Args:
        parameters: All of the model's, by name; those that ``lower`` changed are rounded.
        seed: The trial's.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], seed: int) -> None:
        self._seed = seed
        self._lowered = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.dtype == torch.bfloat16 and parameter.grad_dtype == torch.float32
        }

    @contextmanager
    def stepping(self, names: Iterable[str], step: int) -> Iterator[None]:
        """Inside, the named parameters are float32; afterwards rounded, where they were.

        ``step`` counts from 0.
        """
        places = {name: self._lowered[name].data for name in names if name in self._lowered}
        for name, place in places.items():
            self._lowered[name].data = place.float()
        try:
            yield
        finally:
            for name, place in places.items():
                parameter = self._lowered[name]
                round_into(place, parameter.data, self._generator(name, step, place.device))
                parameter.data = place

    def _generator(self, name: str, step: int, device: torch.device) -> torch.Generator:
        key = hashlib.blake2b(f"{self._seed}/{step}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device)
        generator.manual_seed(int.from_bytes(key, "little") >> 1)
        return generator


def round_into(place: Tensor, value: Tensor, generator: torch.Generator) -> None:
    """Write float32 ``value`` to the bfloat16 ``place``, up or down by chance.

    Both lie in memory alike, without gaps. On a CPU in pieces that its cache holds.
    """
    flat_place, flat_value = (t.as_strided((t.numel(),), (1,)) for t in (place, value))
    size = _PIECE if value.device.type == "cpu" else max(1, value.numel())
    for start in range(0, value.numel(), size):
        piece = flat_value[start : start + size]
        _round_piece(flat_place[start : start + size], piece, generator)


def _round_piece(place: Tensor, value: Tensor, generator: torch.Generator) -> None:
    words = torch.empty(-(-value.numel() // 4), dtype=torch.int64, device=value.device)
    words.random_(-(1 << 63), None, generator=generator)  # each has the bits of four
    bits = words.view(torch.int16)[: value.numel()].to(torch.int32)
    bits.bitwise_and_(_LOW_HALF).add_(value.view(torch.int32)).bitwise_and_(_HIGH_HALF)
    place.copy_(bits.view(torch.float32))
    place.masked_fill_(value != value, float("nan"))  # whose bits may have run over
