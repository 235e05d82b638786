"""The device's kernels: matrix products of a layer, and all of one transformer block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from shoal.bench.measured import Block, Kernel, Matmul, Rate
from shoal.bench.timing import Timer, Work, repeat
from shoal.core.profile import Precision
from shoal.core.seams import Clock
from shoal.device.flops import count_flops

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """A transformer block and the micro-batch that goes through it."""

    batch: int
    sequence: int
    width: int
    heads: int

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and beside the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        attended = merge(self.attend(*self.split(self.qkv(self.norm1(x_BSD)))))
        x_BSD = x_BSD + self.project(attended)
        out: Tensor = x_BSD + self.narrow(gelu(self.widen(self.norm2(x_BSD))))
        return out

    def split(self, qkv_BSE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each batch x heads x sequence x width of a head."""
        batch, sequence, entries = qkv_BSE.shape
        parts = qkv_BSE.view(batch, sequence, 3, self.heads, entries // 3 // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)


def merge(heads_BHSW: Tensor) -> Tensor:
    """The heads side by side again."""
    return heads_BHSW.transpose(1, 2).flatten(2)


def measure_matmuls(
    shape: BlockShape, device: torch.device, timer: Timer, budget_s: float, clock: Clock
) -> tuple[Matmul, ...]:
    """The four matrix products of a layer's forward, in each precision."""
    width = shape.width
    products = (
        ("qkv", width, 3 * width),
        ("projection", width, width),
        ("feed-forward up", width, 4 * width),
        ("feed-forward down", 4 * width, width),
    )
    share = budget_s / (len(products) * len(PRECISIONS))
    found = []
    for precision in PRECISIONS:
        for name, inner, columns in products:
            rows = shape.tokens
            a = torch.randn(rows, inner, device=device).to(_TYPES[precision])
            b = torch.randn(columns, inner, device=device).to(_TYPES[precision])
            work = functools.partial(torch.nn.functional.linear, a, b)
            with torch.no_grad():
                seconds = repeat(functools.partial(timer, work), share, clock)
            rate = Rate.of(2.0 * rows * inner * columns, seconds)
            found.append(
                Matmul(
                    name=name,
                    precision=precision,
                    rows=rows,
                    inner=inner,
                    columns=columns,
                    flops_per_s=rate,
                )
            )
    return tuple(found)


def measure_block(
    shape: BlockShape,
    precision: Precision,
    device: torch.device,
    timer: Timer,
    budget_s: float,
    clock: Clock,
) -> tuple[Block, tuple[Kernel, ...]]:
    """A block's forward and backward, and each kernel of its forward alone."""
    block = TransformerBlock(shape.width, shape.heads).to(device, _TYPES[precision])
    size = shape.batch, shape.sequence, shape.width
    x_BSD = torch.randn(size, device=device).to(_TYPES[precision]).requires_grad_()
    grad = torch.ones(size, device=device, dtype=_TYPES[precision])

    def train() -> None:
        block(x_BSD).backward(grad)
        block.zero_grad()
        x_BSD.grad = None

    kernels = tuple(_kernels_of(block, x_BSD.detach()))
    share = budget_s / (len(kernels) + 4)  # the block's own two runs get twice as much each

    def seconds(work: Work, parts: int = 1) -> float:
        return min(repeat(functools.partial(timer, work), parts * share, clock))

    with torch.no_grad():
        counted = [(name, work, count_flops(work)) for name, work in kernels]
        parts = tuple(
            Kernel(name=name, precision=precision, seconds=seconds(work), flops=flops)
            for name, work, flops in counted
        )
        forward = functools.partial(block, x_BSD)
        forward_flops, forward_s = count_flops(forward), seconds(forward, 2)
    both_flops, both_s = count_flops(train), seconds(train, 2)
    return _block(shape, precision, (forward_s, both_s), (forward_flops, both_flops)), parts


def _block(
    shape: BlockShape, precision: Precision, seconds: Sequence[float], flops: Sequence[int]
) -> Block:
    """From the forward, and from the forward with its backward."""
    forward_s, both_s = seconds
    return Block(
        precision=precision,
        tokens=shape.tokens,
        width=shape.width,
        heads=shape.heads,
        forward_s=forward_s,
        backward_s=max(both_s - forward_s, 0.0),
        forward_flops=flops[0],
        backward_flops=flops[1] - flops[0],
    )


def _kernels_of(
    block: TransformerBlock, x_BSD: Tensor
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Each kernel of the forward, on what it gets there."""
    with torch.no_grad():
        normed = block.norm1(x_BSD)
        split = block.split(block.qkv(normed))
        attended = merge(block.attend(*split))
        wide = block.widen(normed)
    yield "norm", functools.partial(block.norm1, x_BSD)
    yield "qkv", functools.partial(block.qkv, normed)
    yield "attention", functools.partial(block.attend, *split)
    yield "projection", functools.partial(block.project, attended)
    yield "residual", functools.partial(torch.add, x_BSD, attended)
    yield "feed-forward up", functools.partial(block.widen, normed)
    yield "gelu", functools.partial(gelu, wide)
    yield "feed-forward down", functools.partial(block.narrow, wide)
