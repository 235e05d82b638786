"""A recipe by the names of its functions, where no name leads to its study.

A script may make its study in a function, ``main`` say: no attribute of the file is the
study then, but what its recipe consists of mostly stands at the top level of files. It is
recorded as text, and imported again when it is needed, as ``source`` does with studies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from shoal.core.errors import SpecError
from shoal.recipes.recipe import Recipe
from shoal.recipes.wholeset import WholeSet
from shoal.source import import_recorded, load_recorded

_NAME = "name"  # of a record that is one, and no value
_WHOLE_SET = "whole set"  # of a record of two, which are a shoal.WholeSet
_SCRIPT = "script"  # beside a recipe's fields: the file that made it, for the modules next to it


def name_recipe(recipe: Recipe) -> dict[str, Any]:
    """A recipe as JSON-ready names and plain values; empty where something has no name.

    That is a lambda, a function inside another one, and any other object.
    """
    try:
        fields = recipe.__dataclass_fields__
        named = {field: _name_of(getattr(recipe, field)) for field in fields}
    except _Nameless:
        return {}
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return {_SCRIPT: str(Path(file).resolve()) if file else "", **named}


def recall_recipe(
    named: Mapping[str, Any],
    study_dir: str | os.PathLike[str],
    study: str,
    arguments: Sequence[str] = (),
) -> Recipe:
    """The recipe that ``name_recipe`` wrote into a study's directory.

    ``arguments`` are those of the command line, which its files find again.

    Raises:
        SpecError: a file, a module or a name is not there any more, or not to be trusted.
    """
    values = dict(named)
    script, modules = values.pop(_SCRIPT, ""), {}
    if script:  # first: modules beside it are found then
        modules[script] = import_recorded(script, study_dir, study, arguments)

    def recall(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if value.keys() == {_WHOLE_SET}:
            return WholeSet(*map(recall, value[_WHOLE_SET]))
        if value.keys() != {_NAME}:
            return {key: recall(item) for key, item in value.items()}
        place, _, name = str(value[_NAME]).rpartition(":")
        if place not in modules:
            modules[place] = import_recorded(place, study_dir, study, arguments)
        module = modules[place]
        if not hasattr(module, name):
            raise SpecError(
                f"the study in {study_dir} was made with {name} of {place}, and there is no "
                f"{name} any more. Put it back, or name a file that defines the study: --file "
                "FILE.py[:STUDY]."
            )
        return getattr(module, name)

    return Recipe(**{field: recall(value) for field, value in values.items()})


@dataclass(frozen=True, slots=True)
class Origin:
    """What a study's directory says of where its recipe is: either may be empty."""

    study: str = ""
    source: str = ""
    named: Mapping[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] = ()

    def recipe(self, study_dir: str | os.PathLike[str]) -> Recipe | None:
        """The recipe, imported again; None where nothing is on record.

        Raises:
            SpecError: what is on record is not there any more, or not to be trusted.
        """
        if self.source:
            loaded = load_recorded(self.source, study_dir, self.study, self.arguments)
            found: Recipe = loaded.study.recipe
            return found
        if not self.named:
            return None
        return recall_recipe(self.named, study_dir, self.study, self.arguments)


class _Nameless(Exception):
    pass


def _name_of(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, WholeSet):
        return {_WHOLE_SET: [_name_of(value.collect), _name_of(value.compute)]}
    if isinstance(value, Mapping):
        return {str(key): _name_of(item) for key, item in value.items()}
    if not isinstance(value, FunctionType | type):
        raise _Nameless
    module = sys.modules.get(value.__module__)
    name = getattr(value, "__qualname__", "")
    if module is None or vars(module).get(name) is not value:
        raise _Nameless
    place = value.__module__
    if place == "__main__":
        file = getattr(module, "__file__", None)
        if not file:
            raise _Nameless
        place = str(Path(file).resolve())
    return {_NAME: f"{place}:{name}"}
