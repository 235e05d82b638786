"""A fused step that is the kernel alone leaves the bits of ``optimizer.step()``."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import optimizer as base

from shoal.kernels import kernelstep
from shoal.kernels.kernelstep import is_one_kernel, step_by_kernel, step_whole, steps_by_kernel


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


# -- inside somebody's own code -----------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch):
    """How often the kernel was called past ``step()``."""
    found = []
    call = kernelstep.step_by_kernel

    def counted(*of):
        done = call(*of)
        found.append(done)
        return done

    monkeypatch.setattr(kernelstep, "step_by_kernel", counted)
    return found


def _stepped(make=torch.optim.Adam, **settings):
    """A model that has a gradient, and its optimizer after the first step, which makes a state."""
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), **{"lr": 0.1, "fused": True, **settings})
    _fill_all(model, 0)
    optimizer.step()
    return model, optimizer


def _fill_all(model, step):
    torch.manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_inside_bits_are_those_of_the_optimizers_own_step(make, kernels):
    models = [_model() for _ in range(2)]
    groups = [_groups(model) for model in models]
    if make is torch.optim.SGD:
        groups = [[{**group, "betas": None} for group in each] for each in groups]
    theirs, ours = (make(group, lr=0.01, fused=True) for group in groups)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (theirs, ours)]
    for step in range(6):
        for model in models:
            _fill(model, step)
        theirs.step()
        with steps_by_kernel([ours]):
            ours.step()
        for schedule in schedules:
            schedule.step()
    assert any(kernels) == (make in kernelstep.KNOWN)
    for mine, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(mine, other)
        for key, value in theirs.state[other].items():
            assert value is None or torch.equal(ours.state[mine][key], value)


def test_afterwards_step_is_what_it_was_also_after_an_error():
    _, plain = _stepped()
    _, scheduled = _stepped()
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.9)
    before = scheduled.__dict__["step"]

    with steps_by_kernel([plain, scheduled]):
        assert "step" in plain.__dict__
        assert scheduled.__dict__["step"] is not before
    assert "step" not in plain.__dict__
    assert scheduled.__dict__["step"] is before

    with pytest.raises(KeyError, match="theirs"), steps_by_kernel([plain, scheduled]):
        raise KeyError("theirs")
    assert "step" not in plain.__dict__
    assert scheduled.__dict__["step"] is before


def test_within_another_one_it_is_put_back_to_that():
    model, optimizer = _stepped()
    with steps_by_kernel([optimizer]):
        outer = optimizer.__dict__["step"]
        with steps_by_kernel([optimizer]):
            optimizer.step()
        assert optimizer.__dict__["step"] is outer
    assert "step" not in optimizer.__dict__
    assert {float(optimizer.state[p]["step"]) for p in model.parameters()} == {2.0}


def test_what_the_code_puts_in_the_place_of_step_stays():
    _, optimizer = _stepped()

    def own():
        return "own"

    with steps_by_kernel([optimizer]):
        optimizer.step = own
    assert optimizer.step() == "own"


def test_a_schedule_from_outside_knows_that_there_was_a_step(kernels):
    """pytest makes an error of its warning that ``optimizer.step()`` was not called before."""
    model, optimizer = _stepped()
    _fill_all(model, 1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    with steps_by_kernel([optimizer]):
        assert optimizer.step._wrapped_by_lr_sched
        optimizer.step()
        schedule.step()

    assert kernels == [True]
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_schedule_that_is_made_inside_works_there_and_later():
    bits, rates = [], []
    for context in (nullcontext, steps_by_kernel):
        torch.manual_seed(5)
        model, optimizer = _stepped()
        with context([optimizer]):
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            _fill_all(model, 1)
            optimizer.step()
            schedule.step()
        with context([optimizer]):
            _fill_all(model, 2)
            optimizer.step()
            schedule.step()
        bits.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        rates.append(schedule.get_last_lr())
    assert torch.equal(*bits)
    assert rates == [[0.025], [0.025]]


def _counts(optimizer):
    return [float(state["step"]) for state in optimizer.state.values()]


def test_a_closure_and_the_first_step_are_left_to_torch(kernels):
    model, optimizer = _stepped()
    asked = []

    def closure():
        asked.append(torch.is_grad_enabled())
        return torch.tensor(3.0)

    with steps_by_kernel([optimizer]):
        assert optimizer.step(closure) == 3.0
        assert optimizer.step(closure=closure) == 3.0
    assert asked == [True, True]
    assert kernels == []
    assert _counts(optimizer) == [3.0, 3.0]

    first = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    with steps_by_kernel([first]):
        first.step()
    assert kernels == [False]
    assert _counts(first) == [1.0, 1.0]


def test_hooks_are_run_whether_they_were_there_before_or_came_inside(kernels):
    before, inside = _stepped()[1], _stepped()[1]
    heard = []
    before.register_step_pre_hook(lambda *_: heard.append("before"))
    with steps_by_kernel([before, inside]):
        assert "step" not in before.__dict__
        before.step()
        inside.step()
        assert kernels == [True]
        inside.register_step_post_hook(lambda *_: heard.append("inside"))
        inside.step()
    handle = base.register_optimizer_step_pre_hook(lambda *_: heard.append("all"))
    try:
        with steps_by_kernel([inside]):
            inside.step()
    finally:
        handle.remove()
    assert heard == ["before", "inside", "all", "inside"]
    assert kernels == [True]
    assert _counts(inside) == [4.0, 4.0]


def test_settings_that_change_inside_are_those_of_the_step(kernels):
    ours, theirs = _stepped()[1], _stepped()[1]
    with steps_by_kernel([ours]):
        ours.param_groups[0]["lr"] = 0.5
        ours.step()
        ours.param_groups[0]["amsgrad"] = True
        with pytest.raises(KeyError, match="max_exp_avg_sq"):  # as alone
            ours.step()
    assert kernels == [True]
    theirs.param_groups[0]["amsgrad"] = True
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        theirs.step()


def test_an_optimizer_that_is_not_fused_is_not_touched(kernels):
    _, optimizer = _stepped(fused=False)
    with steps_by_kernel([optimizer]):
        assert "step" not in optimizer.__dict__
        optimizer.step()
    assert kernels == []


def test_a_gradient_scaler_steps_and_skips(kernels):
    """It tells the kernel by attributes of the optimizer; a gradient of inf is no step."""
    model, optimizer = _stepped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with steps_by_kernel([optimizer]):
        for factor in (1.0, float("inf")):
            _fill_all(model, 1)
            scaler.scale(torch.ones(()))
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
            scaler.step(optimizer)
            scaler.update()
    assert kernels == []
    assert _counts(optimizer) == [2.0, 2.0]
