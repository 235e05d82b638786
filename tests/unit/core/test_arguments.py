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
        (shoal.Study, "direction", "mode"),  # closer to "directory"
        (shoal.Study, "directions", "mode"),
        (shoal.Study, "metrics", "metric"),
        (shoal.Study, "n_trials", "trials"),
        (shoal.Study, "num_samples", "trials"),
        (shoal.Study, "config", "space"),
        (shoal.Study, "scheduler", "pruner"),
        (shoal.Study, "points_to_evaluate", "points"),
        (shoal.Recipe, "criterion", "loss"),
        (shoal.Recipe, "gradient_clip_val", "clip_grad_norm"),
    ],
)
def test_an_argument_with_a_slip_or_of_another_library_is_told_which_was_meant(kind, given, meant):
    with pytest.raises(SpecError) as caught:
        kind(**{given: 3})
    assert str(caught.value) == (
        f"{kind.__name__}({given}=...) is no argument of a {kind.__name__}; did you mean {meant}=?"
    )


def test_one_for_which_there_is_none_here_is_told_what_to_do():
    with pytest.raises(SpecError, match=r"^log_uniform\(step=\.\.\.\): .*integer\(lo, hi, log="):
        shoal.log_uniform(8, 64, step=8)
    with pytest.raises(SpecError, match=r"^uniform\(log=\.\.\.\): write log_uniform\(lo, hi\)"):
        shoal.uniform(0.1, 1, log=True)
    assert list(inspect.signature(shoal.integer).parameters) == ["lo", "hi", "log", "step"]


def test_one_that_is_close_to_none_is_told_all_there_are():
    with pytest.raises(SpecError, match="; it takes model, data, loss, inputs, optimizer, "):
        shoal.Recipe(zzzzz=3)


def test_what_an_editor_shows_of_a_class_stays():
    assert list(inspect.signature(shoal.Study).parameters)[:3] == ["name", "recipe", "space"]
    assert inspect.signature(shoal.Recipe).parameters["precision"].default == "fp32"


def test_an_argument_that_is_missing_is_told_of_as_ever():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'space'"):
        shoal.Study("a", None)


@pytest.mark.parametrize("kind", [shoal.Study, shoal.Recipe])
def test_what_other_libraries_call_it_is_a_name_that_is_here(kind):
    names = inspect.getclosurevars(kind.__init__).nonlocals["elsewhere"]
    assert set(names.values()) <= set(inspect.signature(kind).parameters)
    assert not names.keys() & set(inspect.signature(kind).parameters)
