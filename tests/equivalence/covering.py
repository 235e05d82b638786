"""Few rows in which every pair of values of every two factors meets, or every value occurs."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Mapping, Sequence

Row = dict[str, Hashable]
Pair = frozenset[tuple[str, Hashable]]


def cover_pairs(factors: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    """Rows that together hold every pair of values; the same ones every time.

    Greedy, after AETG (Cohen et al., 1997): a row starts with a pair that is still
    missing, and each further factor takes the value that adds the most missing pairs; of
    equal ones the value that has been used least, so that late rows are as varied.
    """
    missing = all_pairs(factors)
    rows: list[Row] = []
    while missing:
        row: Row = dict(missing[0])
        for name in sorted(factors, key=lambda name: -len(factors[name])):
            if name not in row:
                row[name] = _best_value(name, factors[name], row, missing, rows)
        covered = pairs_of(row)
        missing = [pair for pair in missing if pair not in covered]
        rows.append({name: row[name] for name in factors})
    return rows


def all_pairs(factors: Mapping[str, Sequence[Hashable]]) -> list[Pair]:
    """Every two values of two different factors, in the factors' order."""
    return [
        frozenset({(first, one), (second, other)})
        for first, second in itertools.combinations(factors, 2)
        for one in factors[first]
        for other in factors[second]
    ]


def pairs_of(row: Mapping[str, Hashable]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def full_product(factors: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    return [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]


def cover_values(
    cases: Mapping[str, Mapping[str, Hashable]], most: int | None = None
) -> list[str]:
    """The names of few cases in which every factor has each of its values; the same every time.

    With ``most`` just so many, where there are: not with every value, or more than that takes.
    Greedy: the case with the most values that are still missing, of equal ones whichever comes
    first by a checksum of its name, so that lists that many tests share, such as of models, are
    not all cut to their first ones.
    """
    missing = {item for case in cases.values() for item in case.items()}
    left = sorted(cases, key=lambda name: zlib.crc32(name.encode()))
    found: list[str] = []
    while missing and (most is None or len(found) < most):
        best = max(left, key=lambda name: len(missing & set(cases[name].items())))
        left.remove(best)
        missing -= set(cases[best].items())
        found.append(best)
    return found if most is None else [*found, *left[: most - len(found)]]


def _best_value(
    name: str, values: Sequence[Hashable], row: Row, missing: Sequence[Pair], rows: Sequence[Row]
) -> Hashable:
    wanted = set(missing)

    def worth(value: Hashable) -> tuple[int, int, int]:
        gain = sum(frozenset({(name, value), item}) in wanted for item in row.items())
        demand = sum((name, value) in pair for pair in missing)
        used = sum(earlier[name] == value for earlier in rows)
        return gain, demand, -used

    return max(values, key=worth)
