"""What a model's code may do on a GPU alone, trials in an array may do there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.core.spec import HyperParameters
from shoal.fusion import Member, dry_run
from shoal.rng import capture_rng

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
RATES = (0.1, 2.0, 5.0)
CODES = {
    "times": lambda h, rate: h * torch.exp(torch.tensor(-rate)).clamp(min=0.1),
    "in place": lambda h, rate: h.add_(torch.tensor(rate).sqrt()),
    "of two": lambda h, rate: torch.lerp(h, h.tanh(), torch.tensor(rate).sigmoid()),
    "where": lambda h, rate: torch.where(h > 0, h, torch.tensor(rate)),
    "a function": lambda h, rate: nn.functional.softplus(h / (1 + torch.tensor(rate))),
}


class Net(nn.Module):
    def __init__(self, code, rate):
        super().__init__()
        self.layer, self.code, self.rate = nn.Linear(4, 4), code, rate

    def forward(self, x):
        return self.code(self.layer(x), self.rate)


def loss(output, batch):
    return output.square().mean()


@pytest.mark.parametrize("code", CODES)
def test_a_number_that_torch_makes_of_a_hyperparameter_is_each_trials_own(code):
    recipe = shoal.Recipe(model=lambda hp: None, data=lambda hp: ([], None), loss=loss)
    device, members = torch.device("cuda"), []
    for rate in RATES:
        module = Net(CODES[code], rate).to(device)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        known = {"recipe": recipe, "hp": HyperParameters({"rate": rate}), "schedule": None}
        rng = capture_rng(device)
        members.append(Member(module=module, optimizer=optimizer, rng=rng, **known))

    assert dry_run(members, list(torch.randn(3, 5, 4)), device=device) == ""
