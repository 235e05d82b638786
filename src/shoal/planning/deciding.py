"""What is measured of one trial until its technique is settled, and why that one."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from shoal.core.errors import PlanError, TooLarge
from shoal.core.plan import BITWISE, Job
from shoal.core.spec import DeviceSpec, JobMeasure, Place, Scalar, TrialSpec
from shoal.core.technique import (
    DataParallel,
    Pipelined,
    Resident,
    Spilled,
    Technique,
    asks_by_shard,
)
from shoal.core.units import Bytes, Seconds, counted, format_bytes, format_enough, format_seconds
from shoal.hardware import available_cores
from shoal.kernels.kernelchoice import KernelChoice
from shoal.memory.chunks import in_chunks
from shoal.memory.layout import as_it_travels
from shoal.pipeline.stops import Stops
from shoal.planner.away import with_none_recomputed
from shoal.planner.choose import choices
from shoal.planner.job import (
    least,
    make_job,
    make_pipeline_job,
    make_replicated_job,
    refuse,
)
from shoal.planner.keep import keep_best
from shoal.planner.loops import why_order
from shoal.planner.need import (
    Need,
    Request,
    fits,
    need,
    waiting_input_bytes,
)
from shoal.planner.paper import Cutting
from shoal.planner.pipeline import Alternative
from shoal.planner.price import Price, price
from shoal.planner.room import Room
from shoal.planning.capturing import Capturing, Total
from shoal.planning.moving import refuse_moved, why_kept, why_moved, why_narrow
from shoal.planning.pipelining import Pipelining, Question
from shoal.planning.pipelining import numerics as pipeline_numerics
from shoal.planning.planned import Settled
from shoal.planning.refusing import (
    as_named,
    refuse_activations,
    refuse_borrowers,
    refuse_head,
    refuse_master,
    refuse_order,
    refuse_own_step,
    refuse_shards,
    refuse_too_many,
    refuse_transfer,
    refuse_turn,
    splits_nothing,
    too_large_a_step,
)
from shoal.planning.replicating import Replicating
from shoal.planning.replicating import numerics as replica_numerics
from shoal.planning.sharing import Shared, share
from shoal.planning.speeds import corrected, speeds_of, why_priced
from shoal.planning.spilling import Spilling, asked_of
from shoal.recipes.recipe import Recipe
from shoal.recipes.schedules import schedule_numerics
from shoal.runtime.wire.messages import Measure, Measured, MeasureShards, Order

ENDLESS = Bytes(2**63)
MOST_ACTIVE = 3
"""Trials that share a device at most: more would leave each too little of it."""


class Deciding:
    """Decides for one trial after the other, on the smallest of the devices.

    Args:
        technique: Forced, or None to choose.
        place: Where the trials that go on stepped, if that is part of their bits.
        steps: Of a trial; None where it ends after epochs.
        stops: Where trials stop, if that is known.
        varies: There were batches larger than those that are measured.
        idle: Devices beside these, which no trial would have.
        total: Steps of a trial, of the batches of an epoch and those of a step.
        host_memory: What the study may use of it, in bytes; None for any number.
    """

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        recipe: Recipe,
        technique: Technique | None,
        place: Place | None,
        *,
        steps: int | None = None,
        stops: Stops | None = None,
        varies: bool = False,
        idle: Sequence[DeviceSpec] = (),
        host_memory: int | None = None,
        total: Total = lambda batches, each: None,
    ) -> None:
        self._host_memory, self._devices, self._trials = host_memory, devices, 1
        self._prices: dict[int, tuple[Settled, Price]] = {}  # of what is settled
        self._device, self._recipe, self._by_epochs = devices[0], recipe, steps is None
        self._budget = Bytes(min(device.for_trials for device in devices))
        self._speeds = speeds_of(self._device)
        self._request = Request(
            micro_batches=recipe.accumulate,
            clip=recipe.clip_grad_norm is not None,
            technique=technique,
            prefers="device" if self._device.kind == "cuda" else "host",
            place=place,
            varies=varies,
            # On a GPU which shards step where is part of a trial's bits: another budget, or
            # less memory, must not change that.
            mixes=self._device.kind == "virtual",
            has_pools=self._device.kind == "cuda",
            capture_bytes=self._device.library_bytes,  # as much as for the stream that there is
        )
        self._capturing = Capturing(
            request=self._request,
            budget=self._budget,
            devices=len(devices),
            total=total,
            looks=technique is None and self._device.profile is None,
        )
        self._replicating = Replicating(devices, recipe, self._request)
        self._pipelining = Pipelining(
            devices, recipe, self._request, steps=steps, stops=stops, idle=idle
        )

    def spilling(self) -> Spilling:
        """Who looks for arrays in shards."""
        asked, why_not = asked_of(self._request.technique)
        if self._device.kind == "cuda" and asked.optimizer is None:
            asked = replace(asked, optimizer="device")  # where a whole array steps: of its bits
        if self._recipe.step is not None:
            why_not = "a step of one's own is one unit, which cannot be cut into shards"
        return Spilling(
            request=self._request,
            speeds=self._speeds,
            budget=self._budget,
            why_not=why_not,
            asked=asked,
            is_forced=isinstance(self._request.technique, Spilled),
        )

    @property
    def _narrow(self) -> bool:
        """Whether to look for weights that may travel as bfloat16."""
        forced = self._request.technique
        if isinstance(forced, Spilled) and (forced.transfer or forced.optimizer == "device"):
            return forced.transfer == "bf16"
        return self._recipe.precision == "bf16" and self._request.place != "device"

    def settle(self, trial: TrialSpec, crowd: bool, trials: int = 1) -> Question:
        """Order measures until the technique of one trial is decided.

        ``crowd``: there are more trials than devices; ``trials``: how many there are.

        Raises:
            PlanError: it fits in no way, or what was forced cannot be done.
        """
        forced = self._request.technique
        if self._recipe.step is not None:
            return (yield from self._settle_own_step(trial))
        if isinstance(forced, DataParallel):
            return (yield from self._replicating.settle(trial, forced, self._speeds))
        if isinstance(forced, Pipelined):
            return (yield from self._pipelining.settle(trial, forced, trials, self._speeds))
        measured = yield Measure(trial, cut=isinstance(forced, Spilled), narrow=self._narrow)
        if not isinstance(forced, Spilled):
            whole = self._resident(measured)
            if whole.total <= self._budget:
                settled = self._settled_resident(measured, whole)
                return (yield from self._capturing.instead(trial, settled, trials))
            if isinstance(forced, Resident):
                raise TooLarge(
                    f"trial {trial.number} was asked to train {_named(forced)}, which needs "
                    f"{format_enough(whole.total)} on a device of {format_bytes(self._budget)}. "
                    "Leave technique= out to have it spilled, or give the device more memory."
                )
            measured = yield Measure(trial, cut=True, narrow=self._narrow)
        whole = self._resident(measured)
        if not measured.measure.cuttable:
            return self._settle_uncut(trial, measured, whole)
        settled = yield from self._settle_spilled(trial, measured, whole, crowd, trials)
        if forced is not None:
            return settled
        other = Alternative(name="spilled", step_s=self._price(settled).step_s)
        args = (trial, measured, settled, other, trials, self._speeds)
        return (yield from self._pipelining.instead(*args))

    def _settle_own_step(self, trial: TrialSpec) -> Question:
        """A step of one's own trains resident or not at all."""
        refuse_own_step(trial, self._request.technique)
        measured = yield Measure(trial, cut=False, narrow=False)
        whole = self._resident(measured)
        if whole.total > self._budget:
            raise too_large_a_step(trial, measured.measure, self._budget, whole)
        return self._settled_resident(measured, whole)

    def _settle_uncut(self, trial: TrialSpec, measured: Measured, whole: Need) -> Settled:
        """A model in one piece: it trains resident if it fits."""
        forced = self._request.technique
        if isinstance(forced, Spilled) and forced.shards not in (None, 1):
            raise PlanError(
                f"trial {trial.number} was asked to train in {forced.shards} shards, but its "
                f"model cannot be cut: {'; '.join(measured.measure.notes).rstrip('.')}. "
                "Use technique='resident'."
            )
        if whole.total > self._budget:
            raise refuse(trial, measured.measure, self._budget, self._request)
        return self._settled_resident(measured, whole)

    def _settle_spilled(
        self, trial: TrialSpec, measured: Measured, whole: Need, crowd: bool, trials: int
    ) -> Question:
        forced = self._request.technique
        refuse_too_many(trial, measured, forced)
        refuse_order(trial, measured, self._request)
        refuse_turn(trial, measured, self._request)
        refuse_transfer(trial, measured, forced, self._recipe.precision)
        self._speeds = corrected(self._speeds, measured.measure.link)
        request = self._spilled_request(whole)
        at_once = MOST_ACTIVE if crowd else 1
        request = replace(request, waiting_room=self._waiting_room(measured, trials, at_once))
        found = yield from self._first_that_fits(trial, measured.measure, request, whole, at_once)
        if isinstance(found, str):
            measure = replace(measured.measure, in_turn=found)
            found = yield from self._first_that_fits(trial, measure, request, whole, at_once)
        assert isinstance(found, Settled), "in the plain order nothing is rehearsed"
        return found

    def _first_that_fits(
        self, trial: TrialSpec, measure: JobMeasure, request: Request, whole: Need, at_once: int
    ) -> Generator[Order, Measured, Settled | str]:
        """Settled by the first choice whose shards fit, with up to ``at_once`` trials at a time.

        Where that has shards run all micro-batches in one visit and nobody asked for it, they are
        rehearsed so; in words, why they cannot.
        """
        closest, forced = None, self._request.technique
        actives = range(1, at_once + 1)
        for choice in choices(measure, self._budget, actives, request, self._speeds):
            asked, active = choice.technique, choice.active
            tries = asked.order == "shard" and not asks_by_shard(forced)
            exact = yield MeasureShards(trial, choice.cuts, narrow=self._narrow, by_shard=tries)
            if exact.measure.in_turn:
                return exact.measure.in_turn
            exact = replace(exact, measure=replace(exact.measure, in_turn=measure.in_turn))
            exact = self._in_chunks(exact)
            refuse_borrowers(trial, exact, asked)
            refuse_head(trial, exact, asked)
            refuse_activations(trial, exact, asked)
            refuse_moved(trial, exact.measure.shards, asked)
            room = self._room(exact, asked, request, active)
            if found := keep_best(room, self._speeds):
                refuse_master(trial, exact, found[0], forced)
                return self._spilled(exact, whole, *found, active, choice)
            needed = self._least_as_named(exact, asked, request)
            closest = needed if closest is None else min(closest, needed, key=lambda n: n.total)
        refuse_shards(trial, forced, closest, self._budget)
        finest = least(measure, request)
        exact = self._in_chunks((yield MeasureShards(trial, finest.cuts, narrow=self._narrow)))
        is_free = forced is None or forced == Spilled(optimizer=getattr(forced, "optimizer", None))
        room = self._room(exact, finest.technique, request, 1)
        if is_free and (found := keep_best(room, self._speeds)):
            return self._spilled(exact, whole, *found, 1)
        exact_bytes = self._need(exact, finest.technique, request).total
        raise refuse(trial, measure, self._budget, self._request, exact_bytes)

    def _least_as_named(self, exact: Measured, asked: Spilled, request: Request) -> Need:
        """What such shards need with nothing kept but what is asked for."""
        named = as_named(asked)
        needed = self._need(exact, named, request)
        if asked.recompute is not False:
            return needed
        room = replace(self._room(exact, asked, request, 1), budget=ENDLESS)
        saves = with_none_recomputed(room, (named, needed))
        return saves[1] if saves else needed  # else the host has no room for what forwards saved

    def _spilled_request(self, whole: Need) -> Request:
        """Who asks for spilling where the whole model would fit wants to see it travel."""
        forced = self._request.technique
        if isinstance(forced, Spilled) and forced.keep is None and whole.total <= self._budget:
            turn, gradients = forced.keep_turn or 0, forced.keep_gradients or 0
            travels = replace(forced, keep=(), keep_weights=(), keep_turn=turn)
            travels = replace(travels, keep_gradients=gradients)
            named = forced.keep_activations is not None or forced.spill_activations is not None
            if not named and forced.recompute == "auto":
                travels = replace(travels, recompute=True)
            return replace(self._request, technique=travels)
        return self._request

    def _waiting_room(self, measured: Measured, trials: int, active: int) -> Bytes | None:
        """Host memory for what waits there of one trial, if all are about as large as this one."""
        self._trials = trials
        if self._host_memory is None or measured.layout is None:
            return None
        at_once = len(self._devices) * active
        room = self._host_memory - trials * measured.measure.loader_bytes
        copies = min(trials, len(self._devices))  # that are being written
        states = (trials + copies) * measured.layout.num_bytes
        master = getattr(self._request.technique, "master", None)
        if master == "split" or (master is None and states > room):
            states -= trials * self._saved_by_split(measured)
        return Bytes(max(room - states, 0) // at_once)

    def _saved_by_split(self, measured: Measured) -> int:
        """Bytes of a trial on the host, where the float32 of what travels narrow is split."""
        assert measured.layout is not None
        split = Spilled(shards=1, optimizer="host", master="split")
        names, sums = measured.measure.narrow, self._request.micro_batches > 1
        least = as_it_travels(measured.layout, split, names, sums=sums)
        return max(measured.layout.num_bytes - least.num_bytes, 0)

    def _room(self, exact: Measured, technique: Spilled, request: Request, active: int) -> Room:
        return Room(
            measure=exact.measure,
            shards=exact.measure.shards,
            technique=technique,
            request=request,
            budget=self._budget,
            active=active,
            layout=exact.layout,
        )

    def _in_chunks(self, exact: Measured) -> Measured:
        """With the chunks in which its shards would step on the host."""
        if exact.layout is None:
            return exact
        found = in_chunks(exact.measure, exact.layout, self._speeds.host_step)
        return replace(exact, measure=found)

    def _need(self, exact: Measured, technique: Spilled, request: Request) -> Need:
        return need(exact.measure, exact.measure.shards, technique, request, exact.layout)

    def _resident(self, measured: Measured) -> Need:
        assert measured.layout is not None
        measure = measured.measure
        return need(measure, measure.shards, Resident(), self._request, measured.layout)

    def _settled_resident(self, measured: Measured, whole: Need) -> Settled:
        why = (
            f"it fits: the whole model needs {format_bytes(whole.total)} of "
            f"{format_bytes(self._budget)}, and nothing has to move"
        )
        return _settled(measured, Resident(), 1, [why, *measured.measure.notes])

    def _why_spilled(
        self,
        whole: Need,
        exact: Measured,
        technique: Spilled,
        found: Need,
        active: int,
        choice: Cutting | None,
    ) -> list[str]:
        forced = self._request.technique
        reasons = [
            f"as a whole it would need {format_bytes(whole.total)}, and the device has "
            f"{format_bytes(self._budget)}"
        ]
        if isinstance(forced, Spilled) and forced.shards:
            asked = counted(forced.shards, "shard was", "shards were")
            reasons.append(f"{asked} asked for")
        else:
            share = f"{active} trials share the device" if active > 1 else "it fits the device"
            count = counted(technique.shards or 1, "shard")
            reasons.append(f"with {count} {share}; of the cuts that were weighed none is quicker")
        reasons.append(
            f"with the optimizer's step on the {technique.optimizer} {format_bytes(found.moved)} "
            "move over the link in a step"
        )
        reasons += why_kept(exact, technique, self._request)
        if technique.transfer == "bf16":
            reasons.append(why_narrow(exact.measure.shards, technique))
        if splits_nothing(exact, technique):
            reasons.append("master='split' changes nothing: no weight travels as bfloat16")
        args = (exact.measure.shards, technique, self._request.micro_batches)
        if waits := waiting_input_bytes(*args):
            reasons.append(
                f"{format_bytes(waits)} of inputs wait on the host between forward and backward"
            )
        reasons += self._why_saved(exact.measure, technique, active)
        if self._request.micro_batches > 1 or asks_by_shard(forced):
            reasons.append(why_order(exact.measure, technique, self._request, choice))
        costs = self._price_of(exact.measure, technique, active)
        reasons.append(why_priced(costs, self._shared_s(costs), active, self._speeds))
        return reasons

    def _why_saved(self, measure: JobMeasure, technique: Spilled, active: int) -> list[str]:
        """Which forwards are run once, and where what they saved waits."""
        reasons = list[str]()
        if saves := technique.keep_activations:
            seconds = sum(measure.shards[shard].forward_s for shard in saves)
            reasons.append(
                f"{counted(len(saves), 'shard keeps what its', 'shards keep what their')} "
                "forward saved, for which there is room: running it again would take "
                f"{format_seconds(seconds)} a micro-batch"
            )
        if technique.spill_activations:
            recomputes = replace(technique, spill_activations=(), recompute="auto")
            prices = [self._price_of(measure, t, active) for t in (technique, recomputes)]
            moves_s, recomputes_s = (found.step_s for found in prices)
            reasons.append(why_moved(measure.shards, technique, moves_s, recomputes_s))
        return reasons

    def _shared_s(self, found: Price) -> Seconds:
        return found.on_cores(self._devices, available_cores())

    def _price(self, settled: Settled) -> Price:
        assert isinstance(settled.technique, Spilled)
        return self._price_of(settled.measure, settled.technique, settled.active)

    def _price_of(self, measure: JobMeasure, technique: Spilled, active: int) -> Price:
        args = (measure.shards, measure.batch_bytes, technique, self._request, self._speeds)
        return price(*args, active)

    # -- of what is settled ---------------------------------------------------------------

    def active(self, settled: Iterable[Settled]) -> int:
        """How many trials share a device: as many as is best for one kind, and as any fit."""
        all_ = list(settled)
        if any(one.replicated for one in all_):
            return 1  # replicas hold their devices up for each other
        most = max((s.active for s in all_ if isinstance(s.technique, Spilled)), default=1)
        if any(one.staged for one in all_):
            most = MOST_ACTIVE  # one pipeline's stages compute while another's wait
        needs = [
            s.staged.need
            if s.staged
            else need(s.measure, s.measure.shards, s.technique, self._request, s.layout)
            for s in all_
        ]
        fitting = (n for n in range(most, 1, -1) if fits(needs, self._budget, n))
        return next(fitting, 1)

    def mix(self, settled: Mapping[str, Settled], present: Sequence[str], active: int) -> Shared:
        """The kinds, and how trials share a device, where these are present on one."""
        return share(
            settled,
            present,
            active,
            self._again,
            self._request,
            self._budget,
            self._speeds,
            by_epochs=self._by_epochs,
        )

    def _again(self, settled: Settled, active: int) -> Settled | None:
        """A kind, with what stays of it where so many share the device."""
        forced, technique = self._request.technique, settled.technique
        if not isinstance(technique, Spilled):
            return settled
        asked = forced if isinstance(forced, Spilled) else Spilled()
        if asked.keep is None and (technique.keep or forced is None):
            technique = replace(technique, keep=None, keep_weights=(), keep_head=None)
            technique = replace(technique, late_state=asked.late_state)
        turn, gradients = asked.keep_turn, asked.keep_gradients
        technique = replace(technique, keep_turn=turn, keep_gradients=gradients)
        if technique.recompute is not True:
            keeps, moved = asked.keep_activations, asked.spill_activations
            technique = replace(technique, keep_activations=None, spill_activations=moved)
            technique = replace(technique, keep_activations=keeps)
        exact = Measured(0, settled.measure, settled.layout)
        room = self._waiting_room(exact, self._trials, max(active, MOST_ACTIVE))
        request = replace(self._request, waiting_room=room)
        found = keep_best(self._room(exact, technique, request, active), self._speeds)
        if found is None or settled.whole is None:
            return None
        return self._spilled(exact, settled.whole, *found, active)

    def _spilled(
        self,
        exact: Measured,
        whole: Need,
        technique: Spilled,
        found: Need,
        active: int,
        choice: Cutting | None = None,
    ) -> Settled:
        """Settled, with the host region laid out for what travels as bfloat16.

        ``choice``: what it was on paper, where it is the first.
        """
        why = self._why_spilled(whole, exact, technique, found, active, choice)
        settled = _settled(exact, technique, active, [*why, *exact.measure.notes])
        sums, names = self._request.micro_batches > 1, exact.measure.narrow
        layout = as_it_travels(settled.layout, technique, names, sums=sums)
        return replace(settled, layout=layout, whole=whole)

    def job(self, trial: TrialSpec, settled: Settled) -> Job:
        """The job of a trial of a signature that is settled."""
        reads_s = Seconds(self._recipe.accumulate * settled.measure.read_s)
        return replace(self._job(trial, settled), reads_s=reads_s)

    def _job(self, trial: TrialSpec, settled: Settled) -> Job:
        start = (trial, settled.measure, settled.layout)
        end = (self._request, settled.why, self._numerics(settled))
        if settled.replicated is not None:
            return make_replicated_job(*start, settled.replicated, *end)
        if settled.staged is not None:
            return make_pipeline_job(*start, settled.staged, *end)
        job = make_job(*start, settled.technique, *end, self._speeds)
        if not isinstance(settled.technique, Spilled):
            return job
        if id(settled) not in self._prices:
            self._prices[id(settled)] = settled, self._price(settled)
        return replace(job, moves_s=self._shared_s(self._prices[id(settled)][1]))

    def _numerics(self, settled: Settled) -> dict[str, Scalar]:
        """All that may change a trial's bits, fixed before its first step."""
        device, technique = self._device, settled.technique
        place = _step_place(technique)
        kernels = KernelChoice.here()
        cache_off = any("use_cache was switched off" in note for note in settled.why)
        return {
            **({"use_cache": "off"} if cache_off else {}),
            "torch": torch.__version__,
            "device": "cpu" if device.kind == "virtual" else torch.cuda.get_device_name(0),
            "threads": device.threads,
            "precision": self._recipe.precision,
            **({"loss_rows": self._recipe.loss_rows} if self._recipe.loss_rows else {}),
            "optimizer": settled.measure.optimizer,
            **({"compiled modules": settled.measure.compiled} if settled.measure.compiled else {}),
            "optimizer_place": place if device.kind == "cuda" else "cpu",
            "matmul": kernels.matmul,
            **kernels.told(on_gpu=device.kind == "cuda"),
            "accumulate": self._recipe.accumulate,
            **schedule_numerics(self._recipe),
            "cut": BITWISE if settled.measure.bitwise else "none",
            **pipeline_numerics(technique, self._recipe.accumulate),
            **replica_numerics(technique, settled.measure, self._request),
        }


def _named(technique: Technique) -> str:
    return type(technique).__name__.lower()


def _step_place(technique: Technique) -> str:
    if not isinstance(technique, Spilled | Pipelined):
        return "device"
    if technique.optimizer == "host" and technique.keep:
        kept = "+".join(map(str, technique.keep))
        return f"host, of {technique.shards} shards {kept} on the device"
    return str(technique.optimizer or "device")


def _settled(measured: Measured, technique: Technique, active: int, why: Iterable[str]) -> Settled:
    assert measured.layout is not None
    return Settled(
        measure=measured.measure,
        layout=measured.layout,
        technique=technique,
        why=(*why, measured.measure.data),
        active=active,
    )
