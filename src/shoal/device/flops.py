"""The floating point operations of a unit, and the seconds an emulated device takes for it.

[Note: what counting costs]
A unit runs under torch's ``FlopCounterMode``: the operators whose formula is known (matrix
products, convolutions, attention) are counted by their shapes; all others are free, which is why
a profile's FLOP/s are those *sustained in a model*. The counter is Python between
operators: some 20 to 60 microseconds each, about what ``AllocationTracker`` takes, so a unit is
counted once for each shard, operation and shape of batch, and never when it trains. It
changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from shoal.core.errors import SpecError
from shoal.core.profile import Precision
from shoal.core.spec import DeviceSpec, Narrow, ShardSpec
from shoal.core.units import Bytes

Work = Callable[[], object]
Stopwatch = Callable[[Work], float]
"""Runs a piece of work, once or more, and says how many seconds it takes."""

Shape = tuple[int, ...]
_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two matrix products of every query with every key; a causal mask saves nothing."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (width + value[-1])


def _attention_backward_flops(
    _: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any
) -> int:
    """The scores again, and four products: as torch counts the kernels of a GPU."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (3 * width + 2 * value[-1])


_CPU_ATTENTION = {  # torch 2.13 has formulas for the kernels of GPUs only
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def count_flops(work: Work) -> int:
    """Run ``work`` once, its backward included, and count what it computes."""
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        work()
    return int(counter.get_total_flops())


def kernel_precision(precision: str) -> Precision:
    """In which precision the matrix products of a recipe's ``precision`` run.

    Raises:
        SpecError: no profile has figures for it.
    """
    for kind in _PRECISIONS:
        if precision == kind or precision.startswith(f"{kind}-"):
            return kind
    raise SpecError(
        f"no profile says how fast precision {precision!r} is. Emulated devices know "
        f"{', '.join(_PRECISIONS)} and their variants, such as bf16-sr."
    )


def stopwatch_of(spec: DeviceSpec, precision: str) -> Stopwatch | None:
    """Times units by the profile that a device emulates; None where it emulates none.

    ``precision`` is the recipe's. What the stopwatch says is what ``compute(seconds=...)`` is
    to be given for the unit, so that the plan, the replay and the run mean the same times.
    """
    profile = spec.profile
    if profile is None:
        return None
    kind = kernel_precision(precision)
    return lambda work: profile.kernel_seconds(count_flops(work), kind)


def step_bytes(shard: ShardSpec) -> Bytes:
    """What an element-wise optimizer reads and writes for a shard's step, where it steps."""
    return shard.step_bytes


def host_step_bytes(shard: ShardSpec) -> Bytes:
    """What a step on the host costs the host's memory, copies included.

    The parameters that were uploaded twice for it and the gradients that came
    back crossed the same memory: 40 bytes a parameter for AdamW in float32, 34 with
    bf16 copies of a float32 master, which are written once more.
    """
    copies = shard.parameter_bytes if shard.parameter_bytes < shard.owned_bytes else 0
    moved = 2 * shard.parameter_bytes + shard.gradient_bytes
    return Bytes(step_bytes(shard) + moved + copies)


def narrow_step_factor(owned: Bytes, state: Bytes, narrow: Narrow) -> float:
    """How much longer a step on the host takes when its weights travel as bfloat16.

    ``owned`` parameter and ``state`` bytes in float32; all gradients counted as trained.
    """
    wide = 2 * owned + owned + 2 * state + 2 * owned + owned
    travels = 3 * narrow.parameter_bytes + 2 * narrow.gradient_bytes
    return (2 * owned + 2 * state + travels) / max(1, wide)
