"""Where a trial's weights are while its optimizer is made.

A trial's model is built in host memory, and comes to its device when it has a lease. Alone it is
on a GPU when its optimizer is made, and the factory may keep copies of weights: an average that a
hook goes on with. On the host those could not meet the weights at the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shoal.core.plan import Job
from shoal.core.technique import Resident
from shoal.memory.store import same_bits

HOST = torch.device("cpu")


@contextmanager
def weights_where_they_step(job: Job, device: torch.device, model: nn.Module) -> Iterator[None]:
    """Those of a trial that is on its GPU as a whole are there inside, and in host memory again.

    Whoever has a lease has room for that, in an array where the gradients of a step will be, so
    not for what is frozen. One in shards has none.
    """
    whole = isinstance(job.technique, Resident) and device.type != "cpu"
    there = [p for p in model.parameters() if whole and (job.array is None or p.requires_grad)]
    homes = [(p, p.data) for p in there]
    try:
        for parameter, home in homes:
            parameter.data = home.to(device)
        yield
    finally:
        for parameter, home in homes:
            now = parameter.data.to(HOST)  # the factory may have written to it
            parameter.data = home if same_bits(now, home) else now
