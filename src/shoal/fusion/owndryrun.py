"""One step of the users' own as an array beside one of each alone, before an array is trusted.

In float64: tensors that a step makes are float64 too, where it does not ask for another type.
Compared is what outlives a step: losses, parameters, buffers, random streams.

[Note: gradients that are rounding] What a norm takes away again, as a bias before it, has a
gradient that is nothing but rounding, and Adam's step is as long for that as for any other. So
where a tensor ended elsewhere, the step alone is taken again from weights one rounding away, up
and down: how far that leads is what rounding does to this tensor, and no fault of an array.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.fusion.array import Array
from shoal.fusion.declined import Declined
from shoal.fusion.effects.globals import global_settings
from shoal.fusion.likeness import (
    Comparison,
    as_double,
    close,
    copies,
    numpy_stream,
    set_apart,
    told,
)
from shoal.fusion.member import Member, in_streams
from shoal.recipes.ownstep import Losses, OwnStep
from shoal.rng import same_rng

LIMIT = 1e-9  # of a tensor's largest element, and of 1
ROUNDINGS = 1000  # as which a sum of many terms in another order may be, beside one of weights


def own_dry_run(members: Sequence[Member], batches: Sequence[Any], device: torch.device) -> str:
    """In words, why these trials should not train as one array; empty if they may.

    The trials are not touched.

    Raises:
        Declined: they cannot be compared, or cannot run as one.
        torch.OutOfMemoryError: the device has no room for this.
    """
    apart = copies(members)
    if set_apart(apart):
        words = told(functools.partial(_compared, apart, batches, device))
        if words is not None:
            return words
    del apart  # the room they take
    return _compared(members, batches, device).words


def _compared(
    members: Sequence[Member], batches: Sequence[Any], device: torch.device
) -> Comparison:
    """A step of copies as an array, and alone."""
    alone, together, later = _wide(members), _wide(members), _wide(members[:1])[0]
    wide = [as_double(batch) for batch in batches]
    with _in_float64():
        if not isinstance(_step_alone(later, wide[0], device), Exception):
            later.step += 1  # what a first call sets a later one may change
            _step_alone(later, wide[0], device)
        found = [_step_alone(m, b, device) for m, b in zip(alone, wide, strict=True)]
        if all(isinstance(one, Exception) for one in found):
            kind = type(found[0]).__name__
            raise Declined(
                "none of the trials can do a step in float64, in which an array is compared with "
                f"each alone: {kind}: {found[0]}"
            )
        array = Array(together, device=device)
        stepped = array.step(wide)
    is_told = not stepped.failures and all(map(math.isfinite, stepped.losses))
    for slot, one in enumerate(found):
        if isinstance(one, Exception):
            is_told = False
            continue  # its own code raises, alone too
        if slot in stepped.failures:
            error = stepped.failures[slot]
            words = f"slot {slot} fails as part of an array: {type(error).__name__}: {error}"
            return Comparison(words, False)
        rounded = _Rounded(members[slot], wide[slot], device)
        words = _difference(slot, one, alone[slot], stepped.losses[slot], array, rounded)
        if words:
            words = f"one step as an array is not the step alone: slot {slot}: {words}."
            return Comparison(words, True)
    return Comparison("", is_told)


def _wide(members: Sequence[Member]) -> list[Member]:
    made = copies(members)
    for member in made:
        member.module.double()
        member.schedule = None  # of an optimizer that is not the copy
    return made


@contextmanager
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _step_alone(member: Member, batch: Any, device: torch.device) -> Losses | Exception:
    """What the step returns, or raises.

    Raises:
        Declined: it draws from what the slots of an array have in common.
    """
    assert member.modes is not None
    own = OwnStep(member.recipe, member.module, member.optimizer, member.hp, member.modes)
    with in_streams(member, device):
        python, numpy = random.getstate(), numpy_stream()
        kept = global_settings(member.recipe, member.module)
        try:
            found = own(batch, member.step)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return error
        after = global_settings(member.recipe, member.module)
        if changed := sorted(name for name in kept if kept[name] != after.get(name)):
            raise Declined(f"the step changes {changed[0]}, of which there is one for all slots.")
        if random.getstate() != python or numpy_stream() != numpy:
            raise Declined(
                "the step draws from random or NumPy, which have one stream for all slots."
            )
    return found


class _Rounded:
    """How far rounding leads: a step alone, from weights one rounding away, if anybody asks."""

    def __init__(self, member: Member, batch: Any, device: torch.device) -> None:
        self._member, self._batch, self._device = member, batch, device

    def scale(self, name: str, alone: Tensor) -> float:
        """Of what size differences are in a tensor, which ended so alone, where that tells."""
        off = max(float((end[name].detach() - alone).abs().max()) for end in self._ends)
        return max(1.0, ROUNDINGS * off / LIMIT) if math.isfinite(off) else 1.0

    @functools.cached_property
    def _ends(self) -> list[dict[str, Tensor]]:
        """What a step left, from above and from below."""
        return [self._end(toward) for toward in (math.inf, -math.inf)]

    def _end(self, toward: float) -> dict[str, Tensor]:
        (twin,) = _wide([self._member])
        limit = torch.tensor(toward, device=self._device)
        with torch.no_grad(), _in_float64():
            for parameter in twin.module.parameters():
                if parameter.is_floating_point():
                    parameter.copy_(torch.nextafter(parameter, limit.to(parameter.dtype)))
        with _in_float64():
            _step_alone(twin, self._batch, self._device)
        return _state(twin)


def _state(member: Member) -> dict[str, Tensor]:
    return {**dict(member.module.named_parameters()), **dict(member.module.named_buffers())}


def _difference(
    slot: int, losses: Losses, alone: Member, total: float, array: Array, rounded: _Rounded
) -> str:
    if not close(torch.tensor(losses.total), torch.tensor(total), LIMIT, 1.0):
        return f"the loss is {total!r}, alone {losses.total!r}"
    with array.streams(slot):
        pass
    found = array.member(slot)
    if not same_rng(found.rng, alone.rng):
        return "the array draws other random numbers"
    theirs = _state(found)
    for name, tensor in _state(alone).items():
        one, other = tensor.detach(), theirs[name].detach()
        if close(one, other, LIMIT, 1.0):
            continue
        if not close(one, other, LIMIT, rounded.scale(name, one)):
            return f"{name!r} is another one"
    return ""
