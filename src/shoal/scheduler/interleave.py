"""Device level: which of the trials leased to a device advances next. Pure.

The worker asks with the trials whose next unit is feasible now. It asks at every
unit, so a device is idle only while no unit is feasible. The unit of fairness is
the step: every step draws a ticket when it starts, and a policy compares tickets.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.errors import TransitionError
from shoal.core.seams import Candidate
from shoal.core.turns import DEFAULT, rule_of
from shoal.core.units import counted

__all__ = ["Candidate", "Interleaver"]


class Interleaver:
    """Tickets of the steps in progress on one device, and the choice among them.

    For each step the worker calls ``started`` before its first unit and
    ``step_finished`` after its last; ``forget`` when a trial leaves in mid-step.
    """

    def __init__(self) -> None:
        self._policy = rule_of(DEFAULT)
        self._next_ticket = 0
        self._running: dict[int, tuple[int, int]] = {}  # trial -> (ticket, step)

    def follow(self, rule: str) -> None:
        """Choose by the rule of that name from now on; steps in progress keep their tickets."""
        self._policy = rule_of(rule)

    def choose(self, candidates: Sequence[Candidate]) -> int:
        """The number of the trial that advances by one unit.

        Raises:
            TransitionError: there are no candidates; the worker must wait for an event.
        """
        return self.first(candidates).trial

    def first(self, candidates: Sequence[Candidate]) -> Candidate:
        """That one, as it was given; any thread may ask.

        Raises:
            TransitionError: there are no candidates.
        """
        if not candidates:
            raise TransitionError(
                "asked which trial advances, with no candidates; in progress are steps of "
                f"{counted(len(self._running), 'trial')}. Wait until a unit is feasible."
            )
        return self._policy.choose(candidates)

    def ticket(self, trial: int) -> int:
        """The age of the trial's step: smaller is older.

        Trials between two steps share the ticket that the next step to start will get.
        """
        running = self._running.get(trial)
        return running[0] if running else self._next_ticket

    def started(self, trial: int, step: int) -> int:
        """The first unit of a step was chosen: returns the step's ticket.

        Raises:
            TransitionError: another step of this trial is in progress.
        """
        if trial in self._running:
            ticket, other = self._running[trial]
            raise TransitionError(
                f"trial {trial} started step {step} while its step {other} (ticket {ticket}) is "
                "in progress. Report step_finished first."
            )
        ticket = self._next_ticket
        self._next_ticket += 1
        self._running[trial] = (ticket, step)
        return ticket

    def step_finished(self, trial: int) -> None:
        """The last unit of the trial's step ended.

        Raises:
            TransitionError: no step of this trial is in progress.
        """
        if trial not in self._running:
            running = ", ".join(map(str, self._running)) or "none"
            raise TransitionError(
                f"trial {trial} finished a step that was never started; trials with a step in "
                f"progress: {running}."
            )
        del self._running[trial]

    def forget(self, trial: int) -> None:
        """The trial left the device; a step in progress is given up."""
        self._running.pop(trial, None)
