"""What ``fuse=`` and ``--fuse`` take, and what they refuse."""

from __future__ import annotations

import pytest

import shoal
from shoal.core.errors import PlanError, SpecError
from shoal.launch.wishes import technique_of, wish_of


def test_what_is_asked_for():
    known = {None: None, "auto": "auto", False: 0, "off": 0, 1: 1, 64: 64, "4": 4}
    known |= dict.fromkeys(("4 compiled", "4-compiled"), "4 compiled") | {"4/1": "4/1"}
    assert [wish_of(asked, None) for asked in known] == list(known.values())


@pytest.mark.parametrize("fuse", [True, 0, -1, 65, 2.0, "", "on", "-1", "2.5", "64/0", [2]])
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
        ("500", r"got '500'\. Write 64\.$"),
        (500, r"got 500\. Write 64\.$"),
        (0, r"got 0\. Write off for no arrays\.$"),
        ("0", r"got '0'\. Write off for no arrays\.$"),
        (True, r"got True\. Write auto to have arrays measured\.$"),
        ("4 quick", r"got '4 quick'\. Write one of these\.$"),
        ("4/4", r"got '4/4'\. Widths fall: those that go on are fewer\.$"),
        ("4/1-compiled", r"^passes that are compiled are of one width, got fuse='4/1 compiled'"),
    ],
)
def test_a_refused_width_is_answered_with_what_to_write(fuse, words):
    with pytest.raises(SpecError, match=words):
        wish_of(fuse, None)
