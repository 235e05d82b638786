"""What the study's process knows of one trial: steps, measured seconds, its lease."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEAN_OVER = 100  # steps that the running mean of a step's seconds remembers
_TAPER = 10  # a lease is at most this part of the steps left, so that trials end together
LEAST_LEASE_S = 0.5  # but not shorter than this: many times a round trip to a worker


@dataclass(slots=True, eq=False)
class TrialStanding:
    """One trial as the lease machine sees it; a ``Standing`` to the policies.

    ``remaining_s`` and ``quantum_s`` follow from the rest and are refreshed by
    ``estimate``, because they are read far more often than they change.
    """

    trial: int
    steps_left: int | None
    step_s: float
    switch_s: float
    arrival: int
    lease_s: float
    least_s: float = LEAST_LEASE_S
    lane: tuple[str, int] | None = None  # its array and its slot there
    gang: int = 1  # devices that it needs at a time
    measured: int = 1  # the prediction counts as one measurement
    devices: tuple[str, ...] = ()  # where it has its lease, the leader first; none while it waits
    homes: tuple[str | None, ...] = ()  # where it ran last, stage by stage; None for a lost one
    lease_left: int = 0
    leased_from: int | None = None  # steps_left when the lease was granted
    passed_over: int = 0  # leases of trials added later, while this one waited for its devices
    leaving: bool = False  # will not be extended, as things are
    remaining_s: float = 0.0
    quantum_s: float = 0.0

    def __post_init__(self) -> None:
        self.estimate()

    @property
    def device(self) -> str | None:
        """Its device; of a gang the leader's, which reports for all. None while it waits."""
        return self.devices[0] if self.devices else None

    @property
    def lease_steps(self) -> int:
        """Steps of a full lease; at least two, to decide about the second during the first."""
        steps = round(self.lease_s / self.step_s)
        if self.steps_left is not None:
            least = math.ceil(min(self.lease_s, self.least_s) / self.step_s)
            steps = min(steps, max(least, -(-self.steps_left // _TAPER)))
        return max(2, steps)

    @property
    def doubt(self) -> float:
        """1.0 for a prediction, which may be wrong by a factor of two; less with each step."""
        return 1 / self.measured

    @property
    def is_promised(self) -> bool:
        """Will this trial leave its device when the lease it has now ends?"""
        return self.leaving or self.lease_left == self.steps_left

    def is_at_home(self, devices: set[str]) -> bool:
        """Whether all that it ran on last are among these."""
        return bool(self.homes) and devices.issuperset(self.homes)

    def shares_array(self, other: TrialStanding) -> bool:
        """Whether both have their slots in one array, wherever it is."""
        return None not in (self.lane, other.lane) and self.lane[0] == other.lane[0]  # type: ignore[index]

    def estimate(self) -> None:
        """Refresh the derived seconds. Of unknown length: at least one more lease."""
        lease_s = self.lease_steps * self.step_s
        left_s = lease_s if self.steps_left is None else self.steps_left * self.step_s
        self.remaining_s = left_s
        self.quantum_s = min(lease_s, left_s) + self.switch_s

    def measure(self, seconds: float) -> None:
        """One more finished step: a mean that forgets slowly."""
        self.measured = min(self.measured + 1, _MEAN_OVER)
        self.step_s += (seconds - self.step_s) / self.measured
        if self.steps_left is not None:
            self.steps_left -= 1
        self.lease_left -= 1
        self.estimate()

    def learn(self, steps_left: int | None) -> None:
        """The length became known, perhaps in the middle of a lease that is too long."""
        if self.steps_left is None and steps_left is not None:
            self.steps_left = steps_left
            self.lease_left = min(self.lease_left, steps_left)
            self.estimate()

    def next_steps(self) -> int:
        """How many steps make the lease a full one again."""
        full = self.lease_steps
        if self.steps_left is not None:
            full = min(full, self.steps_left)
        return full - self.lease_left

    def lease(self, devices: tuple[str, ...]) -> int:
        """The trial goes to its devices; returns the steps of its first lease there."""
        self.devices = self.homes = devices
        self.leased_from = self.steps_left
        self.lease_left = self.next_steps()
        return self.lease_left

    def release(self, steps_left: int | None) -> None:
        """The trial is on no device, with its state stored."""
        self.devices, self.lease_left, self.leaving = (), 0, False
        self.steps_left = steps_left
        self.estimate()

    def forget(self, device: str) -> None:
        """A device was lost, and what the trial had there: it is nobody's home any more."""
        self.homes = tuple(None if home == device else home for home in self.homes)
