"""torch.distributed.pipelining, as a second opinion: the same weights after two steps."""

from __future__ import annotations

import functools

import pytest
import torch
from pipelining import LR, classify, plain_sequence, sequence, sgd
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shoal.core.spec import HyperParameters
from shoal.pipeline.run import run_stages
from shoal.testing import same_bits

SCHEDULES = {"flush": Schedule1F1B, "gpipe": ScheduleGPipe}
SPANS = {2: [(0, 4), (4, 8)], 4: [(0, 2), (2, 4), (4, 6), (6, 8)]}
STEPS, SEED = 2, 5


def train_with_torch(place, *, name, micro_batches):
    """One stage of ``plain_sequence`` by torch's own schedule; its weights by name."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = plain_sequence(LR)
    start, stop = SPANS[place.world][place.rank]
    named = [(n, p) for n, p in model.named_parameters() if start <= int(n.split(".")[0]) < stop]
    optimizer = sgd(named, HyperParameters(LR))
    stage = PipelineStage(model[start:stop], place.rank, place.world, torch.device("cpu"))
    schedule = SCHEDULES[name](
        stage, micro_batches, loss_fn=functools.partial(_loss, micro_batches), scale_grads=False
    )
    batches = list(sequence(micro_batches).data(LR)[0])
    for step in range(STEPS):
        group = batches[step * micro_batches : (step + 1) * micro_batches]
        inputs, targets = (torch.cat([batch[i] for batch in group]) for i in (0, 1))
        optimizer.zero_grad()
        given = (inputs,) if place.rank == 0 else ()
        schedule.step(*given, **({"target": targets} if place.rank == place.world - 1 else {}))
        optimizer.step()
    return {n: p.detach() for n, p in named}


def _loss(micro_batches, output, target):
    return classify(output, (None, target)) / micro_batches


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 4), (4, 8)])
def test_torchs_own_schedule_ends_on_the_same_weights(
    name, stages, micro_batches, stage_processes
):
    ours = run_stages(
        sequence(micro_batches),
        LR,
        SEED,
        steps=STEPS,
        stages=stages,
        schedule=name,
        processes=stage_processes,
    )
    theirs = stage_processes.run(
        functools.partial(train_with_torch, name=name, micro_batches=micro_batches), stages
    )
    found = {name: tensor for part in theirs for name, tensor in part.items()}
    assert found.keys() == ours.state["model"].keys()
    for key, tensor in found.items():
        assert same_bits(tensor, ours.state["model"][key]), key
