"""Batches of one kind whose sizes vary: which of them are the same to an array. Pure.

A batch's kind is a text (``signature.kind_of``), ``dict('ids': int64 [8, 39], 'y': int64 [8])``.
Where the batches of one trial have several sizes in a dimension, it is open, ``[8, ~]``: how long
the first batch happened to be tells no two trials apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shoal.fusion.matching.match import Signature

OPEN = "~"
LOOKED_AT = 4
"""Batches of a trial that are looked at for dimensions that vary."""
BATCH = "batch"
"""What the fact of a signature is about that has the kind."""
_SIZES = re.compile(r"(?<=\w )\[[\d~, ]*\]")


def kind_of_all(kinds: Sequence[str]) -> str:
    """The kind of all batches of a trial, in the order in which they come.

    It is the first one's where others have another structure or number of dimensions, and has the
    first one's rows: where all tensors vary in their first dimension a batch is short, not long.
    """
    found = kinds[0]
    for kind in kinds[1:]:
        found = _merged(found, kind) or found
    sizes, first = _sizes(found), _sizes(kinds[0])
    if all(mine[0] == OPEN for mine in sizes if mine):
        sizes = [[*one[:1], *mine[1:]] for mine, one in zip(sizes, first, strict=True)]
    return _with_sizes(found, sizes)


def is_open(kind: str) -> bool:
    """Whether sizes vary in batches of this kind."""
    return any(OPEN in sizes for sizes in _SIZES.findall(kind))


def ranges(kinds: Sequence[str]) -> str:
    """The sizes of tensors where they vary, ``[8, 17 to 40]``.

    Of batches that are built like the first one; there may be others, which have an item more.
    """
    told, alike = [], [kind for kind in kinds if _merged(kinds[0], kind) is not None]
    for tensors in zip(*map(_sizes, alike), strict=True):
        columns = [sorted(map(int, sizes)) for sizes in zip(*tensors, strict=True)]
        pairs = [(sizes[0], sizes[-1]) for sizes in columns]
        if any(least < most for least, most in pairs):
            words = [f"{least} to {most}" if least < most else str(least) for least, most in pairs]
            told.append(f"[{', '.join(words)}]")
    return ", ".join(dict.fromkeys(told))


def joined(one: str, other: str) -> str | None:
    """One kind for both: sizes differ only where they vary in one of them. None: two kinds."""
    found = _merged(one, other)
    if found is None:
        return None
    for both in zip(*map(_sizes, (found, one, other)), strict=True):
        for size, mine, theirs in zip(*both, strict=True):
            if size == OPEN and OPEN not in (mine, theirs):
                return None
    return found


def settled(
    kinds: Mapping[int, str], on_record: Mapping[int, str], known: Iterable[str] = ()
) -> dict[int, str]:
    """By trial, the kind of the batches of all that it may share an array with.

    Args:
        kinds: Of each trial's batches, in the order of trials.
        on_record: Of those that were planned before, which keep theirs.
        known: Open kinds that trials were planned with.
    """
    shared = list(dict.fromkeys([*known, *filter(is_open, on_record.values())]))
    fresh = list(dict.fromkeys(kinds[trial] for trial in kinds if trial not in on_record))
    for kind in filter(is_open, fresh):
        if not any(joined(kind, one) == one for one in shared):
            shared.append(_with_all(kind, fresh))
    return {
        trial: on_record.get(trial)
        or next((one for one in shared if joined(kind, one) == one), kind)
        for trial, kind in kinds.items()
    }


def alike(
    facts: Mapping[int, Signature],
    kinds: Mapping[int, str],
    on_record: Mapping[int, str],
    known: Iterable[Signature] = (),
) -> dict[int, Signature]:
    """The trials' facts, in which lengths of batches part nobody where they vary.

    Args:
        facts: By trial, with its first batch.
        kinds: Of all batches that were looked at (``kind_of_all``).
        on_record: The kinds with which trials were planned before.
        known: Of shapes that were planned.
    """
    apart: dict[Signature, list[int]] = {}
    for trial, signature in facts.items():
        apart.setdefault(without_kind(signature), []).append(trial)
    there = [(without_kind(one), kind_in(one)) for one in known if is_open(kind_in(one))]
    found: dict[int, str] = {}
    for rest, trials in apart.items():
        mine = {trial: kinds.get(trial) or kind_in(facts[trial]) for trial in trials}
        shared = [kind for other, kind in there if other == rest]
        found |= settled(mine, {t: on_record[t] for t in trials if t in on_record}, shared)
    return {trial: with_kind(signature, found[trial]) for trial, signature in facts.items()}


def told_of_lengths(facts: Iterable[Signature]) -> tuple[str, ...]:
    """Lines that say which batches vary in length."""
    kinds = dict.fromkeys(kind for kind in map(kind_in, facts) if is_open(kind))
    return tuple(
        f"    batches vary in length: {kind}; in an array those of one length are one pass"
        for kind in kinds
    )


def with_kind(signature: Signature, kind: str) -> Signature:
    """A signature of trials whose batches are of this kind."""
    facts = ((name, kind if name == BATCH else fact) for name, fact in signature.facts)
    return replace(signature, facts=tuple(facts))


def without_kind(signature: Signature) -> Signature:
    """All of a signature but its batch."""
    return replace(signature, facts=tuple(fact for fact in signature.facts if fact[0] != BATCH))


def kind_in(signature: Signature) -> str:
    """The kind of the batches of a signature's trials; "" where it has none."""
    return dict(signature.facts).get(BATCH, "")


def _with_all(kind: str, others: Sequence[str]) -> str:
    """An open kind with all that it and what joins it leave open."""
    while True:
        before = kind
        for other in filter(is_open, others):
            kind = joined(kind, other) or kind
        if kind == before:
            return kind


def _merged(one: str, other: str) -> str | None:
    """One text for both, open where sizes differ; None where anything else does."""
    if _SIZES.split(one) != _SIZES.split(other):
        return None
    mine, theirs = _sizes(one), _sizes(other)
    if list(map(len, mine)) != list(map(len, theirs)):
        return None
    pairs = zip(mine, theirs, strict=True)
    told = [[a if a == b else OPEN for a, b in zip(*pair, strict=True)] for pair in pairs]
    return _with_sizes(one, told)


def _with_sizes(kind: str, sizes: Sequence[Sequence[str]]) -> str:
    told = iter(sizes)
    return _SIZES.sub(lambda _: f"[{', '.join(next(told))}]", kind)


def _sizes(kind: str) -> list[list[str]]:
    return [[size for size in found[1:-1].split(", ") if size] for found in _SIZES.findall(kind)]
