"""Why the micro-batches of a step go as they do, in words."""

from __future__ import annotations

from shoal.core.spec import JobMeasure
from shoal.core.technique import Spilled
from shoal.core.units import format_seconds
from shoal.planner.choose import may_go_by_shard, orders_of
from shoal.planner.need import Request
from shoal.planner.paper import Cutting


def why_order(
    measure: JobMeasure, technique: Spilled, request: Request, choice: Cutting | None
) -> str:
    """Which loop is outside, and what the other one would take where ``choice`` knows."""
    count = request.micro_batches
    if count == 1:
        return "order='shard' changes nothing: a step has one micro-batch"
    would = _would(choice)
    if technique.order == "shard":
        by_shard = f"a shard runs all {count} micro-batches of a step while it is there"
        if would:
            by_shard += f"{would} they went one after another"
        return by_shard + ("; what each draws at random is drawn ahead" if measure.draws else "")
    plain = f"the {count} micro-batches of a step go through the model one after another"
    if would:
        return f"{plain}{would} a shard ran all of them while it is there"
    if len(orders_of(measure, request)) > 1:
        return plain if choice is None else f"{plain}: there is no room for all their inputs"
    if measure.in_turn:
        return f"{plain}: {measure.in_turn}"
    if may_go_by_shard(measure, request):
        return f"{plain}; where no two layers share statistics, order='shard' loads less"
    why = "their number is not known"
    if measure.draws and not measure.foretold:
        why = "it draws random numbers that cannot be foretold"
    return f"{plain}, since {why}"


def _would(choice: Cutting | None) -> str:
    if choice is None or choice.other_s is None:
        return ""
    about = "at least" if choice.other_least else "about"
    return f": a step would take {about} {format_seconds(choice.other_s)} if"
