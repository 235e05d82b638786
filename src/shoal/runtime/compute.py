"""What the compute actions of one trial do: forward, backward, norm, and the two steps.

Here is the arithmetic of a program; when an action may run, and on which stream, is
decided in ``interpret``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.technique import Resident
from shoal.data.sources import batch_bytes
from shoal.memory.layout import split_bytes
from shoal.program.ir import Action, Op
from shoal.recipes.bound import clip_limit
from shoal.recipes.recipe import Batch, evaluate_metrics, tensors_of
from shoal.recipes.subsets import clip_factor
from shoal.runtime.placing.placed import Placed
from shoal.runtime.task import Task
from shoal.runtime.tenant import Tenant
from shoal.runtime.units import Micro

Work = Callable[[Task, Action], None]


class HostPiece(NamedTuple):
    """A part of a shard's step on the host, and its share of the step's time."""

    work: Callable[[], None]
    share: float


class Compute:
    """The units of one trial on one device.

    Attributes:
        placed: shard -> its tensors on the device now; kept by the seat.
        grads: shard -> gradients on the device, by parameter name. Those of a resident
            trial stay where autograd puts them: at the parameters.
        has_grad: shard -> names that have a gradient on the host.
        grew: A batch was larger than any before: its allocations are to be counted.
    """

    def __init__(self, session: Tenant, host: list[Placed]) -> None:
        self._session, self._host = session, host
        self._resident = isinstance(session.job.technique, Resident)
        self.placed: dict[int, Placed] = {}
        self.grads: dict[int, dict[str, Tensor]] = {}
        self.has_grad: dict[int, set[str]] = {}
        self.grew = False
        for parameter in session.binding.params.values():
            parameter.grad = None  # and so it is between any two units of a spilled trial
        self._norms: dict[str, Tensor] = {}
        self._clip: Tensor | None = None
        self._master: Tensor | None = None  # where the host's thread puts split weights together
        self._largest_batch = {True: 0, False: 0}  # of an evaluation, of a step
        self.works: Mapping[Op, Work] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.STEP: self._step,
            Op.SYNC: self._sync,
        }

    def end_step(self) -> None:
        """A clean slate for the next step.

        Raises:
            TrialError: a loss is not finite, and what is to step on the host will not.
        """
        self._session.require_finite()
        self._clip = None
        self.has_grad.clear()

    def begin(self, task: Task, action: Action) -> None:
        """Have the micro-batch of an F or B on the device; fetches it if it is the first."""
        if action.micro is None or action.micro in task.micros:
            return
        batch = self._session.fetch(task, action.micro)
        self._note_size(batch, evaluates=task.kind == "evaluation")
        task.micros[action.micro] = micro = self._session.units.begin(batch)
        micro.stream = task.streams.get(action.micro)

    def _note_size(self, batch: Batch, *, evaluates: bool = False) -> None:
        """See whether it is larger than any before that something like this was done with."""
        size = sum(map(batch_bytes, tensors_of(batch)))
        if size > self._largest_batch[evaluates]:
            self._largest_batch[evaluates], self.grew = size, True

    def _forward(self, task: Task, action: Action) -> None:
        micro = task.micros[action.micro or 0]
        self._session.binding.bind(action.shard, self.placed[action.shard])
        if task.recorder is not None:
            self._session.units.record(action.shard, micro, task.recorder)
            if action.shard == self._session.units.num_shards - 1:
                task.micros.clear()
            return
        result = self._session.units.forward(action.shard, micro)
        self._put_written(action.shard)
        if task.kind == "evaluation" and isinstance(self._session.job.technique, Resident):
            self._session.binding.put_back_bound()  # a forward may give parameters other data
            self._session.binding.require_same()
        if micro.metrics is not None:
            task.metrics = micro.metrics
            task.micros.clear()
        elif result is not None:
            self.evaluated(task, micro, result)
            task.micros.clear()

    def evaluated(self, task: Task, micro: Micro, result: Any) -> None:
        """The last shard's forward is through, with loss and output."""
        loss, output = result
        task.metrics = evaluate_metrics(self._session.recipe, loss, output, micro.batch)

    def _backward(self, task: Task, action: Action) -> None:
        session, shard = self._session, action.shard
        micro, placed = task.micros[action.micro or 0], self.placed[shard]
        session.binding.bind(shard, placed)
        params = session.binding.params
        if shard in self.grads:  # of a micro-batch before; else no parameter has one
            for name, grad in self.grads[shard].items():
                params[name].grad = grad
        loss = session.units.backward(shard, micro)
        self._put_written(shard)
        if self._resident:
            session.binding.require_frozen()
            session.binding.require_same()
        else:
            self.grads[shard] = self._found_grads(shard)
            for name in placed.params:
                params[name].grad = None
        if any(self.limits()):
            self._norms |= self.norms_of(self.grads_of(shard))
        if loss is not None:
            session.note_loss(loss)
        if micro.losses is not None:
            session.note_losses(micro.losses)
        if shard == session.units.frozen:
            del task.micros[action.micro or 0]

    def norms_of(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The norm of each gradient; of those that came as bfloat16, of what they stand for."""
        dtypes = self._session.binding.dtypes
        as_is = {name: grad for name, grad in grads.items() if grad.dtype == dtypes[name]}
        norms = torch._foreach_norm(list(as_is.values())) if as_is else ()
        found = dict(zip(as_is, norms, strict=True))
        for name in grads.keys() - as_is.keys():
            found[name] = torch._foreach_norm([grads[name].to(dtypes[name])])[0]
        return found

    def grads_of(self, shard: int) -> dict[str, Tensor]:
        """The gradients on the device, by parameter name."""
        return self._found_grads(shard) if self._resident else self.grads.get(shard, {})

    def _found_grads(self, shard: int) -> dict[str, Tensor]:
        params = self._session.binding.params
        owned = self._session.owned[shard]
        return {name: grad for name in owned if (grad := params[name].grad) is not None}

    def _put_written(self, shard: int) -> None:
        """What a forward wrote to its own parameters goes to the host at once; it is rare."""
        host, names = self._host[shard], self._session.units.written(shard)
        for name in names:
            host.params[name].copy_(self.placed[shard].params[name])
        if names:
            host.renew_copies(names)

    def _sync(self, task: Task, action: Action) -> None:
        """The clipping factor of torch's clip_grad_norm_, from norms in parameter order."""
        order = self._session.binding.params
        norms = {name: self._norms[name] for name in order if name in self._norms}
        self._norms = {}
        self._clip = self.clip_factor(norms)

    def limits(self) -> Sequence[float | None]:
        """The largest norm of each trial here, None where it is not clipped."""
        return (clip_limit(self._session.recipe),)

    def clip_factor(self, norms: Mapping[str, Tensor]) -> Tensor | None:
        """Of the norms of the gradients there are, by name in parameter order; None for none."""
        (limit,) = self.limits()
        dtypes = [self._session.binding.dtypes[name] for name in norms]
        return None if limit is None else clip_factor(limit, list(norms.values()), dtypes)

    def _step(self, task: Task, action: Action) -> None:
        shard, binding = action.shard, self._session.binding
        self._session.require_finite()
        if self._session.recipe.step is not None:  # it has stepped already
            binding.take_stock(shard, self.placed[shard])
            return
        if self._clip is not None and (grads := self.grads_of(shard)):
            self.scale(grads, self._clip)
        if self._resident:
            binding.step_where_it_is(shard, self.placed[shard], self._session.step)
        else:
            grads = self.grads.pop(shard, {})
            binding.step(shard, self.placed[shard], grads, self._session.step)

    def scale(self, grads: Mapping[str, Tensor], factor: Tensor) -> None:
        """Clip gradients in place."""
        torch._foreach_mul_(list(grads.values()), factor)

    def host_step(self, shard: int) -> list[HostPiece]:
        """The work of a STEP on the host, on the gradients that were stored there, in chunks.

        All of them take the one clipping factor there is.
        """
        has_grad, number = self.has_grad.pop(shard, set()), self._session.step
        require_finite = self._session.require_finite  # of this step, on the host's thread
        host, clip, binding = self._host[shard], self._clip, self._session.binding

        def step(part: int, names: Sequence[str]) -> None:
            require_finite()
            grads = {
                name: host.grads[name].to(binding.dtypes[name])
                for name in names
                if name in has_grad
            }
            if clip is not None and grads:
                self.scale(grads, clip.cpu())
            binding.step_on_host(part, host, grads, number, self._room_for_a_chunk())
            host.renew_copies(names)

        pieces = binding.pieces[shard]
        sizes = [sum(binding.poison[name].nbytes for name in names) for _, names in pieces]
        total = sum(sizes) or 1
        return [
            HostPiece(functools.partial(step, part, names), size / total)
            for (part, names), size in zip(pieces, sizes, strict=True)
        ]

    def _room_for_a_chunk(self) -> Tensor | None:
        """Memory for the split weights of any chunk, made once; None if there are none."""
        if self._master is None and any(host.split for host in self._host):
            pieces = zip(self._session.layout.shards, self._session.binding.pieces, strict=True)
            most = max(split_bytes(own, names) for own, cut in pieces for _, names in cut)
            self._master = torch.empty(most, dtype=torch.uint8)
        return self._master
