"""What a user may force of a run, from words or objects to what the planner takes."""

from __future__ import annotations

from shoal.core.errors import PlanError, SpecError
from shoal.core.technique import DataParallel, Pipelined, Resident, Spilled, Technique
from shoal.planner.width import MOST
from shoal.planning import Wish, asked_of, width_wished

_TECHNIQUES: dict[object, Technique] = {
    "resident": Resident(),
    "spilled": Spilled(),
    "pipelined": Pipelined(),
    "data_parallel": DataParallel(),
}
_NO_ARRAYS = (
    (Pipelined, "a pipeline", "has one device"),
    (DataParallel, "a data-parallel technique", "has one device"),
)
"""Techniques that arrays cannot have, in words, and why not."""


def technique_of(asked: str | Technique | None) -> Technique | None:
    """The technique that is asked for by name or as an object.

    Raises:
        SpecError: there is no such technique.
    """
    if asked is None or isinstance(asked, Technique):
        return asked
    if isinstance(asked, str) and asked in _TECHNIQUES:
        return _TECHNIQUES[asked]
    raise SpecError(
        f"technique is 'resident', 'spilled', 'pipelined', 'data_parallel', shoal.Resident(), "
        f"shoal.Spilled(...), shoal.Pipelined(...) or shoal.DataParallel(...), got {asked!r}."
    )


def wish_of(fuse: str | bool | int | None, technique: Technique | None) -> Wish:
    """What is asked for with ``fuse=``.

    Raises:
        SpecError: it cannot be meant.
        PlanError: arrays are asked for, and a technique that they cannot have.
    """
    if fuse is None or fuse == "auto":
        return fuse
    if fuse is False:
        return 0
    try:
        width, kind = width_wished(fuse) or (0, None)
    except (SpecError, AttributeError):
        width, kind = 0, None
    if isinstance(fuse, bool) or not 1 <= width <= MOST:
        raise SpecError(
            f"fuse is 'auto', False, or the width of arrays from 1 to {MOST}, which may say how "
            f"passes run ('16 compiled'), got {fuse!r}."
        )
    if width > 1 and isinstance(technique, Spilled):
        _refuse_spilled(fuse, technique, kind)
    for other, words, why in _NO_ARRAYS:
        if width > 1 and isinstance(technique, other):
            raise PlanError(
                f"fuse={fuse} with {words}: what trains as an array {why}. Leave one of them out."
            )
    return fuse


def _refuse_spilled(fuse: str | int, technique: Spilled, kind: str | None) -> None:
    if named := asked_of(technique)[1]:
        raise PlanError(f"fuse={fuse} with a technique that {named}. Leave one of them out.")
    if kind == "compiled":
        raise PlanError(
            f"fuse={fuse!r} with a spilled technique: compiled passes are not cut into shards. "
            "Leave 'compiled' out."
        )


def refuse_future(*, plan: object, exact: str) -> None:
    """Say no to what cannot be done yet, rather than do something else.

    Raises:
        PlanError: it is asked for.
    """
    asked = {
        "plan=...": plan is not None,
        f"exact={exact!r}": exact != "auto",
    }
    refused = [name for name, wanted in asked.items() if wanted]
    if refused:
        raise PlanError(f"{', '.join(refused)} cannot be done yet. Leave it out.")
