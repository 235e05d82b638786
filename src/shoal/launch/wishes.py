"""What a user may force of a run, from words or objects to what the planner takes."""

from __future__ import annotations

from shoal.core.errors import PlanError, SpecError
from shoal.core.plan import Plan
from shoal.core.technique import (
    Captured,
    DataParallel,
    Pipelined,
    Resident,
    Spilled,
    Technique,
)
from shoal.core.values import one_of
from shoal.planner.width import MOST
from shoal.planning import UNCUT, WidthWish, Wish, asked_of, refusal, width_wished
from shoal.recipes.recipe import Recipe

_TECHNIQUES: dict[object, Technique] = {
    "resident": Resident(),
    "captured": Captured(),
    "spilled": Spilled(),
    "pipelined": Pipelined(),
    "data_parallel": DataParallel(),
}
_NO_ARRAYS = (
    (
        Captured,
        "'captured'",
        "runs the passes of its trials as one, for which there is 'N traced'",
    ),
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
        f"technique is 'resident', 'captured', 'spilled', 'pipelined', 'data_parallel', "
        f"shoal.Resident(), shoal.Captured(), shoal.Spilled(...), shoal.Pipelined(...) or "
        f"shoal.DataParallel(...), got {asked!r}."
    )


def refuse_useless(asked: Technique | None, recipe: Recipe) -> None:
    """See to it that all that is asked for of a spilled model can make a difference.

    Raises:
        SpecError: something has no use in this combination.
    """
    if not isinstance(asked, Spilled):
        return
    clips = recipe.clip_grad_norm is not None
    if asked.late_state and asked.keep is not None and not asked.keep_weights:
        raise SpecError(
            f"late_state=True with keep={asked.keep} and no keep_weights=: it is about shards of "
            "which the parameters stay and the optimizer's state travels. Name some in "
            "keep_weights=, or leave late_state= out."
        )
    if asked.late_state is False and clips:
        raise SpecError(
            f"late_state=False with clip_grad_norm={recipe.clip_grad_norm}: no shard steps before "
            "the norm is known, so the state always comes late then. Leave it out."
        )


def wish_of(fuse: str | bool | int | None, technique: Technique | None) -> Wish:
    """What is asked for with ``fuse=``.

    Raises:
        SpecError: it cannot be meant.
        PlanError: arrays are asked for, and a technique that they cannot have.
    """
    if fuse is None or fuse == "auto":
        return fuse
    if fuse is False or fuse == "off":
        return 0
    wish = fuse
    if isinstance(fuse, str):  # as on a command line
        wish = int(fuse) if fuse.isdecimal() else fuse.replace("-", " ", 1)
    if isinstance(wish, bool) or not isinstance(wish, int | str):
        raise refusal(fuse, "Write auto to have arrays measured.")
    width, kind, _ = width_wished(wish) or WidthWish(0)
    if not 1 <= width <= MOST:
        raise refusal(fuse, "Write off for no arrays." if width < 1 else f"Write {MOST}.")
    if width > 1 and isinstance(technique, Spilled):
        _refuse_spilled(fuse, technique, kind)
    for other, words, why in _NO_ARRAYS:
        if width > 1 and isinstance(technique, other):
            raise PlanError(
                f"fuse={fuse} with {words}: what trains as an array {why}. Leave one of them out."
            )
    return wish


def wish_beside(recorded: Wish, technique: Technique | None) -> Wish:
    """A wish on record, where the technique that is asked for now leaves room for it.

    Raises:
        SpecError: the record's words are none.
    """
    try:
        return wish_of(recorded, technique) if recorded else recorded
    except PlanError:
        return None


def _refuse_spilled(fuse: str | int, technique: Spilled, kind: str | None) -> None:
    if named := asked_of(technique)[1]:
        raise PlanError(f"fuse={fuse} with a technique that {named}. Leave one of them out.")
    if kind in UNCUT:
        raise PlanError(
            f"fuse={fuse!r} with a spilled technique: {UNCUT[kind]} are not cut into shards. "
            f"Leave {kind!r} out."
        )


def refuse_inexact(plan: Plan) -> None:
    """Refuse a plan, strictly to be exact, of which a trial trains to other bits than alone.

    Raises:
        PlanError: names the first one, and what it trains as.
    """
    for job in plan.jobs:
        technique = job.technique
        stale = isinstance(technique, Pipelined) and technique.is_stale
        what = "in an array" if job.array or job.began else ""
        what = what or "data-parallel" * isinstance(technique, DataParallel)
        if what := what or "with stale weights" * stale:
            raise PlanError(
                f"exact='strict', and trial {job.trial} would train {what}, to other bits than "
                "alone. Leave one of them out; what began so goes on without exact='strict'."
            )


def strictly(exact: object, technique: Technique | None, fuse: object, recipe: Recipe) -> bool:
    """Whether kernels are to be deterministic alone, and trials to train just as alone.

    Raises:
        SpecError: ``exact`` is no such word.
        PlanError: it is strict, and something is asked for that trains to other bits.
    """
    if one_of("exact", exact, ("auto", "strict")) == "auto":
        return False
    stale = isinstance(technique, Pipelined) and technique.is_stale
    by_replicas = isinstance(technique, DataParallel)
    others = {
        f"fuse={fuse!r}": (bool(fuse) and fuse != 1, "an array's kernels round in other ways"),
        "a data-parallel technique": (by_replicas, "it adds up in another order"),
        "schedule='2bw'": (stale, "its gradients are of weights that are one step old"),
        "Recipe(stale=...)": (recipe.stale is not None, "it lets weights be chosen that are old"),
    }
    for what, (is_asked, why) in others.items():
        if is_asked:
            raise PlanError(
                f"exact='strict' with {what}: {why}, and strict is to the bits of training alone. "
                "Leave one of them out."
            )
    return True
