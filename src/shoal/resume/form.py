"""A study's record as JSON: what stands in ``study.json``, and what is believed of it.

    {"kind": "shoal.study", "format": 5, "name": "sweep", ..., "trials": [{"number": 0, ...}]}

A format that this version does not know is left alone: a newer shoal wrote it. Format 1 had
no ``additions``, format 2 no ``search``, format 3 no ``fuse``, format 4 no ``older``: they are
read, and what is written next is of this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from shoal.core.errors import SpecError, StorageError
from shoal.core.studyfiles import RECORD
from shoal.observe import jsonl
from shoal.resume.recipe import RecipeRecord, record_of
from shoal.resume.record import Addition, StudyRecord, TrialRecord

KIND, FORMAT = "shoal.study", 5


def record_to_json(record: StudyRecord) -> str:
    """The text of ``study.json``, for a reader at night too."""
    values: dict[str, Any] = {"kind": KIND, "format": FORMAT, **_fields(record)}
    values["recipe"] = _fields(record.recipe)
    values["older"] = [_fields(recipe) for recipe in record.older]
    values["trials"] = [_fields(trial) for trial in record.trials]
    values["additions"] = [_fields(addition) for addition in record.additions]
    return jsonl.dumps(values, indent=2) + "\n"


def record_from_json(text: str, where: str = RECORD) -> StudyRecord:
    """The record of a text; ``where`` names its file in messages.

    Raises:
        SpecError: shoal did not write this.
        StorageError: it is damaged, or a newer shoal wrote it.
    """
    values = _parse(text, where)
    written = _take_format(values, where)
    if written < 2:
        values["additions"] = []
    if written < 3:
        values["search"] = {}
    if written < 4:
        values["fuse"] = None
    if written < 5:
        values["older"] = []
    try:
        return _record(values)
    except ValueError as error:
        raise StorageError(
            f"{where} is damaged: {error}. Nothing was changed. Restore the file from a copy, or "
            "give the study another name."
        ) from None


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        values = jsonl.loads(text)
    except ValueError as error:
        if KIND in text:
            raise StorageError(
                f"{where} is damaged: it is no JSON: {error}. Nothing was changed. Restore the "
                "file from a copy, or give the study another name."
            ) from None
        values = None
    if not isinstance(values, dict) or values.pop("kind", None) != KIND:
        raise SpecError(
            f"{where} was not written by this version of shoal: it does not say kind: {KIND!r}. "
            "Nothing was changed. Choose another name or directory for the study."
        )
    return values


def _take_format(values: dict[str, Any], where: str) -> int:
    found = values.pop("format", None)
    if type(found) is int and found > FORMAT:
        raise StorageError(
            f"{where} has format {found}, and this shoal reads formats up to {FORMAT}: a newer "
            "one wrote it. Nothing was changed. Update shoal, or give the study another name."
        )
    if type(found) is not int or found < 1:
        raise StorageError(
            f"{where} is damaged: its format is {found!r}. Nothing was changed. Restore the file "
            "from a copy, or give the study another name."
        )
    return found


# -- values, each with its meaning ------------------------------------------------------------


def _record(values: dict[str, Any]) -> StudyRecord:
    checked = _checked(values, _STUDY)
    if (checked["epochs"] is None) == (checked["steps"] is None):
        raise ValueError("it has not exactly one of epochs and steps")
    recipe = _recipe(checked.pop("recipe"))
    older = tuple(map(_recipe, checked.pop("older")))
    trials = tuple(TrialRecord(**_checked(v, _TRIAL)) for v in checked.pop("trials"))
    if len({trial.number for trial in trials}) != len(trials):
        raise ValueError("two trials have one number")
    additions = tuple(_addition(v, trials) for v in checked.pop("additions"))
    return StudyRecord(**checked, recipe=recipe, older=older, trials=trials, additions=additions)


def _recipe(values: Any) -> RecipeRecord:
    checked = _checked(values, _RECIPE)
    described = record_of(checked["fields"], checked["sources"])
    if described.digest != checked["digest"]:
        raise ValueError("the recipe's digest is another one")
    return described


def _addition(values: Any, trials: tuple[TrialRecord, ...]) -> Addition:
    checked = _checked(values, _ADDITION)
    unknown = set(checked["trials"]) - {trial.number for trial in trials}
    if unknown:
        raise ValueError(f"a trial was added that is not there: {min(unknown)}")
    return Addition(time=checked["time"], trials=tuple(checked["trials"]))


def _checked(values: Any, checks: Mapping[str, Callable[[Any], bool]]) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"an object with {', '.join(checks)} is {type(values).__name__}")
    if values.keys() != checks.keys():
        odd = sorted(values.keys() ^ checks.keys())
        raise ValueError(f"these names are missing or unknown: {', '.join(odd)}")
    for name, accepts in checks.items():
        if not accepts(values[name]):
            raise ValueError(f"{name} is {values[name]!r:.80}")
    return values


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 1)


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _is_wish(value: Any) -> bool:
    return value is None or _is_text(value) or _is_number(value)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _are_scalars(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(item is None or type(item) in (bool, int, float, str) for item in value.values())


_STUDY: dict[str, Callable[[Any], bool]] = {
    "name": _is_text,
    "space": _is_text,
    "trials": lambda value: isinstance(value, list),
    "epochs": _is_count,
    "steps": _is_count,
    "eval_every": _is_count,
    "metric": _is_text,
    "mode": lambda value: value in ("min", "max"),
    "seed": _is_whole,
    "recipe": lambda value: isinstance(value, dict),
    "checkpoint": _are_scalars,
    "additions": lambda value: isinstance(value, list),
    "search": _are_texts,
    "fuse": _is_wish,
    "older": lambda value: isinstance(value, list),
}
_ADDITION: dict[str, Callable[[Any], bool]] = {"time": _is_time, "trials": _are_numbers}
_RECIPE: dict[str, Callable[[Any], bool]] = {
    "fields": _are_texts,
    "sources": _are_texts,
    "digest": _is_text,
}
_TRIAL: dict[str, Callable[[Any], bool]] = {
    "number": _is_number,
    "hp": _are_scalars,
    "seed": _is_number,
    "origin": lambda value: value in ("asked", "extended", "cloned", "searched"),
    "parent": lambda value: value is None or _is_number(value),
    "warm": lambda value: isinstance(value, bool),
}
