"""Layers that visit a device while their model rests on the host. Of parameters: tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.partition.visitors import buffers_on, parameters_on

CPU, AWAY = torch.device("cpu"), torch.device("meta")  # any other device


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_where_they_were_there_they_are_again_without_gradients(model):
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}

    with parameters_on(CPU, model, before):
        model(torch.ones(4, 2)).sum().backward()

    for name, p in model.named_parameters():
        parameter, place, values = before[name]
        assert p is parameter
        assert p.data_ptr() == place
        assert p.grad is None
        assert torch.equal(p, values)


def test_buffers_come_and_go_as_they_were(model):
    mean = model[1].running_mean

    with buffers_on(AWAY, model):
        assert {buffer.device for buffer in model.buffers()} == {AWAY}

    assert model[1].running_mean is mean
