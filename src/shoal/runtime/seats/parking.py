"""Trials whose lease is over and that may come back to this device."""

from __future__ import annotations

import gc

from shoal.memory.store import Regions
from shoal.runtime.reports import Reports
from shoal.runtime.saving import checkpoint
from shoal.runtime.saving.saver import Saver
from shoal.runtime.session import Session
from shoal.runtime.wire.messages import Saved


class Parking:
    """Their sessions, as they stand, and the host regions of all that were here.

    Both are kept until the study says that the trial goes on elsewhere, or nowhere, or until it
    was refused: what becomes of it then, the study decides.

    Attributes:
        regions: Of the trials that are here and of those that are parked; see ``Regions``.
        has_refused: Whether errors of trials may still hold memory: see ``let_go``.
    """

    def __init__(self, saver: Saver, reports: Reports, *, pin: bool) -> None:
        self.regions = Regions(pin=pin)
        self._saver, self._reports = saver, reports
        self._sessions: dict[int, Session] = {}
        self.has_refused = False

    def put(self, session: Session) -> None:
        """It left its device; all of it is in its region."""
        self._sessions[session.job.trial] = session

    def take(self, trial: int) -> Session | None:
        """The trial's session, which is parked no more."""
        return self._sessions.pop(trial, None)

    def save(self, trial: int) -> None:
        """Write a generation of a trial that is parked here, and say so; its region is current."""
        session = self._sessions.get(trial)
        if session is None:
            self._reports.reply(Saved(trial, 0, f"trial {trial} is not parked on this device"))
            return
        outcome = self._saver.wait(trial)
        if outcome is None or outcome.trouble or outcome.step != session.step:
            try:
                self._saver.save(lambda: checkpoint.content(session, copy=False))
            except Exception as error:  # what the model added to its state
                self.refuse(trial, error)
                return
            outcome = self._saver.wait(trial)
        assert outcome is not None
        self._reports.reply(Saved(trial, outcome.step, outcome.trouble))

    def refuse(self, trial: int, error: BaseException) -> None:
        """An order about a trial could not be done, or its own code raised."""
        self.forget(trial)
        self._reports.refuse(trial, error)
        self.has_refused = True

    def let_go(self) -> bool:
        """Free what errors of trials held, once they are gone; whether there was any.

        Frames of a pass that refer to each other keep its tensors until somebody looks.
        """
        has_refused, self.has_refused = self.has_refused, False
        if has_refused:
            gc.collect()
        return has_refused

    def forget(self, trial: int) -> None:
        """The trial goes on elsewhere, or nowhere; it is not on the device any more."""
        session = self.take(trial)
        if session is not None:
            session.close()
        self.regions.forget(trial)

    def close(self) -> None:
        """Nobody comes back: the process may go on with other studies."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        self.regions.close()
