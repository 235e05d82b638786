"""FLOPs of units, counted by torch, and what an emulated device makes of them."""

import pytest
import torch
from torch import nn

from shoal.core.errors import SpecError
from shoal.core.profile import PROFILES
from shoal.core.spec import DeviceSpec, ShardSpec
from shoal.core.units import Bytes
from shoal.device.flops import (
    count_flops,
    host_step_bytes,
    kernel_precision,
    step_bytes,
    stopwatch_of,
)

H200 = PROFILES["h200"]


def test_a_matrix_product_is_two_flops_a_multiply() -> None:
    layer, x = nn.Linear(8, 16), torch.ones(4, 8)

    assert count_flops(lambda: layer(x)) == 2 * 4 * 8 * 16


def test_a_backward_computes_two_more_products() -> None:
    layer, x = nn.Linear(8, 16), torch.ones(4, 8, requires_grad=True)

    assert count_flops(lambda: layer(x).sum().backward()) == 3 * 2 * 4 * 8 * 16


def test_attention_on_the_cpu_counts_like_that_of_a_gpu() -> None:
    query = torch.rand(2, 3, 5, 4, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    product = 2 * (2 * 3 * 5 * 5 * 4)

    with torch.no_grad():
        forward = count_flops(lambda: attend(query, query, query))
    both = count_flops(lambda: attend(query, query, query).sum().backward())

    assert forward == 2 * product
    assert both == 7 * product


def test_counting_changes_no_bit() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.rand(3, 8)
    results = []

    def train() -> None:
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])

    train()
    count_flops(train)

    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _spec(**changes: object) -> DeviceSpec:
    return DeviceSpec(name="cpu:0", kind="virtual", memory=Bytes(1), **changes)


def test_a_stopwatch_tells_the_profile_s_time() -> None:
    layer, x = nn.Linear(8, 16), torch.ones(4, 8)
    stopwatch = stopwatch_of(_spec(profile=H200.slowed(2000)), "bf16")

    assert stopwatch is not None
    assert stopwatch(lambda: layer(x)) == pytest.approx(1024 * 2000 / H200.bf16_flops_per_s)


@pytest.mark.parametrize(
    ("recipe_s", "kind"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16-sr", "bf16")]
)
def test_a_recipe_s_precision_is_that_of_its_kernels(recipe_s: str, kind: str) -> None:
    assert kernel_precision(recipe_s) == kind


def test_a_precision_without_figures_is_refused() -> None:
    with pytest.raises(SpecError, match=r"'fp8' is\. Emulated devices know fp32, bf16, fp16"):
        kernel_precision("fp8")


def test_where_nothing_is_emulated_there_is_no_stopwatch() -> None:
    assert stopwatch_of(_spec(), "fp32") is None


def _shard(parameters: int) -> ShardSpec:
    """AdamW's in float32: 4 bytes of weights and gradients, 8 of state a parameter."""
    sizes = {
        "parameter_bytes": 4, "owned_bytes": 4, "state_bytes": 8, "gradient_bytes": 4,
        "boundary_bytes": 0, "carry_bytes": 0, "forward_peak_bytes": 0,
        "backward_peak_bytes": 0, "step_peak_bytes": 0,
    }  # fmt: skip
    scaled = {name: Bytes(size * parameters) for name, size in sizes.items()}
    return ShardSpec(index=0, layers=(0, 1), **scaled)


def test_a_step_touches_28_bytes_a_parameter_and_40_with_its_copies() -> None:
    assert step_bytes(_shard(1000)) == 28_000
    assert host_step_bytes(_shard(1000)) == 40_000
