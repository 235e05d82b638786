"""What a replica would take, found with one process: its group's messages go nowhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.spec import HyperParameters, ReplicaMeasure, ShardSpec, TrialSpec
from shoal.core.units import Bytes
from shoal.memory.store import same_bits
from shoal.partition.track import AllocationTracker
from shoal.recipes.bound import bound, clip_limit
from shoal.recipes.optimizers import build_optimizer
from shoal.recipes.recipe import (
    Batch,
    Recipe,
    autocast,
    build_model,
    evaluate_metrics,
    loss_and_output,
)
from shoal.replicas import cut_for_replicas, slice_of, step_by_shards
from shoal.rng import capture_rng, restore_rng, seed_all
from shoal.runtime.gangs.group import GangGroup, NoWays, joined, put_aside
from shoal.runtime.gangs.wrapped import Sharded, Whole, shard_groups
from shoal.runtime.measuring.counting import sparse_gradient_of
from shoal.runtime.measuring.finders import with_a_share_of

REENTRANT = (
    "its forward checkpoints with use_reentrant=True, whose backwards inside the backward DDP "
    "cannot count. Use shard=True, or checkpoint(..., use_reentrant=False)"
)
COUPLED = 1e-4
"""Relative difference between steps of shards and of wholes that is no rounding."""


class Probe:
    """One of ``width`` replicas of a trial's model, for measuring only."""

    def __init__(
        self, recipe: Recipe, trial: TrialSpec, device: torch.device, *, width: int, shard: bool
    ) -> None:
        self._hp = HyperParameters(trial.hp)
        self._recipe, self._trial, self._device = bound(recipe, self._hp), trial, device
        self._width, self._shard = width, shard

    def measure(
        self, model: nn.Module, batch: Batch, valid: Batch | None, alone: ShardSpec
    ) -> ReplicaMeasure:
        """Bytes and comparisons; ``alone`` is what the model takes of a replica's rows."""
        losses = self._losses(model, batch)
        problem, alike = _sparse(model), True
        if self._shard and not problem:
            problem = with_a_share_of(self._recipe, self._hp, model)
        if self._shard and not problem:
            problem, alike = self._problem(batch)
        held = unit = 0
        if not problem:
            try:
                held, unit = self._bytes(batch, valid, alone)
            except RuntimeError as error:
                if self._shard or "reentrant" not in str(error):
                    raise
                problem = REENTRANT
        return ReplicaMeasure(
            shard=alone,
            held_bytes=Bytes(held),
            unit_bytes=Bytes(unit),
            whole_loss=losses[0],
            pieces_loss=losses[1],
            problem=problem,
            steps_alike=alike,
            blocks=len(shard_groups(model)),
        )

    # -- losses ---------------------------------------------------------------------------

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[float | None, float | None]:
        """The batch's loss, and the mean of its pieces', with nothing drawn and nothing kept."""
        before = capture_rng(self._device)
        model.eval()
        try:
            whole = self._loss_of(model, batch)
            pieces = cut_for_replicas(batch, self._width)
            return whole, math.fsum(p.weight * self._loss_of(model, p.batch) for p in pieces)
        except Exception:  # a model that cannot evaluate training batches says nothing
            return None, None
        finally:
            model.train()
            restore_rng(before, self._device)

    def _loss_of(self, model: nn.Module, batch: Batch) -> float:
        with torch.no_grad(), autocast(self._recipe, self._device):
            return float(loss_and_output(self._recipe, model, batch)[0])

    # -- FSDP2 ----------------------------------------------------------------------------

    def _model(self) -> nn.Module:
        seed_all(self._trial.seed)
        return build_model(self._recipe, self._hp).to(self._device).train()

    def _problem(self, batch: Batch) -> tuple[str, bool]:
        """Why FSDP2 cannot have this model; and whether its optimizer steps shards as wholes."""
        model = self._model()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0 or not parameter.is_contiguous():
                what = "has no dimension" if parameter.dim() == 0 else "is not contiguous"
                return f"its parameter {name!r} {what}, which FSDP2 cannot divide by rows", True
        try:
            return self._steps() or self._computes_otherwise(batch), self._steps_bits
        except Exception as error:
            return f"FSDP2 fails with it: {type(error).__name__}: {error}", True

    def _computes_otherwise(self, batch: Batch) -> str:
        """Whether a model in FSDP2 over one process has other gradients than the model alone."""
        piece = cut_for_replicas(batch, self._width)[0].batch
        alone = self._model()
        after = capture_rng(self._device)
        with autocast(self._recipe, self._device):
            loss = loss_and_output(self._recipe, alone, piece)[0]
        loss.backward()
        with put_aside(), joined(GangGroup(0, 1, NoWays())):
            engine = Sharded(self._model(), self._recipe, self._device)
            restore_rng(after, self._device)
            engine.root.train()
            engine.backward(piece, 1.0, last=True, check=lambda value: None)
            found = {name: grad.clone() for name, grad in engine.gradients().items()}
        wanted = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        for name in wanted.keys() | found.keys():
            if name not in wanted or name not in found or not _equal(wanted[name], found[name]):
                return f"in FSDP2 the gradient of {name!r} is another one"
        return ""

    def _steps(self) -> str:
        """Whether stepping parameters by rows is stepping them; and if to the same bits."""
        self._steps_bits = True
        results = []
        for by_shards in (False, True):
            model = self._model()
            optimizer = build_optimizer(self._recipe, model.named_parameters(), self._hp)
            held = [p for group in optimizer.param_groups for p in group["params"]]
            generator = torch.Generator().manual_seed(5)
            for _ in range(2):
                for parameter in held:
                    drawn = torch.randn(parameter.shape, generator=generator)
                    parameter.grad = drawn.to(parameter.device, parameter.dtype)
                    if not parameter.requires_grad:
                        parameter.grad = None
                if by_shards:
                    step_by_shards(optimizer, held, self._width)
                else:
                    optimizer.step()
            results.append(dict(model.named_parameters()))
        self._state_part = self._part(e for p in held for e in optimizer.state.get(p, {}).values())
        self._trained_part = self._part(p for p in held if p.requires_grad)
        for name, whole in results[0].items():
            other = results[1][name].detach()
            self._steps_bits &= same_bits(whole, other)
            if not torch.allclose(whole, other, rtol=COUPLED, atol=COUPLED**2):
                return (
                    f"its optimizer steps rows of {name!r} otherwise than all of it, as one does "
                    "that looks at a parameter as a whole"
                )
        return ""

    # -- bytes ----------------------------------------------------------------------------

    def _bytes(self, batch: Batch, valid: Batch | None, alone: ShardSpec) -> tuple[int, int]:
        """What a replica holds between steps, and takes inside one on top of that."""
        piece = cut_for_replicas(batch, self._width)[0].batch
        model = self._model()
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        held = float(alone.parameter_bytes + alone.state_bytes)
        step_peak = float(alone.step_peak_bytes)
        if self._shard:
            held = alone.parameter_bytes * self._part(model.parameters())
            held += alone.state_bytes * self._state_part
            step_peak *= self._trained_part
        with put_aside(), joined(GangGroup(0, self._width, NoWays())):
            engine = (Sharded if self._shard else Whole)(model, self._recipe, self._device)
            steps = [self._step_bytes(engine, piece) for _ in range(2)]
            step, after = (max(found) for found in zip(*steps, strict=True))
            seen = 0 if valid is None else self._seen_bytes(engine, valid)
            buckets = engine.bucket_bytes
            engine.close()
        return math.ceil(held) + buffers + buckets, max(step, math.ceil(after + step_peak), seen)

    def _part(self, values: Iterable[Any]) -> float:
        """What of tensors is the first replica's, who has the most rows; of their bytes."""
        wholes = [value for value in values if isinstance(value, Tensor) and value.dim()]
        rows = sum(slice_of(whole, self._width, 0).nbytes for whole in wholes)
        return rows / max(1, sum(whole.nbytes for whole in wholes))

    def _step_bytes(self, engine: Whole | Sharded, piece: Batch) -> tuple[int, int]:
        """The most that a step's backwards take, and what is left for the optimizer."""
        for parameter in engine.root.parameters():
            parameter.grad = None
        engine.root.train()
        batches = min(2, self._recipe.accumulate)
        with AllocationTracker(resized=engine.gathered) as tracker:
            for micro in range(batches):
                for buffer in engine.root.buffers():
                    buffer.clone()  # as the first replica's comes to another one, beside its own
                last = micro == batches - 1
                engine.backward(piece, 0.5, last=last, check=lambda value: None)
            engine.finish()
            if (limit := clip_limit(self._recipe)) is not None:
                engine.clip(limit)
        return tracker.peak_bytes, tracker.current_bytes

    def _seen_bytes(self, engine: Whole | Sharded, valid: Batch) -> int:
        """The most that a validation batch takes."""
        engine.root.eval()
        tracker = AllocationTracker(resized=engine.gathered)
        with tracker, torch.no_grad():
            loss, output = engine.root(valid)
            evaluate_metrics(self._recipe, loss, output, valid)
        return tracker.peak_bytes


def _equal(one: Any, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-4, atol=1e-7))


def _sparse(model: nn.Module) -> str:
    """Why replicas cannot have a model some gradient of which is sparse; empty if none is."""
    name = sparse_gradient_of(model)
    if not name:
        return ""
    return f"the gradient of {name!r} is sparse, and replicas do not add those up"
