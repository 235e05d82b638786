"""What a trial's model costs: built, run and stepped once or twice on real batches.

Everything here happens outside the device's budget, before a trial trains, and leaves
nothing behind. A model that is measured again (with finer cuts) is not built again.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import TypeVar

import torch
from torch import nn

from shoal.bench.link import glance
from shoal.core.errors import PlanError, TrialError
from shoal.core.spec import ALIGNMENT, HyperParameters, JobMeasure, ShardSpec, TrialSpec
from shoal.core.units import Bytes, Seconds, round_up
from shoal.data import host_bytes, rule_of
from shoal.data.sources import batch_bytes
from shoal.device import Device
from shoal.device.allocator import allocator_here
from shoal.device.flops import host_step_bytes, stopwatch_of
from shoal.device.pace import SystemClock
from shoal.frames import own_traceback
from shoal.kernels.kernelchoice import repeatable
from shoal.memory.layout import TensorSpec
from shoal.memory.store import describe
from shoal.partition.apart import reads_beside
from shoal.partition.chain import Chain
from shoal.partition.compiled import compiled_modules, compiled_notes, compiles, eagerly
from shoal.partition.measure import (
    faster_of_two,
    measure_layers,
    measure_shards,
    written_and_shared,
    written_parameters,
)
from shoal.partition.narrow import find_narrow
from shoal.partition.pilot import PilotReport, pilot
from shoal.partition.preserve import drop_gradients
from shoal.partition.visitors import There, buffers_on, everywhere, visits_of
from shoal.pystate import ambient
from shoal.pystate.attributes import Attributes
from shoal.recipes.bound import bound
from shoal.recipes.habits import habits_of, unfreezes
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.ownstep import Modes, require_evaluation
from shoal.recipes.recipe import Batch, Recipe, build_model, epoch_length, read_data, to_device
from shoal.recipes.schedules import build_schedule
from shoal.replicas import cut_for_replicas
from shoal.rng import seed_all
from shoal.runtime.capture.captures import Captures
from shoal.runtime.measuring.bothloops import rehearse_orders
from shoal.runtime.measuring.capturebench import measure_capture
from shoal.runtime.measuring.chains import Chains, key_of
from shoal.runtime.measuring.clearing import refuse_gradients
from shoal.runtime.measuring.counting import (
    optimizer_name,
    with_step,
    with_step_seconds,
)
from shoal.runtime.measuring.coupling import Coupling, coupling_of, step_peaks, step_seconds
from shoal.runtime.measuring.describe import describe as describe_trials
from shoal.runtime.measuring.describe import own_error
from shoal.runtime.measuring.drawing import with_draws
from shoal.runtime.measuring.finders import away_from
from shoal.runtime.measuring.firstbatches import (
    FEW_ROWS,
    first_batch,
    first_rows,
    read_one,
    rows_of,
)
from shoal.runtime.measuring.meter import Resting, free_bytes, rest_on_host
from shoal.runtime.measuring.settling import why_changes_matter
from shoal.runtime.measuring.slices import finish
from shoal.runtime.measuring.wholemodel import Built, WholeModel, draws_in_cudnn, step_draws
from shoal.runtime.measuring.widths import ArrayBench
from shoal.runtime.placing.layouts import grads_of, layout_of
from shoal.runtime.validating import FIRST_BATCH, in_validation
from shoal.runtime.wire.messages import (
    ArrayTry,
    Describe,
    MeasureArray,
    MeasureArrayShards,
    Measured,
    MeasuredArray,
    MeasuredArrayShards,
    MeasureReplica,
    MeasureShards,
    OfOneTrial,
    Order,
    Refused,
    Reply,
    TimeArray,
    TimedArray,
)

T = TypeVar("T")


class Measurer:
    """Answers the orders that train nothing in a worker.

    Attributes:
        note: Called with the trial whose code runs, None when it is over.
        captures: Captures passes, also of trials that train here.
        chains: Those that were found, also for trials that train here.
    """

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self._given, self._recipe, self._device = recipe, recipe, device
        self.note: Callable[[int | None], None] = lambda trial: None
        self.captures = Captures(recipe, device.torch_device)
        self.chains = Chains(recipe)
        self._timed = stopwatch_of(device.spec, recipe.precision) or faster_of_two(self._clock)
        self._here = device.torch_device  # where the model is while it is measured
        self._no_room: int | None = None  # the trial of which the device had none
        self._built: Built | None = None
        self._changes: frozenset[str] = frozenset()  # attributes that its forwards changed
        self._chain: Chain | None = None
        self._key: Hashable = None  # of what is built, by which its chain is kept
        self._whole: JobMeasure | None = None
        self._narrow: tuple[str, ...] = ()  # of the chain
        self._by_tensor = False  # may the chain's optimizer step so
        self._states: Mapping[str, Sequence[TensorSpec]] = {}
        self._bench: ArrayBench | None = None
        self._resting = Resting()
        self._is_to_be_timed = False  # the bench, whoever comes to the device meanwhile
        self._link: tuple[()] | tuple[float, float] | None = None  # not looked at yet

    def forget(self) -> None:
        """Let go of what was measured: the trials need the memory now."""
        if self._built is None and self._bench is None:
            return
        self._built = self._chain = self._whole = None
        self._resting.come_back(False)
        if not self._is_to_be_timed:
            self._bench = None
        if self._device.spec.kind == "cuda":
            torch.cuda.empty_cache()
            if (allocator := allocator_here()) is not None:
                allocator.forget()

    def answer(self, order: Order) -> Reply:
        """The reply to one order; what a trial's own code raises is part of it."""
        reply = self._answer(order)
        if isinstance(reply, Refused):
            gc.collect()  # frames that refer to each other would hold what is on the device
        return reply

    def _answer(self, order: Order) -> Reply:
        if isinstance(order, Describe):
            return describe_trials(self._given, order, self.note)
        assert isinstance(order, OfOneTrial)
        trial = order.trial
        self.note(trial.number)
        try:
            if isinstance(order, MeasureArray):
                return MeasuredArray(trial.number, self._measure_array(order))
            if isinstance(order, MeasureArrayShards):
                return self._measure_array_shards(order)
            if isinstance(order, TimeArray):
                assert self._bench is not None, "an array is built before it is timed"
                self._is_to_be_timed = False
                return TimedArray(trial.number, self._bench.time(order))
            self._bench = None
            if not self._resting.come_back(self._built is not None and self._built.trial == trial):
                self.forget()
            if isinstance(order, MeasureReplica):
                return self._measure_replica(trial, order.width, order.shard)
            if isinstance(order, MeasureShards):
                return self._measure_shards(order)
            if order.captures:
                return self._measure_capture(trial)
            return self._measure(trial, cut=order.cut, narrow=order.narrow, halves=order.halves)
        except (Exception, SystemExit) as error:
            return Refused(trial.number, own_traceback(error), own_error(error))
        finally:
            self.note(None)

    def _measure_array(self, order: MeasureArray) -> ArrayTry:
        bench = self._bench_of(order.trials)
        found = bench.build(order)
        if order.captures and not found.declined:
            bench.capture_alone()
        self._is_to_be_timed = any(found.once_s)
        return found

    def _bench_of(self, trials: Sequence[TrialSpec]) -> ArrayBench:
        if self._built is not None:
            self._resting.rest(self._built.model, self._built.optimizer)
        if self._bench is None or not self._bench.is_of(trials[0]):
            self._bench = ArrayBench(self._given, self._device, trials, self.captures)
        return self._bench

    def _measure_array_shards(self, order: MeasureArrayShards) -> MeasuredArrayShards:
        with eagerly():
            bench = self._bench_of(order.trials)
            return bench.shards(order)

    # -- measure --------------------------------------------------------------------------

    def _measure(
        self, trial: TrialSpec, *, cut: bool, narrow: bool = False, halves: bool = False
    ) -> Measured:
        if self._built is None or self._built.trial != trial:
            self._begin(trial)
        assert self._built is not None
        assert self._whole is not None
        layout = layout_of([0, 0], None, self._built.model, self._states)
        if not cut:
            return Measured(trial.number, self._whole, layout)
        with eagerly():
            measure = self._measure_cut(self._built, self._whole, narrow=narrow, halves=halves)
        if self._link is None:
            link = glance(self._device.spec, self._device.torch_device, SystemClock())
            self._link = (link.up.best, link.down.best) if link else ()
        return Measured(trial.number, replace(measure, link=self._link or None), layout)

    def _begin(self, trial: TrialSpec) -> None:
        """Build and measure the whole: on the device, or on the host if there is no room."""
        try:
            return self._build_and_measure(trial)
        except torch.OutOfMemoryError:
            if self._here.type == "cpu":
                raise
            self._no_room = trial.number
        self.forget()  # when the error is gone, and what it held
        self._build_and_measure(trial)

    def _build_and_measure(self, trial: TrialSpec) -> None:
        self._built = self._chain = None
        self._built = self._build(trial)
        with eagerly():
            self._whole = self._measure_whole(self._built, self._room())

    def _build(self, trial: TrialSpec) -> Built:
        hp = HyperParameters(trial.hp)
        self._recipe = bound(self._given, hp)
        ambient.here().begin()
        seed_all(trial.seed)
        model = build_model(self._recipe, hp)
        modes = Modes(self._recipe, model)
        self._here = self._place(trial, model)
        model.to(self._here)
        train, valid = read_data(self._recipe, hp)
        require_evaluation(self._recipe, model, valid)
        optimizer = build_optimizer_of(self._recipe, model, hp)
        schedule = build_schedule(self._recipe, optimizer, hp, train)
        refuse_gradients(self._recipe, model, optimizer)
        made = ambient.here().settle()  # a batch is no part of making a trial
        first, read_s = read_one(train)
        batch = to_device(first, self._here)
        first_valid = None
        if valid is not None:
            with in_validation(FIRST_BATCH):
                first_valid = to_device(first_batch(valid, "validation"), self._here)
        modes.train()
        self._key = key_of(model, self._recipe, batch)
        return Built(
            trial=trial,
            model=model,
            optimizer=optimizer,
            train=train,
            batch=batch,
            valid=first_valid,
            num_batches=epoch_length(train),
            data=str(rule_of(train)),
            read_s=read_s,
            loader_bytes=host_bytes(train, batch),
            modes=modes,
            attributes=Attributes(model, optimizer, schedule),
            globals=made,
            habits=habits_of(schedule),
        )

    def _place(self, trial: TrialSpec, model: nn.Module) -> torch.device:
        """The device, or the host for a model whose training state alone is larger.

        What counts is what a GPU has, not what trials may take of it: nothing trains there yet.
        """
        device = self._device.torch_device
        if device.type == "cpu" or self._no_room == trial.number:
            return torch.device("cpu")
        state = 4 * sum(parameter.nbytes for parameter in model.parameters())  # as with Adam
        return device if state <= free_bytes(device) else torch.device("cpu")

    def _room(self) -> float:
        """What the device has; where seconds are those of a profile they cost nothing."""
        return self._device.spec.memory if self._device.spec.profile is None else inf

    def _measure_whole(self, built: Built, room: float = inf) -> JobMeasure:
        """One shard that is everything: bytes by the tracker, seconds of a second step."""
        model, clocks = built.model, (self._timed, self._clock)
        costs = WholeModel(self._recipe, built, self._here, *clocks, room).costs()
        self._states, self._changes = costs.states, costs.changes
        params = [describe(name, p) for name, p in model.named_parameters()]
        state = [spec for specs in self._states.values() for spec in specs]
        shard = ShardSpec(
            index=0,
            layers=(0, 1),
            parameter_bytes=_aligned(params),
            owned_bytes=_aligned(params),
            state_bytes=_aligned(state),
            gradient_bytes=_aligned(grads_of(model, frozen=unfreezes(self._recipe, built.habits))),
            boundary_bytes=Bytes(0),
            carry_bytes=Bytes(0),
            forward_peak_bytes=costs.forward,
            backward_peak_bytes=costs.backward,
            step_peak_bytes=costs.step,
            backward_s=costs.backward_s,
            step_s=costs.step_s,
            workspace_bytes=costs.workspace,
        )
        profile = self._device.spec.profile
        if profile is not None:
            shard = replace(shard, step_s=profile.host_seconds(host_step_bytes(shard)))
        return JobMeasure(
            layers=(),
            shards=(shard,),
            batch_bytes=Bytes(batch_bytes(built.batch)),
            buffer_bytes=Bytes(sum(b.nbytes for b in model.buffers())),
            resident_bytes=Bytes(
                shard.parameter_bytes + shard.state_bytes + costs.backward + costs.step
            ),
            notes=(*costs.notes, *compiled_notes(model)),
            num_batches=built.num_batches,
            valid_scale=batch_bytes(built.valid) / max(1, batch_bytes(built.batch)),
            optimizer=optimizer_name(built.optimizer),
            cuttable=self._recipe.step is None,
            bitwise=False,
            data=built.about_data(costs.backward_s + costs.step_s),
            read_s=Seconds(built.read_s),
            loader_bytes=built.loader_bytes,
            draws=costs.draws,
            draws_evaluating=costs.draws_evaluating,
            writes_evaluating=costs.writes_evaluating,
            compiled=max(len(compiled_modules(model)), compiles(model)),
            rows=rows_of(built.batch),
            trained=tuple(n for n, p in model.named_parameters() if p.requires_grad),
            lost=built.lost(),
        )

    def _measure_capture(self, trial: TrialSpec) -> Measured:
        """The measure of the whole model, with what a captured pass takes beside an eager one."""
        whole = self._measure(trial, cut=False)
        assert self._built is not None
        here = (self._built.model, self._built.batch, self._here)
        capture = measure_capture(self.captures, self._recipe, *here)
        return replace(whole, measure=replace(whole.measure, capture=capture))

    def _measure_replica(self, trial: TrialSpec, width: int, shard: bool) -> Measured:
        """The measure of the whole model, with what a replica takes beside it."""
        whole = self._measure(trial, cut=False)
        assert self._built is not None
        try:
            piece = cut_for_replicas(self._built.batch, width)[0].batch
        except TrialError as error:  # of the first batch: said before anything starts
            raise PlanError(str(error)) from error
        alone = self._measure_whole(self._built._replace(batch=piece)).shards[0]
        first = whole.measure.shards[0].step_peak_bytes  # which has made the state
        alone = replace(alone, step_peak_bytes=max(first, alone.step_peak_bytes))
        from shoal.runtime.measuring.probe import Probe  # torch's FSDP takes a second

        kind = Probe(self._recipe, trial, self._here, width=width, shard=shard)
        replica = kind.measure(self._built.model, self._built.batch, self._built.valid, alone)
        replica = replace(replica, freezes=self._built.habits.freezes)
        return replace(whole, measure=replace(whole.measure, replica=replica))

    # -- cut ------------------------------------------------------------------------------

    def _measure_cut(
        self, built: Built, whole: JobMeasure, *, narrow: bool, halves: bool
    ) -> JobMeasure:
        """The chain and its layers; with the model on the host where the device has no room."""
        try:
            return self._cut_here(built, whole, narrow=narrow, halves=halves)
        except torch.OutOfMemoryError:
            if self._here.type == "cpu":
                raise
        self._move_to_host(built)  # when the error is gone, and what it held
        return self._cut_here(self._built or built, whole, narrow=narrow, halves=halves)

    def _cut_here(
        self, built: Built, whole: JobMeasure, *, narrow: bool, halves: bool
    ) -> JobMeasure:
        """The chain, compared with the module, and its layers; or why there is none."""

        def uncut(*notes: str) -> JobMeasure:
            return replace(whole, cuttable=False, notes=(*whole.notes, *notes))

        drop_gradients(built.model)
        if note := self._why_whole(built):
            return uncut(note)
        report = self._pilot(built)
        if report.chain is None:
            return uncut(*report.notes)
        coupling = self._coupling(built, report.chain)
        if coupling.why:
            return uncut(*report.notes, coupling.why)
        self._chain, self._by_tensor = report.chain, coupling.by_tensor
        hp = HyperParameters(built.trial.hp)
        self.chains.keep(report.chain, hp, self._key)
        here, sums = report.chain.on(self._here), self._recipe.accumulate > 1
        self._whole = whole = with_draws(whole, here, built.batch)
        narrow = narrow and not compiles(here.model)  # whose kernels read as they like
        on_gpu = self._device.torch_device.type == "cuda"
        seen = first_rows(built.batch, FEW_ROWS) if on_gpu else built.batch
        with repeatable(self._here):
            self._narrow = find_narrow(here, seen, sums=sums) if narrow else ()
        layers = self._on_device(
            lambda chain, batch, there: measure_layers(
                chain,
                batch,
                self._state_bytes(),
                timed=self._timed,
                narrow=self._narrow,
                sums=sums,
                halves=halves,
                there=there,
            )
        )
        if self._here != self._device.torch_device:
            self._whole = whole = self._with_step_there(built, whole)
        return replace(
            whole,
            layers=with_step_seconds(layers, whole, self._device.spec.profile is not None),
            bitwise=report.bitwise,
            steps_by_tensor=self._by_tensor,
            notes=(*whole.notes, *report.notes),
            narrow=self._narrow,
            written=written_parameters(self._chain),
        )

    def _why_whole(self, built: Built) -> str:
        """Why no chain is looked for, whatever the model consists of; empty if one is."""
        if self._device.torch_device.type == "cuda" and (name := draws_in_cudnn(built.model)):
            return (
                f"cuDNN draws the dropout of {name!r}, and a forward that ran again in a shard "
                "would have another mask: dropout=0 there and an nn.Dropout behind it can be cut, "
                "or torch.backends.cudnn.enabled = False"
            )
        if any(built.habits):
            what = "draws random numbers" if built.habits.draws else "touches parameters"
            return f"the code of its schedule {what}, which shards have elsewhere when it steps"
        if note := away_from(self._recipe, HyperParameters(built.trial.hp), built.model):
            return note
        if not self._changes:
            return ""
        return why_changes_matter(self._recipe, built.trial, built.batch, self._changes)

    def _coupling(self, built: Built, chain: Chain) -> Coupling:
        """Whether layers may step one after another, and tensors too."""
        why_not = written_and_shared(chain) or step_draws(self._recipe, built, self._here)
        if why_not:
            return Coupling(why_not, by_tensor=False)
        owned = [list(chain.parameters_of(layer)) for layer in range(chain.num_layers)]
        return coupling_of(self._recipe, built.trial, owned, built.optimizer)

    def _pilot(self, built: Built) -> PilotReport:
        """The chain, compared with the module where the model is.

        On a GPU without room for it, with few rows of the batch; and where there is none, on the
        CPU, whose kernels all repeat themselves and which has more room, with few rows too: a
        batch of a large model would take minutes.
        """
        if self._device.torch_device.type != "cuda":
            return pilot(built.model, self._recipe, built.batch, self._here)
        few, words = first_rows(built.batch, FEW_ROWS), "since the GPU has no room"
        for batch in (built.batch, few) if self._here.type == "cuda" else ():
            with suppress(torch.OutOfMemoryError), repeatable(self._here):
                report = pilot(built.model, self._recipe, batch, self._here)
                if report.chain is not None:
                    return report
                words = f"since on the GPU {report.notes[0]}"
                break
            torch.cuda.empty_cache()
        cpu = torch.device("cpu")
        built.model.to(cpu)
        try:
            report = pilot(built.model, self._recipe, to_device(few, cpu), cpu)
        finally:
            built.model.to(self._here)  # where the optimizer's state is
        return replace(report, notes=(*report.notes, f"compared with its cut on the CPU, {words}"))

    def _on_device(self, measure: Callable[[Chain, Batch, There], T]) -> T:
        """What is found of the chain on the device itself; compared it was on the CPU.

        A model for which there is no room stays on the host, but for the layers that run.
        """
        assert self._built is not None
        assert self._chain is not None
        device = self._device.torch_device
        chain, batch = self._chain.on(device), to_device(self._built.batch, device)
        if self._here == device:
            try:
                return measure(chain, batch, everywhere)
            except torch.OutOfMemoryError:
                if device.type == "cpu":
                    raise
            self._move_to_host(self._built)
        with buffers_on(device, chain.model):
            return measure(chain, batch, visits_of(chain))

    def _move_to_host(self, built: Built) -> None:
        rest_on_host(built.model, built.optimizer)
        self._here = torch.device("cpu")
        batch, valid = (to_device(b, self._here) for b in (built.batch, built.valid))
        self._built = built._replace(batch=batch, valid=valid)

    def _with_step_there(self, built: Built, whole: JobMeasure) -> JobMeasure:
        """``whole``, measured on the host, with the seconds that its step takes on the device.

        Told by the largest layer's: a step is bound by memory, there as here.
        """
        assert self._chain is not None
        layers = range(self._chain.num_layers)
        names = max(map(self._chain.parameters_of, layers), key=self._num_bytes)
        seconds = step_seconds(
            self._recipe, built.trial, built.model, names, self._device.torch_device, self._clock
        )
        shard = whole.shards[0]
        times = shard.owned_bytes / max(1, self._num_bytes(names))
        shard = replace(shard, step_s=Seconds(seconds * times))
        return replace(whole, shards=(shard,))

    def _num_bytes(self, names: Iterable[str]) -> int:
        assert self._built is not None
        return sum(self._built.model.get_parameter(name).nbytes for name in names)

    def _clock(self) -> float:
        """Seconds, when all that was launched is done."""
        finish(self._device.torch_device)
        return time.perf_counter()

    def _state_bytes(self) -> dict[str, int]:
        return {name: int(_aligned(specs)) for name, specs in self._states.items()}

    def _measure_shards(self, order: MeasureShards) -> Measured:
        trial, cuts = order.trial, order.cuts
        if self._chain is None or self._built is None or self._built.trial != trial:
            self._measure(trial, cut=True, narrow=order.narrow)
        assert self._chain is not None
        assert self._built is not None
        assert self._whole is not None
        with eagerly():
            shards = self._on_device(
                lambda chain, batch, there: measure_shards(
                    chain,
                    cuts,
                    batch,
                    self._state_bytes(),
                    timed=self._timed,
                    narrow=self._narrow,
                    sums=self._recipe.accumulate > 1,
                    halves=order.halves,
                    there=there,
                )
            )
            beside = None
            if order.apart:
                with repeatable(self._here):
                    beside = reads_beside(self._chain.on(self._here), self._built.batch, cuts)
        whole = self._whole.shards[0]
        bounds = [0, *cuts, self._chain.num_layers]
        layout = layout_of(bounds, self._chain, self._built.model, self._states)
        device = self._device.torch_device
        peaks = step_peaks(self._recipe, trial, self._built.model, layout, device)
        in_turn = ""
        if order.by_shard:
            data, spans = self._built.train, list(itertools.pairwise(bounds))
            with eagerly():
                in_turn = rehearse_orders(self._chain, data, spans, self._here, device)
        emulated = self._device.spec.profile is not None
        finished = [with_step(s, whole, p, emulated) for s, p in zip(shards, peaks, strict=True)]
        measure = replace(
            self._whole,
            shards=tuple(finished),
            bitwise=True,
            notes=(*self._whole.notes, *self._chain.notes),
            narrow=self._narrow,
            steps_by_tensor=self._by_tensor,
            in_turn=in_turn,
            beside=beside,
        )
        return Measured(trial.number, measure, layout)


def _aligned(specs: Sequence[TensorSpec]) -> Bytes:
    return Bytes(sum(round_up(spec.num_bytes, ALIGNMENT) for spec in specs))
