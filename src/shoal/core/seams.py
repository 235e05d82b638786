"""The Protocols to implement when one part of shoal is replaced.

A seam is small: the records it is asked about are here too, so that an
implementation imports nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Clock(Protocol):
    """Time, passed in, so that a test can turn it by hand."""

    def now(self) -> float:
        """Seconds from any fixed start; never goes back."""
        ...

    def sleep(self, seconds: float) -> None: ...


class Standing(Protocol):
    """What a lease policy may know of a trial. Read only, and only during the call."""

    @property
    def trial(self) -> int: ...

    @property
    def remaining_s(self) -> float:
        """Seconds of device work that are left, from measured steps once there are some."""
        ...

    @property
    def doubt(self) -> float:
        """Relative error that ``remaining_s`` may well have: falls with every measured step."""
        ...

    @property
    def quantum_s(self) -> float:
        """Seconds of one lease of this trial and of moving it: the grain of any decision."""
        ...

    @property
    def arrival(self) -> int:
        """0 for the trial that was added first, and so on."""
        ...


class LeasePolicy(Protocol):
    """Which waiting trial runs next, and which may take a running one's place.

    Pure, but for a random generator it was given.
    """

    def rank(self, waiting: Standing) -> float:
        """The waiting trial with the largest rank is granted the next lease."""
        ...

    def is_close(self, first: Standing, other: Standing) -> bool:
        """May ``other`` go before ``first``, because its state is on the free device?"""
        ...

    def preempts(self, waiting: Standing, running: Standing, reach_s: float) -> bool:
        """Should ``running`` leave at the end of its lease, so that ``waiting`` can run?

        ``reach_s`` is the work a trial gets done until the study's end if it runs
        from now on without a break; who has more left than that makes the study late.
        """
        ...


class Candidate(NamedTuple):
    """A trial whose next unit, or next chunk of a step on the host, could start now.

    ``ticket`` is the age of its step (smaller is older); one is drawn when a step begins.
    ``remaining_s`` is what the trial still has to compute and to step, ``step_s`` what one of its
    steps takes of that. ``warm``: what the unit reads is on the device already.
    """

    trial: int
    ticket: int
    remaining_s: float
    warm: bool
    step_s: float = 0.0


class UnitPolicy(Protocol):
    """Which of the trials of a device advances: by a unit there, by a chunk on the host. Pure."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """One of ``candidates``, which are never empty."""
        ...
