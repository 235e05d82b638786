"""A fused step that is the kernel alone leaves the bits of ``optimizer.step()``."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import optimizer as base

from shoal import kernelstep
from shoal.kernelstep import is_one_kernel, step_by_kernel, step_whole


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4).double(), nn.Linear(4, 2))


def _groups(model: nn.Sequential) -> list[dict[str, object]]:
    return [
        {"params": list(model[0].parameters()), "lr": 0.1, "weight_decay": 0.3},
        {"params": [*model[1].parameters(), *model[2].parameters()], "betas": (0.5, 0.7)},
    ]


def _fill(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) if (number + step) % 4 else None


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_bits_are_those_of_the_optimizers_own_step(make, monkeypatch):
    models = [_model() for _ in range(2)]
    theirs, ours = (make(_groups(model), lr=0.01, fused=True) for model in models)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (theirs, ours)]
    calls = []
    call = kernelstep._call
    monkeypatch.setattr(kernelstep, "_call", lambda *of: calls.append(of) or call(*of))
    for step in range(6):
        for model in models:
            _fill(model, step)
        theirs.step()
        step_whole(ours)
        for schedule in schedules:
            schedule.step()
    assert calls  # once every parameter had a gradient
    for mine, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(mine, other)
        for key, value in theirs.state[other].items():
            assert torch.equal(ours.state[mine][key], value)


def test_what_is_more_than_the_kernel_is_left_to_torch():
    model = _model()

    def made(**settings):
        return torch.optim.AdamW(model.parameters(), **{"lr": 0.1, "fused": True, **settings})

    class Other(torch.optim.AdamW):
        pass

    assert is_one_kernel(made())
    for settings in ({"fused": False}, {"amsgrad": True}, {"maximize": True}):
        assert not is_one_kernel(made(**settings))
    assert not is_one_kernel(made(lr=torch.tensor(0.1)))
    assert not is_one_kernel(Other(model.parameters(), lr=0.1, fused=True))
    hooked, replaced, scaled = made(), made(), made()
    hooked.register_step_post_hook(lambda *_: None)
    replaced.step = lambda: None
    scaled.found_inf = torch.zeros(1)
    assert not any(map(is_one_kernel, (hooked, replaced, scaled)))
    handle = base.register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert not is_one_kernel(made())
    finally:
        handle.remove()


def test_nothing_is_done_where_there_is_no_state_or_a_sparse_gradient():
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    groups = [(optimizer.param_groups[0], list(model.parameters()))]
    before = copy.deepcopy(model.state_dict())
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    assert not step_by_kernel(optimizer, groups)  # it makes the state
    optimizer.step()
    model[1](torch.tensor([1])).sum().backward()
    optimizer.state[model[1].weight] = dict(optimizer.state[model[0].bias])
    after = copy.deepcopy(model.state_dict())
    assert not step_by_kernel(optimizer, groups)
    assert not torch.equal(after["0.weight"], before["0.weight"])
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
