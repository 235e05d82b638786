"""Tracebacks of a user's code, without the frames of shoal that called it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import SpecError, TrialError
from shoal.core.spec import HyperParameters
from shoal.frames import line_of, own_traceback, raised
from shoal.recipes.bound import bound
from shoal.recipes.recipe import Recipe, build_model


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
    assert "recipes/recipe.py" not in text
    assert text.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_an_error_of_what_a_user_gave_keeps_all_frames():
    with pytest.raises(SpecError) as caught:
        HyperParameters({})["lr"]
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert "core/spec.py" in own_traceback(caught.value)


def test_an_error_within_a_library_shows_what_its_modules_did_and_nothing_between():
    code = compile("build = lambda hp: model(rows)", torch.__file__, "exec")
    names = {"model": nn.Sequential(nn.Linear(2, 2).double()), "rows": torch.zeros(1, 2)}
    exec(code, names)
    text = error_of(names["build"], {})
    assert [line.split("in ")[-1] for line in text.split("\n") if "File " in line] == [
        "<lambda>",
        "forward",
        "forward",
    ]
    assert raised(text).startswith("RuntimeError: mat1 and mat2 must have the same dtype")


def test_what_was_raised_is_found_behind_any_chain_of_tracebacks_and_in_a_bare_message():
    try:
        try:
            Bad(0)
        except ZeroDivisionError as error:
            error.add_note("of no note")
            raise ValueError("first\nsecond") from error
    except ValueError as error:
        error.add_note("of note")
        text = own_traceback(error)
    assert raised(text) == "ValueError: first\nsecond\nof note"
    assert raised("worker 0 died\n") == "worker 0 died"


TRIES = """
def tries(function):
    try:
        raise RuntimeError("all of them")
    except RuntimeError:
        function()
"""


def test_what_shoal_caught_before_it_tried_again_is_no_part_of_it_and_a_users_own_is():
    def divides():
        return 1 // 0

    def handles():
        try:
            raise OSError("no file")
        except OSError:
            return 1 // 0

    own, kinds = {}, ("RuntimeError", "OSError", "ZeroDivisionError")
    exec(compile(TRIES, str(Path(shoal.__file__).parent / "some.py"), "exec"), own)
    for function, words in ((divides, kinds[2:]), (handles, kinds[1:])):
        try:
            own["tries"](function)
        except ZeroDivisionError as error:
            error.__traceback__ = error.__traceback__.tb_next
            text = own_traceback(error)
        assert tuple(kind for kind in kinds if kind in text) == words


def test_what_shoal_says_of_a_trial_has_its_last_frame_alone(monkeypatch):
    own = {"TrialError": TrialError}
    code = "def inner():\n    raise TrialError('it is nan')\ndef outer():\n    inner()\n"
    exec(compile(code, str(Path(shoal.__file__).parent / "some.py"), "exec"), own)
    for debug, frames in (("", 1), ("1", 2)):
        monkeypatch.setenv("SHOAL_DEBUG", debug)
        with pytest.raises(TrialError) as caught:
            own["outer"]()
        caught.value.__traceback__ = caught.value.__traceback__.tb_next
        assert own_traceback(caught.value).count("File ") == frames
