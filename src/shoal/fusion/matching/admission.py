"""Who may sit in an array's slots: trials of its signature, and shells where nobody is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from shoal.fusion.declined import Declined
from shoal.fusion.matching.match import Signature, first_difference
from shoal.fusion.matching.oldnorms import old_norm
from shoal.fusion.matching.signature import signature_of
from shoal.fusion.member import Member
from shoal.recipes.modelcopy import deepcopied


def shared_signature(members: Sequence[Member]) -> Signature:
    """The one signature of all members.

    Raises:
        Declined: there are several, or no array trains such a recipe.
    """
    recipe = members[0].recipe
    if recipe.precision == "bf16-sr":
        raise Declined("precision='bf16-sr' rounds each trial's weights by itself.")
    if recipe.loss_rows is not None:
        raise Declined("loss_rows computes a trial's loss in pieces of its own.")
    if recipe.schedule_interval == "evaluation" and any(m.habits.touches for m in members):
        raise Declined("the schedule goes by evaluations, and its code touches parameters.")
    first = _signature(members[0])
    for member in members:
        require_signature(first, member)
    return first


def require_signature(wanted: Signature, member: Member) -> None:
    """Check one more trial.

    Raises:
        Declined: it has another signature, or a hook that an array cannot have; says which.
    """
    difference = first_difference(wanted, _signature(member))
    if difference:
        raise Declined(f"these trials cannot share an array: {difference}.")
    if words := old_norm(member.module):
        raise Declined(words)
    hooked = _with_gradient_hook(member.module)
    if hooked:
        raise Declined(f"{hooked} has a gradient hook, which would see all slots' gradients.")


def _signature(member: Member) -> Signature:
    return signature_of(member.recipe, member.module, member.optimizer)


def _with_gradient_hook(module: nn.Module) -> str:
    """The first parameter or module with a hook in the backward, in words; empty if none."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"the parameter {name!r}"
    for name, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            return f"the module {name!r}"
    return ""


def shell(member: Member, rows: Mapping[str, Tensor] | None = None) -> Member:
    """What stands in an empty slot: the code of a trial that is there, and no trial.

    Its tensors are ``rows`` by first name, the slot's own; without any those of ``member``.
    """
    module = member.module
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors: dict[int, Tensor] = {
        id(tensor): (rows[name] if rows else tensor).detach() for name, tensor in named.items()
    }
    parameters = {
        id(p): nn.Parameter(tensors[id(p)], p.requires_grad) for p in module.parameters()
    }
    module = deepcopied(module, {**tensors, **parameters})
    return Member(
        recipe=member.recipe,
        hp=member.hp,
        module=module,
        optimizer=member.optimizer,
        schedule=None,
        rng=member.rng,
    )
