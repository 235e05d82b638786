"""Convolutions: products of matrices where they can be, else torch's, with a group per slot.

Torch's batching turns them into an operation that autocast does not know, so that a rule casts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.fusion.passes.slots import Slots
from shoal.fusion.rows.layout import laid
from shoal.fusion.rows.level import plainly
from shoal.fusion.rules.linear import in_autocast


def conv(
    slots: Slots,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Of one to three dimensions: products where the kernel is, or may be cut to, a point.

    Or is as large as the image.
    """
    input, weight, bias = in_autocast(input, weight, bias)
    is_ours = slots.level.is_innermost and slots.has_values(weight)
    if is_ours and input.dim() == weight.dim() and _all(stride, 1):
        x, w = slots.stacked(input), slots.stacked(weight)
        b = slots.stacked(bias) if bias is not None else None
        with plainly():
            if _all(dilation, 1):
                w, padding = _within_reach(w, padding, x.shape[3:])
            is_plain, out = _all(dilation, 1) and groups == 1, None
            if _all(padding, 0) and all(size == 1 for size in w.shape[3:]):
                out = _of_point(x.transpose(0, 1), w, b, groups)
            elif _all(padding, 0) and is_plain and w.shape[3:] == x.shape[3:]:
                out = _of_all(x, w, b)
        if out is not None:
            return slots.slotted(out, 1)
        weight = slots.slotted(w)
    native = CONVOLUTIONS[weight.dim() - 2]
    settings: tuple[Any, ...] = stride, padding, dilation, groups
    if is_ours and _leaks(slots, weight):
        return _apart(slots, native, (input, weight, bias), settings)
    if not (is_ours and _are_images(slots, input, weight)):
        return native(input, weight, bias, *settings)
    settings = stride, padding, dilation, slots.width * groups
    is_narrow = groups == 1 < slots.width and _are_narrow(input, weight, NARROW)
    return _of_images(slots, torch.conv2d, (input, weight, bias), settings, is_narrow)


NARROW, NARROW_TRANSPOSED = 32, 16
"""So many channels, in or out, and images lie with a pixel's channels together."""


def _are_narrow(input: Tensor, weight: Tensor, limit: int) -> bool:
    """Whether images are to lie so: the weights have to as well, a copy both ways."""
    return min(weight.shape[:2]) <= limit and weight.numel() <= input.numel()


def _leaks(slots: Slots, weight: Tensor) -> bool:
    """Whether a group per slot would not keep to its slot: oneDNN's kernels of half precision.

    Some pad a group's channels with the next one's, times 0, which of an inf is NaN.
    """
    halves = torch.bfloat16, torch.float16
    return slots.width > 1 and weight.device.type == "cpu" and weight.dtype in halves


def _apart(
    slots: Slots,
    native: Callable[..., Tensor],
    tensors: tuple[Tensor, Tensor, Tensor | None],
    settings: tuple[Any, ...],
) -> Tensor:
    """One convolution after another."""
    stacked = [None if t is None else slots.stacked(t) for t in tensors]
    with plainly():
        rows = [t.unbind() if t is not None else [None] * slots.width for t in stacked]
        found = [native(*one, *settings) for one in zip(*rows, strict=True)]
        return slots.slotted(torch.stack(found))


def _are_images(slots: Slots, input: Tensor, weight: Tensor) -> bool:
    """Whether how they lie matters, and each slot has its own: batches of them, on a CPU."""
    return (
        input.dim() == weight.dim() == 4 and input.device.type == "cpu" and slots.has_values(input)
    )


def _of_images(
    slots: Slots,
    native: Callable[..., Tensor],
    tensors: tuple[Tensor, Tensor, Tensor | None],
    settings: tuple[Any, ...],
    is_narrow: bool,
) -> Tensor:
    """One convolution of all slots: x_BDHW, D slots beside channels.

    See [Note: how images lie in memory] in ``layout.py``.
    """
    input, weight, bias = tensors
    x_BNCHW, w = slots.stacked(input).transpose(0, 1), slots.stacked(weight)
    b = None if bias is None else slots.stacked(bias)
    with plainly():
        w, b = w.flatten(0, 1), None if b is None else b.flatten()
        lies = torch.contiguous_format
        if is_narrow and _is_quick(x_BNCHW):
            lies = torch.channels_last
            w = w.contiguous(memory_format=lies)
        x = _beside_channels(x_BNCHW, lies)
        out = native(x, w, b, *settings)
        if is_narrow:
            out = out.contiguous(memory_format=torch.channels_last)
        shape = (len(out), slots.width, out.shape[1] // slots.width, *out.shape[2:])
        found = torch.ops.aten._unsafe_view(out, shape)  # no view: a ReLU may write into it
    return slots.slotted(found, 1)


def _beside_channels(x_BNCHW: Tensor, lies: torch.memory_format) -> Tensor:
    """x_BDHW, a copy unless slots lie beside channels already, and that as ``lies`` says."""
    slots, channels = x_BNCHW.shape[1:3]
    if slots == 1 or channels == 1 or x_BNCHW.stride(1) == channels * x_BNCHW.stride(2):
        return laid(x_BNCHW.flatten(1, 2), lies)
    if lies is torch.channels_last:
        return x_BNCHW.permute(0, 3, 4, 1, 2).flatten(3).permute(0, 3, 1, 2)
    return x_BNCHW.flatten(1, 2).contiguous()


def _is_quick(x: Tensor) -> bool:
    """Whether torch has a kernel of oneDNN's for it."""
    return x.dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()


CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


def _within_reach(weight: Tensor, padding: Any, sizes: Sequence[int]) -> tuple[Tensor, Any]:
    """The kernel without taps that only ever meet padding, and what padding that leaves.

    A small image in a deep net: of 5 x 5 taps with padding 2, one meets an image of a pixel.
    For steps of one and padding that keeps the size; the sums lose nothing but zeros.
    """
    pads = [padding] * len(sizes) if isinstance(padding, int) else padding
    if isinstance(padding, str) or len(pads) != len(sizes):
        return weight, padding
    if any(taps != 2 * pad + 1 for taps, pad in zip(weight.shape[3:], pads, strict=True)):
        return weight, padding
    kept = [min(pad, size - 1) for pad, size in zip(pads, sizes, strict=True)]
    for at, (pad, less) in enumerate(zip(pads, kept, strict=True)):
        if less < pad:
            weight = weight.narrow(3 + at, pad - less, 2 * less + 1)
    return weight, tuple(kept)


def _of_point(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor | None:
    """x_BNC* with a kernel of one point: across channels, or channel by channel."""
    x_BNCP, w_NOC = x.flatten(3), weight.flatten(2)
    b_NO1 = None if bias is None else bias.unsqueeze(-1)
    if groups == 1:
        out = _pointwise(x_BNCP, w_NOC, b_NO1)
    elif groups == x.shape[2] == weight.shape[1]:
        out = x_BNCP * w_NOC if b_NO1 is None else torch.addcmul(b_NO1, x_BNCP, w_NOC)
    else:
        return None
    shaped: Tensor = torch.ops.aten._unsafe_view(out, (*out.shape[:3], *x.shape[3:]))
    return shaped


def _of_all(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x_NBC* with a kernel as large as the image, as in a discriminator's last layer."""
    x_NBK, w_NKO = x.flatten(2), weight.flatten(2).transpose(1, 2)
    out = torch.bmm(x_NBK, w_NKO) if bias is None else torch.baddbmm(bias[:, None], x_NBK, w_NKO)
    shape = (out.shape[1], out.shape[0], out.shape[2], *([1] * (x.dim() - 3)))
    return out.transpose(0, 1).contiguous().view(shape)


def _pointwise(x_BNCP: Tensor, w_NOC: Tensor, b_NO1: Tensor | None) -> Tensor:
    """[B, N, O, P], P pixels: slots stay beside channels, as grouped convolutions lay them.

    Either each row of the batch has its product, for which the weights are copied, or rows
    are laid side by side for one, and what comes out is laid back: whichever copies less.
    """
    rows, slots, channels, pixels = x_BNCP.shape
    outside = w_NOC.shape[1]
    if 2 * outside * channels < (outside + channels) * pixels:
        out = torch.matmul(w_NOC, x_BNCP)
        return out if b_NO1 is None else out + b_NO1
    x_NCR = x_BNCP.permute(1, 2, 0, 3).reshape(slots, channels, rows * pixels)
    out = torch.bmm(w_NOC, x_NCR) if b_NO1 is None else torch.baddbmm(b_NO1, w_NOC, x_NCR)
    return out.view(slots, -1, rows, pixels).permute(2, 0, 1, 3).contiguous()


def conv_transpose(
    slots: Slots,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """From a single point, as in a generator's first layer: the kernel times the channels."""
    input, weight, bias = in_autocast(input, weight, bias)
    plain = groups == 1 and all(_all(*pair) for pair in ((padding, 0), (output_padding, 0)))
    from_point = input.dim() == weight.dim() and all(size == 1 for size in input.shape[2:])
    is_ours = slots.level.is_innermost and slots.has_values(weight)
    if not (plain and from_point and _all(dilation, 1) and is_ours):
        native = TRANSPOSED[weight.dim() - 2]
        settings: tuple[Any, ...] = stride, padding, output_padding, groups, dilation
        if is_ours and _leaks(slots, weight):
            return _apart(slots, native, (input, weight, bias), settings)
        if not (is_ours and _are_images(slots, input, weight)):
            return native(input, weight, bias, *settings)
        settings = stride, padding, output_padding, slots.width * groups, dilation
        is_narrow = groups == 1 < slots.width and _are_narrow(input, weight, NARROW_TRANSPOSED)
        return _of_images(
            slots, torch.conv_transpose2d, (input, weight, bias), settings, is_narrow
        )
    x, w = slots.stacked(input), slots.stacked(weight)
    b = slots.stacked(bias) if bias is not None else None
    with plainly():
        out = torch.bmm(x.flatten(2), w.flatten(2))  # x_NBI, w_NIK: K is channels and kernel
        out = out.transpose(0, 1).reshape(x.shape[1], slots.width, *w.shape[2:])
        if b is not None:
            out = out + b.view(*b.shape, *([1] * (w.dim() - 3)))
    return slots.slotted(out, 1)


def _all(setting: Any, value: int) -> bool:
    if isinstance(setting, str):
        return setting == "valid" and value == 0
    return all(s == value for s in (setting if isinstance(setting, tuple | list) else (setting,)))
