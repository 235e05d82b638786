"""Models and data that each break a careless engine in one way.

Imported by tests and, by this name, by worker processes. Most take x of 12 features and
give logits of 3 classes; ``hp["lr"]`` is the learning rate.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

WIDTH = 16


# ------------------------------------------------------------------ models


class Chain(nn.Module):
    """A prologue, a list of blocks and an epilogue; what a trap changes is in a subclass."""

    depth = 4

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList(self.make_block(index) for index in range(self.depth))
        self.leave = nn.Linear(WIDTH, 3)

    def make_block(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Cross(nn.Module):
    """A block that reads a second tensor, as a decoder reads its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + torch.tanh(self.own(x) * self.other(memory))


class SharedBoundary(Chain):
    """One boundary tensor read by every block."""

    def __init__(self) -> None:
        super().__init__()
        self.remember = nn.Linear(12, WIDTH)

    def make_block(self, index: int) -> nn.Module:
        return Cross()

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.sigmoid(self.remember(x))
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, memory)
        return self.leave(x)


class Joined(nn.Module):
    """A block that adds a tensor from far before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: Tensor | None) -> Tensor:
        x = F.gelu(self.layer(x))
        return x if kept is None else x * torch.sigmoid(kept)


class Skips(Chain):
    """Boundary tensors that jump over blocks, as in a U-Net, one of them to the end."""

    def make_block(self, index: int) -> nn.Module:
        return Joined()

    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        one = self.blocks[0](first, None)
        two = self.blocks[1](one, None)
        three = self.blocks[2](two, one)
        return self.leave(self.blocks[3](three, first) + first)


class Glue(Chain):
    """Computes between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x) / x.norm()
        return self.leave(x)


class SharedLayer(Chain):
    """One Linear in the first and the last block: one weight, two uses far apart."""

    def make_block(self, index: int) -> nn.Module:
        if index == 0:
            self.shared = nn.Linear(WIDTH, WIDTH)
        layer = self.shared if index in (0, self.depth - 1) else nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(layer, nn.GELU())


class SharedArgument(Chain):
    """A parameter of the whole model that is handed to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH) / 4)

    def make_block(self, index: int) -> nn.Module:
        return Cross()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, self.bias)
        return self.leave(x)


class Reused(Chain):
    """The same block twice in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[1])


class WithUnused(nn.Module):
    """A block with a branch that no input takes, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.used(x)) + self.frozen(x)


class Unused(Chain):
    def make_block(self, index: int) -> nn.Module:
        return WithUnused()


class Late(nn.Module):
    """A branch that only some batches take: its first gradient comes in a later step."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            x = x + self.rarely(x)
        return F.gelu(self.always(x))


class LateGradient(Chain):
    def make_block(self, index: int) -> nn.Module:
        return Late()


class Scaled(Chain):
    """Parameters without a dimension, whose optimizer state has none either."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def make_block(self, index: int) -> nn.Module:
        return Gated()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.exp()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.layer(x)) * self.gate.sigmoid()


class Recurrent(Chain):
    """LSTMs, which keep a list of their own weights and return nested tuples."""

    def make_block(self, index: int) -> nn.Module:
        return nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.enter(x)[:, None].expand(-1, 3, -1), None
        for block in self.blocks:
            x, state = block(x, state)
        return self.leave(x[:, -1])


class FrozenStart(Chain):
    """A pretrained start that gets no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.enter.requires_grad_(False)
        self.blocks[:2].requires_grad_(False)


class ChannelsLast(nn.Module):
    """Convolutions whose weights are channels-last, and one stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
                for _ in range(4)
            )
        )
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.leave = nn.Linear(8, 3)
        self.leave.weight = nn.Parameter(torch.randn(8, 3).t() / 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.to(memory_format=torch.channels_last))
        for layer in self.body:
            x = layer(x)
        return self.leave(x.mean((2, 3)))


class Chancy(nn.Module):
    """Draws from every stream in its forward: dropout, stochastic depth, NumPy noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.3:
            return x
        noise = float(np.random.rand()) if self.training else 0.5
        return x + noise * F.dropout(F.gelu(self.layer(x)), 0.4, self.training)


class Stochastic(Chain):
    def make_block(self, index: int) -> nn.Module:
        return Chancy()


class Normalized(Chain):
    """Batch statistics, one of them a cumulative average, and power iteration in a forward."""

    def make_block(self, index: int) -> nn.Module:
        linear = nn.Linear(WIDTH, WIDTH)
        if index == 1:
            linear = nn.utils.parametrizations.spectral_norm(linear)
        momentum = None if index == 2 else 0.1
        return nn.Sequential(linear, nn.BatchNorm1d(WIDTH, momentum=momentum), nn.Tanh())


class InPlace(Chain):
    """Every block begins with an in-place operation on what the block before gave."""

    def make_block(self, index: int) -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False)


class InnerCheckpoint(Chain):
    def make_block(self, index: int) -> nn.Module:
        return Checkpointed()


class Pair(nn.Module):
    """Takes keywords and gives a tuple with a tensor that needs no gradient and a None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, state: Any = None) -> tuple[Tensor, Any, None]:
        return F.gelu(self.layer(x)) * mask / mask.sum(), mask.sum(), None


class Structured(Chain):
    def make_block(self, index: int) -> nn.Module:
        return Pair()

    def forward(self, x: Tensor) -> Tensor:
        mask = (x[:, :1] > -1).float()
        x = self.enter(x)
        for block in self.blocks:
            x, _, _ = block(x, mask=mask)
        return self.leave(x)


class Renormed(Chain):
    """An embedding that shrinks its own weight in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(12, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.argmax(-1))


class Clamping(nn.Module):
    """A block that clips a weight's values in its forward, behind autograd's back."""

    def __init__(self, other: nn.Linear | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other = [other or self.linear]  # in a list, no submodule

    def forward(self, x: Tensor) -> Tensor:
        self.other[0].weight.data.clamp_(-0.05, 0.05)
        return torch.tanh(self.linear(x))


class Clamped(Chain):
    """Every block clips its own weight."""

    def make_block(self, index: int) -> nn.Module:
        return Clamping()


class ClampsEarlier(Chain):
    """A block clips the weight of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Clamping(self.blocks[0].linear)

    def make_block(self, index: int) -> nn.Module:
        return Clamping()


class Double(Chain):
    """All of it in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


def no_bias(hp):
    """Matrices only, for optimizers that take nothing else."""
    layers = [nn.Linear(12, WIDTH, bias=False)]
    layers += [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    mixed = [module for layer in layers for module in (layer, nn.Tanh())]
    return nn.Sequential(*mixed, nn.Linear(WIDTH, 3, bias=False))


def gpt2(hp):
    """Hugging Face's default keeps a key-value cache, which a recompute would fill twice."""
    import transformers  # lazy: only this trap needs it

    config = transformers.GPT2Config(
        vocab_size=61,
        n_positions=16,
        n_embd=32,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config)


class Build:
    """``(hp) -> module`` of a class in this file, picklable by its name."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind

    def __call__(self, hp):
        return self.kind()


# ------------------------------------------------------------------ data


def examples(count: int, offset: int = 0, shape: tuple[int, ...] = (12,)) -> list[Any]:
    generator = torch.Generator().manual_seed(50 + offset)
    return [
        (torch.randn(shape, generator=generator), torch.randint(3, (), generator=generator))
        for _ in range(count)
    ]


def batches(sizes: list[int], offset: int = 0, shape: tuple[int, ...] = (12,)) -> list[Any]:
    drawn = [examples(size, offset + index, shape) for index, size in enumerate(sizes)]
    return [tuple(map(torch.stack, zip(*batch, strict=True))) for batch in drawn]


def data(hp):
    return batches([4, 4, 4, 4, 3]), batches([4, 4], 20)


def image_data(hp):
    return batches([4, 4, 4], 0, (3, 8, 8)), batches([4], 20, (3, 8, 8))


def token_data(hp):
    generator = torch.Generator().manual_seed(9)
    drawn = [torch.randint(61, (3, 12), generator=generator) for _ in range(4)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn], None


class Augmented(Dataset):
    """Examples with noise from each global stream, as augmentations draw it."""

    def __init__(self, count: int) -> None:
        self.examples = examples(count)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int):
        x, y = self.examples[index]
        return x + torch.rand(12) * random.random() * np.random.rand(), y


def shuffled_data(hp):
    return DataLoader(Augmented(18), batch_size=4, shuffle=True), None


class Trailing:
    """Draws before the first batch, with every batch, and after the last one."""

    def __iter__(self):
        torch.rand(1)
        for x, y in data(None)[0]:
            yield x * (1 + torch.rand(1)), y
        random.random()
        torch.rand(3)
        np.random.rand()


class Noisy(Dataset):
    """Augments with the stream that a loader's worker process seeds."""

    def __init__(self, count: int) -> None:
        self.examples = examples(count)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int):
        x, y = self.examples[index]
        return x + torch.rand(12), y


def worker_data(hp):
    """Loader processes, whose seed is drawn from the trial's stream each epoch."""
    return DataLoader(Noisy(18), batch_size=4, shuffle=True, num_workers=1), None


def private_generator_data(hp):
    """A loader with a generator of its own, which lives as long as the loader."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(examples(18), batch_size=4, shuffle=True, generator=generator), None


def trailing_data(hp):
    return Trailing(), None


def random_valid_data(hp):
    """Validation that draws: it must not reach the training's streams."""
    return data(hp)[0], DataLoader(Augmented(8), batch_size=4, shuffle=True)


# ------------------------------------------------------------------ the rest of a recipe


def loss(output, batch):
    return output.loss if isinstance(batch, dict) else F.cross_entropy(output, batch[1])


def adamw(named_parameters, hp):
    parameters = [parameter for _, parameter in named_parameters]
    return torch.optim.AdamW(parameters, lr=hp["lr"], weight_decay=0.1, fused=True)


def momentum(named_parameters, hp):
    parameters = [parameter for _, parameter in named_parameters]
    return torch.optim.SGD(parameters, lr=hp["lr"], momentum=0.9, dampening=0.5)


def two_rates(named_parameters, hp):
    """The last layer learns faster, and without decay."""
    named = list(named_parameters)
    head = [p for name, p in named if name.startswith("leave")]
    body = [p for name, p in named if not name.startswith("leave")]
    groups = [{"params": body}, {"params": head, "lr": 5 * hp["lr"], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=hp["lr"], weight_decay=0.1, betas=(0.8, 0.95))


def last_layers(named_parameters, hp):
    """Fine-tuning: the first layers keep their weights, though they get gradients."""
    held = [p for name, p in named_parameters if not name.startswith(("enter", "blocks.0"))]
    return torch.optim.SGD(held, lr=hp["lr"], momentum=0.9)


def one_cycle(optimizer, hp):
    """Changes the first beta as well as the learning rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=20)


def lbfgs(named_parameters, hp):
    return torch.optim.LBFGS([parameter for _, parameter in named_parameters], lr=hp["lr"])


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD maximize foreach": ("SGD", {"momentum": 0.9, "maximize": True, "foreach": True}),
    "Adam amsgrad": ("Adam", {"amsgrad": True}),
    "Adam fused": ("Adam", {"fused": True}),
    "AdamW foreach": ("AdamW", {"foreach": True}),
    "AdamW tensor lr": ("AdamW", {"foreach": False}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {}),
    "Adagrad": ("Adagrad", {"initial_accumulator_value": 0.1}),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "Adamax": ("Adamax", {}),
    "Adadelta": ("Adadelta", {}),
    "ASGD": ("ASGD", {"t0": 2}),
    "Rprop": ("Rprop", {}),
    "Adafactor": ("Adafactor", {}),
    "Muon": ("Muon", {}),
}


def named_optimizer(named_parameters, hp):
    kind, options = OPTIMIZERS[hp["optimizer"]]
    parameters = [parameter for _, parameter in named_parameters]
    rate = torch.tensor(hp["lr"]) if "tensor lr" in hp["optimizer"] else hp["lr"]
    return getattr(torch.optim, kind)(parameters, lr=rate, **options)
