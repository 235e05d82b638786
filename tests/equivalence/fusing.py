"""Fifteen small models with their data, and the way to train them as an array and alone.

``hp`` has: model, seed of the data, lr, decay, drop (dropout), plan (the schedule), and for the
comparison of drifts ulp. Everything is float64 unless ``hp["dtype"]`` says otherwise.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shoal.core.spec import HyperParameters
from shoal.fusion import Array, Member
from shoal.recipes.optimizers import build_optimizer
from shoal.recipes.recipe import (
    Recipe,
    build_model,
    chunks,
    read_data,
)
from shoal.recipes.schedules import build_schedule
from shoal.rng import capture_rng, restore_rng, seed_all
from shoal.testing import plain_loop

WORDS = 37
EPOCH = 4  # batches


def _transformers() -> Any:
    """The one lazy import: seconds that most tests need not spend."""
    import transformers

    return transformers


# ------------------------------------------------------------------ models


def mlp(drop):
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.ReLU(),
        nn.Dropout(drop),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 5),
    )


def conv_norm(inside, outside, size=3, stride=1, groups=1, act=nn.ReLU):
    return nn.Sequential(
        nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
        act(inplace=True) if act is not nn.Identity else act(),
    )


def cnn(drop):
    return nn.Sequential(
        conv_norm(3, 8),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8, momentum=None),
        nn.ReLU(),
        nn.Dropout2d(drop),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


class BasicBlock(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.one = conv_norm(inside, outside, stride=stride)
        self.two = conv_norm(outside, outside, act=nn.Identity)
        same = inside == outside and stride == 1
        self.short = (
            nn.Identity() if same else conv_norm(inside, outside, 1, stride, act=nn.Identity)
        )

    def forward(self, x):
        return F.relu(self.two(self.one(x)) + self.short(x), inplace=True)


def resnet(drop):
    widths, blocks = (4, 4, 8, 8, 16), []
    for stage, (inside, outside) in enumerate(itertools.pairwise(widths)):
        blocks += [
            BasicBlock(inside, outside, 2 if stage == 2 else 1),
            BasicBlock(outside, outside, 1),
        ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(drop), nn.Linear(16, 5)]
    return nn.Sequential(conv_norm(3, 4), *blocks, *head)


class Squeeze(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x):
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    def __init__(self, inside, middle, outside, stride):
        super().__init__()
        self.residual = stride == 1 and inside == outside
        self.body = nn.Sequential(
            conv_norm(inside, middle, 1, act=nn.Hardswish),
            conv_norm(middle, middle, 5, stride, middle, act=nn.Hardswish),
            Squeeze(middle),
            conv_norm(middle, outside, 1, act=nn.Identity),
        )

    def forward(self, x):
        return x + self.body(x) if self.residual else self.body(x)


def mobilenet(drop):
    return nn.Sequential(
        conv_norm(3, 8, act=nn.Hardswish),
        Inverted(8, 16, 8, 1),
        Inverted(8, 24, 12, 2),
        Inverted(12, 24, 12, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(12, 16, 1),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Dropout(drop),
        nn.Linear(16, 5),
    )


def generator(drop):
    return nn.Sequential(
        nn.ConvTranspose2d(6, 8, 4, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator(drop):
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(drop),
        nn.Conv2d(8, 1, 2, 1, 0, bias=False),
        nn.Flatten(0),
    )


class PointNet(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.matrix = nn.Linear(8, 9)
        self.body = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(drop), nn.Linear(8, 5))

    def forward(self, x_B3P):
        turn = self.matrix(self.turn(x_B3P).amax(-1)).view(-1, 3, 3)
        turn = turn + torch.eye(3, dtype=x_B3P.dtype)
        return self.head(self.body(torch.bmm(turn, x_B3P)).amax(-1))


class Language(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, 16, padding_idx=0)
        self.places = nn.Parameter(torch.randn(8, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, drop, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, WORDS)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT):
        length = tokens_BT.shape[1]
        ahead = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.places.dtype)
        x = self.tokens(tokens_BT) + self.places[:length]
        return self.head(self.body(x, mask=ahead, is_causal=True))


def bert(drop):
    transformers = _transformers()
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        hidden_dropout_prob=drop,
        attention_probs_dropout_prob=drop,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def t5(drop):
    transformers = _transformers()
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=drop,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


class Attention(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.drop = drop
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BTC):
        q, k, v = self.into(x_BTC).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        rate = self.drop if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, drop)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        self.blocks = nn.ModuleList(Layer(16, drop) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind, drop):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, 8)
        self.body = kind(8, 12, 2, batch_first=True, dropout=drop, bidirectional=kind is nn.GRU)
        self.head = nn.Linear(24 if kind is nn.GRU else 12, WORDS)

    def forward(self, tokens):
        return self.head(self.body(self.tokens(tokens))[0])


class UNet(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.down1, self.down2 = conv_norm(3, 6), conv_norm(6, 12)
        self.up = nn.ConvTranspose2d(12, 6, 2, 2)
        self.norm = nn.GroupNorm(2, 12)
        self.last = nn.Sequential(nn.Dropout2d(drop), conv_norm(12, 6), nn.Conv2d(6, 3, 1))

    def forward(self, x):
        high = self.down1(x)
        low = self.up(self.down2(F.avg_pool2d(high, 2)))
        low = low + F.interpolate(F.max_pool2d(high, 2), scale_factor=2.0, mode="nearest")
        return self.last(self.norm(torch.cat([high, low], 1)))


MODELS = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": resnet,
    "mobilenet": mobilenet,
    "generator": generator,
    "discriminator": discriminator,
    "pointnet": PointNet,
    "language": Language,
    "bert": bert,
    "vit": ViT,
    "lstm": lambda drop: Recurrent(nn.LSTM, drop),
    "gru": lambda drop: Recurrent(nn.GRU, drop),
    "unet": UNet,
    "t5": t5,
}
INPUTS = {  # shape of one batch's input, of its target, and how many classes (0: real numbers)
    "mlp": ((6, 12), (6,), 5),
    "cnn": ((6, 3, 8, 8), (6,), 5),
    "resnet": ((6, 3, 8, 8), (6,), 5),
    "mobilenet": ((6, 3, 8, 8), (6,), 5),
    "generator": ((4, 6, 1, 1), (4, 3, 8, 8), 0),
    "discriminator": ((6, 3, 8, 8), (6,), 0),
    "pointnet": ((6, 3, 10), (6,), 5),
    "vit": ((5, 3, 8, 8), (5,), 5),
    "unet": ((4, 3, 8, 8), (4, 3, 8, 8), 0),
}


# ------------------------------------------------------------------ recipes


def model(hp):
    built = MODELS[hp["model"]](hp["drop"])
    built = built.to(getattr(torch, hp.get("dtype", "float64")))
    if hp.get("ulp"):
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, 9.0)))
    return built


def data(hp):
    name, draws = hp["model"], torch.Generator().manual_seed(hp["rows"])
    dtype = getattr(torch, hp.get("dtype", "float64"))
    if name not in INPUTS:
        tokens = torch.randint(1, WORDS, (EPOCH * 3, 7), generator=draws)
        tokens[:, 5] = 0 if name == "language" else 1  # padding, which must not learn
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 3, shuffle=True), None
    inputs, targets, classes = INPUTS[name]
    x = torch.randn(EPOCH, *inputs, generator=draws, dtype=torch.float64).to(dtype)
    if classes:
        return list(
            zip(x, torch.randint(classes, (EPOCH, *targets), generator=draws), strict=True)
        ), None
    y = torch.rand(EPOCH, *targets, generator=draws, dtype=torch.float64).to(dtype)
    return list(zip(x, y, strict=True)), None


def inputs(batch):
    return (batch[0],)


def t5_inputs(batch):
    return {"input_ids": batch[0], "labels": batch[1]}


def bert_inputs(batch):
    mask = torch.ones_like(batch[0])
    return {"input_ids": batch[0], "attention_mask": mask, "labels": batch[1][:, 0] % 3}


def loss(output, batch):
    if not isinstance(output, Tensor):
        return output.loss
    target = batch[1]
    if not target.is_floating_point():
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    if target.dim() == 1:
        return F.binary_cross_entropy_with_logits(output, target)
    return F.mse_loss(output, target)


def optimizer(named, hp):
    parameters = [parameter for _, parameter in named]
    if hp.get("optimizer") == "sgd":
        return torch.optim.SGD(parameters, lr=hp["lr"], momentum=0.9, weight_decay=hp["decay"])
    return torch.optim.AdamW(
        parameters,
        lr=hp["lr"],
        betas=(hp.get("beta", 0.9), 0.99),
        weight_decay=hp["decay"],
        fused=True,
    )


def schedule(optimizer, hp):
    kind = hp["plan"]
    if kind == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.7)
    if kind == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * hp["lr"], total_steps=400)


def recipe(name, **changes):
    feed = {"t5": t5_inputs, "bert": bert_inputs}.get(name, inputs)
    values = {"model": model, "data": data, "loss": loss, "inputs": feed, "optimizer": optimizer}
    return Recipe(**(values | {"schedule": schedule, "clip_grad_norm": 0.5} | changes))


def hps(name, width=3, **changes):
    """Hyperparameters of ``width`` slots, all different."""
    return [
        HyperParameters(
            {
                "model": name,
                "rows": 100 + slot,
                "lr": (1e-3, 3e-3, 2e-3, 5e-4)[slot % 4],
                "beta": (0.9, 0.8, 0.95, 0.9)[slot % 4],
                "decay": (0.0, 0.1, 0.01, 0.3)[slot % 4],
                "drop": (0.1, 0.3, 0.2, 0.4)[slot % 4],
                "plan": ("step", "cosine", "cycle")[slot % 3],
                **changes,
            }
        )
        for slot in range(width)
    ]


# ------------------------------------------------------------------ training


class Trial:
    """A member and the place in its data; batches are fetched in its random streams."""

    def __init__(self, recipe, hp, seed):
        outer = capture_rng()
        seed_all(seed)
        module = build_model(recipe, hp)
        train, _ = read_data(recipe, hp)
        stepper = build_optimizer(recipe, module.named_parameters(), hp)
        plan = build_schedule(recipe, stepper, hp, train)
        self.member = Member(
            recipe=recipe,
            hp=hp,
            module=module,
            optimizer=stepper,
            schedule=plan,
            rng=capture_rng(),
        )
        restore_rng(outer)
        self.recipe, self.hp, self.seed = recipe, hp, seed
        self.groups = self._groups(train)

    def _groups(self, train):
        while True:
            yield from chunks(train, self.recipe.accumulate)


def trials(recipe, hps, first_seed=0):
    return [Trial(recipe, hp, first_seed + slot) for slot, hp in enumerate(hps)]


def step(array, trials):
    """One optimizer step of every slot that has a trial; ``trials`` by slot, None for empty."""
    groups = [None] * array.width
    for slot in array.occupied:
        with array.streams(slot):
            groups[slot] = next(trials[slot].groups)
    micro = []
    for _ in range(trials[array.occupied[0]].recipe.accumulate):
        batches = [None] * array.width
        for slot in array.occupied:
            with array.streams(slot):
                batches[slot] = next(groups[slot], None)
        micro.append(batches)
    for slot in array.occupied:
        with array.streams(slot):
            next(groups[slot], None)
    return array.step(*micro)


def train(recipe, hps, steps, *, backend=None, first_seed=0):
    """An array of these trials after so many steps, and the losses of every slot."""
    made = trials(recipe, hps, first_seed)
    array = Array([trial.member for trial in made], backend=backend)
    losses = [step(array, made) for _ in range(steps)]
    assert not any(stepped.failures for stepped in losses), losses
    return array, [[s.losses[slot] for s in losses] for slot in range(len(hps))]


def alone(recipe, hp, seed, steps, **changes):
    return plain_loop(recipe, {**hp, **changes}, seed, steps=steps)


def tensors(state):
    """All floating tensors of a state that say how training went, by name."""
    found = {f"model {name}": t for name, t in state["model"].items()}
    for name, entries in state["optimizer"]["state"].items():
        found |= {f"{key} of {name}": t for key, t in entries.items() if isinstance(t, Tensor)}
    return {name: t for name, t in found.items() if t.is_floating_point()}


def drift(one, other):
    """The largest difference in any weight, buffer or moment of two states."""
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    return max(
        float((mine[name] - theirs[name]).abs().max()) for name in mine if mine[name].numel()
    )
