"""study.json: what is written is read back, and what is not ours is left alone."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ShoalError, SpecError, StorageError
from shoal.resume import (
    Addition,
    RecipeRecord,
    StudyRecord,
    TrialRecord,
    form,
    record_from_json,
    record_to_json,
)
from shoal.resume.recipe import record_of

FINITE = st.floats(allow_nan=False)
TEXT = st.text(max_size=9) | st.sampled_from(["NaN", "\\NaN", "-Infinity", "\n"])
POINTS = st.dictionaries(
    TEXT, st.none() | st.booleans() | st.integers() | FINITE | TEXT, max_size=3
)
RECIPES = st.builds(
    record_of, st.dictionaries(TEXT, TEXT, max_size=3), st.dictionaries(TEXT, TEXT, max_size=3)
)
TRIALS = st.lists(
    st.builds(
        TrialRecord,
        number=st.integers(0, 99),
        hp=POINTS,
        seed=st.integers(0),
        origin=st.sampled_from(["asked", "extended", "cloned"]),
        parent=st.none() | st.integers(0),
        warm=st.booleans(),
    ),
    unique_by=lambda trial: trial.number,
    max_size=4,
).map(tuple)


def _additions(record: StudyRecord) -> st.SearchStrategy[Addition]:
    numbers = [trial.number for trial in record.trials]
    some = st.lists(st.sampled_from(numbers), min_size=1, max_size=3) if numbers else st.nothing()
    times = st.floats(allow_nan=False, allow_infinity=False) | st.integers(0)
    return st.builds(Addition, time=times, trials=some.map(tuple))


RECORDS = st.builds(
    StudyRecord,
    name=st.text(string.ascii_lowercase, min_size=1),
    space=TEXT,
    trials=TRIALS,
    epochs=st.just(3),
    steps=st.none(),
    eval_every=st.none() | st.integers(1),
    metric=TEXT,
    mode=st.sampled_from(["min", "max"]),
    seed=st.integers(),
    recipe=RECIPES,
    checkpoint=POINTS,
    search=st.dictionaries(TEXT, TEXT, max_size=3),
    fuse=st.none() | TEXT | st.integers(0),
    older=st.lists(RECIPES, max_size=2).map(tuple),
).flatmap(
    lambda record: st.lists(_additions(record), max_size=3 if record.trials else 0).map(
        lambda additions: replace(record, additions=tuple(additions))
    )
)
SMALL = StudyRecord(
    name="sweep",
    space="lr=0.1",
    trials=(TrialRecord(number=0, hp={"lr": 0.1}, seed=0),),
    additions=(Addition(time=1.5, trials=(0,)),),
    epochs=None,
    steps=9,
    eval_every=None,
    metric="valid_loss",
    mode="min",
    seed=0,
    recipe=record_of({"model": "build"}, {"build": "def build(hp):\n    pass"}),
    checkpoint={"keep": 2},
)


@settings(deadline=None)
@given(RECORDS)
def test_a_record_survives_its_text(record: StudyRecord) -> None:
    assert record_from_json(record_to_json(record)) == record


def test_the_text_can_be_read_by_anybody() -> None:
    values = json.loads(record_to_json(SMALL))

    assert (values["kind"], values["format"], values["name"]) == ("shoal.study", 5, "sweep")
    assert values["trials"][0]["hp"] == {"lr": 0.1}


def test_every_field_is_checked() -> None:
    for kind, checks in (
        (StudyRecord, form._STUDY),
        (TrialRecord, form._TRIAL),
        (Addition, form._ADDITION),
        (RecipeRecord, form._RECIPE),
    ):
        assert [field.name for field in fields(kind)] == list(checks) or kind is StudyRecord
        assert {field.name for field in fields(kind)} == set(checks)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "\x00\x01",
        '{"name": "sweep", "trials": 4}',
        '{"kind": "other"}',
        "[" * 100_000,
    ],
)
def test_what_shoal_did_not_write_is_told_so(text: str) -> None:
    with pytest.raises(SpecError, match=r"x/study.json was not written .* Nothing was changed"):
        record_from_json(text, "x/study.json")


def test_a_newer_format_is_left_alone() -> None:
    text = record_to_json(SMALL).replace('"format": 5', '"format": 6').replace('"seed"', '"new"')

    with pytest.raises(
        StorageError, match=r"has format 6, .* formats up to 5: a newer one .* Update"
    ):
        record_from_json(text)


def test_a_record_of_the_first_format_is_read_and_written_on_as_this_one() -> None:
    values = json.loads(record_to_json(SMALL))
    values["format"] = 1
    del values["additions"]

    record = record_from_json(json.dumps(values))

    assert record == replace(SMALL, additions=())
    assert record_from_json(record_to_json(record)) == record


def test_a_record_before_wishes_for_arrays_says_nothing_of_them() -> None:
    values = json.loads(record_to_json(replace(SMALL, fuse="auto")))
    assert values["fuse"] == "auto"
    values["format"] = 3
    del values["fuse"]

    assert record_from_json(json.dumps(values)) == SMALL


def test_a_record_before_recipes_were_accepted_has_one() -> None:
    values = json.loads(record_to_json(SMALL))
    values["format"] = 4
    del values["older"]

    assert record_from_json(json.dumps(values)).recipes == (SMALL.recipe,)


def test_a_torn_record_is_damaged() -> None:
    text = record_to_json(SMALL)

    for end in range(text.index(form.KIND) + len(form.KIND), len(text) - 2):
        with pytest.raises(StorageError, match=r"study.json is damaged.*Nothing was changed"):
            record_from_json(text[:end])


def _with(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values.update(changes)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_with(format="1"), "its format is '1'"),
        (_with(format=True), "its format is True"),
        (_with(format=0), "its format is 0"),
        (_with(extra=1), "these names are missing or unknown: extra"),
        (lambda values: values.pop("metric"), "these names are missing or unknown: metric"),
        (_with(epochs=3), "not exactly one of epochs and steps"),
        (_with(steps=None), "not exactly one of epochs and steps"),
        (_with(steps=0), "steps is 0"),
        (_with(steps=9.0), "steps is 9.0"),
        (_with(mode="most"), "mode is 'most'"),
        (_with(seed=True), "seed is True"),
        (_with(trials={}), "trials is {}"),
        (_with(trials=[3]), "an object with number, hp, .* is int"),
        (_with(checkpoint={"keep": []}), "checkpoint is {'keep': "),
        (lambda values: values["trials"].append(values["trials"][0]), "two trials have one numb"),
        (lambda values: values["trials"][0].update(number=-1), "number is -1"),
        (_with(fuse=True), "fuse is True"),
        (_with(fuse=-1), "fuse is -1"),
        (_with(additions={}), "additions is {}"),
        (_with(additions=[{"time": 0.0}]), "these names are missing or unknown: trials"),
        (_with(additions=[{"time": True, "trials": [0]}]), "time is True"),
        (_with(additions=[{"time": 0.0, "trials": []}]), r"trials is \[\]"),
        (_with(additions=[{"time": 0.0, "trials": [0, 7]}]), "was added that is not there: 7"),
        (lambda values: values["trials"][0].update(hp={"lr": {}}), "hp is {'lr': {}}"),
        (lambda values: values["recipe"]["sources"].update(build="pass"), "digest is another"),
        (lambda values: values["recipe"]["fields"].update(model=3), "fields is {'model': 3}"),
    ],
)
def test_a_damaged_record_says_what_is_wrong(
    damage: Callable[[dict[str, Any]], Any], said: str
) -> None:
    values = json.loads(record_to_json(SMALL))
    damage(values)

    with pytest.raises(StorageError, match=said):
        record_from_json(json.dumps(values))


@settings(deadline=None)
@given(st.binary(max_size=40), st.integers(0), st.integers(0, 7))
def test_no_text_is_more_than_an_error(noise: bytes, place: int, bit: int) -> None:
    text = bytearray(record_to_json(SMALL).encode())
    text[place % len(text)] ^= 1 << bit

    for candidate in (noise, bytes(text)):
        try:
            record = record_from_json(candidate.decode("utf-8", "replace"))
        except ShoalError:
            continue
        assert record_from_json(record_to_json(record)) == record


def test_unlike_records_have_unlike_texts() -> None:
    assert record_to_json(SMALL) != record_to_json(replace(SMALL, steps=10))
