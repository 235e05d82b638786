"""Which trials may train as one array, and for two that may not, why.

A signature is a list of named facts, made by ``signature.py``: names and texts, so that this
file decides without torch and two machines can compare theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.core.spec import Scalar, TrialSpec
from shoal.core.units import counted

LONG, BEFORE = 160, 40  # characters: of a fact that is told in full, and before a difference
_NAMED = re.compile(r"'[^']*': ")  # of a setting


@dataclass(frozen=True, slots=True)
class Signature:
    """Facts that trials of one array share: (what it is about, what it is), in order.

    Numbers that may differ inside an array are not told: a fact says "a float".
    """

    facts: tuple[tuple[str, str], ...]


class ToldApart(NamedTuple):
    """Hyperparameters by name: those that may differ inside an array, and those that may not."""

    fusible: tuple[str, ...]
    infusible: tuple[str, ...]


def first_difference(one: Signature, other: Signature) -> str:
    """In words, the first fact in which two signatures differ; empty if there is none."""
    if one == other:
        return ""
    theirs = dict(other.facts)
    for subject, fact in one.facts:
        if subject not in theirs:
            return f"{subject}: {fact} in one, nothing of that name in the other"
        if theirs[subject] != fact:
            here, there = _where_they_differ(fact, theirs[subject])
            return f"{subject}: {here} in one, {there} in the other"
    mine = dict(one.facts)
    for subject, fact in other.facts:
        if subject not in mine:
            return f"{subject}: nothing of that name in one, {fact} in the other"
    return "the same facts come in another order"


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Two facts, long ones (a configuration with all its settings) from where they differ on."""
    if max(len(one), len(other)) <= LONG:
        return one, other
    unlike = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    at = next(unlike, min(len(one), len(other)))
    names = [found.start() for found in _NAMED.finditer(one[:at])]
    begin = names[-1] if names and at - names[-1] <= LONG else max(0, at - BEFORE)
    return _excerpt(one, begin), _excerpt(other, begin)


def _excerpt(fact: str, begin: int) -> str:
    end = begin + LONG // 2
    return "... " * (begin > 0) + fact[begin:end] + " ..." * (len(fact) > end)


def groups(signatures: Sequence[Signature]) -> tuple[tuple[int, ...], ...]:
    """Indices of equal signatures, in the order of their first."""
    found: dict[Signature, list[int]] = {}
    for index, signature in enumerate(signatures):
        found.setdefault(signature, []).append(index)
    return tuple(tuple(members) for members in found.values())


def told_apart(hps: Sequence[Mapping[str, Scalar]], signatures: Sequence[Signature]) -> ToldApart:
    """Which hyperparameters differ inside some group, and which only between groups."""
    names = sorted({name for hp in hps for name in hp})
    inside = {
        name
        for members in groups(signatures)
        for name in names
        if len({repr(hps[index].get(name)) for index in members}) > 1
    }
    varying = {name for name in names if len({repr(hp.get(name)) for hp in hps}) > 1}
    return ToldApart(tuple(sorted(inside)), tuple(sorted(varying - inside)))


def told_of(trials: Sequence[TrialSpec], facts: Mapping[int, Signature]) -> tuple[str, ...]:
    """Lines that say who may share an array, and what keeps the others apart."""
    some = [trial for trial in trials if trial.number in facts]
    signatures = [facts[trial.number] for trial in some]
    shapes = groups(signatures)
    if len(some) < 2:
        return ()
    apart = told_apart([trial.hp for trial in some], signatures)
    lines = [
        f"  arrays: {len(some)} trials of {counted(len(shapes), 'shape')}; trials in one "
        f"array may differ in {', '.join(apart.fusible) or 'nothing that differs here'}"
        + (f"; shapes differ by {', '.join(apart.infusible)}" if apart.infusible else "")
    ]
    first = shapes[0][0]
    lines += [
        f"    trial {some[other[0]].number} shares no array with trial {some[first].number}: "
        + first_difference(signatures[first], signatures[other[0]])
        for other in shapes[1:4]
    ]
    return tuple(lines)
