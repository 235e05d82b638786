"""Stages that sleep their kernels' time: real processes, programs, messages and waits.

Imported by ``run.py`` and, by this name, by the processes of stages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shoal.core.units import Seconds
from shoal.pipeline.check import check_pipeline
from shoal.pipeline.packing import Packer
from shoal.pipeline.post import Post, lines_of
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.stage import Ran, run_stage
from shoal.program.ir import Action, Op


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Seconds of one stage's units for one micro-batch, and the boundary's size in floats.

    With ``recompute`` a B takes its forward's time too.
    """

    forward_s: float
    inputs_s: float
    weights_s: float
    step_s: float
    boundary: int
    recompute: bool = False

    def seconds(self, action: Action, stages: int) -> Seconds | None:
        """Of an action that computes; None of others. The last stage's B begins with its F."""
        begins = self.recompute or action.shard == stages - 1
        first = self.forward_s if begins else 0.0
        known = {
            Op.F: self.forward_s,
            Op.I: first + self.inputs_s,
            Op.W: self.weights_s,
            Op.B: first + self.inputs_s + self.weights_s,
            Op.STEP: self.step_s,
        }
        found = known.get(action.op)
        return None if found is None else Seconds(found)


class Sleeping:
    """A stage's compute that takes the kernels' time, and says tensors of the right size."""

    def __init__(self, kernels: Kernels, stages: int) -> None:
        self._kernels, self._stages = kernels, stages
        self._tensor = torch.zeros(kernels.boundary)

    def run(self, action: Action) -> None:
        time.sleep(self._kernels.seconds(action, self._stages) or 0.0)

    def give(self, action: Action) -> Any:
        return self._tensor

    def take(self, action: Action, tree: Any) -> None:
        pass


def run_ours(place: Any, *, pipeline: Pipeline, kernels: Kernels) -> list[Ran]:
    """One stage of a pipeline's program."""
    program = pipeline.program()
    check_pipeline(pipeline, program)
    actions = program.devices[place.rank]
    torch.distributed.barrier()
    with Post(lines_of(actions), Packer()) as post:
        return run_stage(actions, Sleeping(kernels, pipeline.stages), post, place.watch)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, forward_s: float, backward_s: float) -> Any:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        time.sleep(ctx.backward_s)
        return grad, torch.zeros(1), None, None


class SleepingModule(nn.Module):
    """The same kernels for torch's own schedules."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._times = (kernels.forward_s, kernels.inputs_s + kernels.weights_s)

    def forward(self, x: Any) -> Any:
        return _Kernel.apply(x, self.weight, *self._times)


def run_torch(place: Any, *, micro_batches: int, steps: int, kernels: Kernels) -> list[Ran]:
    """One stage of torch's 1F1B for so many steps."""
    stage = PipelineStage(SleepingModule(kernels), place.rank, place.world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=_mean, scale_grads=False)
    x = torch.zeros(micro_batches, kernels.boundary)
    ran = []
    for number in range(steps + 1):
        if number == 1:  # the first one settles shapes
            torch.distributed.barrier()
        start = time.monotonic()
        last = place.rank == place.world - 1
        given = (x,) if place.rank == 0 else ()
        schedule.step(*given, **({"target": x, "return_outputs": False} if last else {}))
        time.sleep(kernels.step_s)
        ran.append(Ran(number, start, time.monotonic()))
    return ran[1:]


def _mean(output: Any, target: Any) -> Any:
    return output.mean()
