"""What ``fuse=`` and ``--fuse`` take, and what they refuse."""

from __future__ import annotations

import pytest

import shoal
from shoal.core.errors import PlanError, SpecError
from shoal.launch.wishes import technique_of, wish_of
from shoal.ui.train import parse_fuse


def test_what_is_asked_for():
    known = {None: None, "auto": "auto", False: 0, 1: 1, 64: 64}
    assert [wish_of(asked, None) for asked in known] == list(known.values())


@pytest.mark.parametrize("fuse", [True, 0, -1, 65, 2.0, "4", "off", [2]])
def test_other_widths_are_refused(fuse, tmp_path):
    recipe = shoal.Recipe(model=dict, data=dict, loss=dict)
    study = shoal.Study("k", recipe, space={"lr": 0.1}, trials=1, steps=1, directory=tmp_path)
    for ask in (study.run, study.plan):
        with pytest.raises(SpecError, match="the width of arrays from 1 to 64, which"):
            ask(fuse=fuse)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("technique", ["spilled", shoal.Spilled(shards=2)])
def test_an_array_of_spilled_trials_may_be_asked_for(technique):
    assert wish_of(8, technique_of(technique)) == 8
    assert wish_of(False, technique_of(technique)) == 0
    assert wish_of("auto", technique_of(technique)) == "auto"
    with pytest.raises(PlanError, match="compiled passes are not cut into shards"):
        wish_of("8 compiled", technique_of(technique))


@pytest.mark.parametrize(
    ("fuse", "words"),
    [
        ("1", r"got '1'\. A width alone is a number, not text: write fuse=1\.$"),
        ("500", r"got '500'\. A width alone is a number, not text: write fuse=64\.$"),
        (500, r"got 500\. Write fuse=64\.$"),
        (0, r"got 0\. Write fuse=False for no arrays\.$"),
        (True, r"got True\. Write fuse='auto' to have arrays measured\.$"),
        ("4 quick", r"got '4 quick'\. Write one of these\.$"),
    ],
)
def test_a_refused_width_is_answered_with_what_to_write(fuse, words):
    with pytest.raises(SpecError, match=words):
        wish_of(fuse, None)


def test_the_option_is_read():
    assert [parse_fuse(text) for text in (None, "auto", "off", "4")] == [None, "auto", False, 4]


@pytest.mark.parametrize("text", ["", "on", "-1", "2.5", "many", "0", "1000", "64/0"])
def test_other_options_are_refused(text):
    words = r"--fuse is auto, off, or the width of arrays, 1 to 64 \(16, .*, or 16/4/1 .*\), got"
    with pytest.raises(SpecError, match=words):
        parse_fuse(text)
