"""What a trial's model costs: built, run and stepped once or twice on real batches.

Everything here happens outside the device's budget, before a trial trains, and leaves
nothing behind. A model that is measured again (with finer cuts) is not built again.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError, SpecError
from shoal.core.spec import (
    ALIGNMENT,
    HyperParameters,
    JobMeasure,
    LayerMeasure,
    ShardSpec,
    TrialSpec,
)
from shoal.core.units import Bytes, Seconds, round_up
from shoal.data import epoch_length, host_bytes, rule_of
from shoal.device import Device
from shoal.device.flops import host_step_bytes, stopwatch_of
from shoal.memory.layout import TensorSpec, TrialLayout, lay_out
from shoal.memory.store import describe
from shoal.partition.chain import Chain
from shoal.partition.measure import faster_of_two, measure_layers, measure_shards
from shoal.partition.pilot import pilot
from shoal.partition.track import AllocationTracker
from shoal.recipe import (
    Batch,
    Recipe,
    autocast,
    build_optimizer,
    build_schedule,
    compute_loss,
    model_inputs,
    read_data,
    to_device,
)
from shoal.rng import capture_rng, same_rng, seed_all
from shoal.runtime.binding import Binding, state_specs
from shoal.runtime.messages import (
    Describe,
    Described,
    Measure,
    Measured,
    MeasureShards,
    Order,
    Refused,
    Reply,
)
from shoal.runtime.units import evaluate_metrics


class _Built(NamedTuple):
    """A trial's objects, for measuring only."""

    trial: TrialSpec
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    valid: Batch | None
    num_batches: int | None
    data: str  # how it is led to a position
    loader_bytes: Bytes


class Measurer:
    """Answers Describe, Measure and MeasureShards in a worker.

    Attributes:
        note: Called with the trial whose code runs, None when it is over.
    """

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self._recipe, self._device = recipe, device
        self.note: Callable[[int | None], None] = lambda trial: None
        self._timed = stopwatch_of(device.spec, recipe.precision) or faster_of_two(self._clock)
        self._here = device.torch_device  # where the model is while it is measured
        self._built: _Built | None = None
        self._chain: Chain | None = None
        self._whole: JobMeasure | None = None
        self._states: Mapping[str, Sequence[TensorSpec]] = {}

    def forget(self) -> None:
        """Let go of what was measured: the trials need the memory now."""
        if self._built is None:
            return
        self._built = self._chain = self._whole = None
        if self._device.spec.kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device.torch_device)

    def answer(self, order: Order) -> Reply:
        """The reply to one order; what a trial's own code raises is part of it."""
        if isinstance(order, Describe):
            return self._describe(order.trials)
        assert isinstance(order, Measure | MeasureShards)
        trial = order.trial
        self.note(trial.number)
        try:
            if isinstance(order, MeasureShards):
                return self._measure_shards(trial, order.cuts)
            return self._measure(trial, cut=order.cut)
        except (Exception, SystemExit) as error:
            return Refused(trial.number, traceback.format_exc(), _own(error))
        finally:
            self.note(None)

    # -- describe -------------------------------------------------------------------------

    def _describe(self, trials: Sequence[TrialSpec]) -> Described:
        signatures, errors = {}, {}
        cause: Exception | None = None
        for trial in trials:
            self.note(trial.number)
            try:
                signatures[trial.number] = self._signature(trial)
            except (Exception, SystemExit) as error:
                errors[trial.number] = traceback.format_exc()
                cause = cause or _own(error)
        self.note(None)
        return Described(signatures, errors, cause)

    def _signature(self, trial: TrialSpec) -> str:
        """Equal for trials whose steps cost the same; values of hyperparameters do not count."""
        hp = HyperParameters(trial.hp)
        model = self._skeleton(hp, trial.seed)
        train, _ = read_data(self._recipe, hp)
        batch = _first_batch(train)
        optimizer = build_optimizer(self._recipe, model.named_parameters(), hp)
        names = {id(p): name for name, p in model.named_parameters()}
        parts = [
            repr(model),
            [_scalars_of(module) for module in model.modules()],
            [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in _all_params(model)],
            [(n, tuple(b.shape), str(b.dtype)) for n, b in model.named_buffers()],
            _shape_of(batch),
            epoch_length(train),  # how many steps there are, and whether that is known
            type(optimizer).__qualname__,
            [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups],
            [_kind_of(group) for group in optimizer.param_groups],
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _skeleton(self, hp: HyperParameters, seed: int) -> nn.Module:
        """The model without memory where it can be built so, else with."""
        seed_all(seed)
        try:
            with torch.device("meta"):
                return self._recipe.model(hp)
        except ShoalError:
            raise
        except Exception:
            seed_all(seed)
            return self._recipe.model(hp)

    # -- measure --------------------------------------------------------------------------

    def _measure(self, trial: TrialSpec, *, cut: bool) -> Measured:
        if self._built is None or self._built.trial != trial:
            self._built = self._build(trial)
            self._chain = None
            self._whole = self._measure_whole(self._built)
        assert self._whole is not None
        layout = _layout([0, 0], None, self._built.model, self._states)
        if not cut:
            return Measured(trial.number, self._whole, layout)
        measure = self._measure_cut(self._built, self._whole)
        return Measured(trial.number, measure, layout)

    def _build(self, trial: TrialSpec) -> _Built:
        hp = HyperParameters(trial.hp)
        seed_all(trial.seed)
        model = self._recipe.model(hp)
        if not isinstance(model, nn.Module):
            raise SpecError(
                f"Recipe(model=...) returned {type(model).__name__}; return an nn.Module."
            )
        self._here = self._place(model)
        model.to(self._here)
        train, valid = read_data(self._recipe, hp)
        optimizer = build_optimizer(self._recipe, model.named_parameters(), hp)
        build_schedule(self._recipe, optimizer, hp)
        self._refuse_forgotten(model, optimizer)
        batch = to_device(_first_batch(train), self._here)
        first_valid = to_device(next(iter(valid or ()), None), self._here)
        return _Built(
            trial=trial,
            model=model.train(),
            optimizer=optimizer,
            batch=batch,
            valid=first_valid,
            num_batches=epoch_length(train),
            data=str(rule_of(train)),
            loader_bytes=host_bytes(train, batch),
        )

    def _place(self, model: nn.Module) -> torch.device:
        """The device, or the host for a model whose training state alone is larger."""
        state = 4 * sum(parameter.nbytes for parameter in model.parameters())  # as with Adam
        fits = state <= self._device.spec.memory
        return self._device.torch_device if fits else torch.device("cpu")

    def _refuse_forgotten(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Clipping by a norm of gradients that nobody clears means what nobody wants."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        forgotten = [
            name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held
        ]
        if forgotten and self._recipe.clip_grad_norm is not None:
            raise SpecError(
                f"the optimizer does not hold {len(forgotten)} trainable parameters, the first "
                f"{forgotten[0]!r}, and clip_grad_norm is set: their gradients are never cleared, "
                "and would count in the norm, larger at every step. Freeze them with "
                "requires_grad_(False), or give them to the optimizer."
            )

    def _measure_whole(self, built: _Built) -> JobMeasure:
        """One shard that is everything: bytes by the tracker, seconds of a second step."""
        model = built.model
        before = capture_rng(self._here)
        forward = _peak(lambda: self._forward(built))
        draws = not same_rng(before, capture_rng(self._here))
        if built.valid is not None:
            forward = max(forward, _peak(lambda: self._evaluate(built)))
        backward = _peak(lambda: self._backward(built))
        _fill_missing_gradients(model)  # a branch that this batch does not take has state too
        first_step = _peak(lambda: self._step(built))  # makes the state, then it is moved
        binding = Binding(model, built.optimizer, [[]], self._here)
        self._states = state_specs(binding)
        backward_s = self._timed(lambda: self._backward(built))
        step_peak = _peak(lambda: self._step(built))
        self._backward(built)
        _fill_missing_gradients(model)
        step_begin = time.perf_counter()
        self._step(built)
        step_s = time.perf_counter() - step_begin
        self._states = state_specs(binding)
        params = [describe(name, p) for name, p in model.named_parameters()]
        state = [spec for specs in self._states.values() for spec in specs]
        shard = ShardSpec(
            index=0,
            layers=(0, 1),
            parameter_bytes=_aligned(params),
            owned_bytes=_aligned(params),
            state_bytes=_aligned(state),
            gradient_bytes=Bytes(sum(s.num_bytes for s in params)),
            boundary_bytes=Bytes(0),
            carry_bytes=Bytes(0),
            forward_peak_bytes=forward,
            backward_peak_bytes=backward,
            step_peak_bytes=Bytes(max(step_peak, first_step)),
            backward_s=Seconds(backward_s),
            step_s=Seconds(step_s),
        )
        profile = self._device.spec.profile
        if profile is not None:
            shard = replace(shard, step_s=profile.host_seconds(host_step_bytes(shard)))
        return JobMeasure(
            layers=(),
            shards=(shard,),
            batch_bytes=Bytes(_batch_bytes(built.batch)),
            buffer_bytes=Bytes(sum(b.nbytes for b in model.buffers())),
            resident_bytes=Bytes(
                shard.parameter_bytes + shard.state_bytes + backward + shard.step_peak_bytes
            ),
            num_batches=built.num_batches,
            valid_scale=_batch_bytes(built.valid) / max(1, _batch_bytes(built.batch)),
            optimizer=_name_of(built.optimizer),
            cuttable=True,
            bitwise=False,
            data=built.data,
            loader_bytes=built.loader_bytes,
            draws=draws,
        )

    def _forward(self, built: _Built) -> None:
        with torch.no_grad(), autocast(self._recipe, self._here):
            self._loss(built)

    def _evaluate(self, built: _Built) -> None:
        """A validation batch, with its metrics, as the trial will run it."""
        recipe, batch = self._recipe, built.valid
        built.model.eval()
        with torch.no_grad(), autocast(recipe, self._here):
            args, kwargs = model_inputs(recipe, batch)
            output = built.model(*args, **kwargs)
            loss = compute_loss(recipe, output, batch)
        evaluate_metrics(recipe, loss, output, batch)
        built.model.train()

    def _backward(self, built: _Built) -> None:
        for parameter in built.model.parameters():
            parameter.grad = None
        with autocast(self._recipe, self._here):
            loss = self._loss(built)
        (loss / self._recipe.accumulate).backward()

    def _loss(self, built: _Built) -> Tensor:
        args, kwargs = model_inputs(self._recipe, built.batch)
        return compute_loss(self._recipe, built.model(*args, **kwargs), built.batch)

    def _step(self, built: _Built) -> None:
        try:
            built.optimizer.step()
        except TypeError as error:
            raise SpecError(
                f"{type(built.optimizer).__name__}.step() cannot be called without arguments "
                f"({error}): it wants a closure that recomputes the loss, because it couples all "
                "parameters in a line search. shoal cannot train with it; use an optimizer that "
                "steps each parameter by its own gradient, such as AdamW or SGD."
            ) from error

    # -- cut ------------------------------------------------------------------------------

    def _measure_cut(self, built: _Built, whole: JobMeasure) -> JobMeasure:
        """The chain, compared with the module, and its layers; or why there is none."""
        for parameter in built.model.parameters():
            parameter.grad = None
        cpu = torch.device("cpu")
        built.model.to(cpu)
        report = pilot(built.model, self._recipe, to_device(built.batch, cpu), cpu)
        if report.chain is None:
            return replace(whole, cuttable=False, notes=report.notes)
        coupled = (
            _written_and_shared(report.chain)
            or self._draws(built)
            or self._coupling(built, report.chain)
        )
        if coupled:
            return replace(whole, cuttable=False, notes=(*report.notes, coupled))
        self._chain = report.chain
        layers = measure_layers(
            self._chain_here(), built.batch, self._state_bytes(), timed=self._timed
        )
        return replace(
            whole,
            layers=_with_step_seconds(layers, whole),
            bitwise=report.bitwise,
            notes=report.notes,
        )

    def _chain_here(self) -> Chain:
        """The chain on the device itself; compared it was on the CPU."""
        assert self._chain is not None
        self._chain.model.to(self._here)
        return self._chain.on(self._here)

    def _clock(self) -> float:
        """Seconds, when all that was launched is done."""
        if self._here.type == "cuda":
            torch.cuda.synchronize(self._here)
        return time.perf_counter()

    def _state_bytes(self) -> dict[str, int]:
        return {name: int(_aligned(specs)) for name, specs in self._states.items()}

    def _measure_shards(self, trial: TrialSpec, cuts: tuple[int, ...]) -> Measured:
        if self._chain is None or self._built is None or self._built.trial != trial:
            self._measure(trial, cut=True)
        assert self._chain is not None
        assert self._built is not None
        assert self._whole is not None
        shards = measure_shards(
            self._chain_here(), cuts, self._built.batch, self._state_bytes(), timed=self._timed
        )
        whole = self._whole.shards[0]
        bounds = [0, *cuts, self._chain.num_layers]
        layout = _layout(bounds, self._chain, self._built.model, self._states)
        peaks = self._step_peaks(self._built, layout)
        finished = [_with_step(s, whole, p) for s, p in zip(shards, peaks, strict=True)]
        measure = replace(
            self._whole, shards=tuple(finished), bitwise=True, notes=self._chain.notes
        )
        return Measured(trial.number, measure, layout)

    def _step_peaks(self, built: _Built, layout: TrialLayout) -> list[Bytes]:
        """What the step of each shard allocates: the first one, which makes state, and later."""
        hp = HyperParameters(built.trial.hp)
        model = built.model
        optimizer = build_optimizer(self._recipe, model.named_parameters(), hp)
        owned = [[f.spec.name for f in shard.param.fields] for shard in layout.shards]
        binding = Binding(model, optimizer, owned, next(model.parameters()).device)
        peaks = []
        for index in range(len(owned)):
            _fill_gradients(model, index)
            rounds = [_peak(lambda i=index: binding.step_part(i)) for _ in range(3)]  # type: ignore[misc]
            peaks.append(max(rounds))
        return peaks

    def _draws(self, built: _Built) -> str:
        """Whether the optimizer's step draws random numbers; why that cannot be spilled."""
        before = capture_rng(self._here)
        _fill_gradients(built.model, 0)
        self._step(built)
        if same_rng(before, capture_rng(self._here)):
            return ""
        return (
            f"the step of {type(built.optimizer).__name__} draws random numbers, and a shard at a "
            "time it would draw others"
        )

    def _coupling(self, built: _Built, chain: Chain) -> str:
        """Whether stepping layer by layer gives other bits than stepping at once; why."""
        hp = HyperParameters(built.trial.hp)
        owned = [list(chain.parameters_of(layer)) for layer in range(chain.num_layers)]
        results = []
        for parts in ([[name for names in owned for name in names]], owned):
            seed_all(built.trial.seed)
            model = self._recipe.model(hp)
            optimizer = build_optimizer(self._recipe, model.named_parameters(), hp)
            binding = Binding(model, optimizer, parts, torch.device("cpu"))
            for round_ in range(2):
                _fill_gradients(model, round_)
                for index in reversed(range(len(parts))):  # as a backward comes by
                    binding.step_part(index)
            if kept := binding.kept_beside():
                return (
                    f"the optimizer {type(built.optimizer).__name__} keeps {kept!r} beside its "
                    "state, and each shard would have one of its own"
                )
            results.append(dict(model.named_parameters()))
        different = [n for n, p in results[0].items() if not torch.equal(p, results[1][n])]
        if not different:
            return ""
        return (
            f"the optimizer {type(built.optimizer).__name__} couples parameters across layers: "
            f"stepping them a shard at a time changes {different[0]!r} and "
            f"{len(different) - 1} others"
        )


def _written_and_shared(chain: Chain) -> str:
    """Whether a forward writes to a parameter that another layer reads; why that is not cut."""
    written = {n for layer in range(chain.num_layers) for n in chain.written_parameters(layer)}
    borrowed = {n for layer in range(chain.num_layers) for n in chain.borrowed_by(layer)}
    both = sorted(written & borrowed)
    if not both:
        return ""
    return (
        f"a forward writes to {both[0]!r}, as max_norm does, and another layer reads it: its copy "
        "there could be the one of before"
    )


def _own(error: BaseException) -> Exception | None:
    """The error when it is shoal's own and says all there is to say."""
    return error if isinstance(error, ShoalError) else None


def _first_batch(train: Any) -> Batch:
    batch = next(iter(train), None)
    if batch is None:
        raise SpecError(
            "the training data yielded no batch. Recipe(data=...) must return a source that "
            "yields at least one batch each time it is read."
        )
    return batch


def _all_params(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _scalars_of(module: nn.Module) -> dict[str, Any]:
    """A module's plain attributes: numbers of heads or passes cost bytes too."""
    plain = (bool, int, float, str, type(None))
    return {k: v for k, v in vars(module).items() if type(v) in plain and k != "training"}


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer's class and which of torch's implementations it uses."""
    group = optimizer.param_groups[0]
    chosen = [kind for kind in ("fused", "foreach", "capturable") if group.get(kind)]
    return " ".join([*chosen, type(optimizer).__name__])


def _kind_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a param group's options decides which state and scratch a step needs."""
    values = {"params", "lr", "initial_lr", "betas", "eps"}
    return {
        key: value if value is None or isinstance(value, bool | str) else bool(value)
        for key, value in group.items()
        if key not in values
    }


def _shape_of(value: Any) -> Any:
    """The shapes and types of a batch, without its values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, Mapping):
        return {key: _shape_of(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_shape_of(item) for item in value]
    return type(value).__name__


def _batch_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_batch_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(_batch_bytes, value))
    return 0


def _peak(work: Callable[[], None]) -> Bytes:
    with AllocationTracker() as tracker:
        work()
    return Bytes(tracker.peak_bytes)


def _aligned(specs: Sequence[TensorSpec]) -> Bytes:
    return Bytes(sum(round_up(spec.num_bytes, ALIGNMENT) for spec in specs))


def _fill_missing_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _fill_gradients(model: nn.Module, round_: int) -> None:
    generator = torch.Generator().manual_seed(round_)
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)


def _with_step(shard: ShardSpec, whole: ShardSpec, peak: Bytes) -> ShardSpec:
    """A shard with its part of the whole step's seconds, and its own step's peak."""
    part = shard.owned_bytes / max(1, whole.owned_bytes)
    return replace(shard, step_s=Seconds(whole.step_s * part), step_peak_bytes=peak)


def _with_step_seconds(
    layers: Sequence[LayerMeasure], whole: JobMeasure
) -> tuple[LayerMeasure, ...]:
    """A step's seconds, shared out by parameter bytes."""
    total = max(1, whole.shards[0].owned_bytes)
    seconds = whole.shards[0].step_s
    return tuple(
        replace(layer, step_s=Seconds(seconds * layer.parameter_bytes / total)) for layer in layers
    )


def _layout(
    bounds: Sequence[int],
    chain: Chain | None,
    model: nn.Module,
    states: Mapping[str, Sequence[TensorSpec]],
) -> TrialLayout:
    """The host region of a model in shards; one shard when there is no chain."""
    parameters = {name: describe(name, p) for name, p in model.named_parameters()}
    buffers = [describe(name, b) for name, b in model.named_buffers()]
    if chain is None:
        return lay_out([list(parameters)], [[]], parameters, states, buffers)
    spans = list(itertools.pairwise(bounds))
    owned = [[n for layer in range(*span) for n in chain.parameters_of(layer)] for span in spans]
    borrowed = []
    for span, own in zip(spans, owned, strict=True):
        names = [n for layer in range(*span) for n in chain.borrowed_by(layer)]
        borrowed.append([n for n in dict.fromkeys(names) if n not in own])
    return lay_out(owned, borrowed, parameters, states, buffers)
