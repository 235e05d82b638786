"""What shoal is measured against, and builders for tests: public, for outsiders too.

``plain_loop`` is the definition of training alone. ``compare`` and ``assert_same`` say
whether a trial of a study ended on the same bits, and name the first that differ.

    plain = plain_loop(recipe, trial.hp, trial.seed, steps=100)
    assert_same(plain, trial)
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.errors import SpecError, TrialError
from shoal.core.plan import Job, Resident
from shoal.core.spec import DeviceSpec, HyperParameters, LayerMeasure, Place, ShardSpec
from shoal.core.units import Bytes, Seconds
from shoal.recipe import (
    HP,
    Batch,
    Recipe,
    autocast,
    build_model,
    build_optimizer,
    build_schedule,
    chunks,
    compute_loss,
    model_inputs,
    read_data,
    rounding_of,
    to_device,
)
from shoal.rng import RngState, capture_rng, restore_rng, seed_all

# ---------------------------------------------------------------- the plain loop


@dataclass(frozen=True, kw_only=True)
class PlainResult:
    """A model trained alone, and all that it ended with.

    ``losses`` has one float per optimizer step: the sum of the undivided micro-batch
    losses over their number. ``history`` has one row per evaluation: ``step`` and
    ``epoch`` (both from 1), ``seconds``, ``metrics``. ``parameters`` are the tensors the
    optimizer steps, by name: the model's own, or their host copies.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    parameters: Mapping[str, nn.Parameter]
    losses: tuple[float, ...]
    history: tuple[dict[str, Any], ...]
    metrics: Mapping[str, float]
    rng: RngState
    step: int

    def state(self) -> dict[str, Any]:
        """The layout of ``TrialResult.load_state()``: everything by parameter name."""
        return {
            "model": {name: tensor.cpu() for name, tensor in self.model.state_dict().items()},
            "optimizer": optimizer_state(self.optimizer, self.parameters),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "rng": self.rng,
            "step": self.step,
        }


def plain_loop(
    recipe: Recipe,
    hp: HP,
    seed: int,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    threads: int = 1,
    device: str | torch.device = "cpu",
    optimizer: Place = "device",
    eval_every: int | None = None,
    on_nonfinite: Literal["fail", "ignore"] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PlainResult:
    """Train one model alone, as anyone would: what a trial of a study must equal bit for bit.

    Ends after ``epochs``, or after ``steps`` optimizer steps, in the middle of an epoch if
    need be; no batch is fetched after the last step. Evaluates every ``eval_every`` steps,
    or after each epoch, and at the end. ``optimizer="host"`` steps on copies in host
    memory, which off a GPU is the same thing. ``on_nonfinite`` overrides the recipe's.
    The caller's random streams and thread count are put back.

    Raises:
        SpecError: neither or both of ``steps`` and ``epochs``, or no training data.
        TrialError: a loss is not finite and the recipe does not ignore it.
    """
    _require_one_end(steps, epochs)
    where = torch.device(device)
    ignore_nonfinite = (on_nonfinite or recipe.on_nonfinite) == "ignore"
    losses: list[float] = []
    history: list[dict[str, Any]] = []
    hp = HyperParameters(hp)

    with _borrowed_process(threads, where):
        seed_all(seed)
        model = build_model(recipe, hp).to(where)
        train, valid = read_data(recipe, hp)
        stepper = _make_stepper(recipe, model, hp, optimizer if where.type != "cpu" else "device")
        rounding = rounding_of(recipe, stepper.parameters, seed)
        schedule = build_schedule(recipe, stepper.optimizer, hp)
        started = clock()

        def record(epoch: int) -> None:
            if history and history[-1]["step"] == len(losses):
                return
            since = history[-1]["step"] if history else 0
            metrics = {"train_loss": sum(losses[since:]) / len(losses[since:])}
            metrics |= evaluate(recipe, model, valid, where) if valid is not None else {}
            row = {"step": len(losses), "epoch": epoch, "seconds": clock() - started}
            history.append({**row, "metrics": metrics})
            model.train()

        for epoch in itertools.count(1):
            model.train()
            steps_before = len(losses)
            for group in chunks(train, recipe.accumulate):
                stepper.zero_grad()
                loss = backward_group(recipe, model, group, where)
                if not (ignore_nonfinite or math.isfinite(loss)):
                    raise TrialError(_nonfinite(loss, len(losses) + 1))
                if recipe.clip_grad_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad_norm)
                with rounding.stepping(stepper.parameters, len(losses)):
                    stepper.step()
                if schedule:
                    schedule.step()
                losses.append(loss)
                if eval_every and len(losses) % eval_every == 0:
                    record(epoch)
                if len(losses) == steps:
                    break
            if len(losses) == steps_before:
                raise SpecError(
                    f"train data has no batches in epoch {epoch}; it needs one or more."
                )
            done = len(losses) == steps or epoch == epochs
            if done or not eval_every:
                record(epoch)
            if done:
                break

        rng = capture_rng(where)

    return PlainResult(
        model=model,
        optimizer=stepper.optimizer,
        schedule=schedule,
        parameters=stepper.parameters,
        losses=tuple(losses),
        history=tuple(history),
        metrics=history[-1]["metrics"],
        rng=rng,
        step=len(losses),
    )


def array_loop(
    recipe: Recipe,
    hp: HP,
    seed: int,
    *,
    slot: int,
    width: int,
    steps: int | None = None,
    epochs: int | None = None,
    threads: int = 1,
    device: str | torch.device = "cpu",
    eval_every: int | None = None,
) -> PlainResult:
    """The plain loop of a trial that trained in an array: in its slot, with nobody beside it.

    Its bits depend on the slot and the width, and on no neighbour. They are those of
    ``plain_loop`` but for the rounding of other kernels.

    Raises:
        Declined: the trial can be in no array.
    """
    from shoal.fusion import train_in_slot  # an import that only this needs

    _require_one_end(steps, epochs)
    where = torch.device(device)
    ends: dict[str, int | None] = {"steps": steps, "epochs": epochs, "eval_every": eval_every}
    with _borrowed_process(threads, where):
        member, losses, history = train_in_slot(
            recipe, hp, seed, slot, width, device=where, **ends
        )
    return PlainResult(
        model=member.module,
        optimizer=member.optimizer,
        schedule=member.schedule,
        parameters=dict(member.module.named_parameters()),
        losses=losses,
        history=tuple({"seconds": 0.0, **row} for row in history),
        metrics=history[-1]["metrics"],
        rng=member.rng,
        step=len(losses),
    )


def backward_group(
    recipe: Recipe, model: nn.Module, group: Iterable[Batch], device: torch.device
) -> float:
    """Add the gradients of one optimizer step's batches; returns their mean loss.

    Every loss is divided by ``recipe.accumulate``, also in a short last group.
    """
    total, count = 0.0, 0
    for fetched in group:
        batch = to_device(fetched, device)
        with autocast(recipe, device):
            arguments, keywords = model_inputs(recipe, batch)
            loss = compute_loss(recipe, model(*arguments, **keywords), batch)
        (loss / recipe.accumulate).backward()  # torch's own
        total, count = total + float(loss.detach()), count + 1
    return total / count


def evaluate(
    recipe: Recipe, model: nn.Module, valid: Iterable[Batch], device: torch.device
) -> dict[str, float]:
    """Means over the validation batches, unweighted; leaves the random streams as they were.

    The model is left in evaluation mode. The metrics are computed outside autocast.

    Raises:
        TrialError: there is no batch.
    """
    model.eval()
    sums = dict.fromkeys(["valid_loss", *(f"valid_{name}" for name in recipe.metrics)], 0.0)
    count = 0
    with _restored_rng(device), torch.no_grad():
        for fetched in valid:
            batch = to_device(fetched, device)
            with autocast(recipe, device):
                arguments, keywords = model_inputs(recipe, batch)
                output = model(*arguments, **keywords)
                sums["valid_loss"] += float(compute_loss(recipe, output, batch))
            for name, metric in recipe.metrics.items():
                sums[f"valid_{name}"] += float(metric(output, batch))
            count += 1
    if count == 0:
        raise TrialError("validation data has no batches. Return None for it if there is none.")
    return {name: value / count for name, value in sums.items()}


def _require_one_end(steps: int | None, epochs: int | None) -> None:
    if (steps is None) == (epochs is None):
        raise SpecError(f"give steps or epochs, one of them; got steps={steps}, epochs={epochs}.")
    if (steps or epochs or 0) < 1:
        raise SpecError(f"train at least one step, got steps={steps}, epochs={epochs}.")


def _nonfinite(loss: float, step: int) -> str:
    return (
        f"the loss of step {step} is {loss}. Lower the learning rate or clip the gradients, "
        "or train on with Recipe(on_nonfinite='ignore')."
    )


@contextmanager
def _restored_rng(device: torch.device) -> Iterator[None]:
    """Put the random streams back on the way out."""
    saved = capture_rng(device)
    try:
        yield
    finally:
        restore_rng(saved, device)


@contextmanager
def _borrowed_process(threads: int, device: torch.device) -> Iterator[None]:
    """This process with ``threads`` threads; threads and random streams as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _restored_rng(device):
            yield
    finally:
        torch.set_num_threads(before)


class _Stepper(Protocol):
    """One optimizer over a model's parameters, wherever it steps."""

    optimizer: torch.optim.Optimizer
    parameters: dict[str, nn.Parameter]

    def zero_grad(self) -> None: ...
    def step(self) -> None: ...


def _make_stepper(recipe: Recipe, model: nn.Module, hp: HP, place: Place) -> _Stepper:
    kind = _HostStepper if place == "host" else _DeviceStepper
    return kind(recipe, model, hp)


class _DeviceStepper:
    """The ordinary case: the optimizer steps the model's own parameters."""

    def __init__(self, recipe: Recipe, model: nn.Module, hp: HP) -> None:
        self.parameters = dict(model.named_parameters())
        self.optimizer = build_optimizer(recipe, self.parameters.items(), hp)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.optimizer.step()


class _HostStepper:
    """The optimizer steps copies in host memory; gradients go down, weights come up."""

    def __init__(self, recipe: Recipe, model: nn.Module, hp: HP) -> None:
        self._on_device = dict(model.named_parameters())
        self.parameters = {
            name: nn.Parameter(parameter.detach().cpu().clone(), parameter.requires_grad)
            for name, parameter in self._on_device.items()
        }
        for name, parameter in self._on_device.items():
            if parameter.requires_grad:
                self.parameters[name].grad_dtype = parameter.grad_dtype
        self.optimizer = build_optimizer(recipe, self.parameters.items(), hp)

    def zero_grad(self) -> None:
        """As the optimizer would: what it does not hold keeps its gradient."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self._on_device.items():
            if id(self.parameters[name]) in held:
                parameter.grad = None

    def step(self) -> None:
        for name, parameter in self._on_device.items():
            gradient = parameter.grad
            self.parameters[name].grad = None if gradient is None else gradient.cpu()
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self._on_device.items():
                parameter.copy_(self.parameters[name])


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """State and param groups by parameter name; tensors are shared, on the CPU if they can be."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    state = {
        names[id(parameter)]: {
            key: value.cpu() if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
    }
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}


# ---------------------------------------------------------------- comparing


class Comparison(NamedTuple):
    """Whether two trained states are the same bits; ``first_difference`` is words, or empty."""

    equal: bool
    tensors: int
    first_difference: str


class Trained(Protocol):
    """What ``assert_same`` needs of a trial's result."""

    @property
    def number(self) -> int: ...
    @property
    def history(self) -> Sequence[Mapping[str, Any]]: ...
    def load_state(self) -> Mapping[str, Any]: ...


@dataclass(slots=True)
class _Tally:
    """What a walk over two states has found so far."""

    tensors: int = 0
    differences: list[str] = field(default_factory=list)


def compare(
    plain: PlainResult, state: Mapping[str, Any], *, losses: Sequence[float] | None = None
) -> Comparison:
    """Compare a trial's state with the plain loop's, bit for bit.

    Weights, buffers, optimizer state and groups by parameter name, schedule, random
    streams, the step, and ``losses`` (one per step) when given. A tied weight may stand
    under any of its names; buffers that a checkpoint omits are not asked for.
    """
    expected = plain.state()
    tally = _Tally()
    _compare_model(plain.model, state["model"], tally)
    _walk("optimizer", expected["optimizer"], state["optimizer"], tally)
    _walk("schedule", expected["schedule"], state["schedule"], tally)
    _compare_rng(expected["rng"], state["rng"], tally)
    _walk("step", expected["step"], state["step"], tally)
    if losses is not None:
        _walk("losses", list(plain.losses), list(losses), tally)
    first = tally.differences[0] if tally.differences else ""
    return Comparison(not tally.differences, tally.tensors, first)


def assert_same(
    plain: PlainResult, trial: Trained, *, losses: Sequence[float] | None = None
) -> None:
    """Raise AssertionError with the first difference unless ``trial`` ended on the plain bits.

    Beside the state, compares every validation metric of the trial's history, and
    ``losses``, one per step, when given.
    """
    found = compare(plain, trial.load_state(), losses=losses)
    if not found.equal:
        raise AssertionError(
            f"trial {trial.number} differs from the loop: {found.first_difference}"
        )
    tally = _Tally()
    _walk("metrics", _valid_rows(plain.history), _valid_rows(trial.history), tally)
    if tally.differences:
        raise AssertionError(f"trial {trial.number}: {tally.differences[0]}")


def _valid_rows(history: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    rows = {row["step"]: row["metrics"] for row in history}
    return {
        step: {name: value for name, value in metrics.items() if name.startswith("valid_")}
        for step, metrics in rows.items()
        if any(name.startswith("valid_") for name in metrics)
    }


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal in type, shape and every bit (NaN payloads and signs too)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _compare_model(model: nn.Module, found: Mapping[str, Tensor], tally: _Tally) -> None:
    known: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    known |= dict(model.named_parameters(remove_duplicate=False))
    first_name: dict[int, str] = {}
    for name, tensor in known.items():
        first_name.setdefault(id(tensor), name)
    stated = {first_name[id(known[name])] for name in model.state_dict() if name in known}
    present = {first_name[id(known[name])] for name in found if name in known}
    tally.differences += [f"model: {name!r} is missing" for name in sorted(stated - present)]
    for name, tensor in found.items():
        if name in known:
            _walk(f"model {name!r}", known[name], tensor, tally)
        else:
            tally.differences.append(f"model: {name!r} is no parameter or buffer of the model")


def _compare_rng(expected: RngState, found: RngState, tally: _Tally) -> None:
    for stream in ("torch", "python", "numpy", "cuda"):
        _walk(
            f"random stream {stream!r}", getattr(expected, stream), getattr(found, stream), tally
        )


def _walk(name: str, expected: Any, found: Any, tally: _Tally) -> None:
    """Compare two structures of containers, tensors, arrays and scalars; note each difference."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        tally.tensors += 1
        if not same_bits(expected, found):
            tally.differences.append(f"{name}: {_describe(expected, found)}")
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in expected.keys() | found.keys():
            if key in expected and key in found:
                _walk(f"{name} {key!r}", expected[key], found[key], tally)
            else:
                owner = "the plain loop" if key in expected else "the trial"
                tally.differences.append(f"{name} {key!r} exists in {owner} only")
    elif _is_sequence(expected) and _is_sequence(found):
        if len(expected) != len(found):
            tally.differences.append(
                f"{name}: {len(expected)} entries expected, {len(found)} found"
            )
        for index, pair in enumerate(zip(expected, found, strict=False)):
            _walk(f"{name}[{index}]", *pair, tally)
    elif isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        if not np.array_equal(expected, found):
            tally.differences.append(f"{name}: the arrays differ")
    elif not _same_scalar(expected, found):
        tally.differences.append(f"{name}: {expected!r} expected, {found!r} found")


def _is_sequence(value: object) -> bool:
    return isinstance(value, list | tuple)


def _same_scalar(expected: object, found: object) -> bool:
    if isinstance(expected, float) and isinstance(found, float) and math.isnan(expected):
        return math.isnan(found)
    return type(expected) is type(found) and bool(expected == found)


def _describe(expected: Tensor, found: Tensor) -> str:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return (
            f"{expected.dtype} {tuple(expected.shape)} expected, "
            f"{found.dtype} {tuple(found.shape)} found"
        )
    # As float64 a NaN, or a zero's sign, may hide a difference; then only the count speaks.
    one, other = expected.detach().cpu().double(), found.detach().cpu().double()
    count = int((one != other).sum())
    largest = float((one - other).abs().max())
    return f"{count} of {expected.numel()} elements differ, the largest by {largest:.3g}"


# ---------------------------------------------------------------- aids for tests


class ManualClock:
    """A ``Clock`` that a test turns; ``sleep`` only moves the hand."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Turn the clock forward."""
        if seconds < 0:
            raise ValueError(f"a clock does not go back, got {seconds} seconds")
        self._now += seconds

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


def make_device(name: str = "cpu:0", memory: int = 2**28, **changes: Any) -> DeviceSpec:
    """A virtual device, 256 MiB unless told otherwise."""
    return DeviceSpec(name=name, kind="virtual", memory=Bytes(memory), **changes)


def make_layer(name: str = "layer", parameter_bytes: int = 1024, **changes: Any) -> LayerMeasure:
    """A layer's measurement; what is not given follows from its parameters, Adam's sizes."""
    size = Bytes(parameter_bytes)
    values: dict[str, Any] = {
        "parameter_bytes": size,
        "state_bytes": Bytes(2 * size),
        "borrowed_bytes": Bytes(0),
        "boundary_bytes": Bytes(256),
        "carry_bytes": Bytes(256),
        "forward_peak_bytes": Bytes(512),
        "saved_bytes": Bytes(512),
        "backward_peak_bytes": Bytes(1024 + size),
        "forward_s": Seconds(0.001),
        "backward_s": Seconds(0.003),
        "step_s": Seconds(0.0005),
    }
    return LayerMeasure(name=name, **(values | changes))


def make_shard(index: int = 0, parameter_bytes: int = 1024, **changes: Any) -> ShardSpec:
    """A shard of one layer; what is not given follows from its parameters, Adam's sizes."""
    size = Bytes(parameter_bytes)
    values: dict[str, Any] = {
        "layers": (index, index + 1),
        "parameter_bytes": size,
        "owned_bytes": size,
        "state_bytes": Bytes(2 * size),
        "gradient_bytes": size,
        "boundary_bytes": Bytes(256 if index else 0),
        "carry_bytes": Bytes(256 if index else 0),
        "forward_peak_bytes": Bytes(512),
        "backward_peak_bytes": Bytes(1024 + size),
        "step_peak_bytes": Bytes(0),
        "forward_s": Seconds(0.001),
        "backward_s": Seconds(0.003),
        "step_s": Seconds(0.0005),
    }
    return ShardSpec(index=index, **(values | changes))


def make_job(trial: int = 0, shards: Sequence[ShardSpec] = (), **changes: Any) -> Job:
    """A resident job of one shard unless told otherwise."""
    values: dict[str, Any] = {
        "hp": {"lr": 0.1},
        "seed": trial,
        "technique": Resident(),
        "batch_bytes": Bytes(256),
        "buffer_bytes": Bytes(0),
        "held_bytes": Bytes(4096),
        "unit_bytes": Bytes(2048),
        "peak_bytes": Bytes(4096 + 2048),
        "host_bytes": Bytes(4096),
        "step_s": Seconds(0.01),
        "micro_batches": 1,
        "why": (),
        "numerics": {},
    }
    return Job(trial=trial, shards=tuple(shards) or (make_shard(),), **(values | changes))
