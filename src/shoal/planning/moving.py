"""What is said of what stays on the device, of what waits on the host, and of narrow weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.core.errors import PlanError
from shoal.core.spec import ShardSpec, TrialSpec
from shoal.core.technique import (
    Spilled,
    has_split_master,
    kept_weights,
    late_shards,
    travels_narrow,
    turned_shards,
    waiting_gradients,
)
from shoal.core.units import Seconds, counted, format_bytes, format_seconds
from shoal.planner.away import FROZEN, can_move
from shoal.planner.need import Request, moved_saved_bytes, need
from shoal.runtime.wire.messages import Measured
from shoal.spill.generate import route_of


def why_moved(
    shards: Sequence[ShardSpec], technique: Spilled, step_s: Seconds, without_s: Seconds
) -> str:
    """How many shards keep, recompute or move what they saved, and what the last is worth.

    ``without_s`` is what a step takes where those that move would recompute too.
    """
    keep, move = len(technique.keep_activations or ()), len(technique.spill_activations or ())
    again = len(shards) - 1 - keep - move - sum(shard.frozen for shard in shards)
    return (
        f"what the forward of {counted(move, 'shard')} saved waits on the host, "
        f"{format_bytes(moved_saved_bytes(shards, technique))} each way a micro-batch; "
        f"{counted(keep, 'keeps', 'keep')} it on the device, "
        f"{counted(again, 'runs its', 'run their')} forward again: a step takes "
        f"{format_seconds(step_s)}, and {format_seconds(without_s)} if nothing waited on the host"
    )


def refuse_moved(trial: TrialSpec, shards: Sequence[ShardSpec], technique: Spilled) -> None:
    """See to it that what was asked for can be done.

    Raises:
        PlanError: what a named shard saves cannot leave, or no forward shall run again and one
            has to; says why.
    """
    able = route_of(technique, shards).may_spill
    for shard in technique.spill_activations or ():
        if shard not in able or not can_move(shards[shard]):
            raise PlanError(
                f"trial {trial.number} was asked to have what shard {shard} of {len(shards)} "
                "saves wait on the host, but "
                f"{_why_not(shards[shard], technique, shard in able)}. Leave it out of "
                "spill_activations=."
            )
    stuck = [s.index for s in shards[:-1] if s.saved_bytes is None and not s.frozen]
    if technique.recompute is False and (stuck or technique.order == "shard"):
        why = "with order='shard' its forward of the next micro-batch comes before its backward"
        if stuck:
            why = "its forward changes what its backward, or another shard, reads"
        raise PlanError(
            f"trial {trial.number} was asked to run no forward again, but shard "
            f"{stuck[0] if stuck else 0} has to: {why}. Use recompute='auto'."
        )


def _why_not(shard: ShardSpec, technique: Spilled, is_able: bool) -> str:
    if technique.order == "shard":
        return "its forward of the next micro-batch comes before the backward of this one"
    if shard.frozen:
        return FROZEN
    if not is_able:
        return "its backward comes too soon after its forward"
    if shard.saved_bytes is not None:
        return shard.why_not_movable or "with narrower weights its backward could not bear it"
    return "its forward changes what its backward, or another shard, reads"


def why_kept(exact: Measured, technique: Spilled, request: Request) -> list[str]:
    """What stays on the device from step to step, or from forward to backward."""
    forced, shards, reasons = request.technique, exact.measure.shards, list[str]()
    if technique.keep or technique.keep_weights:
        none = need(exact.measure, shards, _all_travel(technique), request, exact.layout)
        stay = counted(len(technique.keep or ()), "shard stays", "shards stay")
        weights = kept_weights(technique)
        more = f", and the parameters of {len(weights)} more" if weights else ""
        reasons.append(
            f"{stay} on the device{more}, for which there is room; if all travelled "
            f"{format_bytes(none.moved)} would move"
        )
    if turned := [s for s in turned_shards(technique, len(shards)) if not shards[s].frozen]:
        reasons.append(
            f"{counted(len(turned), 'more shard holds its', 'more shards hold their')} "
            "parameters from forward to backward, when there is room for them"
        )
    if waiting := waiting_gradients(technique, len(shards)):
        reasons.append(
            f"the gradients of {counted(len(waiting), 'shard')} that do not stay wait for the "
            "step on the device, for which there is room"
        )
    if isinstance(forced, Spilled) and forced.late_state and not late_shards(technique):
        reasons.append("late_state=True changes nothing: no state comes without its parameters")
    return reasons


def _all_travel(technique: Spilled) -> Spilled:
    none = replace(technique, keep=(), keep_weights=(), keep_head=None)
    none = replace(none, keep_turn=0, keep_gradients=0, late_state=None)
    return replace(none, keep_activations=(), spill_activations=())


def why_narrow(shards: Sequence[ShardSpec], technique: Spilled) -> str:
    """Why some weights travel as bfloat16, and what that saves."""
    whole = sum(s.owned_bytes for s in shards if travels_narrow(technique, s.index))
    narrow = sum(
        s.narrow.parameter_bytes
        for s in shards
        if s.narrow is not None and travels_narrow(technique, s.index)
    )
    said = (
        "weights that only bf16 products read travel as bfloat16, with the same bits: of the "
        f"shards that travel {format_bytes(narrow)} are loaded instead of "
        f"{format_bytes(whole)}"
    )
    if has_split_master(technique):
        said += ", and beside that the host keeps no more than the 17 bits that it lacks of each"
    return said
