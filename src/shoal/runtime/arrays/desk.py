"""The arrays of one device: whose trials come, step together, are saved, and leave.

What ``loop`` does for trials that are alone on their seats, for those that share one.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable

from shoal.core.plan import ArrayPlace
from shoal.core.seams import Candidate
from shoal.core.units import Bytes
from shoal.fusion import backend_of
from shoal.fusion.crew import ArrayBackend
from shoal.fusion.graphs.traced import TracedBackend
from shoal.runtime.arrays.seat import ArraySeat, Seated
from shoal.runtime.saving import checkpoint
from shoal.runtime.seats.house import House
from shoal.runtime.session import Session
from shoal.runtime.task import Issued
from shoal.runtime.wire.messages import Grant, LeaseOver

MOST = 4
"""Arrays that ended whose graphs are kept for the next ones of their kind."""


class ArrayDesk:
    """Seats trials in arrays and sees them out; used by the device's thread."""

    def __init__(self, house: House) -> None:
        self._device, self._ledger = house.device, house.ledger
        self._reports, self._saver = house.reports, house.saver
        self._record, self._tell_failure = house.record, house.fail
        self._room, self._went, self._handed_over = house.room, house.went, house.handed_over
        self._alive = house.waits
        self._arrays: dict[str, ArraySeat] = {}
        self._captures = house.captures
        self._rested: dict[str, TracedBackend] = {}  # of arrays that ended, by group
        self._stepping: int | None = None  # a trial of the array whose step runs

    def __len__(self) -> int:
        return len(self._arrays)

    def has(self, group: str) -> bool:
        """Whether an array of this group is here."""
        return group in self._arrays

    @property
    def unit_bytes(self) -> list[Bytes]:
        """What a step of each array needs on top of what it holds."""
        return [array.unit_bytes for array in self._arrays.values()]

    @property
    def trials(self) -> dict[int, ArraySeat]:
        """The trials that are here, and in which array."""
        return {trial: array for array in self._arrays.values() for trial in array.seated}

    def session(self, trial: int) -> Session | None:
        """The session of a trial that is here."""
        array = self.trials.get(trial)
        return array.seated[trial].session if array else None

    @property
    def candidates(self) -> dict[int, ArraySeat]:
        """The arrays that could step now, each by one of its trials."""
        return {array.number: array for array in self._arrays.values() if array.active}

    def candidate(self, array: ArraySeat, ticket: int) -> Candidate:
        """An array as one trial that takes its longest one's time."""
        left = max(seated.session.steps_left for seated in array.active)
        step_s = array.seated[array.number].session.job.step_s * len(array.active)
        return Candidate(
            trial=array.number, ticket=ticket, remaining_s=left * step_s, warm=False, step_s=step_s
        )

    # -- coming ---------------------------------------------------------------------------

    def admit(self, grant: Grant, session: Session) -> None:
        """A trial takes its slot; the first one of its group makes the array.

        Raises:
            CapacityError: the device has no room for the array.
            Declined: it is of another shape than those that are there.
        """
        place, trial = grant.job.array, grant.job.trial
        assert place is not None
        array = self._arrays.get(place.group) or self._open(grant)
        self._saver.expect(trial, grant.save_in_s)
        try:
            seated = array.admit(session)
        except BaseException:
            session.close()
            raise
        finally:
            self._close_if_empty(array)
        session.until = grant.until
        session.on_step = lambda loss: self._report_step(array, seated, loss)
        session.on_evaluated = lambda found: self._reports.evaluation(session, found, self._saver)
        session.on_boundary = lambda: self._boundary(array, seated)
        self._reports.hear(session)

    def _open(self, grant: Grant) -> ArraySeat:
        assert grant.job.array is not None
        array = ArraySeat(
            grant.job,
            self._backend(grant.job.array),
            self._device,
            self._ledger,
            guard=self._guard,
            fail=self._fail,
            record=self._issue,
            room=self._room,
        )
        self._arrays[array.place.group] = array
        try:
            self._room()
        except BaseException:
            self._close_if_empty(array)
            raise
        return array

    def _backend(self, place: ArrayPlace) -> ArrayBackend:
        """What runs an array's passes; of one that was here before, with the graphs it made."""
        known = self._rested.pop(place.group, None)
        launcher = self._captures.launcher() if place.captures else None
        return known or backend_of(place.kind, place.constants, launcher)

    def _rest(self, array: ArraySeat) -> None:
        """Keep the graphs of an array that ends. On a GPU they hold its memory, and go."""
        backend = array.backend
        if isinstance(backend, TracedBackend) and self._device.torch_device.type == "cpu":
            backend.rest()
            self._rested[array.place.group] = backend
            while len(self._rested) > MOST:
                del self._rested[next(iter(self._rested))]

    def _issue(self, issued: Issued) -> None:
        """Something of an array is under way: its steps may be long, and are no hang."""
        self._reports.issue(issued)
        self._alive()

    def _close_if_empty(self, array: ArraySeat) -> None:
        group = array.place.group
        if not array.seated and self._arrays.get(group) is array:
            del self._arrays[group]
            array.close()
            self._rest(array)
            self._went()

    # -- stepping -------------------------------------------------------------------------

    def step(self, array: ArraySeat) -> None:
        """A round of its trials. Where all of them failed nobody comes into what is left of it."""
        self._stepping = array.number
        self._record(self._stepping)
        try:
            array.round()
        except (Exception, SystemExit) as error:  # of none of them: the array's own
            active = array.active
            told = array.blame.told(error, [seated.slot for seated in active])
            for seated in active:
                self._fail(seated.trial, told[seated.slot])
        finally:
            self._stepping = None
            self._record(None)
        self._close_if_empty(array)

    def _guard(self, trial: int, work: Callable[[], None]) -> None:
        """Run a trial's own code; what it raises ends that trial and no other."""
        try:
            self._record(trial)
            work()
        except (Exception, SystemExit) as error:
            self._fail(trial, error)
        finally:
            self._record(self._stepping)

    def _fail(self, trial: int, error: BaseException) -> None:
        session = self.session(trial)
        if session is None:
            return
        self.dismiss(trial)
        self._saver.forget(trial)
        session.close()
        self._tell_failure(trial, session.told(error))

    def dismiss(self, trial: int) -> bool:
        """Take a trial out at once; False if it is not here."""
        array = self.trials.get(trial)
        if array is not None:
            array.dismiss(trial)
        return array is not None

    # -- leaving --------------------------------------------------------------------------

    def see_out(self) -> None:
        """Hand over the trials whose leases are over."""
        for array in list(self._arrays.values()):
            for seated in array.leaving:
                self._guard(seated.trial, functools.partial(self._hand_over, array, seated))
            self._close_if_empty(array)

    def _hand_over(self, array: ArraySeat, seated: Seated) -> None:
        session, trial = seated.session, seated.trial
        if self._saver.is_writing(trial):  # the region is what it is writing
            return
        if seated.over is None:
            array.bring_out(seated)
            self._reports.flush(of=trial)
            seated.over = LeaseOver(trial, session.progress(), session.ended)
            if session.ended:
                self._reports.send_events()
                self._saver.save(functools.partial(checkpoint.content, session, copy=False))
                return
        over = seated.over
        if session.ended:
            over = self._saver.with_generation(over)
        pickle.dumps(over)  # a schedule that cannot travel fails its trial here, alone
        self.dismiss(trial)
        self._handed_over(session, over)

    # -- what is told and saved -------------------------------------------------------------

    def _report_step(self, array: ArraySeat, seated: Seated, loss: float) -> None:
        self._reports.step(seated.session, loss, array.share_s)
        if array.peak_bytes:
            self._reports.array_peak(array)
            array.peak_bytes = 0
        array.count_after(seated.session.step)
        self._reports.flush()

    def _boundary(self, array: ArraySeat, seated: Seated) -> None:
        """Between two steps: save the trial when it is time."""
        if self._saver.is_due(seated.trial):
            self._reports.send_events()  # whoever finds the generation has heard of its step
            self._saver.save(functools.partial(self._take, array, seated))

    def _take(self, array: ArraySeat, seated: Seated) -> checkpoint.Content:
        self._saver.wait(seated.trial)
        self._reports.flush()
        return array.take(seated)
