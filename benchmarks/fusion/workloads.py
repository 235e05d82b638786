"""Models of HFTA's kinds and sizes of search: what many trials of one shape look like."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 64


@dataclass(frozen=True)
class Workload:
    """A model, a batch of it, and the bar: how many times the best serial loop.

    Several models by name have a ``step`` of their own; what it returns are its losses.
    """

    model: Callable[[Any], Any]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    bar: float
    step: Callable[[Any, Any, Any, Any], dict[str, Tensor]] | None = None


def mlp(hp: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


class Language(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, drop, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(tokens)))


class Coder(nn.Module):
    """A variational autoencoder: it draws its code, by PyTorch's own distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.outside = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.inside(x).chunk(2, -1)
        deviation = F.softplus(spread)
        code = torch.distributions.Normal(mean, deviation).rsample()
        apart = mean.square() + deviation.square() - 1 - 2 * deviation.log()
        return self.outside(code), apart.mean()


class Diffusion(nn.Module):
    """A denoiser: it draws times and noise, and is its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(65, 128), nn.SiLU(), nn.Linear(128, 64))
        self.register_buffer("left", torch.linspace(0.999, 0.001, 100))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        time, noise = torch.randint(0, 100, (len(x),), device=x.device), torch.randn_like(x)
        left = self.left[time][:, None]
        seen = left.sqrt() * x + (1 - left).sqrt() * noise
        found = self.body(torch.cat([seen, time[:, None] / 100], 1))
        return x, F.mse_loss(found, noise)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, 16)
        self.body = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(tokens))[0])


def conv_norm(
    inside: int, outside: int, size: int, stride: int = 1, groups: int = 1, act: Any = nn.ReLU
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
        act(),
    )


def cnn(hp: Any) -> nn.Module:
    layers = [conv_norm(3 if i == 0 else 16, 16, 3) for i in range(6)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class Squeeze(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = max(8, width // 4)
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """A block of MobileNetV3 (Howard et al., 2019)."""

    def __init__(self, inside: int, row: tuple[int, int, int, bool, Any, int]) -> None:
        super().__init__()
        size, middle, outside, squeezes, act, stride = row
        self.residual = stride == 1 and inside == outside
        self.body = nn.Sequential(
            conv_norm(inside, middle, 1, act=act),
            conv_norm(middle, middle, size, stride, middle, act),
            Squeeze(middle) if squeezes else nn.Identity(),
            conv_norm(middle, outside, 1, act=nn.Identity),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


R, S = nn.ReLU, nn.Hardswish
SMALL = [
    (3, 16, 16, True, R, 2),
    (3, 72, 24, False, R, 2),
    (3, 88, 24, False, R, 1),
    (5, 96, 40, True, S, 2),
    (5, 240, 40, True, S, 1),
    (5, 240, 40, True, S, 1),
    (5, 120, 48, True, S, 1),
    (5, 144, 48, True, S, 1),
    (5, 288, 96, True, S, 2),
    (5, 576, 96, True, S, 1),
    (5, 576, 96, True, S, 1),
]


LARGE = [
    (3, 16, 16, False, R, 1),
    (3, 64, 24, False, R, 2),
    (3, 72, 24, False, R, 1),
    (5, 72, 40, True, R, 2),
    (5, 120, 40, True, R, 1),
    (5, 120, 40, True, R, 1),
    (3, 240, 80, False, S, 2),
    (3, 200, 80, False, S, 1),
    (3, 184, 80, False, S, 1),
    (3, 184, 80, False, S, 1),
    (3, 480, 112, True, S, 1),
    (3, 672, 112, True, S, 1),
    (5, 672, 160, True, S, 2),
    (5, 960, 160, True, S, 1),
    (5, 960, 160, True, S, 1),
]


def mobilenet(rows: list[Any], last: int, hp: Any) -> nn.Module:
    """Its published ``rows``, six times the last width on top, and a head of ``last``."""
    layers: list[nn.Module] = [conv_norm(3, 16, 3, 2, act=S)]
    inside = 16
    for row in rows:
        layers.append(Inverted(inside, row))
        inside = row[2]
    top = 6 * inside
    head = [conv_norm(inside, top, 1, act=S), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(top, last), S(), nn.Linear(last, 10))


def discriminator(hp: Any) -> nn.Module:
    """DCGAN's discriminator of 32 x 32 images, 16 channels wide."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for inside, outside in ((16, 32), (32, 64)):
        layers += [
            nn.Conv2d(inside, outside, 4, 2, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers, nn.Conv2d(64, 2, 4), nn.Flatten())


def generator(hp: Any) -> nn.Module:
    """DCGAN's generator to 32 x 32, 16 channels wide."""
    widths, layers = (64, 32, 16), []
    inside = 32
    for at, outside in enumerate(widths):
        stride, padding = (1, 0) if at == 0 else (2, 1)
        layers += [
            nn.ConvTranspose2d(inside, outside, 4, stride, padding, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(True),
        ]
        inside = outside
    return nn.Sequential(*layers, nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh())


def gan(hp: Any) -> dict[str, nn.Module]:
    """Both halves of DCGAN; the discriminator says a number."""
    judge = discriminator(hp)
    judge[-2] = nn.Conv2d(64, 1, 4)
    return {"generator": generator(hp), "discriminator": judge}


def gan_step(models: Any, batch: Any, optimizers: Any, hp: Any) -> dict[str, Tensor]:
    """A step of each: real images and made ones for the discriminator, then the generator's."""
    noise, real = batch
    made = models["generator"](noise)
    optimizers["discriminator"].zero_grad()
    right, wrong = models["discriminator"](real), models["discriminator"](made.detach())
    judged = _told(right, 1.0) + _told(wrong, 0.0)
    judged.backward()
    optimizers["discriminator"].step()
    optimizers["generator"].zero_grad()
    fooled = _told(models["discriminator"](made), 1.0)
    fooled.backward()
    optimizers["generator"].step()
    return {"generator": fooled, "discriminator": judged}


def _told(found: Tensor, target: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(found, torch.full_like(found, target))


def wide(hp: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


class Residual(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.one = conv_norm(inside, outside, 3, stride)
        self.two = conv_norm(outside, outside, 3, act=nn.Identity)
        same = inside == outside
        self.short = (
            nn.Identity() if same else conv_norm(inside, outside, 1, stride, act=nn.Identity)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.two(self.one(x)) + self.short(x))


def resnet(hp: Any) -> nn.Module:
    rows = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    rows += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    blocks = [Residual(*row) for row in rows]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(conv_norm(3, 64, 3), *blocks, *head)


class PointNet(nn.Module):
    """The classifier's trunk (Qi et al., 2017), without its transforms."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside in ((3, 64), (64, 128), (128, 1024)):
            layers += [nn.Conv1d(inside, outside, 1), nn.BatchNorm1d(outside), nn.ReLU()]
        self.points = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(-1))


class Segmentation(nn.Module):
    """PointNet's segmenter: each point's features beside the cloud's; without transforms."""

    def __init__(self, parts: int = 8) -> None:
        super().__init__()
        self.near = self._points(3, 64, 64)
        self.far = self._points(64, 128, 1024)
        self.head = nn.Sequential(self._points(1088, 256, 128), nn.Conv1d(128, parts, 1))

    @staticmethod
    def _points(*widths: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inside, outside in itertools.pairwise(widths):
            layers += [nn.Conv1d(inside, outside, 1), nn.BatchNorm1d(outside), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        near = self.near(x)
        cloud = self.far(near).amax(-1, keepdim=True).expand(-1, -1, x.shape[-1])
        return self.head(torch.cat([near, cloud], 1)).transpose(1, 2)


class Masked(nn.Module):
    """BERT of the size called mini: 4 layers of 256, GELU, learnt positions, a tied head."""

    def __init__(self, vocabulary: int = 2048, width: int = 256, length: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places.weight[: tokens.shape[1]]
        hidden = self.body(self.drop(self.norm(self.tokens(tokens) + places)))
        return F.linear(hidden, self.tokens.weight, self.bias)


def words(rows: int, length: int, vocabulary: int = WORDS) -> Any:
    def batch(draws: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (rows, length + 1), generator=draws)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def images(rows: int, size: int, classes: int = 10) -> Any:
    def batch(draws: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, 3, size, size, generator=draws)
        return x, torch.randint(classes, (rows,), generator=draws)

    return batch


def table(draws: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(64, 32, generator=draws), torch.randint(2, (64,), generator=draws)


def large_table(draws: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(256, 64, generator=draws), torch.randint(10, (256,), generator=draws)


def clouds(draws: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 128, generator=draws), torch.randint(10, (4,), generator=draws)


def parts(draws: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 3, 128, generator=draws)
    return x, torch.randint(8, (4, 128), generator=draws)


def noise(draws: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 32, 1, 1, generator=draws), torch.rand(8, 3, 32, 32, generator=draws)


def rows(draws: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.rand(32, 64, generator=draws)
    return x, x


def loss(output: Any, batch: Any) -> Tensor:
    target = batch[1]
    if isinstance(output, tuple):  # what was found, and what else there is to be small
        return F.mse_loss(output[0], target) + output[1]
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


WORKLOADS = {
    "tabular MLP": Workload(mlp, table, 3.0),
    "tiny Transformer LM": Workload(lambda hp: Language(32, 0.0), words(2, 16), 5.0),
    "tiny Transformer LM, dropout 0.1": Workload(lambda hp: Language(32, 0.1), words(2, 16), 0.97),
    "small LSTM": Workload(lambda hp: Recurrent(), words(4, 10), 6.0),
    "MobileNetV3-small": Workload(partial(mobilenet, SMALL, 1024), images(4, 32), 1.35),
    "MobileNetV3-large": Workload(partial(mobilenet, LARGE, 1280), images(4, 32), 0.97),
    "variational autoencoder": Workload(lambda hp: Coder(), rows, 0.97),
    "diffusion MLP": Workload(lambda hp: Diffusion(), rows, 0.97),
    "small CNN": Workload(cnn, images(8, 16), 1.25),
    "DCGAN generator": Workload(generator, noise, 1.15),
    "DCGAN discriminator": Workload(discriminator, images(8, 32, 2), 1.15),
    "DCGAN": Workload(gan, noise, 1.15, gan_step),
    "wide MLP": Workload(wide, large_table, 0.97),
    "Transformer LM of width 128": Workload(lambda hp: Language(128, 0.0), words(4, 32), 0.97),
    "BERT-mini": Workload(lambda hp: Masked(), words(2, 32, 2048), 0.97),
    "PointNet": Workload(lambda hp: PointNet(), clouds, 0.97),
    "PointNet, segmentation": Workload(lambda hp: Segmentation(), parts, 0.97),
    "ResNet-18": Workload(resnet, images(2, 32), 0.97),
}
