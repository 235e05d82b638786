"""Why a trial is not fused, or leaves an array: an error whose message is the reason."""

from __future__ import annotations

from shoal.core.errors import PlanError


class Declined(PlanError):
    """These trials cannot train as one array; alone they can. The message says why."""


class Disagreement(Declined):
    """The slots of an array would take different paths through the model's Python code."""


class Unbatched(Disagreement):
    """Code that goes another way in each slot, whatever the slots hold."""


class Untraceable(Declined):
    """A pass that cannot be kept as a graph; operation by operation it runs."""


FROZEN = (
    "parameters were frozen or unfrozen while it trained, and those of an array are trained in "
    "all slots or in none"
)
