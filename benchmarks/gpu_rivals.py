"""The stages of gpu_large.py that are other programs: DeepSpeed and RoundPipe.

Both are imported here only, and are in no list of what shoal needs:

    pip install deepspeed roundpipe beartype

Each gives a ``Rival``: its step, and what has to be over before its clock is read.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.examples.gpt import GPT, next_byte_loss

Batch = tuple[Tensor, Tensor]
LR, DECAY, CLIP = 1e-4, 0.01, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One training; ``finish`` waits for what a step has left to do."""

    step: Callable[[Sequence[Batch]], None]
    finish: Callable[[], None] = lambda: None


# -- DeepSpeed ----------------------------------------------------------------------------


class _WithLoss(nn.Module):
    """A model whose forward ends with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        return next_byte_loss(self.model(batch[0]), batch)


def deepspeed(model: GPT, micro_batches: int, rows: int, where: torch.device) -> Rival:
    """ZeRO-3 on one rank, parameters and optimizer on the host, DeepSpeed's own Adam there.

    ``model`` has blocks that recompute. DeepSpeed's default clips at 1.0, which is the task's. The
    three sizes are what Hugging Face's "auto" makes of a width.
    """
    import deepspeed as library
    import torch.distributed as dist
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    warnings.filterwarnings("ignore", category=FutureWarning)  # one a collective, with a print
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # as a launcher would say
    on_gpu = where.type == "cuda"
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    place, width = {"device": "cpu", "pin_memory": on_gpu}, model.token.embedding_dim
    whole = _WithLoss(model)
    engine, *_ = library.initialize(
        model=whole,
        optimizer=DeepSpeedCPUAdam(whole.parameters(), lr=LR, weight_decay=DECAY),
        config={
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": CLIP,
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "zero_optimization": {
                "stage": 3,
                "offload_param": place,
                "offload_optimizer": place,
                "overlap_comm": True,
                "reduce_bucket_size": width**2,
                "stage3_prefetch_bucket_size": int(0.9 * width**2),
                "stage3_param_persistence_threshold": 10 * width,
            },
        },
    )

    def step(batches: Sequence[Batch]) -> None:
        for batch in batches:
            engine.backward(engine(*batch))
            engine.step()

    return Rival(step=step)


# -- RoundPipe ----------------------------------------------------------------------------


class _First(nn.Module):
    """What comes before the blocks."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        found: Tensor = self.token(tokens) + self.position(positions)
        return found


class _Last(nn.Module):
    """What comes after them; its weight is the embedding's."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def roundpipe(model: GPT, micro_batches: int, *, stale: bool) -> Rival:
    """RoundPipe with its own Adam on the host and weights of bfloat16 on the device.

    ``stale``: as it is by default, with weights that are one step old; else each step waits for
    the one before, as everything else here does.
    """
    import roundpipe as library

    layers = nn.Sequential(_First(model), *model.blocks, _Last(model)).to(torch.bfloat16)
    config = library.RoundPipeRunConfig(num_microbatch=micro_batches, preserve_rng_state=False)
    wrapped = library.RoundPipe(
        layers, optim_dtype=torch.float32, model_run_config=config, pin_model="register"
    )
    with library.OptimizerCtx():
        optimizer = library.optim.Adam(
            wrapped.parameters(), lr=LR, weight_decay=DECAY, decoupled_weight_decay=True
        )

    def loss(output: Tensor, label: Tensor) -> Tensor:
        return next_byte_loss(output, (label, label)) / micro_batches

    def update() -> None:
        nn.utils.clip_grad_norm_(list(wrapped.optim_parameters()), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    def step(batches: Sequence[Batch]) -> None:
        inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        wrapped.forward_backward(input_args=(inputs,), label=labels, loss_fn=loss)
        wrapped.step(update, is_async=stale)

    return Rival(step=step, finish=wrapped.synchronize)
