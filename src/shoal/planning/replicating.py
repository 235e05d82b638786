"""One trial with replicas on several devices: what is asked until it is settled, and why.

Nothing chooses it but whoever asks: its sums have another order, so its bits are others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shoal.core.errors import PlanError
from shoal.core.spec import DeviceSpec, JobMeasure, ReplicaMeasure, Scalar, TrialSpec
from shoal.core.technique import DataParallel, Resident, Technique
from shoal.core.units import Bytes, counted, format_bytes, format_enough, format_seconds
from shoal.kernels import rounding
from shoal.planner.need import Request, need
from shoal.planner.price import Speeds
from shoal.planner.replicas import Replicated, replicated
from shoal.planning.pipelining import Question
from shoal.planning.planned import Settled
from shoal.recipes.recipe import Recipe
from shoal.recipes.schedules import by_evaluations
from shoal.runtime.wire.messages import Measure, Measured, MeasureReplica

BY_SHARDS = "by shards"
ROUNDING = {"fp32": 1e-4}
LOOSE = 2e-2  # of losses of products in bfloat16, whose rounding follows from their shapes
NO_MEAN = 0.1
"""Relative difference of a loss from the mean of its pieces' that shows that it is no mean."""


def early(technique: Technique | None, recipe: Recipe, devices: Sequence[DeviceSpec]) -> None:
    """Refuse replicas that are impossible whatever the model is.

    Raises:
        PlanError: says what was asked, what there is, and the way out.
    """
    if not isinstance(technique, DataParallel):
        return
    width, names = technique.width or 2, ", ".join(device.name for device in devices)
    if width > len(devices):
        raise PlanError(
            f"data-parallel training with {width} replicas takes a device for each, and there "
            f"{'is' if len(devices) == 1 else 'are'} {len(devices)}: {names}. Ask for fewer "
            "replicas, or give more devices."
        )
    if not recipe.splittable:
        raise PlanError(
            f"data-parallel training cuts each batch by rows, into {technique.width or 'several'} "
            "pieces, and the recipe does not say that they may be cut: a split is another "
            "experiment for BatchNorm, ignored labels and losses over a batch. Give "
            "Recipe(splittable=True), or train with technique='pipelined' or on one device."
        )
    if recipe.precision == rounding.NAME:
        raise PlanError(
            f"precision={rounding.NAME!r} cannot be data-parallel: its steps round weights by "
            "chance, which no test holds to the plain loop over replicas yet. Use 'bf16' or "
            "'fp32'."
        )
    if words := by_evaluations(recipe):
        raise PlanError(words)
    if recipe.loss_rows is not None and technique.shard:
        raise PlanError(
            f"loss_rows={recipe.loss_rows} with shoal.DataParallel(shard=True): the last "
            "projection is read after the model's forward, when FSDP2 may have put it away. Use "
            "shard=False, or leave loss_rows out."
        )


def numerics(technique: Technique, measure: JobMeasure, request: Request) -> dict[str, Scalar]:
    """What of replicas changes a trial's bits."""
    if not isinstance(technique, DataParallel) or measure.replica is None:
        return {}
    found: dict[str, Scalar] = {"replicas": technique.width}
    others = request.clip or request.micro_batches > 1 or not measure.replica.steps_alike
    if technique.shard and others:
        found["sums"] = BY_SHARDS
    if measure.draws:
        found["draws"] = "each replica its own"
    if measure.buffer_bytes:
        found["buffers"] = "those of replica 0"
    return found


def technique_on_record(keys: Iterable[Mapping[str, Scalar]]) -> Technique | None:
    """The technique that trials with such numerics keys go on with; None for any other one."""
    for key in keys:
        if width := key.get("replicas"):
            return DataParallel(width=int(width), shard=key.get("sums") == BY_SHARDS)
    return None


class Replicating:
    """Decides on replicas, for devices of the smallest one's size."""

    def __init__(self, devices: Sequence[DeviceSpec], recipe: Recipe, request: Request) -> None:
        self._devices, self._recipe, self._request = devices, recipe, request
        self._budget = Bytes(min(device.for_trials for device in devices))

    def settle(self, trial: TrialSpec, asked: DataParallel, speeds: Speeds) -> Question:
        """Order measures until a trial's replicas are settled.

        Raises:
            PlanError: its batch or model cannot be cut so, or a replica does not fit.
        """
        measured = yield Measure(trial, cut=False)
        width = self._width(trial, measured.measure, asked)
        technique = replace(asked, width=width)
        exact = yield MeasureReplica(trial, width, asked.shard)
        replica, measure = exact.measure.replica, exact.measure
        assert replica is not None
        if replica.problem:
            raise PlanError(
                _head(trial, technique) + f"{replica.problem}. " + _ways_out(technique)
            )
        mean = self._mean(trial, technique, replica)
        found = replicated(technique, measure, self._request, speeds)
        if found.need.total > self._budget:
            raise self._too_large(trial, found)
        assert exact.layout is not None
        return Settled(
            measure=measure,
            layout=exact.layout,
            technique=technique,
            why=(
                *self._why(asked, found, exact, speeds),
                *mean,
                *(_why_it_may_end(technique) if replica.freezes else ()),
                *measure.notes,
                measure.data,
            ),
            active=1,
            replicated=found,
        )

    def _width(self, trial: TrialSpec, measure: JobMeasure, asked: DataParallel) -> int:
        """How many replicas there are.

        Raises:
            PlanError: the batch cannot be cut in so many, or the model not be trained so.
        """
        rows, head = measure.rows, _head(trial, asked)
        if rows is None:
            raise PlanError(
                head + "the tensors of its first batch do not have rows in common, by which it "
                "could be cut. Use technique='pipelined', or train on one device."
            )
        width = asked.width or min(len(self._devices), rows)
        if not 2 <= width <= rows:
            raise PlanError(
                head + f"its first batch has {counted(rows, 'row')}, and each of "
                f"{max(width, 2)} replicas takes one or more. Make the batch larger, ask for "
                "fewer replicas, or train on one device."
            )
        if measure.compiled:
            raise PlanError(
                head + "its model is compiled, and what DDP and FSDP2 do to compiled code is in "
                "no test here. Leave torch.compile out, or train on one device."
            )
        if measure.draws_evaluating:
            raise PlanError(
                head + "it, or a metric, draws random numbers while it is evaluated, and replicas "
                "evaluate batches at the same time. Use technique='spilled' or 'resident'."
            )
        if measure.writes_evaluating:
            raise PlanError(
                head + "its buffers change while it is evaluated, and each replica evaluates "
                "other batches: none would have seen all of them. Write to buffers only where "
                "module.training is true, or use technique='spilled' or 'resident'."
            )
        return width

    def _mean(
        self, trial: TrialSpec, technique: DataParallel, replica: ReplicaMeasure
    ) -> tuple[str, ...]:
        """What comparing the loss with its pieces' mean has shown.

        Raises:
            PlanError: it is no mean over rows.
        """
        whole, pieces = replica.whole_loss, replica.pieces_loss
        if whole is None or pieces is None:
            return ("the loss of a whole batch could not be compared with its pieces'",)
        off = abs(whole - pieces) / max(abs(whole), abs(pieces), 1e-12)
        words = (
            f"the loss of the first batch is {whole:.6g}, and the mean of its "
            f"{technique.width} pieces' is {pieces:.6g}, weighted by rows"
        )
        if not off < NO_MEAN:
            raise PlanError(
                _head(trial, technique) + f"{words}: the loss is no mean over rows, so the "
                "gradients of pieces do not add up to the batch's. Divide the loss by the rows, "
                "or train on one device."
            )
        if off > ROUNDING.get(self._recipe.precision, LOOSE):
            return (f"{words}: it is not quite a mean over rows, and this is another experiment",)
        return (f"{words}: a mean over rows",)

    def _why(
        self, asked: DataParallel, found: Replicated, exact: Measured, speeds: Speeds
    ) -> list[str]:
        width, measure = found.technique.width, exact.measure
        rows = measure.rows or 0
        named = f"{width} replicas were asked for"
        if asked.width is None:
            named = (
                f"there are {len(self._devices)} devices, and {counted(rows, 'row')} in a batch"
            )
        each = f"{rows // (width or 1)} of its {counted(rows, 'row')}"
        if rows % (width or 1):
            each += ", the first ones one more"
        how = (
            "gradients are reduced"
            if not found.technique.shard
            else ("parameters are gathered twice for each batch, and gradients reduced,")
        )
        return [
            f"{named}; each computes {each}",
            f"a step takes {format_seconds(found.step_s)} on {width} devices, "
            f"{format_seconds(found.sending_s)} of it for {format_bytes(found.sent)} that each "
            f"sends, if nothing hides them: {how} in the order of the replicas",
            self._alone(exact, speeds),
        ]

    def _alone(self, exact: Measured, speeds: Speeds) -> str:
        """What one device would take."""
        measure = exact.measure
        whole = need(measure, measure.shards, Resident(), self._request, exact.layout)
        if whole.total > self._budget:
            return (
                f"whole, on one device, it would need {format_bytes(whole.total)}, and one has "
                f"{format_bytes(self._budget)}"
            )
        shard = measure.shards[0]
        step_s = shard.backward_s * self._request.micro_batches
        step_s += shard.step_s * speeds.device_step
        return f"on one device, resident, a step would take {format_seconds(step_s)}"

    def _too_large(self, trial: TrialSpec, found: Replicated) -> PlanError:
        shard = found.replica.shard
        words = (
            f"{format_bytes(shard.parameter_bytes)} of parameters and "
            f"{format_bytes(shard.state_bytes)} of optimizer state on each"
        )
        out = "Use shoal.DataParallel(shard=True), which divides them; "
        if found.technique.shard:
            words = words.replace("on each", "divided among them")
            out = "Ask for more replicas; "
        return PlanError(
            _head(trial, found.technique)
            + f"a replica needs {format_enough(found.need.total)} on "
            f"a device of {format_bytes(self._budget)}: {words}, and "
            f"{format_bytes(found.need.unit)} inside a step. {out}or use technique='spilled' or "
            "'pipelined'."
        )


def _why_it_may_end(technique: DataParallel) -> tuple[str, ...]:
    what = "freezes or unfreezes" if technique.shard else "unfreezes"
    return (
        f"its schedule's code names requires_grad: where it {what} a parameter the trial fails at "
        "the next step, since replicas reduce the gradients of what was trained when they were "
        "made. On one device it may",
    )


def _head(trial: TrialSpec, asked: DataParallel) -> str:
    count = f"{asked.width} replicas" if asked.width else "replicas"
    return f"trial {trial.number} was asked to train data-parallel with {count}, but "


def _ways_out(technique: DataParallel) -> str:
    return "Use shoal.DataParallel(shard=False)." if technique.shard else "Or train on one device."
