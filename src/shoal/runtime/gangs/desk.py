"""The members of gangs on one device, stages and replicas: who comes with its sockets, computes
when its messages are there, and leaves when its part is in the region.

What ``loop`` does for trials that are alone on their seats, for those that have several devices.
"""

from __future__ import annotations

import functools
import pickle
import socket
import time
from collections.abc import Sequence

from shoal.core.errors import CapacityError, ShoalError
from shoal.core.plan import Job
from shoal.core.seams import Candidate
from shoal.core.technique import DataParallel, Pipelined
from shoal.core.units import Bytes
from shoal.frames import own_traceback
from shoal.memory.store import Region
from shoal.pipeline.links import Links
from shoal.pipeline.packing import Packer
from shoal.pipeline.wide import called
from shoal.runtime.gangs.leader import GangSession
from shoal.runtime.gangs.seat import GangSeat, Hands, MemberError
from shoal.runtime.gangs.spilledstages import SpilledStageSeat
from shoal.runtime.gangs.stages import StageSeat
from shoal.runtime.saving import checkpoint
from shoal.runtime.seats.house import House
from shoal.runtime.session import Session
from shoal.runtime.wire.messages import Grant, LeaseOver, Progress, Refused


class GangDesk:
    """Seats members and sees them out; used by the device's thread."""

    def __init__(self, house: House) -> None:
        self._recipe, self._device, self._ledger = house.recipe, house.device, house.ledger
        self._reports, self._saver, self._settings = house.reports, house.saver, house.settings
        self._record, self._tell_failure = house.record, house.fail
        self._room, self._went, self._handed_over = house.room, house.went, house.handed_over
        self._waits = house.waits
        self._seats: dict[int, GangSeat] = {}
        self._over: dict[int, LeaseOver] = {}  # of those that left, until they are written
        self._step_began: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def unit_bytes(self) -> list[Bytes]:
        """What a unit of each member needs on top of what it holds."""
        return [seat.unit_bytes for seat in self._seats.values()]

    @property
    def trials(self) -> list[int]:
        """The trials that have a member here."""
        return list(self._seats)

    def session(self, trial: int) -> Session | None:
        """The session of a trial that has its leader here: the one that orders are for."""
        seat = self._seats.get(trial)
        return seat.session if seat is not None and seat.stage == 0 else None

    @property
    def waits_for_others(self) -> bool:
        """Whether a member could go on if one elsewhere did: no hang of this device."""
        return any(not seat.ready() and not seat.waits_here for seat in self._seats.values())

    @property
    def candidates(self) -> list[int]:
        """The trials whose members could go on now."""
        return [trial for trial, seat in self._seats.items() if seat.ready()]

    def candidate(self, trial: int, ticket: int) -> Candidate:
        """A member as one trial among those that share the device."""
        session = self._seats[trial].session
        step_s = session.job.step_s
        left_s = session.steps_left * step_s
        return Candidate(trial=trial, ticket=ticket, remaining_s=left_s, warm=False, step_s=step_s)

    # -- coming ---------------------------------------------------------------------------

    def admit(
        self,
        grant: Grant,
        region: Region,
        sockets: Sequence[socket.socket],
        parked: Session | None,
    ) -> None:
        """A member takes its place; ``sockets`` are to the others, in their order.

        Raises:
            CapacityError: the device has no room for it.
        """
        trial, stage, where = grant.job.trial, grant.stage, self._device.torch_device
        peers = [peer for peer in range(grant.job.gang) if peer != stage]
        self.dismiss(trial)
        if stage == 0:
            session = checkpoint.take_up(
                self._recipe, grant, region, self._settings, where, parked
            )
        else:
            session = parked or self._new_session(grant)
        assert isinstance(session, GangSession)
        links = Links(
            dict(zip(peers, sockets, strict=True)),
            Packer(dict(session.model.named_parameters())),
            self._device.notify,
            where,
            functools.partial(_called, grant.job),
        )
        try:
            seat = self._made(grant, session, region, links)
        except CapacityError:
            links.cut()  # it has threads by now
            raise
        self._seats[trial] = seat
        session.until = grant.until
        if stage == 0:
            self._lead(grant, seat, session)
        try:
            self._room()
        except CapacityError:
            self.dismiss(trial)
            raise

    def _made(self, grant: Grant, session: GangSession, region: Region, links: Links) -> GangSeat:
        hands = Hands(
            place=functools.partial(self._join, grant, region),
            record=self._reports.issue,
            room=self._room,
            on_peak=lambda peak: self._report_peak(peak, grant.job),
            waits=self._waits,
        )
        technique = grant.job.technique
        kind: type[GangSeat] = StageSeat
        if isinstance(technique, DataParallel):
            from shoal.runtime.gangs.replicaseat import ReplicaSeat  # torch's FSDP takes a second

            kind = ReplicaSeat
        elif isinstance(technique, Pipelined) and technique.is_spilled:
            kind = SpilledStageSeat
        return kind(session, grant.stage, self._device, self._ledger, region, links, hands)

    def _lead(self, grant: Grant, seat: GangSeat, session: GangSession) -> None:
        """Of the leader: it tells of steps, and saves."""
        trial = grant.job.trial
        self._saver.expect(trial, grant.save_in_s)
        self._step_began[trial] = time.perf_counter()
        session.on_step = lambda loss: self._report_step(session, loss)
        session.on_evaluated = lambda found: self._reports.evaluation(session, found, self._saver)
        self._reports.hear(session)
        session.save_is_due = lambda: self._saver.is_due(trial, copies=True)
        seat.save = lambda: self._save(session)

    def _new_session(self, grant: Grant) -> Session:
        where = self._device.torch_device
        return checkpoint.new_session(self._recipe, grant.job, self._settings, where)

    def _join(
        self, grant: Grant, region: Region, session: GangSession, progress: Progress
    ) -> GangSession:
        """Another member's session in the trial's region, built anew if it is of another step."""
        if session.step != progress.step and session.step:
            session.close()
            built = self._new_session(grant)
            assert isinstance(built, GangSession)
            session = built
        session.place(grant.layout, region, fresh=False)
        session.resume(progress, reads=False)
        return session

    # -- computing ------------------------------------------------------------------------

    def step(self, trial: int) -> None:
        """A unit of a trial's member, or more of what waits for nobody."""
        seat = self._seats[trial]
        self._record(trial)
        try:
            seat.advance()
            if seat.left:
                self._see_out(trial, seat)
        except (Exception, SystemExit) as error:
            self._fail(trial, error)
        finally:
            self._record(None)

    def _fail(self, trial: int, error: BaseException) -> None:
        """Dismiss it. The leader tells the study, also of what another member failed with."""
        seat = self._seats[trial]
        error = seat.session.told(error)
        if seat.stage:
            cause = error if isinstance(error, ShoalError) else None
            seat.tell_failure(own_traceback(error), cause)
        self.dismiss(trial)
        self._saver.forget(trial)
        seat.session.close()
        if isinstance(error, MemberError):
            self._reports.reply(Refused(trial, error.failed.error, error.failed.cause))
        elif not seat.stage:
            self._tell_failure(trial, error)

    def dismiss(self, trial: int) -> bool:
        """Take a member off the device at once; False if it is not here."""
        is_here = self._leave(trial)
        if is_here:
            self._went()
        return is_here

    def _leave(self, trial: int) -> bool:
        """Take it off the device, and let nobody in yet: its session may have buffers there."""
        seat = self._seats.pop(trial, None)
        self._over.pop(trial, None)
        if seat is None:
            return False
        seat.session.leave()
        seat.close()
        return True

    # -- leaving --------------------------------------------------------------------------

    def see_out(self) -> None:
        """Hand over the trials whose last generation is written by now."""
        for trial in list(self._over):
            self._hand_over(trial, self._seats[trial])

    def _see_out(self, trial: int, seat: GangSeat) -> None:
        """Its part is in the region, and if it is the leader all others' are too."""
        session = seat.session
        self._reports.emulation()
        if seat.stage:
            self._leave(trial)
            if session.has_ended:
                session.park()
                session.close()
            else:
                self._handed_over(session, None)
            self._went()
            return
        self._reports.flush(of=trial)
        self._over[trial] = LeaseOver(trial, session.progress(), session.ended)
        if session.ended:
            self._reports.send_events()
            self._saver.save(functools.partial(checkpoint.content, session, copy=False))
        self._hand_over(trial, seat)

    def _hand_over(self, trial: int, seat: GangSeat) -> None:
        """Tell the study, unless the region is what is being written."""
        session = seat.session
        if self._saver.is_writing(trial):
            return
        over = self._over[trial]
        if session.ended:
            over = self._saver.with_generation(over)
        try:
            pickle.dumps(over)  # a schedule that cannot travel fails its trial here, alone
        except Exception as error:
            self._fail(trial, error)
            return
        self._leave(trial)
        self._handed_over(session, over)
        self._went()

    # -- what is told and saved -------------------------------------------------------------

    def _report_peak(self, peak: int, job: Job) -> None:
        """Steps were counted: what they took of an emulated device's time counts for nothing."""
        self._reports.member_peak(peak, job)
        self._reports.warmed_up()

    def _report_step(self, session: GangSession, loss: float) -> None:
        trial, now = session.job.trial, time.perf_counter()
        seconds, self._step_began[trial] = now - self._step_began[trial], now
        self._reports.step(session, loss, seconds)
        self._reports.flush()

    def _save(self, session: GangSession) -> None:
        """Between two steps; all shards are in the region, and stay as they are until copied."""
        self._saver.wait(session.job.trial)
        self._reports.send_events()  # whoever finds the generation has heard of its step
        session.put_away()  # where nobody was waited for
        copies = not session.job.disk_bytes  # of what memory is too small for there are none
        take = functools.partial(checkpoint.content, session, copy=copies)
        self._saver.save(take, copies=copies, waits=not copies)


def _called(job: Job, peer: int) -> str:
    """What errors call another member of a trial's gang."""
    if isinstance(job.technique, Pipelined):
        return called(peer, job.parts, job.technique.width)
    return f"replica {peer}"
