"""Attributes in the memory of a parameter: refused where the model's code reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.core.errors import SpecError
from shoal.modelaliases import refuse_aliases
from shoal.modelchecks import check_model


class Box:
    def __init__(self, inside):
        self.inside = inside


def closure(weight):
    data = weight.data
    return lambda: data


class Net(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kept = keep(self.layer.weight)

    def forward(self, x):
        return self.layer(x) + x @ self.kept


@pytest.mark.parametrize(
    "keep",
    [
        lambda w: w.data,
        lambda w: w.detach()[0],
        lambda w: w.t(),
        lambda w: w.detach().numpy(),
        lambda w: [{"a": w.data}],
        lambda w: Box(w.data),
        closure,
    ],
)
def test_what_the_forward_reads_is_refused(keep):
    with pytest.raises(SpecError, match=r"reads 'kept', .*parameter 'layer\.weight'.*\.clone\(\)"):
        check_model(Net(keep))


@pytest.mark.parametrize("keep", [lambda w: w, lambda w: w.data.clone(), lambda w: [w], Box])
def test_the_parameter_itself_and_copies_are_not(keep):
    check_model(Net(keep))


def test_what_is_frozen_is_not_as_it_stays():
    net = Net(lambda w: w.data)
    refuse_aliases(net.requires_grad_(False))


def test_what_only_making_reads_is_not():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.randn(5, 3)
            self.build()

        def build(self):
            self.words = nn.Embedding.from_pretrained(self.table, freeze=False)

        def forward(self, x):
            return self.words(x)

    check_model(Words())


def test_what_lies_beside_a_parameter_is_not():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            both = torch.randn(8)
            self.first, self.second = nn.Parameter(both[:4]), both[4:]

        def forward(self, x):
            return x * self.first + self.second

    check_model(Halves())


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_what_torchs_norms_set_in_each_forward_is_not(norm):
    check_model(nn.Sequential(norm(nn.Linear(3, 3)), nn.LSTM(3, 3)))
