"""The rule of data-parallel training: what each replica computes, and in which order it is added.

[Note: the rule]
A batch is cut by rows, the first replicas have a row more where it does not divide. Replica r
computes the gradients of *its rows' loss times its part of the rows*, so that for a loss that is
a mean over rows they add up to those of the whole batch.

    replicas      each adds up its gradients of the step's batches, then the replicas' sums
                  are added in their order: ((g0 + g1) + g2) + g3
    by shards     after each batch the replicas' gradients are added in their order, and that
                  to the step's (FSDP2 keeps no whole gradients); the norm of a parameter's
                  gradient is that of the norms of its shards; and each shard is stepped alone,
                  which some kernels round in another way

Replica 0 is the trial: its random streams are the trial's, and its buffers (BatchNorm's
statistics) are the trial's after each batch; all replicas begin a batch with them. The other
replicas' streams begin anew with each batch, from a seed of the trial's seed, step, batch and
replica. So nothing depends on who was quicker, and nothing but the step's number is needed to go
on. A replica without rows computes the first row with weight 0.

``Replicas`` runs all of it in one process: the definition that trials are held against.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import TrialError
from shoal.recipes.recipe import Batch, Recipe, autocast, compute_loss, model_inputs, to_device
from shoal.recipes.steppers import Stepper
from shoal.recipes.subsets import clip_factor
from shoal.rng import capture_rng, restore_rng, seed_all


class Piece(NamedTuple):
    """A replica's rows of a batch, and what its loss counts in the whole batch's."""

    batch: Batch
    weight: float


def cut_for_replicas(batch: Batch, width: int) -> list[Piece]:
    """A batch in pieces of as equal rows as can be, each with memory of its own.

    Raises:
        TrialError: its tensors do not have rows in common, or what is no tensor has rows too.
    """
    leaves, tree = pytree.tree_flatten(batch)
    found = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves if isinstance(leaf, Tensor)}
    rows = found.pop() if len(found) == 1 else 0
    if found or not rows:
        words = ", ".join(map(str, sorted(found | {rows}))) if found else "no"
        raise TrialError(
            f"a batch whose tensors have {words} rows cannot be cut for {width} replicas: all its "
            "tensors must have the same rows, one or more. Put what belongs to the batch as a "
            "whole elsewhere, or train on one device."
        )
    _refuse_other_rows(batch, rows, width)
    pieces, start = [], 0
    for rank in range(width):
        count = rows // width + (rank < rows % width)
        here = slice(start, start + count) if count else slice(0, 1)
        cut = [leaf[here].clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        pieces.append(Piece(pytree.tree_unflatten(cut, tree), count / rows))
        start += count
    return pieces


def _refuse_other_rows(batch: Batch, rows: int, width: int) -> None:
    """Refuse values for each row that are in no tensor: each replica would get all of them."""

    def has_rows(node: Any) -> bool:
        if isinstance(node, Tensor | str | bytes) or rows < 2:
            return False
        if isinstance(node, list | tuple):
            return len(node) == rows and not any(
                isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(node)
            )
        shape = getattr(node, "shape", ())
        return isinstance(shape, tuple) and shape[:1] == (rows,)

    for node in pytree.tree_leaves(batch, is_leaf=has_rows):
        if has_rows(node):
            raise TrialError(
                f"a batch of {rows} rows cannot be cut for {width} replicas: it has a "
                f"{type(node).__name__} of {rows} values that are no tensors, one for each row as "
                "it seems, and only tensors are cut. Make it a tensor, or leave it out of the "
                "batch. If it belongs to the batch as a whole, give it as an attribute of an "
                "object of your own. Or train on one device."
            )


def stream_seed(seed: int, step: int, micro: int, rank: int) -> int:
    """What the random streams of a replica other than the first begin a batch with.

    Args:
        step: How many steps were taken before.
        micro: The batch's number in its step.
    """
    words = f"{seed} {step} {micro} {rank}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big")


def slice_of(tensor: Tensor, width: int, rank: int) -> Tensor:
    """A replica's shard of a parameter: rows, as ``torch.chunk`` gives them; maybe none."""
    size = -(-tensor.shape[0] // width)
    return tensor[min(rank * size, tensor.shape[0]) : (rank + 1) * size]


def shard_norms(grads: Sequence[Tensor]) -> Tensor:
    """The norms of a replica's shards of gradients, in one type."""
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    wide = any(grad.dtype == torch.float64 for grad in real)
    norms = [torch.linalg.vector_norm(g.float() if not wide else g.double()) for g in real]
    return torch.stack(norms) if norms else torch.zeros(0)


def clip_by_shards(limit: float, norms: Tensor, grads: Sequence[Tensor]) -> None:
    """Scale gradients as ``clip_grad_norm_`` does, of the norms of all replicas' shards of them.

    Args:
        norms: A row for each replica, as ``shard_norms`` gives it.
        grads: The gradients, or shards of them, in the order of the norms.
    """
    whole = [torch.linalg.vector_norm(norms[:, index]) for index in range(norms.shape[1])]
    factor = clip_factor(limit, whole, [grad.dtype for grad in grads])
    if factor is not None:
        for grad in grads:
            grad.mul_(factor.to(grad.dtype))


def step_by_shards(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], width: int
) -> None:
    """``optimizer.step()`` on one replica's shards of all parameters after the other's.

    Only for state of the parameters' own shapes, and scalars that all shards have alike.
    """
    state, found = optimizer.state, [dict(group) for group in optimizer.param_groups]
    wholes = [(p, p.data, p.grad, dict(state.get(p, {}))) for p in parameters]
    each: list[list[dict[str, Any]]] = []
    for rank in range(width):
        for parameter, data, grad, before in wholes:
            parameter.grad = None
            parameter.data = slice_of(data, width, rank)
            parameter.grad = None if grad is None else slice_of(grad, width, rank)
            state.pop(parameter, None)
            if before:
                state[parameter] = {k: _state_of(v, width, rank) for k, v in before.items()}
        for group, options in zip(optimizer.param_groups, found, strict=True):
            group.clear()  # a count goes on once
            group.update(options)
        optimizer.step()
        each.append([state.pop(parameter, {}) for parameter, *_ in wholes])
    for (parameter, data, grad, _), *shards in zip(wholes, *each, strict=True):
        parameter.grad = None
        parameter.data, parameter.grad = data, grad
        if shards[0]:
            state[parameter] = {key: _joined([s[key] for s in shards]) for key in shards[0]}


def _state_of(value: Any, width: int, rank: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return slice_of(value, width, rank).clone() if value.dim() else value.clone()


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    return torch.cat(list(values)) if isinstance(first, Tensor) and first.dim() else first


class Replicas:
    """All replicas of a model in one process, one after the other."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        seed: int,
        device: torch.device,
        *,
        width: int,
        sharded: bool,
    ) -> None:
        self._recipe, self._model, self._seed, self._device = recipe, model, seed, device
        self._width, self._sharded = width, sharded

    def backward_group(self, group: Iterable[Batch], step: int) -> float:
        """Give the parameters one step's gradients; returns the mean loss of its batches."""
        apart: list[dict[str, Tensor]] = [{} for _ in range(self._width)]
        total, count = 0.0, 0
        for micro, fetched in enumerate(group):
            batch = to_device(fetched, self._device)
            pieces = cut_for_replicas(batch, self._width)
            if self._sharded:
                each: list[dict[str, Tensor]] = [{} for _ in pieces]
                total += self._batch(pieces, each, step, micro)
                summed = sum_in_order(each)
                apart[0] = sum_in_order([apart[0], summed]) if micro else summed
            else:
                total += self._batch(pieces, apart, step, micro)
            count += 1
        found = apart[0] if self._sharded else sum_in_order(apart)
        for name, parameter in self._model.named_parameters():
            parameter.grad = found.get(name)
        return total / count

    def step(self, stepper: Stepper) -> None:
        """Step the optimizer."""
        if self._sharded:
            step_by_shards(stepper.optimizer, list(stepper.parameters.values()), self._width)
        else:
            stepper.step()

    def clip(self, limit: float) -> None:
        """Clip by the global norm."""
        if not self._sharded:
            nn.utils.clip_grad_norm_(self._model.parameters(), limit)
            return
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        rows = [
            shard_norms([slice_of(grad, self._width, rank) for grad in grads])
            for rank in range(self._width)
        ]
        clip_by_shards(limit, torch.stack(rows), grads)

    def _batch(
        self, pieces: Sequence[Piece], sums: Sequence[dict[str, Tensor]], step: int, micro: int
    ) -> float:
        """Each replica's gradients are added to its own; returns the batch's loss."""
        before = buffers_of(self._model)
        loss = self._piece(pieces[0], sums[0])
        rng, after = capture_rng(self._device), buffers_of(self._model)
        for rank, piece in enumerate(pieces[1:], 1):
            put_buffers(self._model, before)
            seed_all(stream_seed(self._seed, step, micro, rank))
            loss += self._piece(piece, sums[rank])
        put_buffers(self._model, after)
        restore_rng(rng, self._device)
        return loss

    def _piece(self, piece: Piece, sums: dict[str, Tensor]) -> float:
        """One replica's forward and backward; its loss, weighted."""
        recipe = self._recipe
        with added_to(sums, self._model):
            with autocast(recipe, self._device):
                arguments, keywords = model_inputs(recipe, piece.batch)
                loss = compute_loss(recipe, self._model(*arguments, **keywords), piece.batch)
            (loss * (piece.weight / recipe.accumulate)).backward()
        return piece.weight * float(loss.detach())


@contextmanager
def added_to(sums: dict[str, Tensor], model: nn.Module) -> Iterator[None]:
    """The gradients of a model within are ``sums``, and what backwards add to them."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.grad = sums.get(name)
    yield
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            sums[name] = parameter.grad


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's buffers."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def put_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy them back."""
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def sum_in_order(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The replicas' gradients added in their order; one that a replica lacks is zeros there."""
    names = dict.fromkeys(name for grads in each for name in grads)
    found = {}
    for name in names:
        like = next(grads[name] for grads in each if name in grads)
        parts = [g[name] if name in g else torch.zeros_like(like) for g in each]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        found[name] = total
    return found
