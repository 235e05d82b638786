"""Where in its data a trial is: records that say it, and nothing else.

A position holds plain containers, numbers, tensors and ``RngState``s, so that a checkpoint
can keep it without a pickle. What leads to a position again is in ``keepers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import Tensor

from shoal.rng import RngState

Way = Literal["index", "sampler", "state", "epoch", "replay"]
"""How a source is led to a position: see ``sources.Rule``."""


@dataclass(frozen=True, slots=True)
class Moves:
    """How one random stream moved on between the draws of a source, in one epoch.

    ``runs`` are (first, count, gap): before each of ``count`` fetches from ``first`` on, others
    had drawn ``gap`` numbers since the source last drew. ``states`` has the whole state for
    fetches where no number says it. Fetch -1 is the making of the iterator.
    """

    runs: tuple[tuple[int, int, int], ...] = ()
    states: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Epoch:
    """How one epoch was read: the batches fetched, and the moves of each random stream."""

    batches: int
    moves: Mapping[str, Moves]


@dataclass(frozen=True, slots=True)
class Trail:
    """All that a source was ever read: enough to have it go through everything again.

    ``start`` are the streams' states when the first iterator was made. The last of
    ``epochs`` is the current one where the position is within an epoch.
    """

    start: Mapping[str, Any] = field(default_factory=dict)
    epochs: tuple[Epoch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where in the data a trial is, and what leads there again.

    Attributes:
        way: Which of the fields below lead there.
        epoch: Epochs read to their end.
        batch: Batches of this epoch that were fetched.
        begun: Whether this epoch's iterator was made; making one may draw random numbers.
        start: The random streams just before it was made.
        order: The states then of the generators that the order of batches comes from.
        generators: The states now of all generators that the source was found to own.
        state: The source's own ``state_dict()``.
        trail: How everything was read, for a source that may keep anything.
    """

    way: Way
    epoch: int = 0
    batch: int = 0
    begun: bool = False
    start: RngState | None = None
    order: Mapping[str, Tensor] = field(default_factory=dict)
    generators: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None
    trail: Trail | None = None

    @property
    def is_start(self) -> bool:
        """Whether nothing was read yet."""
        return (self.epoch, self.batch, self.begun) == (0, 0, False)

    @property
    def needs_new_source(self) -> bool:
        """Whether only a source as it was built can be led here."""
        return self.way == "replay" or (self.way == "state" and self.state is None)

    def pack(self) -> dict[str, Any]:
        """As containers, numbers, tensors and ``RngState``s only, for a checkpoint."""
        record = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return record | {"trail": None if self.trail is None else _pack_trail(self.trail)}

    @classmethod
    def unpack(cls, record: Mapping[str, Any]) -> Position:
        """The position that ``pack`` made ``record`` of."""
        trail = record["trail"]
        return cls(**{**record, "trail": None if trail is None else _unpack_trail(trail)})


def _pack_trail(trail: Trail) -> dict[str, Any]:
    epochs = [
        {"batches": e.batches, "moves": {n: (m.runs, m.states) for n, m in e.moves.items()}}
        for e in trail.epochs
    ]
    return {"start": trail.start, "epochs": epochs}


def _unpack_trail(record: Mapping[str, Any]) -> Trail:
    epochs = tuple(
        Epoch(e["batches"], {name: Moves(*moves) for name, moves in e["moves"].items()})
        for e in record["epochs"]
    )
    return Trail(record["start"], epochs)
