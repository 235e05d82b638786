"""What is asked of a spilled trial by name, and cannot be: refused with the reason."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.errors import PlanError, TooLarge
from shoal.core.spec import JobMeasure, TrialSpec
from shoal.core.technique import (
    Resident,
    Spilled,
    Technique,
    has_split_master,
    heads_of,
    kept_shards,
    kept_weights,
    travels_narrow,
)
from shoal.core.units import Bytes, counted, format_bytes, format_enough
from shoal.memory.layout import TrialLayout, head_sizes, lenders, state_of
from shoal.planner.away import FROZEN
from shoal.planner.choose import may_go_by_shard
from shoal.planner.need import Need, Request, goes_by_batch
from shoal.planner.stages import most_pieces
from shoal.runtime.wire.messages import Measured
from shoal.spill.generate import route_of


def refuse_own_step(trial: TrialSpec, forced: Technique | None) -> None:
    """Raises PlanError where a step of one's own is to train otherwise than resident."""
    if forced is not None and type(forced) is not Resident:
        raise PlanError(
            f"trial {trial.number} was asked to train {type(forced).__name__.lower()}, but "
            "its recipe has a step of its own: that is one unit, and what of it a shard or a "
            "stage would run is not known. Use technique='resident', or leave technique= out."
        )


def too_large_a_step(
    trial: TrialSpec, measure: JobMeasure, budget: Bytes, whole: Need
) -> TooLarge:
    """Why a step of one's own does not fit."""
    return TooLarge(
        f"trial {trial.number} does not fit a device of {format_bytes(budget)}: "
        f"with all its models and optimizers it needs {format_enough(whole.total)}, of "
        f"them {format_bytes(measure.shards[0].owned_bytes)} parameters, "
        f"{format_bytes(measure.shards[0].state_bytes)} of the optimizers' state and "
        f"{format_bytes(measure.shards[0].backward_peak_bytes)} inside the step. A step "
        "of one's own, Recipe(step=...), cannot be spilled or cut into stages. Give the "
        "device that much memory, or make the batch or the models smaller."
    )


def as_named(technique: Spilled) -> Spilled:
    """With nothing kept but what was asked for by name."""
    return replace(
        technique,
        keep=technique.keep or (),
        keep_turn=technique.keep_turn or 0,
        keep_gradients=technique.keep_gradients or 0,
        keep_activations=technique.keep_activations or (),
        spill_activations=technique.spill_activations or (),
    )


def refuse_shards(
    trial: TrialSpec, forced: Technique | None, closest: Need | None, budget: Bytes
) -> None:
    """Raises TooLarge where so many shards were asked for, and do not fit."""
    if not isinstance(forced, Spilled) or not forced.shards or closest is None:
        return
    kept = f", {len(forced.keep)} of them kept on the device," if forced.keep else ""
    if forced.keep_activations:
        kept += f" {len(forced.keep_activations)} of them with their activations,"
    raise TooLarge(
        f"trial {trial.number} was asked to train in {counted(forced.shards, 'shard')}"
        f"{kept} which needs {format_enough(closest.total)} or more on a device of "
        f"{format_bytes(budget)}. Ask for more shards, or leave shards= out to have "
        "the fewest that fit."
    )


def refuse_too_many(trial: TrialSpec, measured: Measured, forced: Technique | None) -> None:
    """Raises PlanError where there are to be more shards than the model has pieces."""
    most = most_pieces(measured.measure.layers)
    if isinstance(forced, Spilled) and (forced.shards or 1) > most:
        raise PlanError(
            f"trial {trial.number} was asked to train in {forced.shards} shards, but its "
            f"model has {counted(most, 'piece')} that may stand alone. Ask for at most {most}."
        )


def refuse_transfer(
    trial: TrialSpec, measured: Measured, forced: Technique | None, precision: str
) -> None:
    """Raises PlanError where weights are to travel narrow, and none can."""
    measure = measured.measure
    if isinstance(forced, Spilled) and forced.transfer == "bf16" and not measure.narrow:
        why = (
            "no weight of its model is read by bf16 products alone"
            if precision == "bf16"
            else f"its recipe trains in {precision}"
        )
        if measure.compiled:
            why = "it is compiled, and nobody sees what reads its weights"
        what, name = "its weights travel as bfloat16", "transfer="
        if forced.master == "split":
            what = "the float32 of weights that travel as bfloat16 split on the host"
            name = "master= and transfer="
        raise PlanError(
            f"trial {trial.number} was asked to have {what}, but {why}. Leave {name} out, or give "
            "Recipe(precision='bf16')."
        )


def splits_nothing(exact: Measured, technique: Technique) -> bool:
    """Whether no weight travels narrow whose float32 was to be split."""
    names, shards = exact.measure.narrow, exact.layout.shards if exact.layout else ()
    moving = (own for index, own in enumerate(shards) if travels_narrow(technique, index))
    is_narrow = (field.spec.name in names for own in moving for field in own.param.fields)
    return has_split_master(technique) and not any(is_narrow)


def refuse_master(
    trial: TrialSpec, exact: Measured, technique: Spilled, forced: Technique | None
) -> None:
    """Raises PlanError where a float32 is to be split, and what was named to stay has them all."""
    if isinstance(forced, Spilled) and forced.keep and splits_nothing(exact, technique):
        shards = counted(len(exact.measure.shards), "shard")
        raise PlanError(
            f"trial {trial.number} was asked to have the float32 of weights that travel as "
            f"bfloat16 split on the host, but of its {shards} those that travel have none. Leave "
            "master= out, or name fewer shards in keep=."
        )


def refuse_order(trial: TrialSpec, measured: Measured, request: Request) -> None:
    """Raises PlanError where shards are to run all micro-batches, and that is another training."""
    forced, measure = request.technique, measured.measure
    if not isinstance(forced, Spilled) or forced.order != "shard":
        return
    if request.micro_batches > 1 and not may_go_by_shard(measure, request):
        why = why_by_micro(measure)
        raise PlanError(
            f"trial {trial.number} was asked to run all {request.micro_batches} "
            f"micro-batches of a step shard by shard, but {why}. Use order='micro', or leave "
            "it out."
        )


def refuse_turn(trial: TrialSpec, measured: Measured, request: Request) -> None:
    """Raises PlanError where parameters are to wait over a turn that no program has."""
    forced = request.technique
    if not isinstance(forced, Spilled) or not forced.keep_turn:
        return
    if goes_by_batch(measured.measure, request):
        raise PlanError(
            f"trial {trial.number} was asked to hold parameters of {forced.keep_turn} shards from "
            "forward to backward, but its data does not say how many batches it has, so each "
            f"of the {request.micro_batches} micro-batches of a step is a program of its own. "
            "Give the data a __len__, or leave keep_turn= out."
        )


def why_by_micro(measure: JobMeasure) -> str:
    """Why no shard may run all micro-batches of a step."""
    if not measure.draws or measure.foretold:
        return "its data does not say how many batches it has"
    if measure.compiled:
        return (
            "the model draws random numbers while it trains, and those of compiled code cannot be "
            "foretold"
        )
    return (
        "the model draws random numbers while it trains that cannot be foretold: drawing again "
        "what torch's operators drew does not come to the same state (numbers from Python's or "
        "NumPy's generator?)"
    )


def refuse_borrowers(trial: TrialSpec, exact: Measured, technique: Spilled) -> None:
    """Raises PlanError where a shard is to stay whose parameters another one steps."""
    for shard in (*kept_shards(technique), *kept_weights(technique)):
        spec = exact.measure.shards[shard]
        borrowed = spec.parameter_bytes - spec.owned_bytes
        if borrowed and steps_borrowed(exact.layout, shard):
            raise PlanError(
                f"trial {trial.number} was asked to keep shard {shard} of {technique.shards} on "
                f"the device, but it borrows {format_bytes(borrowed)} of tied parameters from "
                "another shard, whose step would leave it an old copy. Leave it out of keep=."
            )


def steps_borrowed(layout: TrialLayout | None, shard: int) -> bool:
    """Whether what a shard borrows is trained, or may come to be."""
    if layout is None:
        return True
    return any(
        entry.spec.name in {field.spec.name for field in layout.shards[owner].grad.fields}
        for owner, entry in layout.shards[shard].borrowed
    )


def refuse_head(trial: TrialSpec, exact: Measured, technique: Spilled) -> None:
    """Raises PlanError where bytes are to stay that are no whole tensors, or tied ones."""
    if exact.layout is None:
        return
    for shard, asked in heads_of(technique).items():
        spec, part = exact.measure.shards[shard], exact.layout.shards[shard].param
        if shard in technique.keep_weights:
            part = state_of(exact.layout, technique, shard)
        sizes = head_sizes(part)
        tied = shard in lenders(exact.layout) or spec.parameter_bytes > spec.owned_bytes
        if tied or asked not in sizes:
            why = "it has tied parameters" if tied else f"its first tensors have {sizes} bytes"
            raise PlanError(
                f"trial {trial.number} was asked to keep {asked} bytes of shard {shard} of "
                f"{technique.shards} on the device, but {why}. Leave keep_head= out to keep what "
                "fits."
            )


def refuse_activations(trial: TrialSpec, exact: Measured, technique: Spilled) -> None:
    """Raises PlanError where a shard is to keep its activations that has to recompute."""
    shards = exact.measure.shards
    stays = route_of(technique, shards).may_save
    for shard in technique.keep_activations or ():
        if shard in stays and shards[shard].saved_bytes is not None:
            continue
        why, way_out = (
            "its parameters are not on the device from its forward to its backward",
            ", or name it in keep= or keep_weights= too",
        )
        if shards[shard].frozen:
            why, way_out = FROZEN, ""
        elif shard == len(shards) - 1:
            why, way_out = "the last shard's forward and backward are one unit anyway", ""
        elif technique.order == "shard":
            why = "its forward of the next micro-batch comes before the backward of this one"
            way_out = ", or leave out order='shard'"
        elif shard in stays:
            why, way_out = "its forward changes what its backward, or another shard, reads", ""
        raise PlanError(
            f"trial {trial.number} was asked to keep the activations of shard {shard} of "
            f"{len(shards)}, but {why}. Leave it out of keep_activations={way_out}."
        )
