"""The device loop: trials on one device, advanced action by action.

Orders come in, replies and events go out; between them the loop issues the copies of
every seat, asks the interleaver whose unit computes next, and waits only when no unit
can start. One thread; it is the device's compute thread.
"""

from __future__ import annotations

import mmap
import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from shoal.core.errors import ShoalError
from shoal.core.event import (
    ActionFinished,
    Evaluated,
    Event,
    Packed,
    PeakMeasured,
    StepFinished,
    pack_event,
)
from shoal.core.plan import Resident, Spilled
from shoal.core.seams import Candidate
from shoal.core.units import Bytes
from shoal.device import Device
from shoal.memory.layout import slot_parts, slot_size
from shoal.memory.ledger import Ledger
from shoal.memory.store import Region
from shoal.recipe import Recipe
from shoal.rng import capture_rng, restore_rng
from shoal.runtime import checkpoint
from shoal.runtime.interpret import Issued, Seat
from shoal.runtime.messages import (
    Extend,
    Grant,
    Happened,
    LeaseOver,
    Order,
    Refused,
    Reply,
    Settings,
    Shutdown,
    Stop,
)
from shoal.runtime.session import Session, Task
from shoal.scheduler.interleave import Interleaver
from shoal.spill import generate

TELL_EVERY_S = 0.02


@dataclass(slots=True)
class _Stay:
    """A seat and how far its current lease is."""

    seat: Seat
    tasks: Iterator[Task]
    task: Task | None = None
    leaving: bool = False
    step_began: float = field(default_factory=time.perf_counter)
    saved_at: float = field(default_factory=time.monotonic)


class DeviceLoop:
    """Runs leases until ``Shutdown``.

    Args:
        device: The device this loop's thread computes on.
        recipe: The study's.
        settings: The study's.
        reply: Sends to the study's process; called from this thread.
        orders: Filled by another thread, which then notifies ``device``.
    """

    def __init__(
        self,
        device: Device,
        recipe: Recipe,
        settings: Settings,
        interleaver: Interleaver,
        reply: Callable[[Reply], None],
        orders: queue.SimpleQueue[tuple[Order, tuple[int, ...]]],
        others: Callable[[Order], None],
        forget: Callable[[], None],
        running: mmap.mmap,
    ) -> None:
        self._device, self._recipe, self._settings = device, recipe, settings
        self._interleaver, self._send, self._orders = interleaver, reply, orders
        self._events: list[Packed] = []
        self._sent_at = time.monotonic()
        self._others, self._forget = others, forget
        self._recorder = memoryview(running).cast("q")
        self._pending: list[tuple[Grant, Region]] = []  # there is no room for them yet
        self._ledger = Ledger(device.spec.name, device.spec.memory)
        self._stays: dict[int, _Stay] = {}
        self._parked: dict[int, Session] = {}
        self._current: int | None = None  # whose random streams are in place
        self._issued: list[Issued] = []
        self._unit_bytes = 0
        self._peak = 0
        self._running = True

    def run(self) -> None:
        """Until ``Shutdown``: orders, copies, units."""
        with self._device.active():
            while self._running:
                seen = self._device.version
                self._take_orders(block=not self._stays)
                for trial in list(self._stays):
                    self._guard(trial, self._prepare)
                if not self._advance() and self._stays:
                    self._wait(seen)
            for trial in list(self._stays):
                self._dismiss(trial)

    # -- messages -----------------------------------------------------------------------

    def _reply(self, reply: Reply) -> None:
        """Send a reply, behind the events that happened before it."""
        self._send_events()
        self._send(reply)

    def _tell(self, event: Event) -> None:
        """Send an event with others that happen about now."""
        self._tell_packed(pack_event(event))

    def _tell_packed(self, packed: Packed) -> None:
        self._events.append(packed)
        if time.monotonic() - self._sent_at > TELL_EVERY_S:
            self._send_events()

    def _send_events(self) -> None:
        if self._events:
            self._send(Happened(tuple(self._events)))
            self._events.clear()
        self._sent_at = time.monotonic()

    # -- orders -------------------------------------------------------------------------

    def _take_orders(self, *, block: bool) -> None:
        while self._running and (block or not self._orders.empty()):
            if block:
                self._send_events()
            self._obey(*self._orders.get())
            block = False

    def _obey(self, order: Order, descriptors: tuple[int, ...]) -> None:
        match order:
            case Grant():
                self._admit(order, descriptors[0])
            case Extend():
                if order.trial in self._stays:
                    self._stays[order.trial].seat.session.until = order.until
            case Stop():
                self._dismiss(order.trial)
                parked = self._parked.pop(order.trial, None)
                if parked is not None:
                    parked.feed.close()
            case Shutdown():
                self._running = False
            case _:
                self._leave_streams()
                self._others(order)

    def _admit(self, grant: Grant, descriptor: int) -> None:
        """Take up a lease, or keep it until those that are here leave room for it."""
        self._forget()
        try:
            region = Region(descriptor, grant.layout.num_bytes, pin=self._pins)
        except Exception as error:
            self._fail(grant.job.trial, error)
            return
        finally:
            os.close(descriptor)  # the mapping stays
        self._pending.append((grant, region))
        self._admit_pending()

    def _admit_pending(self) -> None:
        """Admit what fits; alone on the device, what does not fit fails."""
        for entry in list(self._pending):
            grant, region = entry
            largest = max(grant.job.unit_bytes, self._unit_bytes)
            needed = grant.job.held_bytes + largest - self._unit_bytes
            if self._stays and needed > self._ledger.free:
                continue
            self._pending.remove(entry)
            self._enter_device(grant, region)

    def _enter_device(self, grant: Grant, region: Region) -> None:
        trial = grant.job.trial
        self._leave_streams()
        try:
            self._record(trial)
            seat = self._seat(grant, region)
        except (Exception, SystemExit) as error:
            region.unpin()
            self._fail(trial, error)
            return
        finally:
            self._record(None)
        session = seat.session
        session.until = grant.until
        stay = _Stay(seat, session.tasks())
        session.on_step = lambda loss: self._report_step(stay, loss)
        session.on_evaluated = lambda metrics: self._report_evaluation(session, metrics)
        session.on_boundary = lambda: self._save(stay)
        seat.reserve_units = self._reserve_largest_unit
        seat.note_host = self._record_host
        self._stays[trial] = stay
        self._guard(trial, lambda _: self._reserve_largest_unit())
        if trial in self._stays and isinstance(grant.job.technique, Resident):
            self._begin(stay, Task(generate.arrival(), "arrival"))

    @property
    def _pins(self) -> bool:
        return self._device.spec.kind == "cuda"

    def _seat(self, grant: Grant, region: Region) -> Seat:
        """The trial, built or taken up again, with its memory reserved."""
        job, layout = grant.job, grant.layout
        session = self._parked.pop(job.trial, None)
        progress = grant.progress
        if grant.restore:
            progress = checkpoint.restore(grant.restore, layout, region)
        if session is None or progress is None or session.step != progress.step:
            session = Session(self._recipe, job, self._settings, self._device.torch_device)
        session.place(layout, region, fresh=progress is None)
        if progress is None:
            checkpoint.check_rules(session)
        if progress is not None:
            session.resume(progress)
        clip = self._recipe.clip_grad_norm is not None
        parts = slot_parts(job.technique, clip=clip, accumulate=self._recipe.accumulate)
        lookahead = job.technique.lookahead if isinstance(job.technique, Spilled) else 0
        return Seat(
            session,
            self._device,
            self._ledger,
            num_slots=1 + (lookahead or 0),
            slot_bytes=slot_size(layout, parts),
            parts=parts,
            record=self._issued.append,
        )

    # -- trials -------------------------------------------------------------------------

    def _guard(self, trial: int, work: Callable[[_Stay], None]) -> None:
        """Run a trial's own code; what it raises ends that trial and no other."""
        stay = self._stays.get(trial)
        if stay is None:
            return
        try:
            self._record(trial)
            work(stay)
            self._record(None)
        except (Exception, SystemExit) as error:
            self._record(None)
            self._dismiss(trial)
            stay.seat.session.feed.close()
            self._fail(trial, error)
            self._admit_pending()

    def _record(self, trial: int | None) -> None:
        """Leave word whose code runs, for whoever finds this process dead."""
        self._recorder[0] = -1 if trial is None else trial

    def _record_host(self, trial: int) -> None:
        self._recorder[1] = trial

    def _fail(self, trial: int, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        cause = error if isinstance(error, ShoalError) else None
        self._reply(Refused(trial, text, cause))

    def _dismiss(self, trial: int) -> None:
        """Take a trial off the device at once, in the middle of whatever it does."""
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
        needed = max(units, default=0)
        if needed:
            self._ledger.reserve("the running unit", Bytes(needed))
            self._unit_bytes = needed

    def _prepare(self, stay: _Stay) -> None:
        """Issue copies; when the task is through, go on to the next one."""
        stay.seat.issue_copies()
        while stay.seat.head is None and stay.seat.trial in self._stays:
            self._finish_task(stay)
            self._next_task(stay)
            if stay.seat.trial in self._stays:
                stay.seat.issue_copies()

    def _begin(self, stay: _Stay, task: Task) -> None:
        stay.task = task
        stay.seat.start(task)

    def _finish_task(self, stay: _Stay) -> None:
        task, stay.task = stay.task, None
        if task is not None and task.kind == "step":
            stay.seat.end_step()
            self._interleaver.step_finished(stay.seat.trial)

    def _next_task(self, stay: _Stay) -> None:
        """Let the trial's loop go on, inside its own random streams, to its next program."""
        session = stay.seat.session
        if stay.leaving:
            self._hand_over(stay)
            return
        self._enter(stay)
        task = next(stay.tasks, None)
        if task is not None:
            if task.kind in ("step", "micro") and not session.micro_losses:
                self._interleaver.forget(stay.seat.trial)
                self._interleaver.started(stay.seat.trial, session.step)
            self._begin(stay, task)
            return
        stay.leaving = True
        if isinstance(session.job.technique, Resident):
            self._begin(stay, Task(generate.departure(), "departure"))

    def _hand_over(self, stay: _Stay) -> None:
        """The lease is over: everything is in the host region; tell the study."""
        seat, session = stay.seat, stay.seat.session
        self._enter(stay)
        seat.drain()
        session.rng = capture_rng(session.device)
        session.put_buffers_back()
        self._flush(of=seat.trial)
        if session.ended:
            checkpoint.write(session)
        over = LeaseOver(seat.trial, session.progress(), session.ended)
        pickle.dumps(over)  # a schedule that cannot travel fails its trial here, alone
        self._dismiss(seat.trial)
        if session.ended:
            session.feed.close()
        else:
            self._parked[seat.trial] = session
        self._reply(over)
        self._admit_pending()

    # -- compute ------------------------------------------------------------------------

    def _advance(self) -> bool:
        """One unit of the trial that the interleaver chooses; False when none can start."""
        ready = [
            stay
            for stay in self._stays.values()
            if stay.seat.waits_for_compute and stay.seat.startable()
        ]
        if not ready:
            return False
        trial = ready[0].seat.trial
        if len(ready) > 1:
            trial = self._interleaver.choose([self._candidate(stay) for stay in ready])
        self._guard(trial, self._compute)
        return True

    def _candidate(self, stay: _Stay) -> Candidate:
        session, trial = stay.seat.session, stay.seat.trial
        left = (session.until or session.step + 1) - session.step
        return Candidate(
            trial=trial,
            ticket=self._interleaver.ticket(trial),
            remaining_s=left * session.job.step_s,
            warm=self._current == trial,
        )

    def _compute(self, stay: _Stay) -> None:
        self._enter(stay)
        stay.seat.issue_compute()

    def _enter(self, stay: _Stay) -> None:
        """Put the trial's random streams in place, and the last trial's away."""
        if self._current == stay.seat.trial:
            return
        self._leave_streams()
        restore_rng(stay.seat.session.rng, self._device.torch_device)
        self._current = stay.seat.trial

    def _leave_streams(self) -> None:
        if self._current is not None:
            session = self._stays[self._current].seat.session
            session.rng = capture_rng(self._device.torch_device)
            self._current = None

    def _wait(self, seen: int) -> None:
        """Sleep until a copy or host step has finished or an order came."""
        self._send_events()
        with self._device.progress:
            if self._device.version == seen:
                self._device.progress.wait(timeout=1.0)

    # -- reports ------------------------------------------------------------------------

    def _report_step(self, stay: _Stay, loss: float) -> None:
        session, now = stay.seat.session, time.perf_counter()
        seconds, stay.step_began = now - stay.step_began, now
        self._tell(
            StepFinished(
                time=time.time(),
                trial=stay.seat.trial,
                step=session.step,
                epoch=session.epoch_number,
                loss=loss,
                seconds=seconds / max(1, len(self._stays)),
                device=self._device.spec.name,
                steps_per_epoch=session.steps_per_epoch,
            )
        )
        self._report_peak(stay)
        stay.seat.track = _is_sampled(session.step)
        self._flush()

    def _save(self, stay: _Stay) -> None:
        """Write a checkpoint now and then, at a step boundary."""
        if time.monotonic() - stay.saved_at < self._settings.checkpoint_every_s:
            return
        seat, session = stay.seat, stay.seat.session
        seat.drain()
        session.rng = capture_rng(self._device.torch_device)
        seat.copy_resident()
        session.put_buffers_back()
        self._flush()
        self._send_events()  # whoever finds the checkpoint has heard of its step
        checkpoint.write(session)
        stay.saved_at = time.monotonic()

    def _report_evaluation(self, session: Session, metrics: dict[str, float]) -> None:
        self._tell(
            Evaluated(
                time=time.time(),
                trial=session.job.trial,
                step=session.step,
                epoch=session.epoch_number,
                metrics=metrics,
            )
        )

    def _report_peak(self, stay: _Stay) -> None:
        if not stay.seat.track:
            return
        others = sum(
            other.seat.resident_bytes() for other in self._stays.values() if other is not stay
        )
        peak = stay.seat.peak_bytes + others
        if self._device.spec.kind == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device.torch_device)
        jobs = [s.seat.session.job for s in self._stays.values()]
        held = sum(job.held_bytes for job in jobs)
        predicted = held + max(job.peak_bytes - job.held_bytes for job in jobs)
        if peak > self._peak:
            self._peak = peak
            self._tell(
                PeakMeasured(
                    time=time.time(),
                    device=self._device.spec.name,
                    peak_bytes=Bytes(peak),
                    budget_bytes=self._device.spec.memory,
                    predicted_bytes=Bytes(predicted),
                )
            )

    def _flush(self, of: int | None = None) -> None:
        """Send the actions that are complete to the timeline; all of the trial ``of``."""
        if not self._issued:
            return
        kept = []
        for issued in self._issued:
            if not issued.event.done and issued.trial != of:
                kept.append(issued)
            elif self._settings.timeline and issued.event.error is None:
                self._tell_packed(self._finished(issued))
        self._issued[:] = kept

    def _finished(self, issued: Issued) -> Packed:
        """An ActionFinished: there are several a step, so it is never made here."""
        start, end = issued.event.span()
        where = (self._device.spec.name, issued.stream, issued.trial, issued.step)
        return ActionFinished, (*where, issued.action, start, end, issued.num_bytes)


def _is_sampled(step: int) -> bool:
    """Whether every allocation of the step after this one is counted: 100, 1000, 10000, ...

    Counting makes a step several times slower. The first steps of a lease and batches larger
    than any before are counted too.
    """
    while step >= 1000 and step % 10 == 0:
        step //= 10
    return step == 100
