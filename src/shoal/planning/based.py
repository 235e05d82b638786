"""Trials that were built with the same frozen weights: an array of them has those once. Pure.

A base that is fine-tuned is the same for all trials that load it, and an array that has it once
takes less memory and, since a product with it is one of all slots' rows, less time. Trials whose
bases differ (one that is drawn at random, say) are no worse than ever: they have a row each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from shoal.core.arraykeys import NO_BASE, Base
from shoal.fusion.matching.match import Signature

BASE = "array_base"
"""What of a numerics key names the base of a trial that shares it, or would."""
FACT = "the bits of the weights that are not trained"
NOTHING: Mapping[int, str] = MappingProxyType({})


def with_base(signature: Signature, base: str) -> Signature:
    """A signature of trials with this base; as it is where that is ""."""
    return replace(signature, facts=(*signature.facts, (FACT, base))) if base else signature


def without_base(signature: Signature) -> Signature:
    """All of it but the base."""
    return replace(signature, facts=tuple(fact for fact in signature.facts if fact[0] != FACT))


def base_in(signature: Signature) -> str:
    """The base that its trials share; "" where each has its own."""
    return dict(signature.facts).get(FACT, "")


def based(
    facts: Mapping[int, Signature],
    bases: Mapping[int, Base],
    on_record: Mapping[int, str],
    known: Mapping[int, str] = NOTHING,
    *,
    exchanges: bool = False,
) -> dict[int, Signature]:
    """The trials' facts, with their base where several have the same.

    Args:
        facts: By trial, without bases.
        bases: Of the trials' frozen weights; none where a trial is to share none.
        on_record: The same of those that were planned before, which keep theirs; "" of none.
        known: Bases that trials of the study shared before, whether or not any of them is here.
        exchanges: Each may go on from another one's state, and with the base that this has: so
            they share one if all of them have the same.
    """
    there = {*known.values(), *on_record.values()}
    mine = {
        trial: _built_with(bases.get(trial, NO_BASE), known)
        for trial in facts
        if trial not in on_record
    }
    if exchanges and len({*mine.values(), *there}) > 1:
        mine = dict.fromkeys(mine, "")
    fresh = Counter((facts[trial], bits) for trial, bits in mine.items())

    def base_of(trial: int, signature: Signature) -> str:
        if trial in on_record:
            return on_record[trial]
        bits = mine[trial]
        return bits if bits in there or fresh[signature, bits] > 1 else ""

    return {trial: with_base(one, base_of(trial, one)) for trial, one in facts.items()}


def _built_with(base: Base, known: Mapping[int, str]) -> str:
    """The bits of a base; "" where its trial begins with a state that may have others.

    A parent that shared this base has it still, and one that did not may have trained it.
    """
    return base.bits if base.parent is None or known.get(base.parent) == base.bits else ""
