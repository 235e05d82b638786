"""A trial's way onto a device: it arrives, waits in the lobby for room, and stays on a seat."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shoal.core.technique import Technique, kept_heads, kept_shards, kept_weights
from shoal.memory.store import Region, Regions
from shoal.runtime.beside import counted
from shoal.runtime.interpret import Seat
from shoal.runtime.session import Session
from shoal.runtime.task import Task
from shoal.runtime.wire.messages import Grant, LeaseOver


@dataclass(frozen=True, slots=True)
class Arrival:
    """A grant that waits for room on the device, with the trial's region and its links."""

    grant: Grant
    region: Region
    links: tuple[socket.socket, ...] = ()

    @classmethod
    def of(
        cls, grant: Grant, descriptor: int, sockets: Sequence[int], regions: Regions
    ) -> Arrival:
        """A grant with the descriptors that came with it, which are taken over."""
        links = tuple(socket.socket(fileno=number) for number in sockets)
        try:
            region = regions.open(grant.job.trial, descriptor, grant.layout.num_bytes)
        except BaseException:
            for link in links:
                link.close()
            raise
        finally:
            os.close(descriptor)  # the mapping stays
        return cls(grant, region, links)

    def until(self, step: int | None) -> Arrival:
        """The same, to another step."""
        return replace(self, grant=replace(self.grant, until=step))

    def give_up(self) -> None:
        """It will not be taken up."""
        self.region.rest()
        for link in self.links:
            link.close()


class Lobby:
    """Who waits for room on the device, first come first.

    A gang overtakes no gang. Grants come in one order everywhere, so the first of those that
    are not complete waits only for such as are, and these leave when their lease is over. With
    overtaking two gangs could each have a device that the other one waits for.
    """

    def __init__(self) -> None:
        self._waiting: list[Arrival] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, arrival: Arrival) -> None:
        """One more."""
        self._waiting.append(arrival)

    def next(self, fits: Callable[[Arrival], bool]) -> Arrival | None:
        """The first that fits, which waits no more."""
        behind_gang = False
        for entry in self._waiting:
            is_gang = entry.grant.job.gang > 1
            if not (is_gang and behind_gang) and fits(entry):
                self._waiting.remove(entry)
                return entry
            behind_gang |= is_gang
        return None

    def extend(self, trial: int, until: int | None) -> None:
        """Its lease is to go on to another step."""
        self._waiting = [
            entry.until(until) if entry.grant.job.trial == trial else entry
            for entry in self._waiting
        ]

    def withdraw(self, trial: int) -> bool:
        """Let one go that has not begun; False if it does not wait."""
        leaving = [entry for entry in self._waiting if entry.grant.job.trial == trial]
        self._waiting = [entry for entry in self._waiting if entry not in leaving]
        for entry in leaving:
            entry.give_up()
        return bool(leaving)


@dataclass(slots=True)
class Stay:
    """A seat and how far its current lease is."""

    seat: Seat[Session]
    tasks: Iterator[Task]
    task: Task | None = None
    has_computed: bool = False  # since it came
    leaving: bool = False  # its tasks are through
    departing: bool = False  # what stayed on the device is on its way to the host
    over: LeaseOver | None = None  # everything is there; what to say of it
    step_began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.seat.session.counted = self._counted

    def _counted(self, work: Callable[[], None], what: str) -> None:
        """As units are: in chosen steps."""
        if self.seat.track:
            counted(self.seat, work, what)
        else:
            work()


def here(technique: Technique) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shards that stay on the device between steps, whose parameters alone do, or some tensors."""
    return kept_shards(technique), kept_weights(technique), kept_heads(technique)
