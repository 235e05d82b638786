"""Random numbers whose kind and shape the code says: each slot's come from its own generator.

They are asked for outside of the pass, as masks are, so that a pass which draws may be a graph:
the noise of a variational autoencoder or a diffusion model, paths that are dropped, tokens that
are hidden. What ``multinomial`` draws depends on a tensor's values: it runs slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.fusion.passes.outside import Numbers
from shoal.fusion.passes.slots import Rule, Slots
from shoal.fusion.rows.layout import in_one_piece, one_alone
from shoal.fusion.rows.level import plainly

USUAL = {"layout": (None, torch.strided), "requires_grad": (False,), "pin_memory": (None, False)}
"""Options that may be said if they say nothing."""


def made(method: str, *numbers: float) -> Rule:
    """Of what makes a tensor of a size and fills it: ``torch.rand``, ``torch.randn``."""

    def rule(slots: Slots, *args: Any, **options: Any) -> Any:
        size = options.pop("size", args[0] if _is_size(args[:1]) else args)
        return _asked(slots, size, options, method, numbers)

    return rule


def randint(slots: Slots, *args: Any, **options: Any) -> Any:
    """``torch.randint(low=0, high, size)``."""
    names = ("low", "high", "size") if len(args) > 2 or "low" in options else ("high", "size")
    said = {**dict(zip(names, args, strict=False)), **options}
    if len(args) > len(names) or not {"high", "size"} <= said.keys():
        return NotImplemented
    low, high, size = said.pop("low", 0), said.pop("high"), said.pop("size")
    said.setdefault("dtype", torch.int64)
    return _asked(slots, size, said, "random_", (low, high))


def randperm(slots: Slots, n: Any, **options: Any) -> Any:
    """``torch.randperm(n)``."""
    options.setdefault("dtype", torch.int64)
    return _asked(slots, (n,), options, "randperm", ())


def alike(method: str, *numbers: float) -> Rule:
    """Of what makes such a tensor like another: ``torch.rand_like``, ``torch.randn_like``."""

    def rule(slots: Slots, input: Tensor, *, dtype: Any = None, **options: Any) -> Any:
        if options or not slots.has_values(input):
            return NotImplemented
        return _asked_like(slots, input, dtype, method, numbers)

    return rule


def randint_like(
    slots: Slots, input: Tensor, *args: Any, dtype: Any = None, **options: Any
) -> Any:
    """``torch.randint_like(input, low=0, high)``."""
    if options or len(args) not in (1, 2) or not slots.has_values(input):
        return NotImplemented
    numbers = args if len(args) == 2 else (0, *args)
    return _asked_like(slots, input, dtype, "random_", numbers)


def normal(slots: Slots, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any) -> Any:
    """``torch.normal``, of a size, or around tensors: as its kernel computes these."""
    if size is not None:
        return _asked(slots, size, options, "normal_", (mean, std))
    pair = [x for x in (mean, std) if isinstance(x, Tensor)]
    if options or len(pair) < 2 or mean.dtype != std.dtype:
        return NotImplemented
    size = torch.broadcast_shapes(mean.shape, std.shape)
    alone = {"dtype": mean.dtype, "device": mean.device}
    drawn = _asked(slots, size, alone, "normal_", (0.0, 1.0))
    if drawn is NotImplemented:
        return drawn
    return _without_slope(slots, drawn.mul(std.detach()).add(mean.detach()), *pair)


def _without_slope(slots: Slots, drawn: Tensor, *inputs: Tensor) -> Tensor:
    """What was drawn, of which gradients by ``inputs`` are zeros, as torch has it."""
    for input in inputs:
        if slots.level.open(input)[0].requires_grad:
            never = torch.zeros((), dtype=torch.bool, device=drawn.device)
            drawn = torch.where(never, input, drawn)
    return drawn


def bernoulli(slots: Slots, input: Tensor, *args: Any, **options: Any) -> Any:
    """``torch.bernoulli(p)`` on a CPU: uniform numbers, as many as there are, beside ``p``."""
    is_known = input.device.type == "cpu" and input.dtype in (torch.float32, torch.float64)
    if args or options or not is_known:
        return NotImplemented
    p_N = slots.stacked(input)
    drawn = _drawn(slots, one_alone(p_N), p_N.dtype, "uniform_", (0.0, 1.0))
    with plainly():
        slots.outside.require(((p_N >= 0) & (p_N <= 1)).all(), _no_chance)
        found = (drawn < p_N).to(p_N.dtype)
    return _without_slope(slots, slots.slotted(found), input)


def _no_chance() -> RuntimeError:
    return RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")


def filled(method: str, *usual: float) -> Rule:
    """Of what fills a tensor in place: ``x.normal_()``, ``x.exponential_()``."""

    def rule(slots: Slots, input: Tensor, *numbers: Any, **options: Any) -> Any:
        if options or not slots.has_values(input):
            return NotImplemented
        x_N = slots.stacked(input)
        with plainly():
            one = in_one_piece(x_N)[0]
        if not one.is_contiguous():  # such a tensor is filled by another kernel, in another order
            return NotImplemented
        numbers = (*numbers, *usual[len(numbers) :])
        if not _are_plain(numbers):
            return NotImplemented
        drawn = _drawn(slots, one, one.dtype, method, numbers)
        with plainly():
            x_N.copy_(drawn)
        return input

    return rule


def _asked(
    slots: Slots, size: Any, options: dict[str, Any], method: str, numbers: Sequence[Any]
) -> Any:
    dtype, device = options.pop("dtype", None), options.pop("device", None)
    says_more = any(value not in USUAL.get(name, ()) for name, value in options.items())
    if says_more or not _is_size((size,)) or not _are_plain(numbers):
        return NotImplemented
    with plainly():
        told = torch.empty(0, dtype=dtype, device=device)
        one = torch.empty(tuple(size), dtype=told.dtype, device="meta")
        ask = Numbers.like(one, told.device, slots.width, method, tuple(numbers))
        return slots.slotted(slots.outside.masks(ask))


def _asked_like(
    slots: Slots, input: Tensor, dtype: Any, method: str, numbers: Sequence[Any]
) -> Any:
    if not _are_plain(numbers):
        return NotImplemented
    x_N = slots.stacked(input)
    with plainly():
        drawn = _drawn(slots, one_alone(x_N), dtype or x_N.dtype, method, numbers)
        return slots.slotted(drawn)


def _drawn(
    slots: Slots, one: Tensor, dtype: torch.dtype, method: str, numbers: Sequence[Any]
) -> Tensor:
    with plainly():
        like = torch.empty_like(one, dtype=dtype, requires_grad=False)
        ask = Numbers.like(like, like.device, slots.width, method, tuple(numbers))
        return slots.outside.masks(ask)


def _is_size(args: Sequence[Any]) -> bool:
    return (
        bool(args) and isinstance(args[0], tuple | list) and all(type(n) is int for n in args[0])
    )


def _are_plain(numbers: Sequence[Any]) -> bool:
    """Whether all slots have them, and no tensor has."""
    return all(type(number) in (int, float) for number in numbers)


DRAWING: dict[Callable[..., Any], Rule] = {
    torch.rand: made("uniform_", 0.0, 1.0),
    torch.randn: made("normal_", 0.0, 1.0),
    torch.randint: randint,
    torch.randperm: randperm,
    torch.rand_like: alike("uniform_", 0.0, 1.0),
    torch.randn_like: alike("normal_", 0.0, 1.0),
    torch.randint_like: randint_like,
    torch.normal: normal,
    torch.bernoulli: bernoulli,
    Tensor.normal_: filled("normal_", 0.0, 1.0),
    Tensor.uniform_: filled("uniform_", 0.0, 1.0),
    Tensor.exponential_: filled("exponential_", 1.0),
    Tensor.bernoulli_: filled("bernoulli_", 0.5),
}
