"""An argument that a study or a recipe does not have is refused with the one that was meant."""

from __future__ import annotations

import inspect

import pytest

import shoal
from shoal.core.errors import SpecError


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        (shoal.Study, "epoch", "epochs"),
        (shoal.Study, "sampeler", "sampler"),
        (shoal.Recipe, "optimiser", "optimizer"),
        (shoal.Recipe, "metric", "metrics"),
    ],
)
def test_an_argument_with_a_slip_is_told_which_was_meant(kind, given, meant):
    with pytest.raises(SpecError) as caught:
        kind(**{given: 3})
    assert str(caught.value) == (
        f"{kind.__name__}({given}=...) is no argument of a {kind.__name__}; did you mean {meant}=?"
    )


def test_one_that_is_close_to_none_is_told_all_there_are():
    with pytest.raises(SpecError, match="; it takes model, data, loss, inputs, optimizer, "):
        shoal.Recipe(zzzzz=3)


def test_what_an_editor_shows_of_a_class_stays():
    assert list(inspect.signature(shoal.Study).parameters)[:3] == ["name", "recipe", "space"]
    assert inspect.signature(shoal.Recipe).parameters["precision"].default == "fp32"


def test_an_argument_that_is_missing_is_told_of_as_ever():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'space'"):
        shoal.Study("a", None)
