"""What is on record of trials' numerics says how those train that are left. Pure.

[Note: who is heard]
A kill may come before anything is saved, and what a trial trains as is fixed before its first
step. So the plans that are on record count too, and those of trials that have ended:

    trials that go on from a generation    what it says: their bits depend on it
    none does: those that were planned     what they were planned as
    none was: all others of the study      one study, one rule

The first of these that there are is heard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from shoal.core.plan import with_seats
from shoal.core.seats import epochs_of, until
from shoal.core.spec import DeviceSpec, Place, Scalar
from shoal.core.technique import PLACES, Technique
from shoal.observe.rows import TrialRow, TrialState
from shoal.planning import technique_on_record, where_it_is

Key = Mapping[str, Scalar]
Keys = Mapping[int, Key]


def keys_to_follow(
    generations: Keys, rows: Iterable[TrialRow], todo: Collection[int]
) -> dict[int, Key]:
    """The numerics keys, by trial, that say how the trials train that are ``todo``.

    ``generations``: the keys of those that go on from one.
    """
    planned = {row.number: row.numerics for row in rows if row.numerics}
    return (
        {number: key for number, key in generations.items() if key}
        or {number: key for number, key in planned.items() if number in todo}
        or planned
    )


def technique_to_follow(keys: Keys, todo: Collection[int]) -> Technique | None:
    """What these keys have trials train as; None where that is open.

    Of trials that have all ended nobody's bits depend on it: they count where they agree.
    """
    if any(number in todo for number in keys):
        return technique_on_record(keys.values())
    found = {technique_on_record([key]) for key in keys.values()}
    return found.pop() if len(found) == 1 else None


def threads_to_follow(keys: Keys, device: DeviceSpec) -> int | None:
    """The threads that these keys have a device of this kind compute with; None where it is open.

    What ran on CPUs says nothing of a GPU, nor the other way round.
    """
    on_cpu = device.kind == "virtual"
    of_its_kind = [k for k in keys.values() if (k.get("device", "cpu") == "cpu") == on_cpu]
    threads = {int(key["threads"] or 1) for key in of_its_kind if "threads" in key}
    return threads.pop() if len(threads) == 1 else None


def place_to_follow(keys: Keys, todo: Collection[int]) -> Place | None:
    """Where trials that are ``todo`` step, where these keys say so and agree.

    On CPUs no bit depends on it, and of trials that have ended nobody's.
    """
    places = {key.get("optimizer_place") for number, key in keys.items() if number in todo}
    return next((place for place in PLACES if places == {place}), None)


def keys_to_keep(generations: Keys, rows: Iterable[TrialRow], todo: Collection[int]) -> Keys:
    """The numerics keys of trials that have begun, which they go on with unless that is waived.

    One that has saved nothing does its steps again, in the seat in which it did the first. One
    that failed so begins anew.
    """
    anew = {
        row.number: _at_its_first_step(row.numerics)
        for row in rows
        if row.number in todo and row.step and row.state is not TrialState.FAILED
    }
    return anew | dict(generations)


def _at_its_first_step(key: Key) -> Key:
    """A key without the seats that the trial is to get later."""
    key = where_it_is(key, 0)
    epochs = epochs_of(key)
    return with_seats(key, until(epochs, 0)) if epochs else key
