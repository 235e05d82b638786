"""The trials of a device that are not alone on a seat: arrays, and members of gangs."""

from __future__ import annotations

from shoal.core.seams import Candidate
from shoal.core.units import Bytes
from shoal.runtime.arrays.desk import ArrayDesk
from shoal.runtime.gangs.desk import GangDesk
from shoal.runtime.seats.house import House
from shoal.runtime.session import Session


class Desks:
    """Both kinds, as the device's loop sees them."""

    def __init__(self, house: House) -> None:
        self.arrays, self.gangs = ArrayDesk(house), GangDesk(house)

    def __len__(self) -> int:
        return len(self.arrays) + len(self.gangs)

    @property
    def unit_bytes(self) -> list[Bytes]:
        """What a step or a unit of each needs on top of what it holds."""
        return self.arrays.unit_bytes + self.gangs.unit_bytes

    @property
    def trials(self) -> list[int]:
        """The trials that are here."""
        return [*self.arrays.trials, *self.gangs.trials]

    def session(self, trial: int) -> Session | None:
        """The session of a trial that is here, for the study's orders."""
        return self.arrays.session(trial) or self.gangs.session(trial)

    def dismiss(self, trial: int) -> bool:
        """Take a trial out at once; False if it is not here."""
        return self.arrays.dismiss(trial) or self.gangs.dismiss(trial)

    def see_out(self) -> None:
        """Hand over the trials whose leases are over."""
        self.arrays.see_out()
        self.gangs.see_out()

    @property
    def candidates(self) -> list[int]:
        """What could compute now: arrays, each by one of its trials, and members."""
        return [*self.arrays.candidates, *self.gangs.candidates]

    def candidate(self, number: int, ticket: int) -> Candidate:
        """One of them as a trial."""
        if (array := self.arrays.candidates.get(number)) is not None:
            return self.arrays.candidate(array, ticket)
        return self.gangs.candidate(number, ticket)
