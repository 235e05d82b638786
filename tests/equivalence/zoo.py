"""Five small models with their data, as one recipe: ``hp`` has model, optimizer and lr.

Imported by tests and, by this name, by worker processes: conftest puts the folder on the
path. Batches are few and small; each source has one habit that breaks careless
engines: a short last batch (gpt), a loader that shuffles with the global stream (bert),
padding (bert), batch statistics (resnet).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shoal.recipes.recipe import Recipe

MODELS = ("gpt", "bert", "llama", "resnet", "mlp")
VOCABULARY = 61
BATCHES = 5  # an epoch; with accumulate=3 its last group is short


def _transformers() -> Any:
    """The one lazy import: four seconds that a study of other models need not spend."""
    import transformers

    return transformers


# ------------------------------------------------------------------ models


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        batch, time, width = x_BTC.shape
        split = self.project_in(x_BTC).view(batch, time, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """Tied embeddings, dropout, a list of blocks: the shape of the main job."""

    def __init__(self, width: int = 32, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(16, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x = self.dropout(self.tokens(tokens_BT) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + x)


def gpt() -> nn.Module:
    return GPT()


def bert() -> nn.Module:
    transformers = _transformers()
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def llama() -> nn.Module:
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config)


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Residual(8),
        nn.Dropout(0.1),
        Residual(8),
        Residual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 16),
        nn.ReLU(),
        nn.Linear(16, 3),
    )


# ------------------------------------------------------------------ data


def _generator(offset: int) -> torch.Generator:
    """Data does not depend on the trial's streams; shuffling it does."""
    return torch.Generator().manual_seed(1000 + offset)


def text_batches(count: int, offset: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and the tokens after them; the last batch is short."""
    generator = _generator(offset)
    sizes = [3] * (count - 1) + [2]
    drawn = [torch.randint(VOCABULARY, (size, 13), generator=generator) for size in sizes]
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in drawn]


def causal_batches(count: int, offset: int) -> list[dict[str, Tensor]]:
    generator = _generator(offset)
    drawn = [torch.randint(VOCABULARY, (3, 12), generator=generator) for _ in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def padded_examples(count: int, offset: int) -> list[dict[str, Tensor]]:
    """Sequences of different lengths, padded to 12 tokens, with their masks and classes."""
    generator = _generator(offset)
    examples = []
    for _ in range(count):
        length = int(torch.randint(5, 13, (), generator=generator))
        mask = (torch.arange(12) < length).long()
        tokens = torch.randint(1, VOCABULARY, (12,), generator=generator) * mask
        label = torch.randint(3, (), generator=generator)
        examples.append({"input_ids": tokens, "attention_mask": mask, "labels": label})
    return examples


def labelled_batches(
    count: int, offset: int, shape: tuple[int, ...]
) -> list[tuple[Tensor, Tensor]]:
    generator = _generator(offset)
    return [
        (
            torch.randn(4, *shape, generator=generator),
            torch.randint(3, (4,), generator=generator),
        )
        for _ in range(count)
    ]


def data(hp):
    name = hp["model"]
    if name == "gpt":
        return text_batches(BATCHES, 0), text_batches(2, 1)
    if name == "llama":
        return causal_batches(BATCHES, 2), causal_batches(2, 3)
    if name == "bert":
        train = DataLoader(padded_examples(BATCHES * 3, 4), batch_size=3, shuffle=True)
        return train, DataLoader(padded_examples(6, 5), batch_size=3)
    shape = (3, 8, 8) if name == "resnet" else (12,)
    return labelled_batches(BATCHES, 6, shape), labelled_batches(2, 7, shape)


# ------------------------------------------------------------------ the recipe


def build(hp):
    return {"gpt": gpt, "bert": bert, "llama": llama, "resnet": resnet, "mlp": mlp}[hp["model"]]()


def loss(output, batch):
    """Hugging Face models compute their own; the others' labels come second in the batch."""
    if isinstance(batch, dict):
        return output.loss
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def accuracy(output, batch):
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    logits = output.logits if isinstance(batch, dict) else output
    return (logits.argmax(-1) == labels).float().mean().item()


def sgd(named_parameters, hp):
    parameters = [parameter for _, parameter in named_parameters]
    return torch.optim.SGD(parameters, lr=10 * hp["lr"], momentum=0.9, nesterov=True)


def adamw(named_parameters, hp):
    """Two groups, as everyone trains transformers: matrices decay, the rest does not."""
    named = list(named_parameters)
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=hp["lr"], fused=True)


def warmup_factor(step: int) -> float:
    return min(1.0, (step + 1) / 4)


def warmup(optimizer, hp):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_factor)


def make_optimizer(named_parameters, hp):
    return {"sgd": sgd, "adamw": adamw}[hp["optimizer"]](named_parameters, hp)


def recipe(
    *,
    clip: float | None = None,
    accumulate: int = 1,
    schedule: bool = False,
    precision: str = "fp32",
) -> Recipe:
    """The recipe of all five models; ``hp`` has ``model``, ``optimizer`` and ``lr``."""
    return Recipe(
        model=build,
        data=data,
        loss=loss,
        optimizer=make_optimizer,
        schedule=warmup if schedule else None,
        metrics={"accuracy": accuracy},
        clip_grad_norm=clip,
        accumulate=accumulate,
        precision=precision,
    )
