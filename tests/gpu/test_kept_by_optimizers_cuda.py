"""What an optimizer keeps of weights in a list of its own is where they were then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


class LooksAhead(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.slow = [p.detach().clone() for p in parameters]

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for fast, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                fast.copy_(slow + 0.5 * (fast - slow))


def test_an_array_is_declined_with_its_name(tmp_path):
    recipe = shoal.Recipe(
        model=lambda hp: nn.Linear(4, 4),
        data=lambda hp: ([(torch.ones(2, 4),)] * 2, None),
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda named, hp: LooksAhead([p for _, p in named], hp["lr"]),
    )
    study = shoal.Study("s", recipe, space=shoal.grid(lr=[0.1, 0.2]), steps=2, directory=tmp_path)
    hardware = shoal.Hardware.parse("cuda:0", "256MiB", threads=1)
    words = study.plan(hardware=hardware, fuse=2, progress=False).explain()
    assert (
        "the optimizer LooksAhead keeps 'slow', made of weights while they were in host" in words
    )
