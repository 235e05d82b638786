"""A replica's model in PyTorch's DDP or FSDP2: gradients of its rows become those of all rows.

Both run inside ``group.joined``, and add up in the order of the replicas (``shoal.replicas``).
What is wrapped is a module that gives the loss: then torch needs to find no tensors in outputs
of kinds that it does not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.core.errors import TrialError
from shoal.partition.discover import NotCuttable, find_candidates
from shoal.recipes.recipe import Batch, Recipe, autocast, loss_and_output
from shoal.replicas import clip_by_shards, shard_norms
from shoal.runtime.gangs.group import GangGroup
from shoal.runtime.gangs.unseen import shard_unseen, show_first_layers
from shoal.runtime.measuring.counting import has_sparse_gradient

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13's
_reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # names


Check = Callable[[float], None]
"""Raises where a loss is not to be trained on."""


class _WithLoss(nn.Module):
    """The user's model with the recipe's loss after it."""

    def __init__(self, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._recipe, self._autocast = recipe, autocast(recipe, device)

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        """The loss, and in evaluation the output beside it."""
        with self._autocast:
            loss, output = loss_and_output(self._recipe, self.model, batch)
        return loss, None if self.training else output


def share_buffers(model: nn.Module) -> None:
    """Have the first replica's buffers in all of them."""
    with torch.no_grad():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A bucket of gradients on its way: of this replica's part, everybody's."""

    buffer: Tensor
    received: Tensor
    sizes: Sequence[int]
    work: Any


class Whole:
    """DDP: gradients in buckets, which leave while the backward goes on.

    The sum of a bucket is taken as everybody's part at everybody: each replica adds up its part
    in the order of the replicas and spreads it, which moves as many bytes as a ring does.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        _refuse_sparse(model)
        self._rank, self._width = dist.get_rank(), dist.get_world_size()
        self.root = _WithLoss(model, recipe, device)
        # Which parameters are used may follow from the rows, so torch has to look for unused ones;
        # that it finds none it says on standard error, unless there is one.
        self.root.spare = nn.Parameter(torch.zeros((), device=device))
        self.gathered: list[torch.UntypedStorage] = []
        self._under_way: list[_Exchange] = []
        self._ddp: DistributedDataParallel | None = DistributedDataParallel(
            self.root,
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
            **_no_buffers_please(),
        )
        self._ddp.register_comm_hook(None, lambda state, bucket: self._send(bucket))

    def used(self) -> dict[str, int]:
        """Nothing: DDP sees to it that replicas may use different parameters."""
        return {}

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the buckets, which are there all the time."""
        return sum(p.nbytes for p in self.root.model.parameters() if p.requires_grad)

    def backward(self, batch: Batch, weight: float, *, last: bool, check: Check) -> float:
        """Gradients of ``weight`` times the loss; sent to the others with the step's last batch.

        Returns the loss, without weight, which was checked before.
        """
        ddp = self._ddp
        assert ddp is not None
        with nullcontext() if last else ddp.no_sync():
            return _run(ddp, batch, weight, check)

    def finish(self) -> None:
        """The parameters' gradients are those of all replicas."""
        spread = []
        for one in self._under_way:
            one.work.wait()
            parts = one.received.view(self._width, -1)
            total = parts[0]
            for part in parts[1:]:
                total += part
            places = one.buffer.split(list(one.sizes))
            places[self._rank].copy_(total)
            for owner, place in enumerate(places):
                if place.numel():
                    spread.append(dist.broadcast(place, src=owner, async_op=True))
        self._under_way.clear()
        for work in spread:
            work.wait()

    def clip(self, limit: float) -> None:
        """Clip by the global norm."""
        nn.utils.clip_grad_norm_(self.root.model.parameters(), limit)

    def close(self) -> None:
        """Take the hooks off the model's parameters, and let go of the buckets.

        DDP's reducer keeps its hook, which keeps this object: no garbage collector sees that.
        """
        ddp, self._ddp = self._ddp, None
        if ddp is not None:
            ddp._remove_autograd_hooks()
            for parameter in self.root.parameters():
                parameter.grad = None  # a view of a bucket
        self._under_way.clear()

    def _send(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Send everybody its part; what torch takes for the sum is the bucket, filled later."""
        buffer = bucket.buffer()
        size = -(-buffer.numel() // self._width)
        starts = [min(rank * size, buffer.numel()) for rank in range(self._width + 1)]
        sizes = [stop - start for start, stop in pairwise(starts)]
        mine = sizes[self._rank]
        received = buffer.new_empty(self._width * mine)
        work = dist.all_to_all_single(received, buffer, [mine] * self._width, sizes, async_op=True)
        self._under_way.append(_Exchange(buffer, received, sizes, work))
        on_gpu = [buffer.device] if buffer.is_cuda else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=on_gpu)
        future.set_result(buffer)
        return future


class _About(DefaultAllocMixin):
    """FSDP2's own operation, said to be about one block: then blocks of a size do not mix."""

    def __init__(self, number: int) -> None:
        self._number = number

    @contextmanager
    def _said(self, group: dist.ProcessGroup) -> Iterator[None]:
        if not isinstance(group, GangGroup):
            yield
            return
        group.about = self._number
        try:
            yield
        finally:
            group.about = 0


class _Gather(_About, AllGather):
    """All-gather of a block's parameters."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        with self._said(group):
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduce(_About, ReduceScatter):
    """Reduce-scatter of a block's gradients."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        with self._said(group):
            return _reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class Sharded:
    """FSDP2 of a model that was built for it: it holds this replica's shards of parameters.

    Gradients are added up after every batch, so no replica ever keeps whole ones.

    Attributes:
        params: The shards by the parameters' names, plain tensors.
        gathered: Where whole parameters are while they are gathered; empty in between.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        self._width = dist.get_world_size()
        self.root = _WithLoss(model, recipe, device)
        mesh = DeviceMesh(device.type, list(range(self._width)))
        for block in shard_groups(model).values():
            shard_unseen(block, mesh)
        show_first_layers(model)
        wrapped: Any = fully_shard(self.root, mesh=mesh)
        sharded = [m for m in self.root.modules() if isinstance(m, FSDPModule)]
        for number, module in enumerate(sharded, 1):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(_Gather(number))
            module.set_custom_reduce_scatter(_Reduce(number))
        wrapped.unshard()  # torch settles where the shards lie when they are first used
        wrapped.reshard()
        self.gathered = [s for module in sharded for s in _gathered_by(module)]
        self._named = {n.removeprefix("model."): p for n, p in self.root.named_parameters()}
        self.params: Mapping[str, Tensor] = {n: _local(p.data) for n, p in self._named.items()}

    bucket_bytes = 0

    def backward(self, batch: Batch, weight: float, *, last: bool, check: Check) -> float:
        """As ``Whole.backward``; gradients are sent with every batch."""
        return _run(self.root, batch, weight, check)

    def finish(self) -> None:
        """The gradients are of all replicas already."""

    def used(self) -> dict[str, int]:
        """How often each parameter's gradient was written to, of those that have one."""
        return {name: grad._version for name, grad in self.gradients().items()}

    def gradients(self) -> dict[str, Tensor]:
        """The shards of those that there are."""
        return {n: _local(p.grad) for n, p in self._named.items() if p.grad is not None}

    def clear(self) -> None:
        """Let go of them."""
        for parameter in self._named.values():
            parameter.grad = None

    def clip(self, limit: float) -> None:
        """Clip by the global norm, of everybody's shards."""
        grads = list(self.gradients().values())
        own = shard_norms(grads)
        rows = own.new_empty(self._width * own.numel())
        _gather(rows, own)
        clip_by_shards(limit, rows.view(self._width, -1), grads)

    def close(self) -> None:
        """Let go of the shards; nothing is left on the user's own model."""
        self.clear()
        self._named, self.params, self.gathered = {}, {}, []


def shard_groups(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks whose parameters FSDP2 gathers together; those of the rest go with the root."""
    try:
        candidates = find_candidates(model)
    except NotCuttable:
        return {}
    blocks = candidates[0].blocks if candidates else {}
    users: dict[int, set[int]] = {}
    for number, block in enumerate(blocks.values()):
        for parameter in block.parameters():
            users.setdefault(id(parameter), set()).add(number)
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    outside = {
        id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)
    }
    shared = outside | {key for key, numbers in users.items() if len(numbers) > 1}
    found: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        keys = [id(parameter) for parameter in block.parameters()]
        if keys and not shared.intersection(keys) and block not in found.values():
            found[name] = block
    return found


def _gathered_by(module: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of a block's whole parameters, which is there only while they are gathered."""
    module.unshard()
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):  # another block's
            yield parameter.untyped_storage()
    module.reshard()


def _run(module: nn.Module, batch: Batch, weight: float, check: Check) -> float:
    loss, _ = module(batch)
    value = float(loss.detach())
    check(value)
    (loss * weight).backward()
    return value


def _local(tensor: Any) -> Tensor:
    """A replica's part of a DTensor."""
    local: Tensor = tensor.to_local()
    return local


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if has_sparse_gradient(module):
            raise TrialError(
                f"{name!r} has sparse gradients, which replicas do not add up. Build it with "
                "sparse=False, or train on one device."
            )


def _no_buffers_please() -> dict[str, Any]:
    """How this torch is told that buffers are none of DDP's concern."""
    known = inspect.signature(DistributedDataParallel).parameters
    return {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }
