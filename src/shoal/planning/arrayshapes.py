"""A shape of trials, which may share an array: what was measured and settled of it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shoal.core.arraykeys import LOOPED, told_of_looped
from shoal.core.spec import PassKind, Scalar, WidthMeasure
from shoal.fusion.matching.lengths import is_open, kind_in, with_kind
from shoal.fusion.matching.match import Signature
from shoal.planner.narrower import Narrower
from shoal.planner.width import Candidate
from shoal.planning.arrayjobs import LOOPING
from shoal.planning.based import BASE, base_in, with_base
from shoal.planning.capturing import BY_CODE, LoneWay
from shoal.planning.reseating import array_kind
from shoal.planning.spilling import SpilledArrayPlan


@dataclass(slots=True)
class Shape:
    """Trials of one signature: what was measured of them, and what those that come train as."""

    signature: Signature
    group: str  # its name
    found: dict[Candidate, WidthMeasure] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    compiler: str = ""
    lone: LoneWay = BY_CODE
    width: int = 0  # not settled yet
    kind: PassKind | None = None  # None: traced, if there is a graph
    constants: str = ""  # of the code that is compiled
    closes: bool = False  # whether its trials get other seats where others are pruned
    rest: tuple[Narrower, ...] = ()  # for the last trials of a generation
    why: tuple[str, ...] = ()
    spilled: dict[int, SpilledArrayPlan | str] = field(default_factory=dict)  # by width

    @property
    def base(self) -> str:
        """What names the frozen weights that its trials share; "" where each has its own."""
        return base_in(self.signature)

    def looped(self, keys: Iterable[Mapping[str, Scalar]]) -> str:
        """Which parts run slot by slot in its arrays: as ``keys`` on record have it, if any do.

        All of its arrays are to say the same, or a trial's bits would tell of who was planned
        before it; but those in which none can say nothing.
        """
        seen = (key for key in keys if "array" in key and array_kind(key) in LOOPING)
        if (before := next(seen, None)) is not None:
            return str(before.get(LOOPED, ""))
        cut = (plan for plan in self.spilled.values() if isinstance(plan, SpilledArrayPlan))
        every = [*(one.looped for one in self.found.values()), *(plan.looped for plan in cut)]
        return told_of_looped(itertools.chain.from_iterable(every))

    @property
    def varies(self) -> bool:
        """Whether its trials' batches vary in length."""
        return is_open(kind_in(self.signature))


def digest_of(signature: Signature) -> str:
    """The name of a shape's group."""
    return hashlib.sha256(repr(signature.facts).encode()).hexdigest()[:12]


def shapes_on_record(
    keys: Iterable[Mapping[str, Scalar]], facts: Iterable[Signature]
) -> Iterator[Signature]:
    """Those of ``facts`` with kinds of batches under which trials of their shape are on record."""
    told = (
        (str(k["array_batches"]), str(k.get(BASE, "")), k["array_group"])
        for k in keys
        if "array_batches" in k
    )
    shapes = dict.fromkeys(told)
    for signature in dict.fromkeys(facts):
        for kind, base, group in shapes:
            there = with_kind(signature, kind)
            if digest_of(with_base(there, base)) == group:
                yield there
