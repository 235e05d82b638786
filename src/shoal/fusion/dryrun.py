"""One step as an array beside one step alone, before an array is trusted.

Copies of the trials take both, from equal state and in float64 where their code allows, so
that rounding cannot hide what is wrong. Compared are losses, gradients, buffers and
random streams; what a forward changes in Python is found on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from shoal.fusion.array import Array
from shoal.fusion.crew import ArrayBackend, Evaluated, Trained
from shoal.fusion.declined import Declined
from shoal.fusion.effects.sideeffects import first_side_effect
from shoal.fusion.graphs.constants import constants_of
from shoal.fusion.likeness import Comparison, as_double, close, copies, set_apart, told
from shoal.fusion.matching.admission import shared_signature
from shoal.fusion.member import Member, in_streams
from shoal.fusion.owndryrun import own_dry_run
from shoal.fusion.passes.fused import StackedBackend
from shoal.fusion.passes.loop import lone_pass
from shoal.fusion.rows.perslot import IN_TORCH, standing_for
from shoal.recipes.recipe import model_inputs, tensors_of, to_device
from shoal.rng import same_rng

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""By how much of a tensor's largest element the two may differ: rounding, not rules."""

NARROW = frozenset((torch.float32, torch.float16, torch.bfloat16))


class _Pass(NamedTuple):
    """An array after its first step, and what that came to; then what an evaluation does."""

    array: Array
    trained: Trained
    batches: Sequence[Any]

    def evaluated(self) -> Evaluated | None:
        """The same batches in evaluation mode; None where that raises, alone too then, maybe."""
        self.array.set_training(False)
        try:
            return self.array.backend.evaluate(
                self.array.crew, self.batches, [True] * self.array.width
            )
        except (Declined, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit):
            return None
        finally:
            self.array.set_training(True)


def dry_run(
    members: Sequence[Member],
    batches: Sequence[Any],
    *,
    device: str | torch.device = "cpu",
    backend: ArrayBackend | None = None,
    one_base: bool = False,
) -> str:
    """In words, why these trials should not train as one array; empty if they may.

    The trials are not touched. ``batches``: one for each. ``backend`` runs their passes;
    ``one_base`` as of ``Array``.

    Where they begin alike, copies are compared that are set apart; and copies as they are, if the
    code goes by what they begin with: asks whether a gate is 0, or has no number elsewhere.

    Raises:
        torch.OutOfMemoryError: the device has no room for this.
    """
    where = torch.device(device)
    moved = [to_device(batch, where) for batch in batches]
    try:
        shared_signature(members)
        if members[0].recipe.step is not None:
            return own_dry_run(members, moved, where)
        if words := first_side_effect(members, moved, where):
            return words
        exact = _in_float64(members, moved, where) or (copies(members), moved)
        if set_apart(exact[0]):
            apart = partial(_compared, *exact, where, backend, one_base)
            if (found := told(apart)) is not None:
                return found
            del exact, apart  # the room they take
            exact = _in_float64(members, moved, where) or (copies(members), moved)
        return _compared(*exact, where, backend, one_base).words
    except Declined as error:
        return str(error)


def _compared(
    members: Sequence[Member],
    batches: Sequence[Any],
    device: torch.device,
    backend: ArrayBackend | None,
    one_base: bool,
) -> Comparison:
    """A step and an evaluation of these as an array, and alone; they are used up."""
    spare = copies(members) if _differ_in_floats(members) else ()
    losses, is_told = _losses(len(members), None, None), False
    try:
        found = _passed(members, batches, device, backend, one_base)
        words = _unlike_alone(found, members, batches, device)
        words += _of_masks(members[0], batches[0]) if words else ""
        evaluated = found.evaluated()
        losses = _losses(len(members), found, evaluated)
        if evaluated is not None:
            words = words or _evaluated_otherwise(found, evaluated, members, device)
        is_whole = not found.trained.failures and bool(found.trained.losses.isfinite().all())
        is_told = bool(words) or is_whole
        del found, evaluated  # the room they take
    except Declined as error:  # maybe at what a hidden number is instead
        words = str(error)
    hidden = hidden_number(spare, batches, device, losses, one_base) if spare else ""
    return Comparison(hidden or words, is_told)


def _in_float64(
    members: Sequence[Member], batches: Sequence[Any], device: torch.device
) -> tuple[list[Member], list[Any]] | None:
    """Copies with float64 weights and batches, if the first one's code runs on them."""
    if members[0].recipe.precision != "fp32":
        return None
    wide = [as_double(batch) for batch in batches]
    try:
        trial = copies(members[:1])[0]
        trial.module.double()
        with in_streams(trial, device), _Watch() as watch:
            lone_pass(trial, wide[0], device)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None
    if watch.has_seen_narrow:
        return None
    made = copies(members)
    for member in made:
        member.module.double()
    return made, wide


class _Watch(TorchFunctionMode):
    """Notices code that computes in fewer bits whatever it is given."""

    has_seen_narrow = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The operation itself."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in NARROW:
            self.has_seen_narrow = True
        return result


def difference(
    members: Sequence[Member],
    batches: Sequence[Any],
    device: torch.device,
    backend: ArrayBackend | None,
    one_base: bool = False,
) -> str:
    """One step of these trials as an array beside one of each alone; the first difference.

    They are used up. ``batches`` are on the device.

    Raises:
        Declined: they cannot be run as an array at all.
    """
    found = _passed(members, batches, device, backend, one_base)
    return _unlike_alone(found, members, batches, device)


def _passed(
    members: Sequence[Member],
    batches: Sequence[Any],
    device: torch.device,
    backend: ArrayBackend | None = None,
    one_base: bool = False,
) -> _Pass:
    """One step of copies of these trials as an array; raises Declined."""
    runs = backend or StackedBackend()
    array = Array(copies(members), device=device, backend=runs, one_base=one_base)
    trained = array.backend.train(array.crew, batches, [True] * len(members), 1.0)
    return _Pass(array, trained, batches)


def _unlike_alone(
    found: _Pass, members: Sequence[Member], batches: Sequence[Any], device: torch.device
) -> str:
    array, trained, _ = found
    array.backend.hand_out(array.crew, range(len(members)))
    for slot, member in enumerate(members):
        if slot in trained.failures:
            continue  # its own code raises, alone too
        with in_streams(member, device):
            member.module.train()
            _, loss = lone_pass(member, batches[slot], device)
            loss.backward()
        losses = (float(loss.detach()), float(trained.losses[slot]))
        words = _first_unequal(slot, member, array.member(slot), losses)
        if not words and not _same_streams(array, slot, member):
            words = f"slot {slot}: the array draws other random numbers"
        if words:
            return f"one step as an array is not the step alone: {words}."
    return ""


def _of_masks(member: Member, batch: Any) -> str:
    """That masks may be what differs, of images whose channels lie together; empty if none do.

    Alone dropout draws in the order of memory, and how a convolution's result would lie there
    nobody knows in an array, which lays images for its kernels (``layout.py``).
    """
    drops = any(isinstance(part, _DropoutNd) and part.p for part in member.module.modules())
    seen = [*member.module.parameters(), *tensors_of(model_inputs(member.recipe, batch))]
    if not drops or not any(map(_has_channels_last, seen)):
        return ""
    return (
        " Its images or weights lie channels last (torch.channels_last): alone dropout draws its "
        "masks in that order, which an array does not know of. Without that memory format, or "
        "without dropout before the images are flat, the trials may train as one."
    )


def _has_channels_last(tensor: Tensor) -> bool:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


def _evaluated_otherwise(
    found: _Pass, evaluated: Evaluated, members: Sequence[Member], device: torch.device
) -> str:
    """Whether a pass in evaluation mode comes to another loss or output than alone."""
    for slot, member in enumerate(members):
        if slot in found.trained.failures:
            continue
        member.module.eval()
        try:
            with torch.no_grad(), in_streams(member, device):
                output, loss = lone_pass(member, found.batches[slot], device)
        except torch.OutOfMemoryError:
            raise
        except (Exception, SystemExit):  # its own code raises
            continue
        pairs = [(loss, evaluated.losses[slot]), *_pairs(output, evaluated.outputs[slot])]
        limit = max(TOLERANCE.get(one.dtype, 1e-3) for one, _ in pairs)
        if member.recipe.precision != "fp32":
            limit = TOLERANCE[torch.bfloat16]
        for one, other in pairs:
            if not close(one.detach().cpu(), other.detach().cpu().to(one.dtype), limit, 1.0):
                words = f"{float(evaluated.losses[slot])!r}, alone {float(loss)!r}"
                return f"an evaluation as an array is not the one alone: slot {slot}: {words}."
    return ""


def _pairs(one: Any, other: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two outputs that can be compared, in order."""
    mine, theirs = list(tensors_of(one)), list(tensors_of(other))
    if len(mine) != len(theirs):
        return []
    return [pair for pair in zip(mine, theirs, strict=True) if pair[0].is_floating_point()]


def _same_streams(array: Array, slot: int, alone: Member) -> bool:
    with array.streams(slot):
        pass
    return same_rng(array.member(slot).rng, alone.rng)


def _first_unequal(slot: int, alone: Member, found: Member, losses: tuple[float, float]) -> str:
    ours = dict(found.module.named_parameters())
    mine = dict(alone.module.named_parameters())
    dtype = next((p.dtype for p in mine.values()), torch.float32)
    if alone.recipe.precision != "fp32":
        dtype = torch.bfloat16
    limit = TOLERANCE.get(dtype.to_real(), 1e-3)
    if not close(torch.tensor(losses[0]), torch.tensor(losses[1]), limit, 1.0):
        return f"slot {slot}: the loss is {losses[1]!r}, alone {losses[0]!r}"
    scale = max(
        (
            float(p.grad.abs().max())
            for p in mine.values()
            if p.grad is not None and p.grad.numel()
        ),
        default=1,
    )
    for name, parameter in mine.items():
        words = _gradient_difference(parameter.grad, ours[name].grad, limit, scale)
        if words:
            return f"slot {slot}: the gradient of {name!r} {words}"
    buffers = dict(found.module.named_buffers())
    for name, buffer in alone.module.named_buffers():
        if name not in buffers:
            return (
                f"slot {slot}: a forward makes the buffer {name!r}, for which an array has no "
                "place. Register it with its shape where the model is built"
            )
        if not close(buffer, buffers[name], limit, 1e-3):
            return f"slot {slot}: the buffer {name!r} is another one"
    return ""


def _gradient_difference(
    alone: Tensor | None, found: Tensor | None, limit: float, scale: float
) -> str:
    if alone is None or found is None:
        return "" if alone is found else "exists in one only: optimizers pass over what has none"
    return "" if close(alone, found, limit, scale) else "is another one"


def _differ_in_floats(members: Sequence[Member]) -> bool:
    every = [constants_of(member.recipe, member.module, rates=True) for member in members]
    return len(set(every)) > 1


STANDING = (1e3, -1e3)
"""What numbers of all slots pass for, where code reads them as one."""


def hidden_number(
    members: Sequence[Member],
    batches: Sequence[Any],
    device: torch.device,
    losses: Tensor,
    one_base: bool,
) -> str:
    """Whether the model's code reads a number that differs by slot as one, and hides that.

    As one it is NaN, which most code hands on to the loss; ``max(0.1, math.exp(-rate))`` does not.
    So it stands for other numbers here, of which an array's losses must not know: they are those
    of the step in which it was NaN.
    """
    with_number = partial(_losses_with, members, batches, device, one_base)
    seen = map(with_number, STANDING)
    if all(torch.equal(losses, others) for others in seen):
        return ""
    if not torch.equal(losses, with_number(math.nan)):
        return (
            "the same step came to other losses when it was done again: the code reads something "
            "that no seed decides, such as a clock or a counter."
        )
    return (
        "the model's code makes one number of a hyperparameter that differs from trial to trial, "
        f"as math.exp(x) does, or NumPy. {IN_TORCH}"
    )


def _losses_with(
    members: Sequence[Member],
    batches: Sequence[Any],
    device: torch.device,
    one_base: bool,
    value: float,
) -> Tensor:
    """The losses of one step in which hidden numbers are this one."""
    with standing_for(value):
        try:
            found = _passed(members, batches, device, one_base=one_base)
            return _losses(len(members), found, found.evaluated())
        except Declined:  # what math says of a number that no trial has
            return _losses(len(members), None, None)


def _losses(width: int, found: _Pass | None, evaluated: Evaluated | None) -> Tensor:
    """Those of two passes, to be compared: infinite where a slot's code raises, or all is
    declined; and of the second what its outputs come to."""
    if found is None:
        return torch.full((3 * width,), math.inf, dtype=torch.float64)
    losses = torch.full((3 * width,), -2.0, dtype=torch.float64)
    losses[:width] = found.trained.losses.detach()
    for slot in found.trained.failures:
        losses[slot] = math.inf
    if evaluated is not None:
        losses[width : 2 * width] = evaluated.losses.detach()
        for slot, output in enumerate(evaluated.outputs):
            sums = [t.detach().double().sum() for t in tensors_of(output) if t.is_floating_point()]
            losses[2 * width + slot] = sum(sums)
    return losses.nan_to_num(nan=-1.0)
