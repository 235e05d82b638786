"""A recipe as text: the source of what it is made of, so that a change of it shows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from shoal.resume.code import is_same
from shoal.resume.home import Home
from shoal.resume.walk import Walk
from shoal.resume.words import is_plain

PERMISSIONS = frozenset(("splittable", "share_data", "stale"))
"""Fields of a recipe that allow something, and change no bit by themselves: what a trial made of
them is in its numerics key. They are on record, and another value is no other recipe."""

_NUMPY = re.compile(r"np\.\w+\((.*)\)")
"""How older records have a NumPy scalar, which is Python's own number by now."""


_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRecord:
    """What a recipe is: its fields by name, and the sources they refer to.

    A field is a value, or the name of a definition; one that has its default is left
    out, so that a later shoal may have more of them. ``sources`` has the text of that
    definition, and of each one that it names in turn. ``digest`` is of both.
    """

    fields: Mapping[str, str]
    sources: Mapping[str, str]
    digest: str

    def is_same(self, other: RecipeRecord) -> bool:
        """Whether both mean one recipe, though other Pythons may have written them."""
        if self.digest == other.digest:
            return True
        if self._computes() != other._computes() or self.sources.keys() != other.sources.keys():
            return False
        return all(is_same(text, other.sources[name]) for name, text in self.sources.items())

    def made_of(self, field: str) -> dict[str, str]:
        """What a field says and leads to: texts by name, of all that one text names in turn."""
        found = {"": self.fields.get(field, "")}
        waiting = list(found.values())
        while waiting:
            words = set(_WORD.findall(waiting.pop()))
            for name, text in self.sources.items():
                if name not in found and _last(name) in words:
                    found[name] = text
                    waiting.append(text)
        return found

    def allows(self) -> dict[str, str]:
        """What it says of the permissions; one that is left out is the default."""
        return {name: text for name, text in self.fields.items() if name in PERMISSIONS}

    def allowing(self, other: RecipeRecord) -> RecipeRecord:
        """The same recipe with the permissions of another record of it."""
        if self.allows() == other.allows():
            return self
        return record_of({**self._computes(), **other.allows()}, self.sources)

    def _computes(self) -> dict[str, str]:
        found = {name: text for name, text in self.fields.items() if name not in PERMISSIONS}
        return {
            name: known[1] if (known := _NUMPY.fullmatch(text)) else text
            for name, text in found.items()
        }


def describe_recipe(recipe: Any) -> RecipeRecord:
    """The record of a ``shoal.Recipe``, or of any dataclass of callables and values.

    Reads the files that define them. Of what has no source, as in an interactive
    session, a digest of its code is recorded.
    """
    values = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    values = {f.name: values[f.name] for f in fields(recipe) if not _is_default(f, values[f.name])}
    allows = {name: repr(values.pop(name)) for name in sorted(PERMISSIONS & values.keys())}
    walk = Walk(Home.of(values.values()))
    described = {name: walk.describe(value) for name, value in values.items()}
    walk.follow_all()
    return record_of(described | allows, walk.sources)


def _last(name: str) -> str:
    """How code calls a source: ``sched`` of ``mine.Kind.sched (2)``, or of a variable of it."""
    owner, _, _ = name.partition(":")
    return owner.split(" ")[0].rpartition(".")[2]


def _is_default(field: Field[Any], value: Any) -> bool:
    if isinstance(value, Mapping):
        return field.default_factory is dict and not value
    return is_plain(value) and type(value) is type(field.default) and value == field.default


def record_of(described: Mapping[str, str], sources: Mapping[str, str]) -> RecipeRecord:
    """A record with its digest."""
    text = json.dumps([dict(described), dict(sources)], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return RecipeRecord(fields=dict(described), sources=dict(sources), digest=digest)
