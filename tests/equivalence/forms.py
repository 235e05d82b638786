"""Models that are no plain row of blocks, with their data; ``hp`` has model, optimizer and lr.

Encoders with decoders, two inputs, skips over many blocks, computation between the blocks,
routing by value, lists in lists and no list at all. Imported by tests and, by this name, by
worker processes. Batches differ in size, and where there are tokens in length too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.recipes.recipe import Recipe

WIDTH, WORDS, CLASSES = 16, 61, 3


def _transformers() -> Any:
    """The one lazy import: four seconds that a study of other models need not spend."""
    import transformers

    return transformers


# ------------------------------------------------------------------ of transformers


def t5() -> nn.Module:
    """Relative positions computed by the first block of each stack; three uses of one weight."""
    hf = _transformers()
    config = hf.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _seq2seq_options() -> dict[str, Any]:
    both = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
    sizes = {f"{part}_{k}": v for part in ("encoder", "decoder") for k, v in both.items()}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {
        "vocab_size": WORDS,
        "d_model": WIDTH,
        "max_position_embeddings": 32,
        "decoder_start_token_id": 1,
        **sizes,
        **special,
    }


def bart() -> nn.Module:
    """Draws the dropout of its decoder's embeddings when its encoder has run."""
    hf = _transformers()
    return hf.BartForConditionalGeneration(hf.BartConfig(**_seq2seq_options()))


def layerdrop() -> nn.Module:
    """Skips blocks by chance: to be trained in one piece."""
    hf = _transformers()
    options = _seq2seq_options() | {"encoder_layerdrop": 0.2}
    return hf.BartForConditionalGeneration(hf.BartConfig(**options))


def _image_options() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "image_size": 8,
        "patch_size": 2,
        "num_labels": CLASSES,
    }


def vit() -> nn.Module:
    hf = _transformers()
    return hf.ViTForImageClassification(hf.ViTConfig(**_image_options()))


def beit() -> nn.Module:
    """A learned bias in its attention, for which torch has another kernel without gradients."""
    hf = _transformers()
    options = _image_options() | {"use_relative_position_bias": True, "drop_path_rate": 0.1}
    return hf.BeitForImageClassification(hf.BeitConfig(**options))


def clip() -> nn.Module:
    """Two towers, and a loss over all pairs."""
    hf = _transformers()
    common = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 2, "attention_dropout": 0.1}
    special = {"bos_token_id": 0, "eos_token_id": 2}
    text = common | {"vocab_size": WORDS, "max_position_embeddings": 16} | special
    vision = common | {"image_size": 8, "patch_size": 2}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def mixtral() -> nn.Module:
    hf = _transformers()
    config = hf.MixtralConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_dropout=0.1,
    )
    return hf.MixtralForCausalLM(config)


# ------------------------------------------------------------------ of plain torch


class Layer(nn.Module):
    """A block that may read a second tensor, as a decoder's does."""

    def __init__(self, *, cross: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Dropout(0.1)
        )
        self.other = nn.Linear(WIDTH, WIDTH) if cross else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.feed(self.norm(x))
        if self.other is not None and memory is not None:
            x = x + torch.tanh(self.other(memory)).mean(1, keepdim=True)
        return x


class Translator(nn.Module):
    """An encoder, a norm between, and a decoder; one weight in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.between = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Layer(cross=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.drop(self.embed(source))
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.drop(self.between(memory)) * 2
        x = self.drop(self.embed(target))
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


class Siamese(nn.Module):
    """Two inputs through the same blocks, one after the other, with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.blocks.append(Statistics())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(self.half(first) - self.half(second))

    def half(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2))


def _convolutions(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Skips from each way down to its way up, and a mask as large as the image."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_convolutions(3, 8), _convolutions(8, 8)])
        self.middle = _convolutions(8, 8)
        self.up = nn.ModuleList([_convolutions(16, 8), _convolutions(16, 8)])
        self.drop, self.head = nn.Dropout(0.1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.drop(self.middle(x))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x).movedim(1, -1)


class Inverted(nn.Module):
    """MobileNet's block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolutions(inputs, 2 * inputs),
            nn.Conv2d(2 * inputs, 2 * inputs, 3, stride, 1, groups=2 * inputs, bias=False),
            nn.BatchNorm2d(2 * inputs),
            nn.Conv2d(2 * inputs, outputs, 1),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class MobileNet(nn.Module):
    """Two Sequentials with a little computation between, as torchvision's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolutions(3, 8),
            nn.Sequential(Inverted(8, 8, 1), Inverted(8, 12, 2)),
            Inverted(12, 12, 1),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(12, 24), nn.ReLU(inplace=True), nn.Linear(24, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 1)
        return self.classifier(torch.flatten(x, 1))


class Unlisted(nn.Module):
    """Modules by name and functions between them, as in a first tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.fc1, self.fc2 = nn.Linear(32, 24), nn.Linear(24, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = torch.flatten(F.relu(self.conv2(F.pad(x, (0, 1, 0, 1)))), 1)
        return self.fc2(self.drop(F.relu(self.fc1(x))))


class Layers(nn.Module):
    """Pre-norm sublayers in a list of lists; the running sum is an argument of no block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(WIDTH),
                    nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True),
                    nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()),
                ]
            )
            for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, attention, feed in self.layers:
            y = norm(x)
            x = x + attention(y, y, y, need_weights=False)[0]
            x = x + feed(x)
        return self.head(x)


class Experts(nn.Module):
    """Sends each token to one expert, by value; also gives the router's probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.norm(x).flatten(0, 1)
        share = self.router(flat).float().softmax(-1)
        best, choice = share.max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, (expert(flat[rows]) * best[rows, None]).to(out.dtype))
        return x + out.view_as(x), share


class Mixture(nn.Module):
    """Routing by value, a loss for the routers beside the blocks, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, balance = self.drop(self.embed(tokens)), torch.zeros(())
        for block in self.blocks:
            x, share = block(x)
            balance = balance + share.mean(0).square().sum()
        return self.head(x) + 0.1 * balance


class Looped(nn.Module):
    """One set of blocks, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = start = self.embed(tokens)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
            x = self.norm(x) + start
        return self.head(x)


# ------------------------------------------------------------------ data


def _generator(offset: int) -> torch.Generator:
    return torch.Generator().manual_seed(2000 + offset)


def _tokens(generator: torch.Generator, rows: int, length: int) -> Tensor:
    return torch.randint(1, WORDS, (rows, length), generator=generator)


def _sizes(count: int) -> list[tuple[int, int]]:
    """Rows and length of each batch: the second is longer, the last short."""
    return [(3, 9), (3, 12), *[(3, 9)] * (count - 3), (2, 7)]


def padded_pairs(count: int, offset: int) -> list[dict[str, Tensor]]:
    generator, batches = _generator(offset), []
    for rows, length in _sizes(count):
        source = _tokens(generator, rows, length)
        mask = torch.ones_like(source)
        mask[0, length - 2 :] = 0
        labels = _tokens(generator, rows, length - 3)
        batches.append({"input_ids": source * mask, "attention_mask": mask, "labels": labels})
    return batches


def pairs(count: int, offset: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Source, target, and what follows the target."""
    generator, batches = _generator(offset), []
    for rows, length in _sizes(count):
        target = _tokens(generator, rows, length - 2)
        batches.append((_tokens(generator, rows, length), target[:, :-1], target[:, 1:]))
    return batches


def judged_pairs(count: int, offset: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Two texts and a class."""
    generator, batches = _generator(offset), []
    for rows, length in _sizes(count):
        classes = torch.randint(CLASSES, (rows,), generator=generator)
        first, second = _tokens(generator, rows, length), _tokens(generator, rows, length - 1)
        batches.append((first, second, classes))
    return batches


def texts(count: int, offset: int) -> list[tuple[Tensor, Tensor]]:
    generator = _generator(offset)
    drawn = [_tokens(generator, rows, length + 1) for rows, length in _sizes(count)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def causal(count: int, offset: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": first, "labels": first} for first, _ in texts(count, offset)]


def images(count: int, offset: int) -> list[tuple[Tensor, Tensor]]:
    return [(x, y) for x, y in zoo.labelled_batches(count, offset, (3, 8, 8))]


def labelled_images(count: int, offset: int) -> list[dict[str, Tensor]]:
    return [{"pixel_values": x, "labels": y} for x, y in images(count, offset)]


def masked_images(count: int, offset: int) -> list[tuple[Tensor, Tensor]]:
    generator = _generator(offset)
    return [
        (
            torch.randn(rows, 3, 8, 8, generator=generator),
            torch.randint(CLASSES, (rows, 8, 8), generator=generator),
        )
        for rows in [3] * (count - 1) + [2]
    ]


def captioned_images(count: int, offset: int) -> list[dict[str, Any]]:
    pictures = images(count, offset)
    generator = _generator(offset)
    return [
        {"input_ids": _tokens(generator, 4, 9), "pixel_values": x, "return_loss": True}
        for x, _ in pictures
    ]


# ------------------------------------------------------------------ the recipe

FORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], list[Any]]]] = {
    "vit": (vit, labelled_images),
    "t5": (t5, padded_pairs),
    "bart": (bart, padded_pairs),
    "beit": (beit, labelled_images),
    "clip": (clip, captioned_images),
    "mixtral": (mixtral, causal),
    "translator": (Translator, pairs),
    "siamese": (Siamese, judged_pairs),
    "unet": (UNet, masked_images),
    "mobilenet": (MobileNet, images),
    "unlisted": (Unlisted, images),
    "layers": (Layers, texts),
    "mixture": (Mixture, texts),
    "looped": (Looped, texts),
    "layerdrop": (layerdrop, padded_pairs),
}
LAYERS = {  # of each chain: blocks, joints and the two ends
    "vit": 5,
    "t5": 7,
    "bart": 7,
    "beit": 5,
    "clip": 7,
    "mixtral": 5,
    "translator": 7,
    "siamese": 9,
    "unet": 13,
    "mobilenet": 10,
    "unlisted": 9,
    "layers": 11,
    "mixture": 7,
    "looped": 10,
}


def build(hp):
    return FORMS[hp["model"]][0]()


def data(hp):
    source = FORMS[hp["model"]][1]
    return source(zoo.BATCHES, 0), source(3, 1)


def inputs(batch):
    return batch if isinstance(batch, dict) else batch[:-1]


def loss(output, batch):
    """Hugging Face models compute their own; the others' answers come last in the batch."""
    if isinstance(batch, dict):
        return output.loss
    return F.cross_entropy(output.flatten(0, -2), batch[-1].flatten())


def recipe(**options: Any) -> Recipe:
    """The recipe of all these models; ``options`` as for the zoo's."""
    schedule = zoo.warmup if options.pop("schedule", False) else None
    clip_at = options.pop("clip", None)
    return Recipe(
        model=build,
        data=data,
        loss=loss,
        inputs=inputs,
        optimizer=zoo.make_optimizer,
        schedule=schedule,
        clip_grad_norm=clip_at,
        **options,
    )
