"""The peers: a model and its step, as a user of each would write them.

Each builder gives a ``Loop``: a step that returns the loss, and nothing else that the arms
need to know. DeepSpeed is imported only by its own builders: it has an environment of its own.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from task import Batch, Task, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PLAIN = "plain"
CHECKPOINTED = "plain with checkpointing"
FSDP2 = "FSDP2 with CPU offload"
ZERO3 = "DeepSpeed ZeRO-3 with offload"
ZERO3_ADAM = "the same, DeepSpeed's CPUAdam"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One training. ``offloads``: between two steps its state is in host memory."""

    step: Callable[[Batch], float]
    offloads: bool
    notes: tuple[str, ...] = ()


class Checkpointed(nn.Module):
    """A block whose activations are recomputed in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return found


class WithLoss(nn.Module):
    """A model whose forward ends with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        return loss_of(self.model(batch[0]), batch)


def checkpointed(task: Task) -> nn.Module:
    """The task's model with every block recomputed."""
    model = task.model()
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model


def plain(task: Task) -> Loop:
    """The whole model on the device."""
    return _in_one_place(task, task.model())


def plain_checkpointed(task: Task) -> Loop:
    """The whole model on the device, its activations recomputed."""
    return _in_one_place(task, checkpointed(task))


def _in_one_place(task: Task, model: nn.Module) -> Loop:
    return Loop(step=_stepper(task, model.to(task.device)), offloads=False)


def _stepper(task: Task, model: nn.Module) -> Callable[[Batch], float]:
    """Forward, backward, clipping and the fused step of all parameters."""
    optimizer = task.optimizer(model.parameters())

    def step(batch: Batch) -> float:
        batch = _on(task.device, batch)
        optimizer.zero_grad(set_to_none=True)
        with task.autocast():
            loss = loss_of(model(batch[0]), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        return loss.item()

    return step


def fsdp2(task: Task) -> Loop:
    """``fully_shard`` of each block and of the model, on one rank, all state on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _one_rank()
    on_gpu = torch.device(task.device).type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    torch.distributed.init_process_group(backend, rank=0, world_size=1)
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (1,))
    policy = CPUOffloadPolicy(pin_memory=on_gpu)
    model = checkpointed(task)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return Loop(
        step=_stepper(task, model),
        offloads=True,
        notes=() if on_gpu else ("pin_memory=False: there is no accelerator to pin for",),
    )


def zero3(task: Task) -> Loop:
    """ZeRO-3, parameters and optimizer offloaded, with the optimizer of all other arms."""
    return _deepspeed(task, lambda model: task.optimizer(model.parameters()))


def zero3_cpu_adam(task: Task) -> Loop:
    """ZeRO-3 as its users have it: with the optimizer that comes with DeepSpeed."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found: torch.optim.Optimizer = DeepSpeedCPUAdam(
            model.parameters(), lr=task.lr, weight_decay=task.weight_decay, adamw_mode=True
        )
        return found

    return _deepspeed(task, build)


def _deepspeed(task: Task, build: Callable[[nn.Module], torch.optim.Optimizer]) -> Loop:
    _one_rank()
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning)  # one a collective, with a print
    model = WithLoss(checkpointed(task))  # autocast, if there is any, is the engine's
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=build(model), config=zero3_settings(task)
    )

    def step(batch: Batch) -> float:
        batch = _on(task.device, batch)
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Loop(step=step, offloads=True)


def zero3_settings(task: Task) -> dict[str, Any]:
    """DeepSpeed's configuration; the three sizes are what Hugging Face's "auto" gives."""
    on_gpu = torch.device(task.device).type == "cuda"
    place = {"device": "cpu", "pin_memory": on_gpu}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.windows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": task.clip,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "reduce_bucket_size": task.width**2,
            "stage3_prefetch_bucket_size": int(0.9 * task.width**2),
            "stage3_param_persistence_threshold": 10 * task.width,
        },
    }
    if task.precision == "bf16":
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return settings


def prepare(name: str) -> None:
    """Imports what an arm needs, before its memory is measured."""
    if name == FSDP2:
        import torch.distributed.fsdp  # noqa: F401
    if name in (ZERO3, ZERO3_ADAM):
        import deepspeed.ops.adam  # noqa: F401


BUILDERS: dict[str, Callable[[Task], Loop]] = {
    PLAIN: plain,
    CHECKPOINTED: plain_checkpointed,
    FSDP2: fsdp2,
    ZERO3: zero3,
    ZERO3_ADAM: zero3_cpu_adam,
}


def _on(device: str, batch: Batch) -> Batch:
    return batch[0].to(device), batch[1].to(device)


def _one_rank() -> None:
    """What a launcher would tell the only process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
