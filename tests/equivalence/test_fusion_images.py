"""Images of all slots, however they lie: no slot meets another, and no code is told."""

from __future__ import annotations

import math

import fusing
import pytest
import torch
from test_fusion_rules import IMAGE, Fn, members_of, worst
from torch import nn
from torch.nn import functional as F

from shoal.fusion import dry_run
from shoal.fusion.passes.slots import Slots
from shoal.fusion.passes.streams import SlotStreams
from shoal.fusion.rows.layout import FORMATS, as_alone, laid, one_alone
from shoal.fusion.rows.level import entered
from shoal.fusion.rules import RULES, convolution
from shoal.fusion.rules.convolution import NARROW, NARROW_TRANSPOSED, conv, conv_transpose
from shoal.rng import capture_rng

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, SIZE = 3, 9
BATCHES = (1, 7)  # of few images and of more than there are weights
WIDTHS, CHANNELS = (2, 4, 5), ((3, 8), (8, 3), (8, 16), (16, 16), (3, 32), (32, 32), (32, 1))
POISONS = (math.nan, math.inf)
HOW = {
    "3 x 3": (conv, 3, {"padding": 1}),
    "4 x 4, stride 2": (conv, 4, {"stride": 2, "padding": 1}),
    "transposed": (conv_transpose, 4, {"stride": 2, "padding": 1}),
    "transposed, stride 1": (conv_transpose, 3, {"padding": 1}),
}


def passed(rule, settings, x, w, b, slope):
    """What a rule computes of all slots, and the gradients of its input, weights and biases."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    width = len(x)
    with entered(width) as level:
        streams = SlotStreams([capture_rng()] * width, torch.device("cpu"))
        slots = Slots(level, streams, [True] * width)
        out = slots.stacked(rule(slots, *map(level.slotted, leaves), **settings))
    return out, (out.detach(), *torch.autograd.grad(out, leaves, slope(out)))


@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("how", HOW)
def test_what_is_not_finite_in_a_slot_stays_there(how, rows, width, channels):
    """Kernels pad channels to what fits a register: 0 times a neighbour's inf would be no 0."""
    rule, size, settings = HOW[how]
    inside, outside = channels
    torch.manual_seed(0)
    x = torch.randn(width, rows, inside, SIZE, SIZE)
    shape = (outside, inside) if rule is conv else (inside, outside)
    w, b = torch.randn(width, *shape, size, size), torch.randn(width, outside)
    limit = NARROW if rule is conv else NARROW_TRANSPOSED
    is_narrow = min(channels) <= limit and w.numel() <= x.numel()
    g = torch.Generator().manual_seed(1)
    out, right = passed(rule, settings, x, w, b, lambda out: torch.randn(out.shape, generator=g))
    assert (as_alone(out) is not out) == (is_narrow and outside > 1)  # as it is meant to lie
    g = torch.randn(out.shape, generator=g.manual_seed(1))
    for slot in range(width):
        others = [other for other in range(width) if other != slot]
        for poison in POISONS:
            for at in range(3):
                tensors = [tensor.clone() for tensor in (x, w, g)]
                tensors[at][slot] = poison
                x1, w1, g1 = tensors
                _, found = passed(rule, settings, x1, w1, b, lambda _, g1=g1: g1)
                for mine, theirs in zip(found, right, strict=True):
                    assert torch.equal(mine[others], theirs[others])
                assert not found[0][slot].isfinite().all() or at == 2


@pytest.mark.parametrize(
    ("how", "channels"),
    [("4 x 4, stride 2", (8, 3)), ("transposed", (3, 4)), ("transposed", (33, 8))],
)
def test_nor_in_bfloat16_where_onednns_groups_meet(how, channels):
    """With a group per slot a NaN of one is in the next one's gradients on some processors."""
    rule, size, settings = HOW[how]
    inside, outside = channels
    torch.manual_seed(0)
    shape = (outside, inside) if rule is conv else (inside, outside)
    x, w = torch.randn(4, ROWS, inside, 13, 13), torch.randn(4, *shape, size, size)
    tensors = [tensor.bfloat16() for tensor in (x, w, torch.randn(4, outside))]
    _, right = passed(rule, settings, *tensors, torch.ones_like)
    for slot in range(4):
        others = [other for other in range(4) if other != slot]
        poisoned = [tensor.clone() for tensor in tensors]
        poisoned[0][slot] = poisoned[1][slot] = math.nan
        _, found = passed(rule, settings, *poisoned, torch.ones_like)
        for mine, theirs in zip(found, right, strict=True):
            assert torch.equal(mine[others], theirs[others])
        assert not found[0][slot].isfinite().any()


@pytest.fixture
def looped(monkeypatch):
    """What ran slot by slot."""
    found = []
    loops = "shoal.fusion.passes.outside.AtOnce.loops"
    monkeypatch.setattr(loops, lambda self, name: found.append(name))
    return found


def narrow_and_wide():
    """Convolutions that lay images one way and the other, and what may be between them."""
    yield from (nn.Conv2d(6, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True))
    yield from (nn.Conv2d(4, 40, 1), nn.Conv2d(40, 34, 3, padding=1), nn.LeakyReLU(0.2, True))
    yield from (nn.MaxPool2d(2), nn.ConvTranspose2d(34, 3, 4, 2, 1), nn.Conv2d(3, 3, 3, groups=3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layers_that_lay_images_in_turns_compute_what_they_do_alone(dtype, looped):
    found, notes = worst(lambda s: nn.Sequential(*narrow_and_wide()), IMAGE, dtype)
    assert found <= (1e-12 if dtype == torch.float64 else 1e-3)
    assert (notes, looped) == ((), [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(6, 4, 3, padding=1),
        lambda: nn.Conv2d(6, 1, 3, 2, 1, bias=False),
        lambda: nn.ConvTranspose2d(6, 4, 4, 2, 1),
    ],
)
def test_a_relu_writes_into_what_a_narrow_convolution_gives(layer, dtype):
    found, notes = worst(lambda s: nn.Sequential(layer(), nn.ReLU(inplace=True)), IMAGE, dtype)
    assert found <= (1e-12 if dtype == torch.float64 else 1e-3)
    assert notes == ()


@pytest.mark.parametrize("wanted", FORMATS)
@pytest.mark.parametrize("before", FORMATS)
def test_a_gradient_comes_as_the_images_lay(before, wanted):
    x = torch.randn(2, 6, 3, 5).contiguous(memory_format=before).requires_grad_()
    slope = torch.randn(2, 6, 3, 5).contiguous(memory_format=wanted)

    out = laid(x, wanted)
    (found,) = torch.autograd.grad(out, x, slope)

    assert torch.equal(out, x)
    assert out.is_contiguous(memory_format=wanted)
    assert torch.equal(found, slope)
    assert found.is_contiguous(memory_format=before)


def test_what_an_activation_writes_over_is_no_view_to_autograd():
    """The gradient of what is written into a view is laid anew: two passes more."""
    made = torch.randn(2, 3, 4, 5, 5, requires_grad=True) * 1  # slots beside channels
    with entered(3) as level:
        slots = Slots(level, SlotStreams([capture_rng()] * 3, made.device), [True] * 3)
        out = level.open(RULES[torch.relu_](slots, level.slotted(made, 1)))[0]

    assert out is made
    assert type(made.grad_fn).__name__ == "ReluBackward0"


POOLED = {  # functions of images and a weight of one number
    "one pixel": lambda x, w: F.adaptive_avg_pool2d(x * w, 1),
    "a pair": lambda x, w: F.adaptive_avg_pool2d(x * w, (1, 1)),
    "one image": lambda x, w: F.adaptive_avg_pool2d(x[0] * w, 1),
    "more pixels": lambda x, w: F.adaptive_avg_pool2d(x * w, 2),
    "a row": lambda x, w: F.adaptive_avg_pool2d(x * w, (1, None)),
    "uneven": lambda x, w: F.adaptive_avg_pool2d(x * w, (1, 2)),
    "the same in each slot": lambda x, w: w * F.adaptive_avg_pool2d(IMAGES.to(x), 1),
    "the same, more pixels": lambda x, w: w * F.adaptive_avg_pool2d(IMAGES.to(x), (2, 1)),
}
IMAGES = torch.arange(24.0).view(1, 4, 3, 2)


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("what", POOLED)
def test_pooling_is_that_of_the_trial_alone(what, is_narrow, looped):
    def module(slot):
        pooled = Fn(POOLED[what], 1)
        return nn.Sequential(nn.Conv2d(6, 4, 3, padding=1), pooled) if is_narrow else pooled

    found, notes = worst(module, IMAGE)
    assert found <= 1e-12
    assert notes == ()
    if what in ("one pixel", "a pair"):
        assert looped == []


def narrow(function):
    """``function`` of what a narrow convolution gives, and of its weights."""
    return Fn(lambda x, w: function(F.conv2d(x, w, padding=1), w), 4, 6, 3, 3)


TELLING = {  # operations whose result tells how a tensor lies in memory
    "view": lambda y, w: y.view(len(y), -1),
    "view of what is pooled": lambda y, w: F.max_pool2d(F.relu(y), 2).view(len(y), -1),
    "view of all": lambda y, w: y.view(-1),
    "view of a crop": lambda y, w: y[:, :2].view(len(y), -1),
    "patches": lambda y, w: F.dropout(y.flatten(2).transpose(1, 2) + w.flatten()[:4], 0.3),
    "channels last": lambda y, w: F.dropout(y.permute(0, 2, 3, 1), 0.3),
    "videos": lambda y, w: F.dropout(y.view(2, 2, 4, 5, 5).mean((-1, -2)), 0.3),
    "videos, pooled": lambda y, w: F.dropout(
        F.adaptive_avg_pool2d(y, 1).view(2, 2, 4) * w.mean(), 0.3
    ),
    "dropout in place": lambda y, w: F.dropout(y * 1, 0.3, True, True),
    "dropout of one channel": lambda y, w: F.dropout(y[:, :1], 0.3),
    "dropout of one row": lambda y, w: F.dropout(y[:, :, :1], 0.3),
    "dropout of one image": lambda y, w: F.dropout(y[:1], 0.3),
    "dropout of a sum": lambda y, w: F.dropout(y + y.contiguous(), 0.3),
    "noise": lambda y, w: y + torch.randn_like(y),
    "noise in place": lambda y, w: y + torch.empty_like(y).normal_(),
    "noise in place, few": lambda y, w: y * torch.empty_like(y).bernoulli_(0.3),
    "noise like it": lambda y, w: y + y.new_empty(y.shape).uniform_(),
    "noise around it": lambda y, w: y + torch.normal(y.detach(), 1.0),
    "random slopes": lambda y, w: F.rrelu(y, training=True),
    "gumbel": lambda y, w: F.gumbel_softmax(y, dim=1),
    "written": lambda y, w: written(y * 1),
    "penalty": lambda y, w: y * penalty(y, w) / 1000,
}


def penalty(y, w):
    return torch.autograd.grad(y.tanh().sum(), w, create_graph=True)[0].norm()


def written(y):
    y[:, 0] = 0
    y[y > 1] = 0.5
    y[1:, :, 2].mul_(2)
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("what", TELLING)
def test_no_code_is_told_how_images_lie(what, dtype):
    def module(slot):
        return nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), narrow(TELLING[what]))

    found, _ = worst(module, IMAGE, dtype)
    assert found <= (1e-12 if dtype == torch.float64 else 1e-2)


def test_noise_is_that_alone_where_slots_are_beside_channels():
    """Behind a wide convolution: images lie as alone, and a slot's are in pieces."""

    def noisy(x, w):
        y = F.conv2d(x, w, padding=1)
        return y + torch.empty_like(y).normal_()

    assert worst(lambda s: Fn(noisy, 40, 36, 3, 3), (2, 36, 5, 5))[0] <= 1e-12


@pytest.mark.parametrize(
    "counting",
    [
        lambda y, w: written_flat(y * 1),
        lambda y, w: y * y.stride(1),
        lambda y, w: y.as_strided((2, 3), (25, 1)),
    ],
)
def test_code_that_counts_on_it_all_the_same_is_declined(counting):
    """In float64, as a dry run is where it can be, images lie as they do in float32."""
    recipe, hps = members_of(lambda s: narrow(counting), IMAGE, torch.float32)
    made = fusing.trials(recipe, hps)

    words = dry_run([t.member for t in made], [recipe.data(hp)[0][0] for hp in hps])

    assert "one step as an array is not the step alone" in words


def channels_last(drop):
    body = [nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Dropout(drop), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*body).to(memory_format=torch.channels_last)


def test_masks_drawn_in_the_order_of_channels_last_are_told_of():
    """Without dropout such images train as others do."""
    found = {}
    for drop in (0.0, 0.5):
        recipe, hps = members_of(lambda s, drop=drop: channels_last(drop), IMAGE, torch.float32)
        made = fusing.trials(recipe, hps)
        found[drop] = dry_run([t.member for t in made], [recipe.data(hp)[0][0] for hp in hps])
    assert found[0.0] == ""
    assert "alone dropout draws its masks in that order, which an array does not" in found[0.5]


def written_flat(y):
    y.flatten(1)[:, ::2].mul_(3)  # alone it is a view
    return y


@pytest.mark.parametrize(
    "mapped",
    [
        lambda x, w: torch.vmap(lambda one: F.conv2d(one[None], w, padding=1)[0])(x),
        lambda x, w: torch.vmap(lambda one: F.conv2d(one[None], w[:, :, :1, :1])[0])(x),
        lambda x, w: torch.vmap(lambda one: F.conv2d(x, one, stride=2))(torch.stack([w, 2 * w])),
        lambda x, w: torch.vmap(lambda one: F.conv_transpose2d(one[None], w.mT[:, :4])[0])(
            x[:, :4]
        ),
        lambda x, w: torch.vmap(lambda one: F.adaptive_avg_pool2d(one * w.sum(), 1))(x),
        lambda x, w: torch.func.grad(lambda v: F.conv2d(x, v, stride=2).square().sum())(w),
    ],
)
def test_a_models_own_vmap_over_images_is_batched_twice(mapped):
    found, _ = worst(lambda s: Fn(mapped, 4, 6, 3, 3), IMAGE)
    assert found <= 1e-12


def test_no_images_are_a_batch_too():
    def empty(x, w):
        return F.conv2d(x[:0], w, stride=2).sum() + w.square()

    assert worst(lambda s: Fn(empty, 4, 6, 3, 3), IMAGE)[0] <= 1e-12


def test_group_norm_that_asks_how_images_lie_is_no_loop(monkeypatch):
    looped = []
    each = Slots.each
    monkeypatch.setattr(Slots, "each", lambda *args: looped.append(args[1]) or each(*args))

    def net(slot):
        return nn.Sequential(nn.Conv2d(6, 8, 3), nn.GroupNorm(2, 8, eps=1e-3), nn.Conv2d(8, 4, 3))

    assert worst(net, IMAGE)[0] <= 1e-12
    assert looped == []


def test_without_onednn_images_lie_alike(monkeypatch):
    monkeypatch.setattr(convolution, "_is_quick", lambda x: False)
    found, _ = worst(lambda s: nn.Sequential(*narrow_and_wide()), IMAGE, torch.float32)
    assert found <= 1e-3


@pytest.mark.parametrize("shape", [(3, 4, 2, 5, 6), (3, 1, 2, 5, 6), (3, 4, 2, 1, 6)])
@pytest.mark.parametrize("permuted", [(0, 1, 2, 3, 4), (0, 1, 3, 4, 2), (0, 1, 4, 2, 3)])
def test_what_lies_as_alone_has_its_values_and_strides(shape, permuted):
    plain = torch.randn(shape)
    laid = plain.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)
    lone = plain[0].permute([dim - 1 for dim in permuted[1:]])

    found, one = as_alone(laid.permute(permuted)), one_alone(laid.permute(permuted))

    assert torch.equal(found, plain.permute(permuted))
    assert found[0].stride() == one.stride() == lone.stride()
    assert one.shape == lone.shape


@pytest.mark.parametrize(
    "x_N",
    [
        torch.randn(3, 4, 2, 5, 6),
        torch.randn(4, 3, 2, 5, 6).transpose(0, 1),
        torch.randn(2, 2, 3, 5).permute(2, 0, 1, 3),
        torch.randn(2, 5, 6, 3, 4).permute(3, 4, 0, 1, 2),
        torch.randn(3, 4, 2, 1, 1).expand(3, 4, 2, 5, 6),
        torch.randn(4, 3, 2, 1, 1).transpose(0, 1),
        torch.randn(4, 2, 5, 6).expand(3, 4, 2, 5, 6),
        torch.randn(3, 4, 2, 5, 6).contiguous(memory_format=torch.channels_last_3d),
    ],
)
def test_what_lies_as_alone_is_left(x_N):
    assert as_alone(x_N) is x_N
    assert one_alone(x_N).stride() == x_N[0].stride()
