"""Models with sparse gradients train whole; what would have to cut them says so by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal import Pipelined
from shoal.core.errors import PlanError


def model(hp):
    return nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 3))


def data(hp):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(10, (8, 4), generator=generator)
    kinds = torch.randint(3, (8, 4), generator=generator)
    return list(zip(words, kinds, strict=True)), None


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(named_parameters, hp):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=hp["lr"])


RECIPE = shoal.Recipe(model=model, data=data, loss=loss, optimizer=sgd, accumulate=4)


def test_a_model_with_sparse_gradients_trains_as_alone(run_study, assert_alone):
    report = run_study(RECIPE, {"lr": 0.1}, steps=4)
    assert_alone(report, report.trials, RECIPE, steps=4)


@pytest.mark.parametrize("width", [1, 2])
def test_its_gradient_is_named_where_stages_or_copies_are_asked_for(width, run_study):
    technique = Pipelined(stages=2, width=width)
    with pytest.raises(PlanError, match=r"the gradient of '0.weight' is sparse.*sparse=False"):
        run_study(RECIPE, {"lr": 0.1}, technique=technique, devices=2 * width, steps=4)
