"""Gradients, state and parameters that no room was planned for: the words for each cause."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shoal.core.errors import TrialError
from shoal.memory.layout import TrialLayout


def require_places(
    params: Mapping[str, nn.Parameter], layout: TrialLayout, *, varies: bool
) -> None:
    """The model is of the shapes that its state has: other hyperparameters give others.

    ``varies``: some change on the way, in a population. Else what is trained now follows from
    what the model or its data did.

    Raises:
        TrialError: it is not, or what was frozen is trained now.
    """
    vary = "Leave {what} out of shoal.PBT(vary=...)."
    trained = {field.spec.name for shard in layout.shards for field in shard.grad.fields}
    stored = [field.spec for shard in layout.shards for field in shard.param.fields]
    for name, shape in ((spec.name, spec.shape) for spec in stored):
        if tuple(found := params[name].shape) != shape:
            raise TrialError(
                f"{name!r} is {tuple(found)} with the hyperparameters that this trial has "
                f"now, and {shape} in its state. {vary.format(what='what changes shapes')}"
            )
        if trained and params[name].requires_grad and name not in trained:
            if not varies:
                raise TrialError(unfrozen(name, "its gradient"))
            raise TrialError(
                f"{name!r} is trained with the hyperparameters that this trial has now, and was "
                f"frozen before. {vary.format(what='what freezes parameters')}"
            )


def unplaced(
    name: str, key: str, value: Tensor, places: Mapping[str, Tensor], *, was_frozen: bool
) -> str:
    """The words for state ``key`` of parameter ``name``; ``places`` are those that it has.

    ``was_frozen``: whether the parameter was, when its model was built.
    """
    if key in places:
        return (
            f"the optimizer's state {key!r} of {name!r} is {_described(value)} now, and was "
            f"{_described(places[key])} when it was measured. State has a fixed place in its "
            "trial's store: give the optimizer state that keeps its shape and type."
        )
    made = f"state {key!r} of shape {tuple(value.shape)}"
    if was_frozen and not places:
        return unfrozen(name, f"the optimizer's {made}")
    had = ", ".join(sorted(places)) or "none"
    return (
        f"the optimizer made {made} for {name!r} in a later step, and when it was measured that "
        f"parameter's state was: {had}. Have the optimizer make all of its state in its first "
        "step."
    )


def unfrozen(name: str, what: str) -> str:
    """The words for ``what`` of a parameter that was frozen when its model was built."""
    return (
        f"unfreeze {name!r} in the schedule: Recipe(schedule=...) may return a subclass of "
        "LRScheduler whose step() sets requires_grad (help(shoal.Recipe) has one), once an "
        "epoch with schedule_interval='epoch': that is seen before anything trains. The "
        "parameter was frozen when the model was measured, and the model or the optimizer "
        f"unfroze it later, so that there is no place for {what}."
    )


def _described(value: Tensor) -> str:
    return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def replaced(who: str, name: str, *, is_there: bool = True) -> str:
    """The words where code (``who``) put another parameter in one's place, or took it away."""
    what = f"gave the model another {name!r}" if is_there else f"took {name!r} away"
    return (
        f"{who} {what}, and a trial's parameters are those that Recipe(model=...) made, which the "
        "optimizer has. Write into them (p.copy_(...), under torch.no_grad()), or build all parts "
        "there and choose between them."
    )
