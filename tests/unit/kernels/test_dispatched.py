"""What a dispatch mode sees comes to the bits that it comes to without one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernels.dispatched import run_operation
from shoal.partition.track import AllocationTracker
from shoal.testing import same_bits


@torch.library.custom_op("shoal_dispatched::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, weight)


@torch.library.custom_op("shoal_dispatched::ruled", mutates_args=())
def ruled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, weight)


torch.library.register_autocast("shoal_dispatched::ruled", "cpu", torch.float32)


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run_operation(func, args, kwargs)


torch.manual_seed(0)
X, WEIGHT = torch.randn(3, 5, 16), torch.randn(16, 16)
ENCODER = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
ATTENTION = nn.MultiheadAttention(16, 2, batch_first=True).eval()
CALLS = {
    "encoder": lambda: ENCODER(X),
    "attention": lambda: ATTENTION(X, X, X, need_weights=False)[0],
    "custom": lambda: product(X, WEIGHT),
    "with a rule": lambda: ruled(X, WEIGHT),
    "cast": lambda: nn.functional.linear(X, WEIGHT),
    "cast to float32": lambda: torch.cdist(X, X),
}


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_under_autocast_an_operation_computes_as_without_a_mode(call, cast):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        expected = CALLS[call]()
        with Watched(), AllocationTracker():
            found = CALLS[call]()
    assert found.dtype == expected.dtype
    assert same_bits(found, expected)


def test_where_autocast_is_off_within_it_stays_off():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Watched():
        with torch.autocast("cpu", enabled=False):
            assert ENCODER(X).dtype == torch.float32
        assert ENCODER(X).dtype == torch.bfloat16
