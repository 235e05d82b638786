"""Each rule computes what its operation does alone; breaking any rule on purpose is noticed."""

import copy

import fusing
import pytest
import torch
from machine import needs_bf16_lstm
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.fusion import dry_run
from shoal.fusion.rules import RULES
from shoal.fusion.rules.table import WRITTEN_OVER
from shoal.recipes.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 3
BF16 = 2**-5
"""How far one step in bfloat16 may be from another one, for the largest number."""


class Fn(nn.Module):
    """A function of the input and one weight."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return self.function(x, self.weight)


class Lists(nn.Module):
    """A recurrent layer, its outputs and its last states."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out, last = self.layer(x)
        states = last if isinstance(last, tuple) else (last,)
        return torch.cat([out.flatten(), *(s.flatten() for s in states)])


def causal(q, w, **options):
    return F.scaled_dot_product_attention(q * w, q, q, **options)


def biased(q, w):
    return F.scaled_dot_product_attention(q, q, q, attn_mask=w)


def hidden(q, w):
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q * w, q, q, attn_mask=mask)


def smoothed(slot):
    loss = nn.CrossEntropyLoss(label_smoothing=0.1 * slot, ignore_index=2)
    return lambda x, w: loss(x * w, torch.tensor([0, 1, 2, 1]))


def weighted(x, w):
    rates = torch.tensor([0.5, 2.0, 1.0], dtype=x.dtype)
    return F.nll_loss((x * w).log_softmax(-1), torch.tensor([0, 1, 2, 1]), weight=rates)


def after(shaped):
    """Dropout of what ``shaped`` makes of a narrow convolution: masks tell how it lies."""
    return nn.Sequential(
        nn.Conv2d(6, 4, 3, padding=1), Fn(lambda x, w: F.dropout(shaped(x) * w, 0.4), 1)
    )


OPTIONS = {torch.threshold_: (0.1, 0.2), torch._C._nn.leaky_relu_: (0.2,)}
IMAGE, THREE, FORTY = (4, 6, 5, 5), (3, 6, 5, 5), (2, 40, 5, 5)
DEEP, ROWS, HEADS = (4, 6, 1, 1), (4, 6), (2, 3, 4, 6)

ROWS_OF = {  # what: (operation with the rule, module of a slot, shape of its input)
    "linear": (F.linear, lambda s: nn.Linear(6, 5), (4, 2, 6)),
    "linear, no bias": (F.linear, lambda s: nn.Linear(6, 5, bias=False), ROWS),
    "1 x 1": (torch.conv2d, lambda s: nn.Conv2d(6, 5, 1), IMAGE),
    "1 x 1 of many pixels": (torch.conv2d, lambda s: nn.Conv2d(6, 5, 1), (2, 6, 9, 9)),
    "1 x 1 of one pixel": (torch.conv2d, lambda s: nn.Conv2d(6, 5, 1, bias=False), DEEP),
    "depthwise on a pixel": (torch.conv2d, lambda s: nn.Conv2d(6, 6, 5, 1, 2, groups=6), DEEP),
    "cut kernel": (torch.conv2d, lambda s: nn.Conv2d(6, 4, 5, 1, 2, groups=2), (4, 6, 2, 3)),
    "points in a line": (torch.conv1d, lambda s: nn.Conv1d(6, 5, 1), (4, 6, 7)),
    "points in space": (torch.conv3d, lambda s: nn.Conv3d(6, 5, 1), (2, 6, 3, 2, 2)),
    "narrow": (torch.conv2d, lambda s: nn.Conv2d(6, 5, 3, padding=1), IMAGE),
    "narrow, stride 2": (torch.conv2d, lambda s: nn.Conv2d(6, 5, 3, 2, 1, bias=False), IMAGE),
    "narrow, same size": (torch.conv2d, lambda s: nn.Conv2d(6, 5, 3, 1, "same", 2), IMAGE),
    "narrow of one channel": (torch.conv2d, lambda s: nn.Conv2d(1, 5, 3), (4, 1, 5, 5)),
    "narrow of one image": (torch.conv2d, lambda s: nn.Conv2d(6, 5, 3), (1, 6, 5, 5)),
    "wide": (torch.conv2d, lambda s: nn.Conv2d(40, 36, 3, padding=1), FORTY),
    "wide, stride 2": (torch.conv2d, lambda s: nn.Conv2d(40, 36, 3, 2, 1, bias=False), FORTY),
    "narrow, groups": (torch.conv2d, lambda s: nn.Conv2d(6, 4, 3, 2, 1, groups=2), IMAGE),
    "from images": (
        torch.conv_transpose2d,
        lambda s: nn.ConvTranspose2d(6, 5, 4, 2, 1),
        (4, 6, 3, 3),
    ),
    "from images, no bias": (
        torch.conv_transpose2d,
        lambda s: nn.ConvTranspose2d(6, 5, 3, 2, 1, output_padding=1, bias=False),
        (4, 6, 3, 3),
    ),
    "from wide images": (
        torch.conv_transpose2d,
        lambda s: nn.ConvTranspose2d(20, 18, 4, 2, 1),
        (2, 20, 3, 3),
    ),
    "mean of an image": (
        torch._C._nn.adaptive_avg_pool2d,
        lambda s: Fn(lambda x, w: F.adaptive_avg_pool2d(x * w, 1), 5),
        IMAGE,
    ),
    "mean of what is narrow": (
        torch._C._nn.adaptive_avg_pool2d,
        lambda s: nn.Sequential(nn.Conv2d(6, 5, 3), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten()),
        IMAGE,
    ),
    **{
        f"{name} of what is narrow": (operation, lambda s, shaped=shaped: after(shaped), IMAGE)
        for name, (operation, shaped) in {
            "view": (Tensor.view, lambda x: x.view(len(x), -1)),
            "view of channels": (Tensor.view, lambda x: x.view(4, 2, 2, -1).transpose(1, 2)),
            "reshape": (Tensor.reshape, lambda x: x.reshape(len(x), -1)),
            "torch.reshape": (torch.reshape, lambda x: torch.reshape(x, (4, -1))),
            "flatten": (Tensor.flatten, lambda x: x.flatten(2).transpose(1, 2)),
            "torch.flatten": (torch.flatten, lambda x: torch.flatten(x, 1)),
            "unflatten": (Tensor.unflatten, lambda x: x.unflatten(0, (2, 2))),
            "torch.unflatten": (torch.unflatten, lambda x: torch.unflatten(x, 0, (2, 2))),
        }.items()
    },
    "dropout of what is narrow": (torch.dropout, lambda s: after(lambda x: x), IMAGE),
    **{
        f"{operation.__qualname__} of what is narrow": (
            operation,
            lambda s, operation=operation: nn.Sequential(
                nn.Conv2d(6, 4, 3, padding=1),
                Fn(lambda x, w: operation(x * w, *OPTIONS.get(operation, ())) * w, 1),
                nn.Conv2d(4, 3, 3),
            ),
            IMAGE,
        )
        for operation in WRITTEN_OVER
    },
    "all of an image": (torch.conv2d, lambda s: nn.Conv2d(6, 3, 5), IMAGE),
    "all of it, no bias": (torch.conv2d, lambda s: nn.Conv2d(6, 3, 5, bias=False), IMAGE),
    "all of what is narrow": (
        torch.conv2d,
        lambda s: nn.Sequential(nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3)),
        THREE,
    ),
    "all of a line": (torch.conv1d, lambda s: nn.Conv1d(6, 5, 7), (4, 6, 7)),
    "narrow, then wide, then narrow": (
        torch.conv2d,
        lambda s: nn.Sequential(
            *(nn.Conv2d(6, 4, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(4, 40, 3, padding=1)),
            *(nn.LeakyReLU(), nn.Conv2d(40, 36, 3), nn.ReLU(True), nn.Conv2d(36, 3, 3)),
        ),
        THREE,
    ),
    "from a pixel": (torch.conv_transpose2d, lambda s: nn.ConvTranspose2d(6, 5, 4), DEEP),
    "from a point": (torch.conv_transpose1d, lambda s: nn.ConvTranspose1d(6, 5, 4), (4, 6, 1)),
    "from a voxel": (
        torch.conv_transpose3d,
        lambda s: nn.ConvTranspose3d(6, 2, 2),
        (4, 6, 1, 1, 1),
    ),
    "batch norm": (torch.batch_norm, lambda s: nn.BatchNorm2d(6), IMAGE),
    "batch norm of rows": (torch.batch_norm, lambda s: nn.BatchNorm1d(6), ROWS),
    "rates of its own": (torch.batch_norm, lambda s: nn.BatchNorm2d(6, momentum=0.1 + s), IMAGE),
    "no rate": (torch.batch_norm, lambda s: nn.BatchNorm2d(6, momentum=None), IMAGE),
    "no statistics": (
        torch.batch_norm,
        lambda s: nn.BatchNorm2d(6, track_running_stats=False),
        IMAGE,
    ),
    "no weights": (torch.batch_norm, lambda s: nn.BatchNorm2d(6, affine=False), IMAGE),
    "dropout": (torch.dropout, lambda s: nn.Dropout(0.4), ROWS),
    "dropout of its own": (torch.dropout, lambda s: nn.Dropout(0.3 * s), ROWS),
    "dropout of everything in one slot": (torch.dropout, lambda s: nn.Dropout(0.5 * s), ROWS),
    "dropout in place": (
        torch.dropout_,
        lambda s: Fn(lambda x, w: F.dropout(x * w, 0.4, True, inplace=True), 6),
        ROWS,
    ),
    "dropout of a transposed one": (
        torch.dropout,
        lambda s: Fn(lambda x, w: F.dropout((x * w).transpose(1, 2), 0.4), 5),
        IMAGE,
    ),
    "channels": (torch.feature_dropout, lambda s: nn.Dropout2d(0.4), IMAGE),
    "channels in place": (
        torch.feature_dropout_,
        lambda s: Fn(lambda x, w: F.dropout2d(x * w, 0.4, True, inplace=True), 5),
        IMAGE,
    ),
    "attention": (F.scaled_dot_product_attention, lambda s: Fn(causal, 6), HEADS),
    "attention, causal": (
        F.scaled_dot_product_attention,
        lambda s: Fn(lambda q, w: causal(q, w, is_causal=True, scale=0.3), 6),
        HEADS,
    ),
    "attention, bias learnt": (
        F.scaled_dot_product_attention,
        lambda s: Fn(biased, 3, 4, 4),
        HEADS,
    ),
    "attention, hidden": (F.scaled_dot_product_attention, lambda s: Fn(hidden, 6), HEADS),
    "attention, dropout": (
        F.scaled_dot_product_attention,
        lambda s: Fn(lambda q, w: causal(q, w, dropout_p=0.3, is_causal=True), 6),
        HEADS,
    ),
    "embedding": (torch.embedding, lambda s: nn.Embedding(7, 5), (4, 3)),
    "padded embedding": (torch.embedding, lambda s: nn.Embedding(7, 5, padding_idx=2), (4, 3)),
    "embedding by frequency": (
        torch.embedding,
        lambda s: nn.Embedding(7, 5, scale_grad_by_freq=True),
        (4, 3),
    ),
    "lstm": (torch.lstm, lambda s: Lists(nn.LSTM(6, 5, 2, dropout=0.2)), (3, 4, 6)),
    "lstm both ways": (
        torch.lstm,
        lambda s: Lists(nn.LSTM(6, 5, batch_first=True, bidirectional=True)),
        (3, 4, 6),
    ),
    "wide lstm": (torch.lstm, lambda s: Lists(nn.LSTM(6, 70)), (3, 4, 6)),
    "projected lstm": (torch.lstm, lambda s: Lists(nn.LSTM(6, 5, proj_size=3)), (3, 4, 6)),
    "gru": (torch.gru, lambda s: Lists(nn.GRU(6, 5, 2, bias=False)), (3, 4, 6)),
    "cross entropy": (
        torch._C._nn.cross_entropy_loss,
        lambda s: Fn(lambda x, w: F.cross_entropy(x * w, torch.tensor([0, 1, 2, 1])), 3),
        (4, 3),
    ),
    "smoothing of its own": (
        torch._C._nn.cross_entropy_loss,
        lambda s: Fn(smoothed(s), 3),
        (4, 3),
    ),
    "derivatives by the input": (
        torch.autograd.grad,
        lambda s: nn.Sequential(Fn(_derived, 6), nn.Linear(6, 6)),
        ROWS,
    ),
    "random numbers": (
        torch.rand,
        lambda s: Fn(lambda x, w: x * w * torch.rand(4, 6).to(x), 6),
        ROWS,
    ),
    "normal numbers": (
        torch.randn,
        lambda s: Fn(lambda x, w: x * w + torch.randn((4, 6), dtype=x.dtype), 6),
        ROWS,
    ),
    "whole numbers": (
        torch.randint,
        lambda s: Fn(lambda x, w: x * w + torch.randint(2, 9, (4, 1)).to(x), 6),
        ROWS,
    ),
    "an order": (
        torch.randperm,
        lambda s: Fn(lambda x, w: x * w * torch.randperm(6).to(x), 6),
        ROWS,
    ),
    "random numbers like it": (
        torch.rand_like,
        lambda s: Fn(lambda x, w: x * w * torch.rand_like(x), 6),
        ROWS,
    ),
    "normal numbers like it, transposed": (
        torch.randn_like,
        lambda s: Fn(lambda x, w: x * w + torch.randn_like((x * w).detach().t()).t(), 6),
        ROWS,
    ),
    "whole numbers like it": (
        torch.randint_like,
        lambda s: Fn(lambda x, w: x * w + torch.randint_like(x, 1, 5), 6),
        ROWS,
    ),
    "around others": (
        torch.normal,
        lambda s: Fn(lambda x, w: x * w + torch.normal(x.detach(), torch.full_like(x, 2.0)), 6),
        ROWS,
    ),
    "around weights": (
        torch.normal,
        lambda s: Fn(lambda x, w: x.exp() + torch.normal(w, w.exp()), 6),
        ROWS,
    ),
    "by the chance of a weight": (
        torch.bernoulli,
        lambda s: Fn(lambda x, w: x.exp() + torch.bernoulli(w.sigmoid().expand(4, 6)), 6),
        ROWS,
    ),
    "by chance": (
        torch.bernoulli,
        lambda s: Fn(lambda x, w: x * w + torch.bernoulli(x.sigmoid()), 6),
        ROWS,
    ),
    **{
        f"filled by {operation.__name__}": (
            operation,
            lambda s, fill=operation, numbers=numbers: Fn(
                lambda x, w: x * w * fill(torch.empty_like(x), *numbers), 6
            ),
            ROWS,
        )
        for operation, numbers in {
            Tensor.normal_: (0.5, 2.0),
            Tensor.uniform_: (),
            Tensor.exponential_: (),
            Tensor.bernoulli_: (0.3,),
        }.items()
    },
    "asked for gradients": (
        Tensor.requires_grad.__get__,
        lambda s: nn.Sequential(
            nn.Linear(6, 6), Fn(lambda x, w: x * w if x.requires_grad else x + w, 6)
        ),
        ROWS,
    ),
    "memory by itself": (Tensor.data.__get__, lambda s: Fn(lambda x, w: x * w + w.data, 6), ROWS),
    **{
        f"a number rolled by {home.__name__}": (
            home.roll,
            lambda s, roll=home.roll: Fn(lambda x, w: x * w + roll(w.sum(), 1), 6),
            ROWS,
        )
        for home in (torch, Tensor)
    },
    **{
        f"a row put in by {home.__name__}": (
            home.select_scatter,
            lambda s, put=home.select_scatter: Fn(lambda x, w: put(x, w * x[0], -2, 1), 6),
            ROWS,
        )
        for home in (torch, Tensor)
    },
    "weight norm": (
        torch._weight_norm,
        lambda s: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
        ROWS,
    ),
    "weight norm of rows": (
        torch._weight_norm,
        lambda s: nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 5, 3), dim=1),
        IMAGE,
    ),
    "weight norm of all": (
        torch._weight_norm,
        lambda s: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5), dim=None),
        ROWS,
    ),
    "weighted classes": (torch._C._nn.nll_loss_nd, lambda s: Fn(weighted, 3), (4, 3)),
}
UNRULED = {  # without a rule: torch's batching, or slot by slot
    "layer norm": (lambda s: nn.LayerNorm(6), ROWS),
    "eps of its own": (lambda s: nn.LayerNorm(6, eps=0.1 + s), ROWS),
    "eps of its own, by batch": (lambda s: nn.BatchNorm2d(6, eps=0.1 + s), IMAGE),
    "slopes of its own": (lambda s: Fn(_leaky(0.1 + s), 6), ROWS),
    "scales of its own": (lambda s: Fn(_scaled(0.5 + s), 6), ROWS),
    "group norm": (lambda s: nn.GroupNorm(2, 6), IMAGE),
    "instance norm": (
        lambda s: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        IMAGE,
    ),
    "grouped": (lambda s: nn.Conv2d(6, 4, 3, 2, 1, groups=2), IMAGE),
    "transposed": (lambda s: nn.ConvTranspose2d(6, 4, 3, 2, 1), IMAGE),
    "noise": (
        lambda s: Fn(lambda x, w: x * w + torch.randn_like(x) + torch.rand(6).to(x), 6),
        ROWS,
    ),
    "noise in place": (lambda s: Fn(lambda x, w: x * w * torch.empty(6).uniform_(), 6), ROWS),
    "gumbel": (lambda s: Fn(_gumbel(1.0 + s), 6), ROWS),
    "alpha dropout": (lambda s: nn.Sequential(nn.Linear(6, 6), nn.AlphaDropout(0.3)), ROWS),
    "random slopes": (lambda s: nn.Sequential(nn.Linear(6, 6), nn.RReLU()), ROWS),
    "random slopes in place": (
        lambda s: nn.Sequential(nn.Linear(6, 6), nn.RReLU(inplace=True)),
        ROWS,
    ),
    "powers in place": (lambda s: Fn(lambda x, w: x.exp().mul(w * w).pow_(w.exp()), 6), ROWS),
    "initialised": (
        lambda s: Fn(lambda x, w: x * w + nn.init.normal_(torch.empty_like(x)), 6),
        ROWS,
    ),
    "counts of successes": (
        lambda s: Fn(lambda x, w: x * w * torch.binomial(5 * torch.ones_like(x), x.sigmoid()), 6),
        ROWS,
    ),
    "gamma": (lambda s: Fn(lambda x, w: torch._standard_gamma((x * w).exp()), 6), ROWS),
    "numbers of a size": (
        lambda s: Fn(lambda x, w: x * w + torch.normal(1.0, 2.0, (6,)).to(x), 6),
        ROWS,
    ),
    "attention of one head": (
        lambda s: Fn(lambda x, w: F.scaled_dot_product_attention(x * w, x, x, dropout_p=0.3), 6),
        ROWS,
    ),
    "channels last": (
        lambda s: Fn(
            lambda x, w: (x * w).to(memory_format=torch.channels_last).view_as(x), 6, 1, 1
        ),
        IMAGE,
    ),
    "another shape in place": (
        lambda s: nn.Sequential(
            nn.Linear(6, 6), Fn(lambda x, w: (x * w).as_strided_((4, 2), (6, 1)), 6)
        ),
        ROWS,
    ),
    "rnn": (lambda s: Lists(nn.RNN(6, 5)), (3, 4, 6)),
    "gru cell": (lambda s: nn.GRUCell(6, 5), ROWS),
    "bilinear": (lambda s: Fn(lambda x, w: F.bilinear(x, x, w), 3, 6, 6), ROWS),
    "attention layer": (lambda s: nn.TransformerEncoderLayer(6, 2, 8, 0.2), (4, 2, 6)),
    "spectral norm": (lambda s: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), ROWS),
    "kl": (lambda s: Fn(_divergence, 6), ROWS),
    "writes into zeros": (lambda s: Fn(_filled, 6), ROWS),
    "counted in mean": (lambda s: Fn(_by_item, 6), ROWS),
    "chosen rows": (lambda s: nn.Sequential(nn.Linear(6, 6), Fn(_chosen, 6)), ROWS),
    "adds into zeros": (lambda s: Fn(_added, 6), ROWS),
    "writes here and there": (lambda s: Fn(_written, 6), ROWS),
    "through numpy": (lambda s: nn.Sequential(nn.Linear(6, 6), Fn(_through_numpy, 6)), ROWS),
    "own backward": (lambda s: nn.Sequential(nn.Linear(6, 6), Fn(_cubed, 6)), ROWS),
    "penalty": (lambda s: nn.Sequential(nn.Linear(6, 6), Fn(_penalised, 6)), ROWS),
    "packed": (lambda s: Packed(), (3, 4, 6)),
    "hooks": (lambda s: Hooked(), ROWS),
    "a teacher": (lambda s: Teacher(), ROWS),
    "lists of weights": (lambda s: Weights(), ROWS),
    "skipped by chance": (lambda s: Fn(_by_chance, 6), ROWS),
    "both attentions": (lambda s: Attends(), (3, 4, 6)),
    "bounds of its own": (lambda s: Fn(_bounded(0.1 + s), 6), ROWS),
    "einsum": (lambda s: Fn(lambda x, w: torch.einsum("bi,io->bo", x, w), 6, 3), ROWS),
}

CASTING = (
    *(F.linear, F.scaled_dot_product_attention, torch.lstm, torch.gru),
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
)
"""What autocast gives bfloat16."""
NO_BF16 = ("through numpy", "bilinear", "adds into zeros", "counts of successes")
"""What is given bfloat16 where it cannot be, alone neither."""
ONEDNN_LSTMS = ("lstm", "lstm both ways", "wide lstm")
"""Those that autocast gives to oneDNN; torch has a kernel of its own for projections."""


class Cube(torch.autograd.Function):
    """One that torch cannot batch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 5, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 3, 2]), batch_first=True)
        out, _ = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.layer.register_forward_hook(lambda module, inputs, output: output * 2)
        self.layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))

    def forward(self, x):
        return self.layer(x)


class Teacher(nn.Module):
    """A model that follows another one, as in self-distillation."""

    def __init__(self):
        super().__init__()
        self.pupil, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.pupil.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 0.1)
        return self.pupil(x) - self.teacher(x)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(6))})

    def forward(self, x):
        return sum(x * weight for weight in self.several) + self.named["a"]


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, 0.2, batch_first=True)

    def forward(self, x):
        hidden = torch.tensor([[False, False, False, True]] * 3)
        masked = self.layer(x, x, x, need_weights=False, key_padding_mask=hidden)[0]
        return self.layer(x, x, x)[0] + masked


def _added(x, w):
    zeros = torch.zeros(6, 6, dtype=x.dtype)
    return zeros.index_add_(0, torch.tensor([0, 1, 1, 2]), x * w)


def _written(x, w):
    out = (x * w).clone()
    out[:, 0] = 0
    out[out > 0.5] = 0.1
    out[1:, 2:].mul_(2)
    flat = out.view(-1)
    flat[::2] += 1
    return out


def _through_numpy(x, w):
    return x * w * float(x.detach().numpy().max())


def _cubed(x, w):
    return Cube.apply(x * w)


def _penalised(x, w):
    out = (x * w).tanh()
    (slope,) = torch.autograd.grad(out.sum(), w, create_graph=True)
    return out * slope.norm()


def _derived(x, w):
    """As PINNs have them, in evaluation too."""
    with torch.enable_grad():
        x.requires_grad_()
        (slope,) = torch.autograd.grad((x**3 * w).sum(), x, create_graph=True)
        ones = torch.ones_like(slope)
        (curve,) = torch.autograd.grad(slope, [x], ones, create_graph=True)
    return slope + curve


def _by_chance(x, w):
    kept = x.new_empty(x.shape[0], 1).bernoulli_(0.5)
    return x + w * kept.div_(0.5)


def _bounded(bound):
    return lambda x, w: torch.add((x * w).clamp(max=bound), w, alpha=bound)


def _scaled(scale):
    return lambda x, w: (1 - scale) * (x * w).exp() ** scale + x / (1 + scale)


def _filled(x, w):
    out = torch.zeros(4, 6, dtype=x.dtype)
    out[:, :3] = x[:, :3]
    return out * w


def _leaky(slope):
    return lambda x, w: F.leaky_relu(x * w, slope)


def _gumbel(tau):
    return lambda x, w: F.gumbel_softmax(x * w, tau=tau)


def _divergence(x, w):
    return F.kl_div((x * w).log_softmax(-1), x.softmax(-1), reduction="batchmean")


def _by_item(x, w):
    return x * w if len(x) > 3 and x.isfinite().all() else x


def _chosen(x, w):
    return (x[x > 0] * 2).sum() * w + x.max().item()


def total(output, batch):
    outputs = output if isinstance(output, tuple) else (output,)
    return sum((o * torch.linspace(0.5, 1.5, o.numel()).to(o).view_as(o)).sum() for o in outputs)


def sgd(named, hp):
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def members_of(module_of, shape, dtype=torch.float64, **changes):
    """Trials of one module each, some weights moved off their symmetric start."""

    def build(hp):
        module = module_of(hp["slot"]).to(dtype)
        if not list(module.parameters()):
            module = nn.Sequential(nn.Linear(shape[-1], shape[-1]).to(dtype), module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return module

    def data(hp):
        draws = torch.Generator().manual_seed(int(hp["slot"]))
        if isinstance(module_of(0), nn.Embedding):
            return [torch.randint(0, 7, shape, generator=draws)], None
        return [torch.randn(*shape, generator=draws, dtype=torch.float64).to(dtype)], None

    settings = {"model": build, "data": data, "loss": total, "optimizer": sgd}
    recipe = Recipe(**(settings | changes))
    return recipe, [{"slot": slot} for slot in range(WIDTH)]


def worst(module_of, shape, dtype=torch.float64, **changes):
    """The largest difference of anything after one step, and the array's notes."""
    recipe, hps = members_of(module_of, shape, dtype, **changes)
    array, losses = fusing.train(recipe, hps, 1)
    found = 0.0
    for slot, hp in enumerate(hps):
        plain = fusing.alone(recipe, hp, slot, 1)
        state = array.extract(slot)
        assert torch.equal(state["rng"].torch, plain.rng.torch), "other random numbers"
        found = max(
            found, fusing.drift(state, plain.state()), abs(losses[slot][0] - plain.losses[0])
        )
    return found, array.backend.notes


@pytest.mark.parametrize("what", ROWS_OF)
def test_a_rule_computes_what_the_operation_does_alone(what):
    _, module_of, shape = ROWS_OF[what]

    found, notes = worst(module_of, shape)

    assert found <= 1e-12
    assert notes == ()


@pytest.mark.parametrize("what", UNRULED)
def test_what_has_no_rule_is_right_too(what):
    found, _ = worst(*UNRULED[what])

    assert found <= 1e-12


@pytest.mark.parametrize("what", [what for what, (of, *_) in ROWS_OF.items() if of in CASTING])
def test_a_rule_leaves_float64_as_it_is_under_autocast(what):
    found, _ = worst(*ROWS_OF[what][1:], precision="bf16")

    assert found <= 1e-12


def behind_a_product(module_of, shape):
    """The module with what a product gives in the place of its input: bfloat16, under autocast."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # rounding decides for some weights on which side of a bend one is
        product = nn.Conv2d(6, 6, 1) if shape == IMAGE else nn.Linear(6, 6)
    return lambda slot: nn.Sequential(copy.deepcopy(product), module_of(slot))


def under_autocast():
    """Each operation first, and where a product can be before it, behind one."""
    for what, row in {**{key: row[1:] for key, row in ROWS_OF.items()}, **UNRULED}.items():
        if what not in NO_BF16:
            marks = [needs_bf16_lstm] if what in ONEDNN_LSTMS else []
            yield pytest.param(*row, id=what, marks=marks)
            if row[1] in (ROWS, IMAGE, HEADS, (3, 4, 6), (4, 2, 6)):
                yield pytest.param(behind_a_product(*row), row[1], id=f"{what}, behind a product")


@pytest.mark.slow
@pytest.mark.parametrize(("module_of", "shape"), list(under_autocast()))
def test_under_autocast_types_are_those_alone_and_numbers_are_near(module_of, shape):
    types: dict[int, list[torch.dtype]] = {0: [], 1: []}
    here = 0

    def loss(output, batch):
        outputs = output if isinstance(output, tuple) else (output,)
        types[here] += [tensor.dtype for tensor in outputs]
        return total(tuple(tensor.float() for tensor in outputs), batch)

    how = {"precision": "bf16", "loss": loss}
    recipe, hps = members_of(module_of, shape, torch.float32, **how)
    array, losses = fusing.train(recipe, hps, 1)
    here = 1
    for slot, hp in enumerate(hps):
        plain = fusing.alone(recipe, hp, slot, 1)
        state = array.extract(slot)
        largest = max(float(t.abs().max()) for t in fusing.tensors(plain.state()).values())
        assert fusing.drift(state, plain.state()) <= BF16 * max(largest, 1.0)
        assert losses[slot] == pytest.approx(plain.losses, rel=BF16, abs=16 * BF16)  # sums
    assert set(types[0]) == set(types[1])


def scaled(rule):
    """The same rule, wrong by a thousandth."""

    def wrong(slots, *args, **kwargs):
        result = rule(slots, *args, **kwargs)
        return _changed(result, lambda t: t * 1.001)

    return wrong


def swapped(rule):
    """The same rule, which gives each slot its neighbour's result."""

    def wrong(slots, *args, **kwargs):
        result = rule(slots, *args, **kwargs)
        return _changed(result, lambda t: slots.slotted(slots.stacked(t).roll(1, 0)))

    return wrong


def _changed(result, change):
    if result is NotImplemented:
        return result
    if isinstance(result, bool):
        return not result
    if isinstance(result, Tensor):
        return change(result)
    return (change(result[0]), *result[1:])


@pytest.mark.parametrize("breaking", [scaled, swapped])
@pytest.mark.parametrize("what", ROWS_OF)
def test_a_broken_rule_is_noticed(what, breaking, monkeypatch):
    operation, module_of, shape = ROWS_OF[what]
    monkeypatch.setitem(RULES, operation, breaking(RULES[operation]))
    recipe, hps = members_of(module_of, shape)
    made = fusing.trials(recipe, hps)

    assert "one step as an array is not the step alone" in dry_run(
        [t.member for t in made], [recipe.data(hp)[0][0] for hp in hps]
    )


def test_every_rule_has_a_row():
    assert {operation for operation, *_ in ROWS_OF.values()} == set(RULES)


def test_a_rule_that_drops_the_slots_own_masks_is_noticed(monkeypatch):
    from shoal.fusion.rules import dropout

    right = dropout.masks
    monkeypatch.setattr(dropout, "masks", lambda slots, one, p: right(slots, one, p).roll(1, 0))

    assert worst(*ROWS_OF["dropout"][1:])[0] > 1e-3


def test_a_rule_that_forgets_the_padding_is_noticed(monkeypatch):
    rule = RULES[torch.embedding]
    monkeypatch.setitem(
        RULES, torch.embedding, lambda slots, weight, index, *rest: rule(slots, weight, index)
    )

    assert worst(*ROWS_OF["padded embedding"][1:])[0] > 1e-3


def test_statistics_that_all_slots_share_are_noticed(monkeypatch):
    monkeypatch.setattr("shoal.fusion.crew.Undo.put_back", lambda self, stacked, slots=None: None)
    rule = RULES[torch.batch_norm]

    def shared(slots, x, weight, bias, mean, var, *rest):
        first = slots.stacked(mean)[:1].expand(slots.width, -1).clone()
        return rule(slots, x, weight, bias, slots.slotted(first), var, *rest)

    monkeypatch.setitem(RULES, torch.batch_norm, shared)

    assert worst(*ROWS_OF["batch norm"][1:])[0] > 1e-3
