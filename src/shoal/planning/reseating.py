"""Seats that trials under way get because a user asks for another width. Pure.

A trial keeps the seat that is on record: its bits depend on it. Who resumes a study with another
width and accepts other bits gives those under way new seats, from the step on at which they go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from shoal.core.plan import with_seats
from shoal.core.seats import ALONE, Epoch, base_of, epochs_of, rebased, until, with_epoch
from shoal.core.spec import PassKind, Scalar
from shoal.planning.widthwish import KINDS, ONE_WIDTH, WidthWish

Key = Mapping[str, Scalar]


def array_place(numerics: Mapping[str, object]) -> tuple[int, int] | None:
    """Slot and width with which a trial began, as its numerics key tells; None: in no array."""
    epochs = epochs_of(numerics)
    return (epochs[0].slot, epochs[0].width) if epochs else None


def array_kind(numerics: Mapping[str, object]) -> PassKind:
    """How the passes of its array run, as a numerics key tells; a study of old says nothing."""
    told = str(numerics.get("array_pass", "eager")).partition(",")[0]
    return next((kind for kind in KINDS if kind == told), "eager")


def recorded_seat(numerics: Mapping[str, object]) -> Epoch:
    """The seat from which others follow: that it began with, or that was asked for last."""
    return base_of(_seats(numerics))


def recorded_width(numerics: Mapping[str, object]) -> int:
    """The width of that seat."""
    return recorded_seat(numerics).width


def free_slot(keys: Iterable[Mapping[str, object]], width: int) -> int:
    """The slot that fewest trials have; they follow each other there."""
    used = Counter(seat.slot for seat in map(recorded_seat, keys) if seat.width == width)
    return min(range(width), key=lambda slot: (used[slot], slot))


def asked_width(keys: Iterable[Mapping[str, object]]) -> int | None:
    """What was asked for last, of trials that were under way then; None if nothing was."""
    asked = [seat for key in keys if (seat := recorded_seat(key)).asked]
    return asked[-1].width if asked else None


def where_it_is(key: Key, step: int) -> Key:
    """A key of a trial that goes on after ``step``: what was asked for later holds from there."""
    epochs = epochs_of(key)
    there = rebased(epochs, step)
    return key if there == epochs else with_seats(key, there)


def begins_in_one(key: Key) -> bool:
    """Whether a trial that trained by itself comes into an array, and how is not on record."""
    epochs = epochs_of(key)
    return bool(epochs) and epochs[0].width == ALONE and "array_pass" not in key


class Reseating:
    """Gives trials under way the seats that are asked for.

    Args:
        wished: None: no width is asked for.
        steps: Where trials under way go on.
        accepts: Whether other bits are accepted.
    """

    def __init__(
        self, wished: WidthWish | None, steps: Mapping[int, int], *, accepts: bool
    ) -> None:
        self._width = None if wished is None else wished.width or ALONE
        self._kind = None if wished is None else wished.kind
        self._steps, self._accepts = dict(steps), accepts

    @property
    def is_asked(self) -> bool:
        """Whether trials under way are to change seats."""
        return self._accepts and self._width is not None

    def accepted(self, trial: int) -> int:
        """Where a trial under way goes on, if it may do so in another seat; else 0."""
        return self._steps.get(trial, 0) if self._accepts else 0

    def begins(self, trial: int) -> bool:
        """Whether a trial that was planned has done no step, and may begin elsewhere."""
        return self.is_asked and self._steps.get(trial) == 0

    def there(self, trial: int, key: Key) -> tuple[Epoch, ...] | None:
        """The seats that it had when it goes on; None of one that is not under way."""
        step = self._steps.get(trial)
        return None if step is None else until(epochs_of(key), step)

    def seat(self, trial: int, key: Key, others: Sequence[Key]) -> tuple[Key, str]:
        """A trial's key with the seat that is asked for, and what there is to say.

        ``others`` are the keys of all trials of its shape.
        """
        step, width = self._steps.get(trial), self._width
        if width is None or not step:
            return key, ""
        epochs = _seats(key)
        so_far = until(epochs, step)
        now = so_far[-1]
        if width in (now.width, base_of(so_far).width):  # or it got where it is by that wish
            return key, ""
        if why_not := self._why_not(key, now, width):
            return key, f"{_it_stays(now)}: {why_not}"
        if not self._accepts:
            way = "--accept-numerics (accept_numerics=True)"
            return key, f"{_it_stays(now)}, as its bits depend on that; {way} would have it change"
        slot = 0 if width == ALONE else free_slot(others, width)
        seat = Epoch(step, slot, width, asked=True)
        was = until(epochs, step - 1)[-1]
        return with_seats(key, with_epoch(so_far, seat)), (
            f"it goes on so from step {step}, as was asked; before that it was {_where(was)}"
        )

    def stays(self, trial: int, key: Key, why_not: str) -> str:
        """What there is to say of a seat that cannot be had."""
        return f"{_it_stays(until(_seats(key), self._steps[trial])[-1])}: {why_not}"

    def _why_not(self, key: Key, now: Epoch, width: int) -> str:
        if now.for_good:
            return "it left its array for good"
        odd = next((kind for kind in (array_kind(key), self._kind) if kind in ONE_WIDTH), None)
        if odd is None or width == ALONE:
            return ""
        return f"passes that are {odd} have bits of their own, and a trial begins with them"


def _seats(key: Mapping[str, object]) -> tuple[Epoch, ...]:
    """Those that a key tells of; of a trial that was in no array, by itself."""
    return epochs_of(key) or (Epoch(0, 0, ALONE),)


def _where(seat: Epoch) -> str:
    return "by itself" if seat.width == ALONE else f"in slot {seat.slot} of {seat.width}"


def _it_stays(seat: Epoch) -> str:
    return f"it stays {_where(seat)}"
