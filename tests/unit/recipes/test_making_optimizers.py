"""What an optimizer that cannot be made says: what it was given, or who reads what is missing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import SpecError
from shoal.core.spec import HyperParameters
from shoal.frames import own_traceback
from shoal.recipes.optimizers import build_optimizer


def made(hp, **changes):
    recipe = shoal.Recipe(model=len, data=len, **changes)
    return build_optimizer(recipe, nn.Linear(2, 2).named_parameters(), HyperParameters(hp))


def test_where_there_is_no_lr_it_is_told_who_reads_it():
    with pytest.raises(SpecError) as caught:
        made({"width": 4})
    assert str(caught.value) == (
        "unknown hyperparameter 'lr'; this trial has 'width'. It is read by AdamW, which trains "
        "where there is no Recipe(optimizer=...). Add lr to the study's space, or give "
        "Recipe(optimizer=...), a function (named_parameters, hp) -> Optimizer."
    )


class Around(torch.optim.Optimizer):
    """As Lookaheads are written: around another optimizer, without torch's ``__init__``."""

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_without_torchs_init_steps_after_another_one_was_copied():
    def around(named, hp):
        return Around(torch.optim.SGD([p for _, p in named], lr=hp["lr"]))

    copy.deepcopy(made({"lr": 0.1}, optimizer=around))
    made({"lr": 0.1}, optimizer=around).step()


def swapped(hp, named):
    return torch.optim.SGD([p for _, p in named], lr=hp["lr"])


def asks_a_list(hp, named):
    return torch.optim.SGD([p for _, p in named], lr=hp.get("lr", 0.1))


@pytest.mark.parametrize(
    ("function", "hp", "kind"),
    [
        (swapped, {"lr": 0.1}, TypeError),
        (swapped, {"width": 4}, ValueError),
        (asks_a_list, {"lr": 0.1}, AttributeError),
    ],
)
def test_an_optimizer_with_its_arguments_swapped_is_told_what_it_got(function, hp, kind):
    with pytest.raises(kind) as caught:
        made(hp, optimizer=function)
    assert own_traceback(caught.value).endswith(
        "Recipe(optimizer=...) is called as (named_parameters, hp). It got a list of 2 pairs of a "
        f"name and a parameter, and the hyperparameters {hp}, in this order.\n"
    )


def test_a_name_that_the_space_does_not_have_is_told_of_as_ever():
    with pytest.raises(SpecError, match="unknown hyperparameter 'lr'; this trial has 'rate'") as e:
        made({"rate": 0.1}, optimizer=lambda named, hp: torch.optim.SGD(dict(named), lr=hp["lr"]))
    assert not hasattr(e.value, "__notes__")
