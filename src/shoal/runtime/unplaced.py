"""An optimizer made state that has no place in its trial's store: the words for each cause."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


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
        return (
            f"unfreeze {name!r} in the schedule: Recipe(schedule=...) may return a subclass of "
            "LRScheduler whose step() sets requires_grad (help(shoal.Recipe) has one), once an "
            "epoch with schedule_interval='epoch': that is seen before anything trains. The "
            "parameter was frozen when the model was measured, and the model or the optimizer "
            f"unfroze it later, so that there is no place for the optimizer's {made}."
        )
    had = ", ".join(sorted(places)) or "none"
    return (
        f"the optimizer made {made} for {name!r} in a later step, and when it was measured that "
        f"parameter's state was: {had}. Have the optimizer make all of its state in its first "
        "step."
    )


def _described(value: Tensor) -> str:
    return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
