"""Arrays whose stacked state does not fit a device: whether they train shard by shard, and how.

An array of N trials is planned as one trial N times as large: layers on paper first, then the
shards of a cut, measured as an array runs them; what stays on the device and what travels is
chosen as for any spilled trial.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.core.plan import Job
from shoal.core.spec import (
    ALIGNMENT,
    NO_SECONDS,
    JobMeasure,
    LayerMeasure,
    Place,
    ShardSpec,
    TrialSpec,
)
from shoal.core.technique import Spilled, Technique, kept_shards, kept_weights
from shoal.core.units import Bytes, Seconds, format_bytes, format_enough, round_up
from shoal.memory.chunks import in_chunks
from shoal.memory.layout import Field, TrialLayout, as_it_travels
from shoal.memory.stacking import ROWS_APART, most_micro_batches, stacked_layout
from shoal.planner.choose import choices
from shoal.planner.keep import keep_best
from shoal.planner.need import Need, Request, need, waiting_input_bytes
from shoal.planner.price import Speeds, price
from shoal.planner.room import Room
from shoal.planner.width import MOST, InShards
from shoal.planning.asking import Asking
from shoal.runtime.wire.messages import (
    Measure,
    MeasureArrayShards,
    Measured,
    MeasuredArrayShards,
    MeasureShards,
)

MOST_SPEAKERS = 4
OTHER_LAYERS = "as an array the model has"  # as ``runtime.arrays.spilled`` words it
MOST_CUTS = 6
"""Cuts that are measured, each with more shards, until one fits."""


class Rows(NamedTuple):
    """How many trials an array has.

    ``one_base``: what is frozen is in it once for all of them. ``varies``: their batches vary in
    length.
    """

    width: int
    one_base: bool = False
    varies: bool = False

    def laid_out(self, home: TrialLayout) -> TrialLayout:
        """Where they lie, each as ``home``."""
        return stacked_layout(home, self.width, one_base=self.one_base)


_Seen = tuple[object, object]
"""What workers answered of a cut: of a trial alone, and of the array."""
HOST: Place = "host"
"""Where inputs of shards are tried last: more than a plan on paper says may not fit the device."""
ASKED = Spilled(
    recompute=True,
    transfer="fp32",
    order="micro",
    keep_activations=(),
    spill_activations=(),
)
"""What of a technique an array leaves open: how many shards, what stays, where the steps are and
inputs of shards wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpilledArrayPlan:
    """An array in shards that fits: its bytes, and those of one of its trials alone.

    ``measure`` is the whole array's, ``layout`` one trial's home, in the same shards. Seconds are
    as in ``InShards``.
    """

    technique: Spilled
    measure: JobMeasure
    layout: TrialLayout
    need: Need
    step_s: Seconds
    valid_s: Seconds = NO_SECONDS
    build_s: Seconds = NO_SECONDS
    visit_s: Seconds = NO_SECONDS
    lone: JobMeasure
    lone_technique: Spilled
    lone_need: Need
    host_bytes: Bytes  # of the array, beside its trials' homes
    passes: float = 1.0  # of a micro-batch, where batches vary in length
    lengths: str = ""
    looped: tuple[str, ...] = ()  # parts whose code slots ran otherwise, by their data

    @property
    def in_shards(self) -> InShards:
        """What it is compared by."""
        return InShards(
            shards=len(self.measure.shards),
            moved_bytes=self.need.moved,
            step_s=self.step_s,
            valid_s=self.valid_s,
            build_s=self.build_s,
            visit_s=self.visit_s,
            passes=self.passes,
            lengths=self.lengths,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spilling:
    """Looks for arrays in shards.

    Args:
        request: What a study asks of a trial's step.
        budget: Of the smallest device.
        why_not: Why no array may be spilled, if so.
        asked: What of a technique is settled; the rest is open.
        is_forced: Every array is to be spilled, whether it fits or not.
    """

    request: Request
    speeds: Speeds
    budget: Bytes
    why_not: str = ""
    asked: Spilled = ASKED
    is_forced: bool = False

    def find(
        self,
        asking: Asking,
        trials: Sequence[TrialSpec],
        width: int,
        *,
        fits: bool = False,
        one_base: bool = False,
        varies: bool = False,
    ) -> SpilledArrayPlan | str:
        """The array of ``width`` of these trials that costs the least; why there is none.

        ``fits``: it would fit as a whole; who asks for shards all the same wants to see it move.
        ``one_base``: what is frozen is the same in all of them, and is there once. ``varies``:
        their batches vary in length.
        """
        if self.why_not:
            return self.why_not
        found: SpilledArrayPlan | str = ""
        rows = Rows(width, one_base, varies)
        # One whose dropout is 0 may have other layers than those that drop.
        for speaker in trials[:MOST_SPEAKERS]:
            others = [trial for trial in trials if trial is not speaker]
            found = self._find(asking, [speaker, *others], rows, fits=fits)
            if isinstance(found, SpilledArrayPlan) or OTHER_LAYERS not in found:
                break
        return found

    def _find(
        self, asking: Asking, trials: Sequence[TrialSpec], rows: Rows, *, fits: bool
    ) -> SpilledArrayPlan | str:
        """The same, where the first of the trials speaks for the others."""
        trial, width = trials[0], rows.width
        whole = asking.answer(Measure(trial, cut=True))
        if not isinstance(whole, Measured):
            return str(whole)
        if not whole.measure.cuttable:
            return "; ".join(whole.measure.notes) or "the model cannot be cut into shards"
        asked, closest, seen = self._technique(fits), None, dict[tuple[int, ...], _Seen]()
        for place in (asked.boundaries,) if asked.boundaries else (None, HOST):
            request = replace(self.request, technique=replace(asked, boundaries=place))
            most = most_micro_batches(request.micro_batches, varies=rows.varies)
            request = replace(request, micro_batches=most)
            found = self._in_shards(asking, trials, rows, whole.measure, request, seen)
            if isinstance(found, SpilledArrayPlan | str):
                return found
            closest = closest or found
        budget = format_bytes(self.budget)
        if closest is None:
            return f"in shards {width} of them need more than {budget} in any cut"
        needs = format_enough(closest.total)
        return f"in shards {width} of them need {needs} or more, and the device has {budget}"

    def _in_shards(
        self,
        asking: Asking,
        trials: Sequence[TrialSpec],
        rows: Rows,
        whole: JobMeasure,
        request: Request,
        seen: dict[tuple[int, ...], _Seen],
    ) -> SpilledArrayPlan | Need | str | None:
        """The same of a request; what one that is too large needs, where any was seen.

        ``seen``: what workers answered of cuts, wherever inputs wait.
        """
        closest: Need | None = None
        if rows.varies and self.request.micro_batches > 1:  # each is a program of its own
            whole = replace(whole, num_batches=None)
        paper = array_measure(whole, rows)
        found = choices(paper, self.budget, (1,), request, self.speeds)
        for choice in itertools.islice(found, MOST_CUTS):
            cuts, num_layers = choice.cuts, len(paper.layers)
            if cuts not in seen:
                order = MeasureArrayShards(
                    tuple(trials[:MOST]), rows.width, cuts, num_layers, *rows[1:]
                )
                seen[cuts] = asking.answer(MeasureShards(trials[0], cuts)), asking.answer(order)
            exact, stacked = seen[cuts]
            if not isinstance(exact, Measured) or exact.layout is None:
                return str(exact)
            cut = in_chunks(exact.measure, exact.layout, self.speeds.host_step)
            exact = replace(exact, measure=cut)
            if not isinstance(stacked, MeasuredArrayShards):
                return str(stacked)
            if stacked.is_over:  # smaller shards may do
                continue
            if stacked.declined:
                return stacked.declined
            measure = with_shards(paper, stacked.shards, exact, rows)
            measure = with_batches(measure, stacked.batch_bytes)
            plan = self._plan(measure, exact, choice.technique, request, rows, stacked.passes)
            if isinstance(plan, SpilledArrayPlan):
                return replace(
                    plan,
                    build_s=stacked.build_s,
                    passes=stacked.passes,
                    lengths=stacked.lengths,
                    looped=stacked.looped,
                )
            closest = plan
        return closest

    def lone_s(self, job: Job) -> Seconds:
        """What a step of a trial that is spilled alone takes, with what moves."""
        assert isinstance(job.technique, Spilled)
        args = (job.shards, job.batch_bytes, job.technique, self.request, self.speeds)
        return price(*args, 1).step_s

    def _technique(self, fits: bool) -> Spilled:
        if not fits or self.asked.keep is not None:
            return self.asked
        return replace(self.asked, keep=(), keep_turn=0, keep_gradients=0)

    def _plan(
        self,
        measure: JobMeasure,
        exact: Measured,
        technique: Spilled,
        request: Request,
        array: Rows,
        passes: float,
    ) -> SpilledArrayPlan | Need:
        """What stays of these shards; what they need if they do not fit.

        ``passes``: what the batches of one micro-batch are, by their lengths.
        """
        assert exact.layout is not None
        alone = Room(
            measure=exact.measure,
            shards=exact.measure.shards,
            technique=technique,
            request=replace(request, micro_batches=self.request.micro_batches),
            budget=self.budget,
            active=1,
            layout=exact.layout,
        )
        lone, home = keep_best(alone, self.speeds), exact.layout
        if lone is not None:  # a trial's home is laid out for when it trains alone
            home = as_it_travels(home, lone[0], (), sums=False)
        rows = array.laid_out(home)
        room = replace(alone, measure=measure, shards=measure.shards, layout=rows, request=request)
        kept = keep_best(room, self.speeds)
        if kept is None or lone is None:
            least = replace(technique, keep=(), keep_turn=0, keep_gradients=0)
            return need(measure, measure.shards, least, request, rows)
        shards = measure.shards
        priced = replace(request, micro_batches=max(1, round(passes * self.request.micro_batches)))
        step_s = replace(room, request=priced).step_s(kept[0], self.speeds)
        waiting = rows_waiting(rows) if request.micro_batches > 1 and not array.varies else 0
        inputs = waiting_input_bytes(shards, kept[0], request.micro_batches)
        return SpilledArrayPlan(
            technique=kept[0],
            measure=measure,
            layout=home,
            need=kept[1],
            step_s=step_s,
            valid_s=evaluation_s(measure, kept[0], self.speeds),
            visit_s=visit_s(shards, kept[0], self.speeds),
            lone=exact.measure,
            lone_technique=lone[0],
            lone_need=lone[1],
            host_bytes=Bytes(rows.num_bytes + waiting + ROWS_APART * inputs),
        )


def rows_waiting(rows: TrialLayout) -> int:
    """Host memory for gradients of slots whose batch is an odd one before a step's last."""
    return sum(shard.grad.num_bytes for shard in rows.shards)


def evaluation_s(measure: JobMeasure, technique: Spilled, speeds: Speeds) -> Seconds:
    """A validation batch of all slots: its units, or what comes for them, whichever is longer."""
    stays = {*kept_shards(technique), *kept_weights(technique)}
    coming = sum(s.parameter_bytes for s in measure.shards if s.index not in stays)
    units_s = measure.valid_scale * sum(shard.forward_s for shard in measure.shards)
    return Seconds(max(units_s, coming / speeds.up_bytes_per_s))


def visit_s(shards: Sequence[ShardSpec], technique: Spilled, speeds: Speeds) -> Seconds:
    """What stays on the device goes to the host, and comes back."""
    whole = sum(shards[s].owned_bytes + shards[s].state_bytes for s in kept_shards(technique))
    size = whole + sum(shards[s].owned_bytes for s in kept_weights(technique))
    return Seconds(size / speeds.up_bytes_per_s + size / speeds.down_bytes_per_s)


def asked_of(forced: Technique | None) -> tuple[Spilled, str]:
    """What a forced technique leaves open for an array; why an array cannot be that, if so."""
    if forced is None:
        return ASKED, ""
    if not isinstance(forced, Spilled):
        return ASKED, f"the trials were asked to train {type(forced).__name__.lower()}"
    named = [
        f"{name}={getattr(forced, name)!r}"
        for name, default in (
            ("order", ("micro",)),
            ("transfer", ("fp32",)),
            ("master", ("float32",)),
            ("recompute", (True, "auto")),
            ("keep_activations", ((),)),
            ("spill_activations", ((),)),
            ("keep_head", ()),
        )
        if getattr(forced, name) is not None and getattr(forced, name) not in default
    ]
    if named:
        return ASKED, f"names what no array has: Spilled({', '.join(named)})"
    settled = {
        name: getattr(ASKED, name)
        for name in (
            *("recompute", "transfer", "order"),
            *("keep_activations", "spill_activations"),
        )
    }
    return replace(forced, **settled), ""


def array_measure(lone: JobMeasure, rows: Rows) -> JobMeasure:
    """A trial's measure as that of an array of such, on paper: layers and batches."""
    width = rows.width
    return replace(
        lone,
        layers=tuple(_layer_times(layer, rows) for layer in lone.layers),
        shards=(),
        batch_bytes=Bytes(width * lone.batch_bytes),
        buffer_bytes=Bytes(width * lone.buffer_bytes),
        resident_bytes=Bytes(width * lone.resident_bytes),
        narrow=(),
    )


def _layer_times(layer: LayerMeasure, rows: Rows) -> LayerMeasure:
    width, gradient = rows.width, layer.gradient_bytes
    once = layer.parameter_bytes - gradient if rows.one_base and gradient is not None else 0
    return replace(
        layer,
        parameter_bytes=Bytes(width * layer.parameter_bytes - (width - 1) * once),
        state_bytes=Bytes(width * layer.state_bytes),
        borrowed_bytes=Bytes(width * layer.borrowed_bytes),
        boundary_bytes=Bytes(width * layer.boundary_bytes),
        carry_bytes=Bytes(width * layer.carry_bytes),
        forward_peak_bytes=Bytes(width * layer.forward_peak_bytes),
        saved_bytes=Bytes(width * layer.saved_bytes),
        backward_peak_bytes=Bytes(width * layer.backward_peak_bytes),
        forward_s=Seconds(width * layer.forward_s),
        backward_s=Seconds(width * layer.backward_s),
        step_s=Seconds(width * layer.step_s),
        private_bytes=Bytes(width * layer.private_bytes),
        stash_bytes=Bytes(width * layer.stash_bytes),
        gradient_bytes=None if gradient is None else Bytes(width * gradient),
        narrow=None,
    )


def with_shards(
    paper: JobMeasure, shards: Sequence[ShardSpec], exact: Measured, array: Rows
) -> JobMeasure:
    """The array's measure with its shards, whose weights lie as ``stacked_layout`` has them."""
    assert exact.layout is not None
    width = array.width
    rows, trained = array.laid_out(exact.layout), set(exact.measure.trained)
    found = [
        replace(
            shard,
            parameter_bytes=Bytes(segments.param.num_bytes + segments.borrowed_bytes),
            owned_bytes=Bytes(segments.param.num_bytes),
            state_bytes=Bytes(segments.state.num_bytes),
            gradient_bytes=Bytes(
                sum(_aligned(f) for f in segments.grad.fields if f.spec.name in trained)
            ),
            step_peak_bytes=alone.step_peak_bytes,  # one trial after the other
            step_s=Seconds(width * alone.step_s),
            step_chunks=(alone.owned_bytes,) * width,
            frozen=alone.frozen,
        )
        for shard, segments, alone in zip(shards, rows.shards, exact.measure.shards, strict=True)
    ]
    return replace(paper, shards=tuple(found))


def with_batches(measure: JobMeasure, size: Bytes) -> JobMeasure:
    """The measure of units that saw batches of this size; those of validation stay as they are."""
    if not size:
        return measure
    scale = measure.valid_scale * measure.batch_bytes / size
    return replace(measure, batch_bytes=size, valid_scale=scale)


def _aligned(field: Field) -> int:
    return round_up(field.spec.num_bytes, ALIGNMENT)
