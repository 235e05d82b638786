"""Why a trial is not fused, or leaves an array: an error whose message is the reason."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.errors import PlanError


class Declined(PlanError):
    """These trials cannot train as one array; alone they can. The message says why."""


class Disagreement(Declined):
    """The slots of an array would take different paths through the model's Python code.

    ``groups``: those that take part, by what they answered; empty where that is not known, or
    others are asked too.
    """

    def __init__(self, words: str, groups: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(words)
        self.groups = groups


def answers_of(error: BaseException) -> Sequence[Sequence[int]]:
    """Slots by what they answered, where more than one answer is why all of them cannot go on."""
    groups = error.groups if isinstance(error, Disagreement) else ()
    return groups if len(groups) > 1 else ()


def leaving(error: BaseException) -> dict[int, Declined]:
    """The slots that answered otherwise than most did, with why each of them is to go on alone."""
    answers = answers_of(error)
    most = max(answers, key=len, default=())
    others = (slot for some in answers if some is not most for slot in some)
    return {slot: Declined(f"most of the others answered otherwise: {error}") for slot in others}


class Unbatched(Disagreement):
    """Code that goes another way in each slot, whatever the slots hold."""


class Draws(Disagreement):
    """Code that draws, of all slots at once, what each is to draw by itself."""


class OfMemory(Declined):
    """Code that goes by where tensors lie: elsewhere in an array, also slot by slot."""


class Untraceable(Declined):
    """A pass that cannot be kept as a graph; operation by operation it runs."""


FROZEN = (
    "parameters were frozen or unfrozen while it trained, and those of an array are trained in "
    "all slots or in none"
)

REPLACED = (
    "the forward gave a weight other values by .data, or put another one in its place, and that "
    "of an array is a row of all trials' (write into it, under torch.no_grad)"
)

OF_ALL_TRIALS = (
    "as_strided is told where in the memory of a tensor to begin (storage_offset), and "
    "in an array that memory is all trials' (without it a view begins where the tensor does)"
)
