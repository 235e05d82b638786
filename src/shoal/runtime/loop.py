"""The device loop: trials on one device, advanced action by action.

Orders come in, replies and events go out; between them the loop issues the copies of
every seat, asks the interleaver whose unit computes next, and waits only when no unit
can start. One thread; it is the device's compute thread.
"""

from __future__ import annotations

import functools
import pickle
import queue
import time
from collections.abc import Callable

from shoal.core.event import pack_event
from shoal.core.seams import Candidate
from shoal.core.technique import Spilled
from shoal.core.units import Bytes
from shoal.device import Device
from shoal.memory.layout import arena
from shoal.memory.ledger import Ledger
from shoal.memory.store import Region
from shoal.recipes.recipe import Recipe
from shoal.runtime.arrays.seat import ArraySeat
from shoal.runtime.interpret import Seat
from shoal.runtime.measuring.measure import Measurer
from shoal.runtime.printing.output import TrialOutput
from shoal.runtime.reports import Reports
from shoal.runtime.runahead import RunAhead, seconds_of
from shoal.runtime.saving import checkpoint
from shoal.runtime.saving.saver import Saver
from shoal.runtime.score import is_sampled
from shoal.runtime.seats.desks import Desks
from shoal.runtime.seats.house import House
from shoal.runtime.seats.parking import Parking
from shoal.runtime.seats.stay import Arrival, Lobby, Stay, here
from shoal.runtime.session import Session
from shoal.runtime.task import Task
from shoal.runtime.wire.messages import (
    Extend,
    Forgotten,
    Grant,
    Happened,
    LeaseOver,
    Order,
    Park,
    Reply,
    Returned,
    Save,
    Settings,
    Shutdown,
    Stop,
)
from shoal.runtime.wire.word import Word
from shoal.scheduler.interleave import Interleaver
from shoal.spill import generate


class DeviceLoop:
    """Runs leases until ``Shutdown``.

    Args:
        device: The device this loop's thread computes on.
        recipe: The study's.
        settings: The study's.
        send: Sends to the study's process; called from this thread and the saver's.
        happened: How many ``Happened`` were sent.
        orders: Filled by another thread, which then notifies ``device``.
        measurer: Answers the orders that train nothing.
        recorder: Shared memory in which whose code runs is written; see ``RECORDER``.
        output: Where what a trial prints goes.
    """

    def __init__(
        self,
        device: Device,
        recipe: Recipe,
        settings: Settings,
        *,
        send: Callable[[Reply], None],
        happened: Callable[[], int],
        orders: queue.SimpleQueue[tuple[Order, tuple[int, ...]]],
        measurer: Measurer,
        recorder: memoryview,
        output: TrialOutput,
    ) -> None:
        self._device, self._recipe = device, recipe
        self._word = Word(recorder, output)
        self._record = self._word.computing
        self._interleaver = Interleaver()
        device.host_turns.claim = self._claim
        device.host_turns.choose = self._interleaver.first
        self._reports = Reports(device, send, timeline=settings.timeline)
        self._saver = Saver(
            settings,
            lambda event: send(Happened((pack_event(event),))),
            self._count_work,
            said=happened,
            heard=lambda: self._word.heard,
            notify=device.notify,
        )
        self._settings, self._orders, self._measurer = settings, orders, measurer
        measurer.note = self._word.note
        self._parking = Parking(self._saver, self._reports, pin=device.spec.kind == "cuda")
        self._ledger = Ledger(device.spec.name, device.spec.memory)
        if device.spec.library_bytes:  # where that is all there is, the plan is refused
            own = min(device.spec.library_bytes, device.spec.memory)
            self._ledger.reserve("what libraries keep", own)
        self._stays: dict[int, Stay] = {}
        self._current: int | None = None  # whose random streams are in place
        self._ahead = RunAhead(device)
        self._turn = Candidate(-1, 0, 0.0, False)  # of the array or member that computes
        self._unit_bytes = self._units_done = 0
        self._lobby, self._running = Lobby(), True
        house = House(
            recipe=recipe,
            device=device,
            ledger=self._ledger,
            reports=self._reports,
            saver=self._saver,
            settings=settings,
            captures=measurer.captures,
            record=self._record,
            fail=self._parking.refuse,
            room=self._reserve_largest_unit,
            went=self._somebody_went,
            waits=functools.partial(self._count_work, 1),
            handed_over=self._handed_over,
        )
        self._desk = Desks(house)

    def run(self) -> None:
        """Until ``Shutdown``: orders, copies, units."""
        with self._device.active():
            while self._running:
                seen = self._device.version
                self._count_work()
                while self._parking.let_go():
                    self._admit_pending()
                self._take_orders(block=not (self._stays or self._desk))
                for trial in list(self._stays):
                    self._guard(trial, self._prepare)
                self._desk.see_out()
                if not self._advance() and (self._stays or self._desk):
                    self._wait(seen)
            sessions = [stay.seat.session for stay in self._stays.values()]
            for trial in [*self._stays, *self._desk.trials]:
                self._dismiss(trial)
            self._saver.close()
            for session in sessions:
                session.close()
            self._parking.close()

    # -- orders -------------------------------------------------------------------------

    def _take_orders(self, *, block: bool) -> None:
        while self._running and (block or not self._orders.empty()):
            if block:
                self._reports.send_events()
            self._obey(*self._orders.get())
            block = False

    def _obey(self, order: Order, descriptors: tuple[int, ...]) -> None:
        match order:
            case Grant():
                self._admit(order, *descriptors)
            case Extend():
                self._extend(order.trial, order.until)
            case Park():
                self._park(order.trial)
            case Save():
                self._parking.save(order.trial)
            case Stop():
                self._forget(order.trial)
                self._reports.reply(Forgotten(order.trial))
            case Shutdown():
                self._running = False
            case _:
                self._leave_streams()
                self._reports.reply(self._measurer.answer(order))

    def _extend(self, trial: int, until: int | None) -> None:
        if (session := self._session_of(trial)) is not None:
            session.until = until
        self._lobby.extend(trial, until)

    def _park(self, trial: int) -> None:
        """End a lease at the next step boundary, or give it back before it began."""
        if (session := self._session_of(trial)) is not None:
            session.until = 0
        elif self._lobby.withdraw(trial):
            self._reports.reply(Returned(trial))
            self._admit_pending()

    def _session_of(self, trial: int) -> Session | None:
        """The session of a trial that is on the device."""
        if trial in self._stays:
            return self._stays[trial].seat.session
        return self._desk.session(trial)

    def _forget(self, trial: int) -> None:
        """The trial goes on elsewhere, or nowhere."""
        session = self._session_of(trial)
        self._dismiss(trial)
        self._saver.forget(trial)
        if session is not None:
            session.close()
        self._parking.forget(trial)
        if self._lobby.withdraw(trial):
            self._admit_pending()  # who may not overtake it

    def _admit(self, grant: Grant, descriptor: int, *sockets: int) -> None:
        """Take up a lease, or keep it until those that are here leave room for it."""
        self._measurer.forget()
        self._interleaver.follow(grant.rule)
        try:
            self._lobby.add(Arrival.of(grant, descriptor, sockets, self._parking.regions))
        except Exception as error:
            self._parking.refuse(grant.job.trial, error)
            return
        self._admit_pending()

    def _admit_pending(self) -> None:
        """Admit what fits, when somebody leaves or waits no more.

        What fails leaves room again, but not before its error and what that held are gone.
        """
        while not self._parking.has_refused and (entry := self._lobby.next(self._fits)):
            job = entry.grant.job
            if job.array is not None or job.gang > 1:
                self._enter_desk(entry)
            else:
                self._enter_device(entry.grant, entry.region)

    def _fits(self, entry: Arrival) -> bool:
        job = entry.grant.job
        if job.array is not None and self._desk.arrays.has(job.array.group):
            return True
        needed = job.held_bytes + max(job.unit_bytes, self._unit_bytes) - self._unit_bytes
        return needed <= self._ledger.free or not (self._stays or self._desk)

    def _enter_device(self, grant: Grant, region: Region) -> None:
        trial = grant.job.trial
        self._leave_streams()
        self._report_emulation()
        try:
            self._record(trial)
            seat = self._seat(grant, region)
        except (Exception, SystemExit) as error:
            region.rest()
            self._parking.refuse(trial, error)
            return
        finally:
            self._record(None)
        session = seat.session
        session.until = grant.until
        self._saver.expect(trial, grant.save_in_s)
        stay = Stay(seat, session.tasks())
        session.on_step = lambda loss: self._report_step(stay, loss)
        session.on_evaluated = lambda found: self._reports.evaluation(session, found, self._saver)
        session.on_boundary = lambda: self._boundary(stay)
        self._reports.hear(session)
        seat.reserve_units = self._reserve_largest_unit
        seat.note_host = self._word.stepping
        self._stays[trial] = stay
        self._guard(trial, lambda _: self._reserve_largest_unit())
        stays = here(grant.job.technique)
        if trial in self._stays and any(stays):
            self._begin(stay, Task(generate.arrival(*stays), "arrival"))

    def _session(self, grant: Grant, region: Region) -> Session:
        parked, where = self._parking.take(grant.job.trial), self._device.torch_device
        args = (self._recipe, grant, region, self._settings, where, parked)
        return checkpoint.take_up(*args, self._measurer.captures, self._measurer.chains)

    def _seat(self, grant: Grant, region: Region) -> Seat[Session]:
        """The trial with its memory reserved, on the device."""
        job, layout = grant.job, grant.layout
        session, clip = self._session(grant, region), self._recipe.clip_grad_norm is not None
        return Seat(
            session,
            self._device,
            self._ledger,
            arena=arena(layout, job.technique, clip=clip, accumulate=self._recipe.accumulate),
            record=self._reports.issue,
        )

    def _enter_desk(self, entry: Arrival) -> None:
        grant, region = entry.grant, entry.region
        trial = grant.job.trial
        self._leave_streams()
        try:
            self._record(trial)
            if grant.job.array is not None:
                self._desk.arrays.admit(grant, self._session(grant, region))
            else:
                parked = self._parking.take(trial)
                self._desk.gangs.admit(grant, region, entry.links, parked)
        except (Exception, SystemExit) as error:
            entry.give_up()
            self._parking.refuse(trial, error)
        finally:
            self._record(None)

    def _somebody_went(self) -> None:
        self._reserve_largest_unit()
        self._admit_pending()

    def _step_array(self, array: ArraySeat) -> None:
        """A step of its trials; more of them, while nobody else is here and no order waits."""
        number = array.number
        self._leave_streams()  # an array puts in place what it needs
        while True:
            ticket = self._interleaver.started(number, 0)
            self._turn = self._desk.arrays.candidate(array, ticket)
            self._desk.arrays.step(array)
            self._interleaver.step_finished(number)
            self._units_done += 1
            self._count_work()
            others = self._stays or len(self._desk) > 1 or self._lobby
            if others or not self._orders.empty() or array.leaving or not array.active:
                return

    # -- trials -------------------------------------------------------------------------

    def _guard(self, trial: int, work: Callable[[Stay], None]) -> None:
        """Run a trial's own code; what it raises ends that trial and no other."""
        stay = self._stays.get(trial)
        if stay is None:
            return
        try:
            self._record(trial)
            work(stay)
            self._record(None)
        except (Exception, SystemExit) as error:
            self._dismiss(trial)  # where that ends the worker, as CUDA may, it was this trial
            self._record(None)
            self._saver.forget(trial)  # the region is what it may still be writing
            (session := stay.seat.session).close()
            self._parking.refuse(trial, session.told(error))

    def _count_work(self, waited: int = 0) -> None:
        """Grows with every unit, copy and host step, and while disk or devices are waited for."""
        self._saver.waits += waited
        self._word.work_done(self._units_done + self._device.version + self._saver.waits)

    def _dismiss(self, trial: int) -> None:
        """Take a trial off the device at once, in the middle of whatever it does."""
        if self._desk.dismiss(trial):
            return
        stay = self._stays.pop(trial, None)
        if stay is None:
            return
        self._interleaver.forget(trial)
        if self._current == trial:
            self._current = None
        stay.tasks = iter(())
        stay.seat.session.leave()
        stay.seat.close()
        self._reserve_largest_unit()

    def _reserve_largest_unit(self) -> None:
        """Room for the one unit that runs at a time, whichever trial's it is."""
        if self._unit_bytes:
            self._ledger.release("the running unit")
            self._unit_bytes = 0
        units = [stay.seat.unit_bytes for stay in self._stays.values()]
        units += self._desk.unit_bytes
        needed = max(units, default=0)
        if needed:
            self._ledger.reserve("the running unit", Bytes(needed))
            self._unit_bytes = needed

    def _prepare(self, stay: Stay) -> None:
        """Issue copies; when the task is through, go on to the next one."""
        stay.seat.issue_copies()
        while stay.seat.head is None and stay.seat.trial in self._stays:
            self._finish_task(stay)
            if not self._next_task(stay):
                return
            if stay.seat.trial in self._stays:
                stay.seat.issue_copies()

    def _begin(self, stay: Stay, task: Task) -> None:
        stay.task = task
        stay.seat.start(task)

    def _finish_task(self, stay: Stay) -> None:
        task, stay.task = stay.task, None
        if task is not None and task.kind == "step":
            if stay.seat.session.habits.draws:
                self._enter(stay)
            stay.seat.end_step()
            self._interleaver.step_finished(stay.seat.trial)

    def _next_task(self, stay: Stay) -> bool:
        """Let the trial's loop go on, inside its own random streams, to its next program.

        False while it waits for a copy, a host step or the disk: others may compute meanwhile.
        """
        if not stay.leaving:
            self._enter(stay)
            task = next(stay.tasks, None)
            if task is not None:
                self._begin_task(stay, task)
                return True
            stay.leaving = True
        if not stay.departing:
            if self._saver.is_writing(stay.seat.trial):  # the region is what it is writing
                return False
            stay.departing = True
            if not stay.has_computed:
                stay.seat.drain()  # what is on its way up must not be stored before it is there
            if any(stays := here(stay.seat.session.job.technique)):
                self._begin(stay, Task(generate.departure(*stays), "departure"))
                return True
        return self._hand_over(stay)

    def _begin_task(self, stay: Stay, task: Task) -> None:
        trial, session = stay.seat.trial, stay.seat.session
        stay.has_computed = True
        if task.kind in ("step", "micro") and not session.losses:
            self._interleaver.forget(trial)
            self._interleaver.started(trial, session.step)
        self._begin(stay, task)

    def _hand_over(self, stay: Stay) -> bool:
        """The lease is over: everything is in the host region; tell the study.

        False while something is still under way.
        """
        seat, session = stay.seat, stay.seat.session
        if stay.over is None:
            # Elsewhere another process would write beside what is being written.
            if self._saver.is_writing(seat.trial) or not seat.settled:
                return False
            stay.over = self._settle(stay)
        over = stay.over
        if session.ended:
            if self._saver.is_writing(seat.trial):
                return False
            over = self._saver.with_generation(over)
        pickle.dumps(over)  # a schedule that cannot travel fails its trial here, alone
        self._dismiss(seat.trial)
        self._handed_over(session, over)
        self._admit_pending()
        return True

    def _handed_over(self, session: Session, over: LeaseOver | None) -> None:
        session.park()  # whoever still refers to it
        if over is not None and over.checkpoint:
            session.close()
        else:
            self._parking.put(session)
        if over is not None:
            self._reports.reply(over)

    def _settle(self, stay: Stay) -> LeaseOver:
        """Bring all of the trial to its region; the generation of one that ended is begun."""
        seat, session = stay.seat, stay.seat.session
        self._enter(stay)
        seat.drain()
        session.put_away()
        session.put_buffers_back()
        self._reports.flush(of=seat.trial)
        self._report_emulation()
        if session.ended:
            self._reports.send_events()
            self._saver.save(functools.partial(checkpoint.content, session, copy=False))
        return LeaseOver(seat.trial, session.progress(), session.ended)

    # -- compute ------------------------------------------------------------------------

    def _advance(self) -> bool:
        """One unit of the trial that the interleaver chooses; False when none can start."""
        shared = len(self._stays) + len(self._desk) > 1
        if shared and self._ahead.waited():
            return True
        ready = {
            stay.seat.trial: self._candidate(stay)
            for stay in self._stays.values()
            if stay.seat.waits_for_compute and stay.seat.startable()
        }
        ticket = self._interleaver.ticket
        at_desk = {one: self._desk.candidate(one, ticket(one)) for one in self._desk.candidates}
        ready |= at_desk
        if not ready:
            return False
        if shared and not (ready := self._ahead.ready(ready, self._stays)):
            return True
        trial = self._interleaver.choose(list(ready.values()))
        if trial not in at_desk:
            self._guard(trial, self._compute)
        elif (array := self._desk.arrays.candidates.get(trial)) is not None:
            self._step_array(array)
        else:
            self._leave_streams()  # a member puts in place what it needs
            self._turn = at_desk[trial]
            self._desk.gangs.step(trial)
            self._units_done += 1
        return True

    def _candidate(self, stay: Stay) -> Candidate:
        session, trial = stay.seat.session, stay.seat.trial
        return Candidate(
            trial=trial,
            ticket=self._interleaver.ticket(trial),
            remaining_s=session.steps_left * session.job.step_s,
            warm=self._current == trial,
            step_s=session.job.step_s,
        )

    def _claim(self, trial: int) -> Candidate:
        """How a trial is that has a step for the host, among others that have one."""
        if (stay := self._stays.get(trial)) is not None:
            return self._candidate(stay)._replace(warm=False)
        return self._turn  # arrays and members submit in their own turns

    def _compute(self, stay: Stay) -> None:
        """One unit; all that can run, where nobody else is on the device and no order waits."""
        seat = stay.seat
        while True:
            self._enter(stay)
            action = seat.head
            seat.issue_compute()
            self._units_done += 1
            if len(self._stays) > 1 or self._desk or not self._orders.empty():
                self._ahead.submitted(seconds_of(seat, action))
                return
            self._count_work()
            self._prepare(stay)
            stays = self._stays.get(seat.trial) is stay
            if not (stays and seat.waits_for_compute and seat.startable()):
                return

    def _enter(self, stay: Stay) -> None:
        """Put the trial's random streams in place, and the last trial's away."""
        if self._current == stay.seat.trial:
            return
        self._leave_streams()
        stay.seat.session.enter()
        self._current = stay.seat.trial

    def _leave_streams(self) -> None:
        if self._current is not None:
            self._stays[self._current].seat.session.put_away()
            self._current = None

    def _wait(self, seen: int) -> None:
        """Sleep until a copy or host step has finished or an order came."""
        self._reports.send_events()
        with self._device.progress:
            idle = self._device.version == seen and not self._device.progress.wait(timeout=1.0)
        trials = [*self._stays, *self._desk.trials]
        waits = not self._stays and self._desk.gangs.waits_for_others  # a stay waits for this one
        if idle and (waits or any(map(self._saver.is_writing, trials))):
            self._count_work(1)

    # -- reports ------------------------------------------------------------------------

    def _report_step(self, stay: Stay, loss: float) -> None:
        seat, now = stay.seat, time.perf_counter()
        seconds, stay.step_began = now - stay.step_began, now
        self._reports.step(seat.session, loss, seconds / max(1, len(self._stays)))
        if seat.track:
            others = [other.seat for other in self._stays.values() if other is not stay]
            self._reports.peak(seat, others)
            self._reports.warmed_up()
        seat.track = False
        if is_sampled(seat.session.step):
            self._report_emulation()
            seat.track = seat.counts
        self._reports.flush()

    def _report_emulation(self) -> None:
        """Unless a step is under way whose allocations are counted: it is left out."""
        if not any(stay.seat.track for stay in self._stays.values()):
            self._reports.emulation()

    def _boundary(self, stay: Stay) -> None:
        """Between two steps: save the trial when it is time."""
        job = stay.seat.session.job
        changes = isinstance(job.technique, Spilled)  # what is in the host region
        copies = changes and not job.disk_bytes  # memory was too small for more
        if self._saver.is_due(stay.seat.trial, copies=copies):
            self._reports.send_events()  # whoever finds the generation has heard of its step
            take = functools.partial(self._take, stay, copies)
            self._saver.save(take, copies=copies, waits=changes and not copies)

    def _take(self, stay: Stay, copies: bool) -> checkpoint.Content:
        """The trial's state at a step boundary; it ``copies`` what goes on in its host region."""
        seat, session = stay.seat, stay.seat.session
        self._saver.wait(seat.trial)
        seat.drain()
        session.put_away()
        seat.copies.copy_kept()
        session.put_buffers_back()
        self._reports.flush()
        return checkpoint.content(session, copy=copies)
