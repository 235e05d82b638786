"""The trials of a device that are not alone on a seat: arrays, and stages of pipelines."""

from __future__ import annotations

from shoal.core.seams import Candidate
from shoal.core.units import Bytes
from shoal.runtime.arrays.desk import ArrayDesk
from shoal.runtime.gangs.desk import StageDesk
from shoal.runtime.house import House
from shoal.runtime.session import Session


class Desks:
    """Both kinds, as the device's loop sees them."""

    def __init__(self, house: House) -> None:
        self.arrays, self.stages = ArrayDesk(house), StageDesk(house)

    def __len__(self) -> int:
        return len(self.arrays) + len(self.stages)

    @property
    def unit_bytes(self) -> list[Bytes]:
        """What a step or a unit of each needs on top of what it holds."""
        return self.arrays.unit_bytes + self.stages.unit_bytes

    @property
    def trials(self) -> list[int]:
        """The trials that are here."""
        return [*self.arrays.trials, *self.stages.trials]

    def session(self, trial: int) -> Session | None:
        """The session of a trial that is here, for the study's orders."""
        return self.arrays.session(trial) or self.stages.session(trial)

    def dismiss(self, trial: int) -> bool:
        """Take a trial out at once; False if it is not here."""
        return self.arrays.dismiss(trial) or self.stages.dismiss(trial)

    def see_out(self) -> None:
        """Hand over the trials whose leases are over."""
        self.arrays.see_out()
        self.stages.see_out()

    @property
    def candidates(self) -> list[int]:
        """What could compute now: arrays, each by one of its trials, and stages."""
        return [*self.arrays.candidates, *self.stages.candidates]

    def candidate(self, number: int, ticket: int) -> Candidate:
        """One of them as a trial."""
        if (array := self.arrays.candidates.get(number)) is not None:
            return self.arrays.candidate(array, ticket)
        return self.stages.candidate(number, ticket)
