"""What an optimizer keeps of weights in a list of its own is where they were then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.observe import read_outline
from shoal.observe.snapshot import Snapshot
from shoal.verify import verify_trials

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


def study_of(kind, place):
    recipe = shoal.Recipe(
        model=lambda hp: nn.Linear(4, 4),
        data=lambda hp: ([(torch.ones(2, 4),)] * 2, None),
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda named, hp: kind([p for _, p in named], hp["lr"]),
    )
    study = shoal.Study("s", recipe, space=shoal.grid(lr=[0.1, 0.2]), steps=2, directory=place)
    return study, shoal.Hardware.parse("cuda:0", "256MiB", threads=1)


def test_an_array_is_declined_with_its_name(tmp_path):
    study, hardware = study_of(LooksAhead, tmp_path)
    words = study.plan(hardware=hardware, fuse=2, progress=False).explain()
    assert (
        "the optimizer LooksAhead keeps 'slow', made of weights while they were in host" in words
    )


def test_what_it_has_in_its_state_before_a_step_is_where_an_array_is(tmp_path):
    study, hardware = study_of(torch.optim.Adagrad, tmp_path)
    report = study.run(hardware=hardware, fuse=2, progress=False, timeline=False)
    rows = Snapshot.of(read_outline(report.directory)).trials
    assert [row.numerics.get("array") for row in rows] == ["slot 0 of 2", "slot 1 of 2"]
    verdicts = list(verify_trials(report.directory, rows, recipe=study.recipe))
    assert [v.first_difference or v.failure or v.skipped for v in verdicts] == ["", ""]
