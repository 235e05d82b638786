"""What a device loop tells the study's process: events in batches, replies behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shoal.core.errors import ShoalError
from shoal.core.event import (
    ActionFinished,
    EmulationMeasured,
    Evaluated,
    Event,
    LoaderRestarted,
    Packed,
    PeakMeasured,
    StateLeftOut,
    StepFinished,
    pack_event,
)
from shoal.core.plan import Job
from shoal.core.units import Bytes
from shoal.device import Device, EmulatedDevice, Ran
from shoal.device.allocator import allocator_here
from shoal.frames import own_traceback
from shoal.runtime.arrays.seat import ArraySeat
from shoal.runtime.interpret import Seat
from shoal.runtime.saving.saver import Saver
from shoal.runtime.session import Session
from shoal.runtime.task import Issued
from shoal.runtime.wire.actionrows import ActionRows, Row
from shoal.runtime.wire.messages import Happened, Refused, Reply

TELL_EVERY_S = 0.1


class Reports:
    """Collects and sends; used by the device's thread.

    Attributes:
        issued: Actions in flight.
    """

    def __init__(self, device: Device, send: Callable[[Reply], None], *, timeline: bool) -> None:
        self._device, self._send, self._timeline = device, send, timeline
        self._name = device.spec.name
        self._emulated = device if isinstance(device, EmulatedDevice) else None
        self.issued: list[Issued] = []
        self._events: list[Packed] = []
        self._rows = ActionRows()
        self._sent_at = time.monotonic()
        self._peak = 0

    def reply(self, reply: Reply) -> None:
        """Send a reply, behind the events that happened before it."""
        self.send_events()
        self._send(reply)

    def refuse(self, trial: int, error: BaseException) -> None:
        """An order about a trial could not be done, or its own code raised."""
        cause = error if isinstance(error, ShoalError) else None
        self.reply(Refused(trial, own_traceback(error), cause))

    def tell(self, event: Event) -> None:
        """Send an event with others that happen about now."""
        self._events.append(pack_event(event))
        if time.monotonic() - self._sent_at > TELL_EVERY_S:
            self.send_events()

    def send_events(self) -> None:
        """Send what was told."""
        self._tell_rows(self._rows.rest())
        if self._events:
            self._send(Happened(tuple(self._events)))
            self._events.clear()
        self._sent_at = time.monotonic()

    def step(self, session: Session, loss: float, seconds: float) -> None:
        """A step ended that took ``seconds`` of the device."""
        self.tell(
            StepFinished(
                time=time.time(),
                trial=session.job.trial,
                step=session.step,
                epoch=session.epoch_number,
                loss=loss,
                seconds=seconds,
                device=self._name,
                steps_per_epoch=session.steps_per_epoch,
            )
        )

    def issue(self, issued: Issued) -> None:
        """Keep an action until it is complete."""
        if type(issued.event) is Ran:
            self._finish(issued)
        else:
            self.issued.append(issued)

    def evaluation(self, session: Session, metrics: dict[str, float], saver: Saver) -> bool:
        """A validation pass ended; whether it is the trial's best yet, and to be kept."""
        self.tell(
            Evaluated(
                time=time.time(),
                trial=session.job.trial,
                step=session.step,
                epoch=session.epoch_number,
                metrics=metrics,
            )
        )
        return saver.is_best(session.job.trial, metrics)

    def hear(self, session: Session) -> None:
        """Tell of what a session says by itself."""
        session.on_loader_lost = lambda reason: self._loader_lost(session, reason)
        session.python.on_left_out = lambda places: self._left_out(session, places)

    def _loader_lost(self, session: Session, reason: str) -> None:
        trial, step = session.job.trial, session.step
        self.tell(LoaderRestarted(time=time.time(), trial=trial, step=step, reason=reason))

    def _left_out(self, session: Session, places: tuple[str, ...]) -> None:
        trial, step = session.job.trial, session.step
        self.tell(StateLeftOut(time=time.time(), trial=trial, step=step, places=places))

    def peak(self, seat: Seat[Session], neighbours: Sequence[Seat[Session]]) -> None:
        """The most bytes the device held in a step that was counted."""
        peak = seat.peak_bytes + sum(other.resident_bytes() for other in neighbours)
        allocator = allocator_here() if self._device.spec.kind == "cuda" else None
        if allocator is not None:
            peak = allocator.peak_bytes - self._device.spec.library_bytes
        jobs = [other.session.job for other in (seat, *neighbours)]
        held = sum(job.held_bytes for job in jobs)
        self._tell_peak(peak, held + max(job.peak_bytes - job.held_bytes for job in jobs))

    def _tell_peak(self, peak: int, predicted: int) -> None:
        """Of both without what libraries keep of the device, which comes on top."""
        own = self._device.spec.library_bytes
        peak, predicted = peak + own, predicted + own
        if peak > self._peak:
            self._peak = peak
            self.tell(
                PeakMeasured(
                    time=time.time(),
                    device=self._device.spec.name,
                    peak_bytes=Bytes(peak),
                    budget_bytes=self._device.spec.memory,
                    predicted_bytes=Bytes(predicted),
                )
            )

    def member_peak(self, peak: int, job: Job) -> None:
        """The most bytes that a member of a gang held in steps that were counted."""
        self._tell_peak(peak, job.held_bytes + job.unit_bytes)

    def array_peak(self, array: ArraySeat) -> None:
        """The most bytes that an array held in a step that was counted."""
        self._tell_peak(array.peak_bytes, array.held_bytes + array.unit_bytes)

    def emulation(self) -> None:
        """How well an emulated device kept up since this was told last, or since a warm-up."""
        if self._emulated is None:
            return
        for stream, kept in self._emulated.fidelity().items():
            self.tell(
                EmulationMeasured(
                    time=time.time(),
                    device=self._name,
                    stream=stream,
                    works=kept.works,
                    emulated_s=kept.emulated_s,
                    behind_s=kept.behind_s,
                    overruns=kept.overruns,
                    overrun_s=kept.overrun_s,
                )
            )
        self.warmed_up()

    def warmed_up(self) -> None:
        """Leave out of what is told next how an emulated device kept up so far."""
        if self._emulated is not None:
            self._emulated.pace.forget()

    def flush(self, of: int | None = None) -> None:
        """Send the actions that are complete to the timeline; all of the trial ``of``."""
        if not self.issued:
            return
        kept = []
        for issued in self.issued:
            if not issued.event.done and issued.trial != of:
                kept.append(issued)
            else:
                self._finish(issued)
        self.issued = kept

    def _finish(self, issued: Issued) -> None:
        """Tell an ActionFinished with the next event; there are many, so none is made here."""
        stream, action, event, num_bytes, step, trial = issued
        if self._timeline and event.error is None:
            self._tell_rows(
                self._rows.add(Row(stream, trial, step, action, *event.span(), num_bytes))
            )

    def _tell_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._events.append((ActionFinished, (self._name, *row)))
