"""What a trial's own objects keep, packed and given to others that were built anew."""

from __future__ import annotations

import torch
from torch import nn

from shoal.pystate import Attributes

CPU = torch.device("cpu")


def built():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    return model, Attributes(model, torch.optim.SGD(model.parameters(), lr=0.1), None)


def test_a_norm_that_was_put_into_evaluation_mode_stays_in_it():
    (model, kept), (other, others) = built(), built()
    assert not kept.changed()[0]
    model[1].eval()

    others.give(kept.changed()[0], CPU)

    assert [module.training for module in other] == [True, False, True]


def test_a_model_that_is_being_evaluated_is_not_given_on_as_such():
    (model, kept), (other, others) = built(), built()
    model.eval()

    others.give(kept.changed()[0], CPU)

    assert other.training
    assert all(module.training for module in other)


def test_a_module_that_a_forward_made_is_left_to_the_forward_that_makes_it_again():
    (model, kept), (other, others) = built(), built()
    model.activation = nn.ReLU()
    model[1].eval()

    others.give(kept.changed()[0], CPU)

    assert [module.training for module in other] == [True, False, True]
