"""What a trial's code changes that an array does not keep for each slot.

Found on copies of the trials, before they are compared as an array.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.fusion.batches import changed_by
from shoal.fusion.declined import Declined
from shoal.fusion.effects.globals import global_settings, identity
from shoal.fusion.effects.otherways import OtherAnswers, may_keep, other_ways, with_other_numbers
from shoal.fusion.effects.passing import handed_on
from shoal.fusion.likeness import copies, numpy_stream
from shoal.fusion.matching.digests import Digests
from shoal.fusion.matching.signature import described
from shoal.fusion.member import Member, in_streams
from shoal.fusion.passes.hooked import HOOKED, tensor_hooks
from shoal.fusion.passes.loop import lone_pass
from shoal.fusion.rows.blend import HIDDEN, same
from shoal.recipes.bound import code_of
from shoal.recipes.recipe import autocast, model_inputs, tensors_of
from shoal.rng import host_words
from shoal.source import MODULE_NAME


def first_side_effect(
    members: Sequence[Member],
    batches: Sequence[Any],
    device: torch.device,
    *,
    own_passes: bool = False,
) -> str:
    """That of the first trial whose own code does not raise; empty if it has none.

    ``own_passes``: each slot's are those of its own module, once, in its own random streams. Then
    only what is kept in Python counts, which such passes leave as it was (``laidup.py``).

    Raises:
        Declined: there is none such.
        torch.OutOfMemoryError: the device has no room for this.
    """
    for member, batch in zip(copies(members), batches, strict=True):
        try:
            words = _side_effect(member, batch, device, own_passes)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failure = error
            continue
        if own_passes:
            return words
        words = words or _laid_up_differently(members, batches, device)
        return words or _change_another_way(copies([member])[0], batch, device)
    raise Declined(f"none of the trials can do a step: {type(failure).__name__}: {failure}")


def _side_effect(member: Member, batch: Any, device: torch.device, own_passes: bool) -> str:
    """What a forward changes that is neither a buffer nor one of torch's random streams."""
    if any(leaf.layout is not torch.strided for leaf in tensors_of(batch)):
        return "its batches have sparse tensors, and arrays stack dense ones alone (to_dense())."
    member.module.train()
    with tensor_hooks() as hooked:
        words = _change(member, batch, device, "a forward", own_passes)
    if hooked and not own_passes:
        return HOOKED
    return words or _change_when_evaluating(member, batch, device, own_passes)


def _change_when_evaluating(
    member: Member, batch: Any, device: torch.device, own_passes: bool
) -> str:
    member.module.eval()
    try:
        with torch.no_grad():
            return _change(member, batch, device, "a forward in evaluation mode", own_passes)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a model that has no loss then is not evaluated
        return ""


def _change(member: Member, batch: Any, device: torch.device, what: str, own_passes: bool) -> str:
    """What is another after forwards, the first of which may lay up something for the others."""
    batch = changed_by(torch.clone, batch)
    parameters = member.module.named_parameters()
    tensors: list[tuple[str, Tensor]] = [(f"the parameter {name!r}", p) for name, p in parameters]
    tensors += [("its batch", leaf) for leaf in tensors_of(batch)]
    kept = [(name, tensor, tensor.detach().clone()) for name, tensor in tensors]
    with in_streams(member, device):
        lone_pass(member, batch, device)
        before = _settings(member)
        python, numpy = random.getstate(), numpy_stream()
        lone_pass(member, batch, device)
        drew = [
            *(["random"] if random.getstate() != python else []),
            *(["NumPy"] if numpy_stream() != numpy else []),
        ]
    if drew and not own_passes and _forward_draws(member, batch, device):
        return f"the model's forward draws from {drew[0]}, which has one stream for all slots."
    words = next((name for name, now, then in kept if not torch.equal(now, then)), "")
    after = _settings(member)
    if not own_passes:
        words = words or _written_later(kept, member, batch, device)
    if words and not own_passes:
        instead = "Do that after the optimizer's step, in a class or a hook of the optimizer's."
        if words == "its batch":
            instead = "Clone it before."
        return (
            f"{what} writes to {words}, which passes of an array do more often than a trial "
            f"alone. {instead}"
        )
    changed = names_changed(before, after)
    if changed := without_handed_on(changed, member, batch, device):
        name = changed[0].replace(f"{MODULE_NAME}.", "")  # of the study's own file
        return (
            f"{what} or its loss changes {name}, {_WITHOUT_IT[own_passes]}. "
            "Make it a buffer of the model, or let the loss do without it."
        )
    return ""


def _written_later(
    kept: Sequence[tuple[str, Tensor, Tensor]], member: Member, batch: Any, device: torch.device
) -> str:
    """Of these, a parameter that a forward writes to when steps have changed them.

    An average of others, say: while they are as they were, what is written is what is there.
    """
    found = [one for one in kept if isinstance(one[1], nn.Parameter) and _can_be_stepped(one[1])]
    stepped = [(*one, 1 + number * _STEP) for number, one in enumerate(found, 1)]
    try:
        with torch.no_grad():
            for _, now, _, factor in stepped:
                now.mul_(factor)
        with in_streams(member, device):
            lone_pass(member, batch, device)
        return next((n for n, now, then, by in stepped if not torch.equal(now, then * by)), "")
    except torch.OutOfMemoryError:
        raise
    except Exception:  # its code does not stand such weights
        return ""
    finally:
        with torch.no_grad():
            for _, now, then, _ in stepped:
                now.copy_(then)


def _can_be_stepped(parameter: Tensor) -> bool:
    """Not what is elsewhere, of which one number stands for all."""
    is_there = parameter.numel() == 1 or any(parameter.stride())
    return is_there and parameter.is_floating_point()


def _forward_draws(member: Member, batch: Any, device: torch.device) -> bool:
    """Whether it is the forward that draws from Python's own streams: inputs and loss may."""
    with in_streams(member, device), autocast(member.recipe, device):
        args, kwargs = model_inputs(member.recipe, batch)
        before = host_words()
        member.module(*args, **kwargs)
        return host_words() != before


def without_handed_on(
    changed: Sequence[str], member: Member, batch: Any, device: torch.device
) -> list[str]:
    """These settings but for attributes that each forward writes before it reads them.

    None is left out where the model is given values of Python, which may be others in the next
    batch: then code may read what this forward wrote first.
    """
    module = member.module
    if _is_given_values(member, batch, device):
        return list(changed)
    places = {words: place for words in changed if (place := _place_of(words, module))}
    if not places:
        return list(changed)

    def run(training: bool) -> None:
        module.train(training)
        with in_streams(member, device), torch.set_grad_enabled(training):
            lone_pass(member, changed_by(torch.clone, batch), device)

    def evaluate() -> None:
        with suppress(Exception):  # a model that has no loss then is not evaluated
            run(False)

    mode = module.training
    try:
        found = handed_on(module, set(places.values()), lambda: run(True), evaluate)
    finally:
        module.train(mode)
    return [words for words in changed if places.get(words) not in found]


def _is_given_values(member: Member, batch: Any, device: torch.device) -> bool:
    """Whether something else than tensors goes into the model with this batch."""
    with in_streams(member, device):
        given = model_inputs(member.recipe, changed_by(torch.clone, batch))
    return not all(isinstance(leaf, Tensor) for leaf in tree_leaves(given))


def _place_of(words: str, module: nn.Module) -> tuple[str, str] | None:
    """The path and the name of which ``naming`` made these words."""
    path, _, name = words.removeprefix("the attribute ").strip("'").rpartition(".")
    is_there = path in dict(module.named_modules()) and words == naming(path, name)
    return (path, name) if is_there else None


_STEP = 2.0**-10  # of the first parameter, by its size; of the others more and more

_WITHOUT_IT = (
    "which would change once for all slots",
    "which an array does not keep for each slot",
)


def _settings(member: Member) -> dict[str, str]:
    """Every setting in words, floats and identities included."""
    return in_words(attributes_of(member.module)) | settings_beside(member)


def settings_beside(member: Member) -> dict[str, str]:
    """Those of them that are no attributes of the model."""
    kept: dict[str, Any] = {}
    for name in ("loss", "inputs"):
        whose, code = f"the recipe's {name}", code_of(getattr(member.recipe, name))
        kept[f"what {whose} keeps"] = code
        if isinstance(code, nn.Module):
            tensors = {f"the buffer {key!r}": value for key, value in code.named_buffers()}
            found = tensors | attributes_of(code)
            kept |= {f"{what} of {whose}": value for what, value in found.items()}
    return in_words(kept) | global_settings(member.recipe, member.module)


def names_changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Of settings in words, those that are others, or in one only; sorted."""
    return sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a model's modules keep beside parameters, buffers and modes."""
    return {
        naming(path, name): value
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if name not in HIDDEN
    }


def naming(path: str, name: str) -> str:
    """What an attribute of the module at ``path`` is called."""
    return f"the attribute {f'{path}.{name}'.lstrip('.')!r}"


def in_words(values: Mapping[str, Any]) -> dict[str, str]:
    """Which tell one moment from another: floats, and which tensor it is and how often written."""
    return {name: f"{described(value)} {identity(value)}" for name, value in values.items()}


# -- what a later forward changes ---------------------------------------------------------------


def _change_another_way(member: Member, batch: Any, device: torch.device) -> str:
    """What forwards keep of their batches where they go as they may with later ones.

    ``if not begins: self.h = ...`` changes nothing in the first batch of an epoch. What is laid up
    once is the same of any batch, and each trial's own there is asked about above. Code that keeps
    nothing is not asked: what it does where it goes another way may be to write a file.
    """
    if not any(map(may_keep, member.module.modules())):
        return ""
    member.module.train()
    with in_streams(member, device):
        ways = list[Any]() if member.recipe.step else other_ways(member.recipe, batch)
    for given, mode in ways:
        try:
            with in_streams(member, device):
                kept = [
                    _kept_after(member, one, mode, device)
                    for one in (given, with_other_numbers(given))
                ]
        except torch.OutOfMemoryError:
            raise
        except (Exception, SystemExit):  # it would not be given that, maybe
            continue
        if isinstance(mode, OtherAnswers) and not mode.asked:
            break
        if changed := names_changed(*kept):
            return (
                f"a forward that goes another way changes {changed[0]}, {_WITHOUT_IT[0]}. Make it "
                "a buffer of the model."
            )
    return ""


def _kept_after(member: Member, batch: Any, mode: Any, device: torch.device) -> dict[str, str]:
    """Digests of what the model's attributes hold after one more forward."""
    with mode:
        lone_pass(member, changed_by(torch.clone, batch), device)
    return {name: Digests().of(value) for name, value in attributes_of(member.module).items()}


# -- what a first forward lays up ---------------------------------------------------------------


_HOOKS = tuple(
    name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs", "_called"))
)
_HOOKED = "Register hooks of the same code in all trials, where the model is made."


def _laid_up_differently(
    members: Sequence[Member], batches: Sequence[Any], device: torch.device
) -> str:
    """Whether two trials keep other things after their first forward; an array has one of them."""
    found: list[tuple[int, dict[str, Any]]] = []
    for slot, (member, batch) in enumerate(zip(copies(members), batches, strict=True)):
        try:
            found.append((slot, _laid_up(member, batch, device)))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # its own, alone too
            continue
        if len(found) == 2:
            break
    if len(found) < 2:
        return ""
    (slot, one), (_, other) = found
    for name in sorted(one.keys() | other.keys()):
        hooks = name.rstrip("'").endswith(_HOOKS)  # of all modules, numbered by torch in turn
        if name in one and name in other:
            pair = [list(v.values()) if hooks else v for v in (one[name], other[name])]
            if _alike(*pair):
                continue
        if without_handed_on([name], copies([members[slot]])[0], batches[slot], device):
            return (
                f"a first forward lays up {name}, and another one in another trial; there would "
                f"be one for all slots. {_HOOKED if hooks else 'Make it a buffer of the model.'}"
            )
    return ""


def _laid_up(member: Member, batch: Any, device: torch.device) -> dict[str, Any]:
    """The attributes that a first forward makes or changes."""
    member.module.train()
    before = in_words(attributes_of(member.module))
    with in_streams(member, device):
        lone_pass(member, changed_by(torch.clone, batch), device)
    found = attributes_of(member.module)
    after = in_words(found)
    return {name: value for name, value in found.items() if before.get(name) != after[name]}


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, Tensor | bool | int | float | complex | str | bytes | type(None)):
        return same([one, other])
    return type(one) is type(other) and described(one) == described(other)
