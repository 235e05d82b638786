"""What of a model is not trained, and which trials are built to see whether it is the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.core.spec import ALIGNMENT, TrialSpec
from shoal.core.units import round_up
from shoal.runtime.measuring import bases
from shoal.runtime.measuring.describe import describe
from shoal.runtime.wire.messages import Describe

BUILT = []


def model(hp):
    """Built by the seed where ``hp`` has "own", and without values on a meta device."""
    layers = nn.Linear(4, 520), nn.Linear(520, 520), nn.Linear(520, 2)
    BUILT.append(layers[0].weight.device.type)
    for parameter in (p for layer in layers[:2] for p in layer.parameters()):
        parameter.requires_grad_(not hp["frozen"])
        if not hp.get("own"):
            nn.init.constant_(parameter, 0.01)
    return nn.Sequential(*layers)


def data(hp):
    return [(torch.zeros(4, 4), torch.zeros(4, dtype=torch.long))] * 2


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


RECIPE = shoal.Recipe(model=model, data=data, loss=loss)
SIZE = 4 * (5 * 520 + 521 * 520)


def described(trials=4, arrays=False, **hp):
    """What is noticed of the trials, in order."""
    BUILT.clear()
    hp = {"lr": 1e-3, "frozen": True, **hp}
    specs = tuple(TrialSpec(number=n, hp=hp, seed=n) for n in range(trials))
    found = describe(RECIPE, Describe(specs, arrays=arrays), lambda number: None)
    assert not found.errors
    return [found.noticed[n] for n in range(trials)]


def test_the_first_two_that_are_described_alike_are_built():
    found = described()
    assert BUILT.count("cpu") == 2
    assert [one.frozen_bytes for one in found] == [SIZE] * 4
    assert found[0].frozen == found[1].frozen != ""
    assert [one.frozen for one in found[2:]] == ["", ""]


def test_a_base_of_each_trials_own_is_told_apart():
    found = described(own=True)
    assert len({found[0].frozen, found[1].frozen, ""}) == 3


def test_those_that_are_built_anyway_are_looked_at_all():
    found = described(arrays=True)
    assert {one.frozen for one in found} == {found[0].frozen} != {""}
    assert BUILT.count("cpu") == 4


def test_where_nothing_is_frozen_none_is_built():
    found = described(frozen=False)
    assert BUILT.count("cpu") == 0
    assert [(one.frozen_bytes, one.frozen) for one in found] == [(0, "")] * 4


def test_nor_one_that_is_large_beside_the_hosts_memory(monkeypatch):
    monkeypatch.setattr(bases, "free_memory", lambda: bases.ROOM * SIZE // 2)
    assert {one.frozen for one in described()} == {""}
    assert BUILT.count("cpu") == 0


def test_who_cannot_be_built_is_not_known(monkeypatch):
    def build(recipe, hp):
        raise MemoryError

    monkeypatch.setattr(bases, "build_model", build)
    assert {one.frozen for one in described()} == {""}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bit_of_a_base_tells_it_apart(dtype):
    one, other = nn.Linear(600, 600).to(dtype), nn.Linear(600, 600).to(dtype)
    other.load_state_dict(one.state_dict())
    for net in (one, other):
        net.requires_grad_(False)
    assert bases.frozen_bits(one) == bases.frozen_bits(other)
    with torch.no_grad():
        other.bias[7] += 1
    (all_, base), (others, other_base) = bases.frozen_bits(one), bases.frozen_bits(other)
    assert all_ != others
    assert base == other_base  # a bias is too small to be there once
    assert base.num_bytes == round_up(one.weight.nbytes, ALIGNMENT)
    with torch.no_grad():
        other.weight[7] += 1
    assert bases.frozen_bits(other)[1] != base
