"""Arrays whose passes and optimizers' steps are CUDA graphs come to the bits of those without."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import shoal
from shoal.fusion import Array, Member, backend_of
from shoal.recipes.optimizers import build_optimizer_of
from shoal.rng import capture_rng
from shoal.runtime.capture.captures import Captures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif("SHOAL_CUDA_STANDIN" in os.environ, reason="no CUDA graphs there"),
]

WIDTH, STEPS = 3, 12
WHERE = torch.device("cuda:0")


def mlp(hp):
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))


def cnn(hp):
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16, 4)),
    )


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def adamw(named, hp):
    return torch.optim.AdamW([p for _, p in named], lr=hp["lr"], fused=True)


def sgd(named, hp):
    parameters = [p for _, p in named]
    return torch.optim.SGD(parameters, lr=hp["lr"], momentum=0.9, weight_decay=0.01)


def array_of(model, optimizer, kind, launcher=None):
    recipe = shoal.Recipe(model=model, data=lambda hp: ([], None), loss=loss, optimizer=optimizer)
    if launcher is None:
        launcher = Captures(recipe, WHERE).launcher()
    members = []
    for slot in range(WIDTH):
        torch.manual_seed(slot)
        module, hp = model({}).to(WHERE), {"lr": 1e-3 * (1 + slot)}
        members.append(
            Member(
                recipe=recipe,
                hp=hp,
                module=module,
                optimizer=build_optimizer_of(recipe, module, hp),
                schedule=None,
                rng=capture_rng(WHERE),
            )
        )
    return Array(members, device=WHERE, backend=backend_of(kind, launcher=launcher))


def batches(model, step):
    draws = torch.Generator().manual_seed(step)
    shape = (8, 16) if model is mlp else (8, 1, 4, 4)
    return [
        (torch.randn(shape, generator=draws), torch.randint(4, (8,), generator=draws))
        for _ in range(WIDTH)
    ]


def trained(array, model):
    losses = [array.step(batches(model, step)) for step in range(STEPS)]
    assert not any(stepped.failures for stepped in losses)
    return [stepped.losses for stepped in losses]


def without_steps(array):
    array._finisher._fused._steps = None
    return array


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("kind", ["eager", "traced", "branches"])
def test_steps_launched_as_one_come_to_the_bits_of_those_that_are_called(kind, optimizer):
    launched = array_of(mlp, optimizer, kind)
    called = without_steps(array_of(mlp, optimizer, kind))
    assert trained(launched, mlp) == trained(called, mlp)
    for slot in range(WIDTH):
        mine, theirs = launched.extract(slot), called.extract(slot)
        assert all(torch.equal(mine["model"][name], v) for name, v in theirs["model"].items())
        for name, state in theirs["optimizer"]["state"].items():
            for key, value in state.items():
                assert torch.equal(mine["optimizer"]["state"][name][key], value)
    if kind == "eager":  # whose gradients are elsewhere in every step
        assert launched.backend.steps is None
    else:
        assert not launched.backend.steps.why_not
        assert launched.backend.steps._launch is not None


@pytest.mark.parametrize("kind", ["traced", "branches"])
def test_convolutions_that_do_not_repeat_themselves_are_captured_with_kernels_that_do(kind):
    array, eager = array_of(cnn, adamw, kind), array_of(cnn, adamw, "eager")
    found, expected = trained(array, cnn), trained(eager, cnn)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), rtol=1e-3)
    assert not array.backend.why_eager
    assert array.backend.steps._launch is not None
