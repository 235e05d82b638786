"""A byte-level GPT over the source text of Python's own standard library.

Ordinary PyTorch: nothing here knows what will train it. The text is on every machine
that runs Python, a token is a byte, so there is nothing to download and no tokenizer.

Tensor names carry shapes: B windows in a batch, T bytes in a window, C the model's
width, H heads, V the 256 byte values.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
# Tests and generated tables read unlike the rest of the library, or repeat themselves.
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    | {"encodings", "pydoc_data", "__pycache__"}
)


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} cannot be shared by {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        batch, length, width = x_BTC.shape
        qkv = self.qkv(x_BTC).view(batch, length, 3, self.heads, width // self.heads)
        query_BHTD, key_BHTD, value_BHTD = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTD = F.scaled_dot_product_attention(
            query_BHTD,
            key_BHTD,
            value_BHTD,
            is_causal=True,
        )
        merged_BTC = mixed_BHTD.transpose(1, 2).reshape(batch, length, width)
        projected_BTC: Tensor = self.project(merged_BTC)
        return projected_BTC


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.norm1(x_BTC)))
        x_BTC = x_BTC + self.dropout(self.shrink(F.gelu(self.expand(self.norm2(x_BTC)))))
        return x_BTC


class GPT(nn.Module):
    """A decoder-only transformer; the embedding of the bytes is also its output layer."""

    def __init__(
        self, *, width: int, depth: int, heads: int, context: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialize)
        for name, parameter in self.named_parameters():
            if name.endswith(("project.weight", "shrink.weight")):
                # What is added to the residual, twice a block, starts smaller, as in GPT-2.
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5)
        self.head.weight = self.token.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The logits of each next byte, shape B T V."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.dropout(self.token(tokens_BT) + self.position(positions_T))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes,
        count: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = 40,
        generator: torch.Generator | None = None,
    ) -> bytes:
        """``prompt`` and ``count`` more bytes, each drawn from what the model expects next.

        A low temperature prefers likely bytes; only the ``top_k`` likeliest are drawn.
        """
        device = self.token.weight.device
        text_BT = torch.tensor([list(prompt)], dtype=torch.long, device=device)
        for _ in range(count):
            logits_BV = self(text_BT[:, -self.context :])[:, -1] / temperature
            if top_k is not None:
                weakest_B1 = logits_BV.topk(min(top_k, VOCABULARY)).values[:, -1:]
                logits_BV = logits_BV.masked_fill(logits_BV < weakest_B1, float("-inf"))
            next_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
            text_BT = torch.cat([text_BT, next_B1], dim=1)
        return bytes(text_BT[0].tolist())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)  # few steps: learns sooner than from 0.02
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def next_byte_loss(logits_BTV: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of the true next bytes, in nats per byte."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch[1].flatten())


@functools.cache
def read_library(max_bytes: int = 8_000_000) -> tuple[Tensor, Tensor]:
    """The library's source as bytes: for training, and whole other files held out.

    Files come in sorted order until ``max_bytes`` are read, every twentieth is held
    out; so the same Python gives the same two uint8 tensors everywhere.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, path in enumerate(_library_files()):
        source = path.read_bytes()
        size += len(source)
        if size > max_bytes:
            break
        parts[number % 20 == 19].append(source)
    train, valid = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts)
    return train, valid


def _library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (
        path for path in root.rglob("*.py") if SKIPPED.isdisjoint(path.parts[len(root.parts) :])
    )
    return sorted(path for path in files if path.is_file())


class RandomWindows:
    """Batches of random windows of a text: ``(x, y)``, where y is x one byte later.

    An epoch is ``batches`` of them, drawn with a generator of its own that starts at
    ``seed`` each time, so reading it again gives the same batches and disturbs no
    other random numbers.
    """

    def __init__(
        self, text: Tensor, *, batches: int, windows: int, length: int, seed: int
    ) -> None:
        if len(text) <= length:
            raise ValueError(f"a window of {length} bytes needs a longer text than {len(text)}")
        self.text = text
        self.batches = batches
        self.windows = windows
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        offsets_1T = torch.arange(self.length + 1)[None]
        for _ in range(self.batches):
            starts_B1 = torch.randint(
                len(self.text) - self.length, (self.windows, 1), generator=generator
            )
            window_BT = self.text[starts_B1 + offsets_1T].long()
            yield window_BT[:, :-1], window_BT[:, 1:]


def library_data(
    *, batches: int, windows: int = 4, length: int = 64, seed: int = 0
) -> tuple[RandomWindows, RandomWindows]:
    """Training batches, and 32 validation batches that are the same for every seed."""
    train, valid = read_library()
    return (
        RandomWindows(train, batches=batches, windows=windows, length=length, seed=seed),
        RandomWindows(valid, batches=32, windows=windows, length=length, seed=0),
    )
