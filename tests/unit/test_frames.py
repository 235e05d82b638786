"""Tracebacks of a user's code, without the frames of shoal that called it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from shoal.bound import bound
from shoal.core.errors import SpecError
from shoal.core.spec import HyperParameters
from shoal.frames import line_of, own_traceback
from shoal.recipe import Recipe, build_model


def error_of(model, hp):
    try:
        build_model(Recipe(model=model, data=lambda hp: ([], None)), HyperParameters(hp))
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next  # not of this test, which is a user too
        return own_traceback(error)
    raise AssertionError("nothing was raised")


class Bad(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 1 // width)


def test_a_function_is_told_by_its_line_whatever_is_around_it():
    def loss(output, batch, hp):
        return output

    @functools.wraps(loss)
    def wrapped(*given):
        return loss(*given)

    line = loss.__code__.co_firstlineno
    trials = bound(Recipe(model=Bad, data=lambda hp: ([], None), loss=loss), {"lr": 0.1}).loss
    for function in (loss, functools.partial(loss, hp=0), wrapped, trials):
        assert line_of(function).endswith(f"test_frames.py:{line}")
    assert line_of(nn.functional.mse_loss) == line_of(nn.MSELoss()) == line_of(None) == ""


def test_frames_before_the_users_first_are_left_out_and_all_after_it_stay():
    def build(hp):
        return nn.Sequential(Bad(0))(torch.zeros(1))

    def calls(hp):
        return build(hp)

    text = error_of(calls, {})
    assert text.count("File ") == 3
    assert "recipe.py" not in text
    assert text.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_an_error_of_what_a_user_gave_keeps_all_frames():
    with pytest.raises(SpecError) as caught:
        HyperParameters({})["lr"]
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert "core/spec.py" in own_traceback(caught.value)
