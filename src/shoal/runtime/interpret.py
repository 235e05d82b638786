"""The interpreter: runs a program's actions, one trial on one device.

A *seat* is a trial's place on a device for the time of a lease: its slots, its copy and
host streams, and what its programs have in flight. Actions are issued in list order. A
copy or host step is submitted to its stream with the events it needs; compute is
submitted when the device loop chooses this seat, which it does only when ``startable``.

[Note: who waits for what]
Besides the slot waits of ``program.slots``:

    LOAD           the last write of the shard's host copy (STORE, STEP@host), of any program
    F B STEP       the shard's LOADs
    STORE          the compute before it
    LOAD boundary  its STORE, and the device's compute before it, whose memory it may be given
    LOAD saved     likewise
    LOAD own       the same write as any LOAD, and the device's compute before it
    LOAD late      likewise, and the late slot's last tenant
    STEP@host      the STORE of its gradients, and SYNC
    RECV           its message; the list waits there, and what was issued before goes on
    SEND param     all that was written to the host

A LOAD of a boundary or of what was saved has a stream of its own: it waits for no weights that
wait for their slot, and passes what is on the link and needed later, or by others.
Tensors that a copy reads or writes are kept alive until the copy's event is done; on
CUDA that is what makes it safe to let the allocator have them back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from shoal.core.errors import CapacityError
from shoal.core.technique import steps_on_host
from shoal.core.turns import Upload
from shoal.core.units import Bytes
from shoal.device import Device, Event, Lane
from shoal.device.streams import Piece, Turn
from shoal.memory.layout import Arena
from shoal.memory.ledger import Ledger
from shoal.partition.track import AllocationTracker, read_bytes, storages_of
from shoal.program.ir import Action, Op, Part, lone_part
from shoal.recipes.recipe import tensors_of
from shoal.runtime.compute import Compute, Work
from shoal.runtime.copies import Copies, Copy, copying
from shoal.runtime.mail import Mail
from shoal.runtime.placing.outgrown import growth_of, outgrown
from shoal.runtime.placing.placed import Placed, place_on_host
from shoal.runtime.score import Score, emulated_seconds, score_of
from shoal.runtime.task import Issued, Task
from shoal.runtime.tenant import Tenant

HOME = {Part.PARAM, Part.STATE, Part.HEAD}  # what a step writes


_Lone = tuple[Part, int, int | None]
"""What of one micro-batch is moved by itself: of which shard, and for which micro-batch."""


@dataclass(slots=True)
class _Run:
    """A task, how far its actions are issued, and their events."""

    task: Task
    score: Score
    cursor: int = 0
    events: dict[int, Event] = field(default_factory=dict)


T = TypeVar("T", bound=Tenant)


class Seat(Generic[T]):
    """A trial's place on a device. Use from the device's own thread only.

    Args:
        session: The trial, placed in its host region.
        device: Where it computes.
        ledger: The device's; ``held`` bytes are reserved there for the seat's life. None where
            whoever made it has reserved them, and lets go of the region.
        arena: What it has there: places of kept shards, and slots.
        record: Called with every action that was issued.
        make_compute: What computes its units, of the session and the tensors on the host.

    Attributes:
        mail: Messages to and from other devices, of a trial that has several.
    """

    def __init__(
        self,
        session: T,
        device: Device,
        ledger: Ledger | None,
        *,
        arena: Arena,
        record: Callable[[Issued], None],
        make_compute: Callable[[T, list[Placed]], Compute] = Compute,
    ) -> None:
        self.session, self.device, self.ledger = session, device, ledger
        self.trial = session.job.trial
        self._record = record
        self._profile = device.spec.profile  # what it emulates
        self._owner = session.owner
        if ledger is not None:
            ledger.reserve(self._owner, session.job.held_bytes)
        layout = session.layout
        self.host = [place_on_host(session.region, layout, s) for s in range(len(layout.shards))]
        try:
            region = device.empty(arena.num_bytes)
            before = device.so_far()  # whose memory the region may be
            for placed in self.host:
                placed.renew_copies()
            self.compute = make_compute(session, self.host)
            self.copies = Copies(region, arena, session, self.host, self.compute)
        except BaseException:  # no memory on the device, or none that CUDA pins
            if ledger is not None:
                ledger.release(self._owner)
            raise
        self._born: list[Event] = [] if before is None else [before]
        self._lane: Lane = device.lane()
        self.mail: Mail | None = None
        self._tails: dict[int, list[Event]] = {}  # slot -> what its last tenant leaves
        self._stores_left: list[Event] = []  # of gradients, from the program before
        self._loads: dict[int, list[Event]] = {}  # shard -> its LOADs
        self._written: dict[int, Event] = {}  # shard -> last write of its host parameters
        self._grads_written: dict[int, Event] = {}
        self._uploads = 0
        self._waker: Event | None = None  # who waits for them so that the device need not
        self._saved: dict[tuple[int, int | None], AllocationTracker] = {}  # of forwards
        self._away: dict[_Lone, Event] = {}  # what waits on the host -> its STORE
        self._synced: Event | None = None
        self._advanced: Event | None = None  # the schedule, behind the host's steps
        self._last_compute = list[Event]()
        self._in_flight: list[tuple[Event, Sequence[Tensor]]] = []
        self.note_host: Callable[[int], None] = lambda trial: None  # whose host step runs
        self._scores: dict[tuple[int, bool], Score] = {}
        self._run: _Run | None = None
        self._closing = threading.Event()
        self.unit_bytes = session.job.unit_bytes
        self.reserve_units: Callable[[], None] = lambda: None  # set by who shares the device
        self.counts = not session.compiled  # of compiled code nothing can be counted
        self.track = self.counts  # measure the next step's units with the tracker
        self._has_evaluated, self.peak_bytes = False, 0

    # -- programs ---------------------------------------------------------------------

    def start(self, task: Task) -> None:
        """Take up a task; the one before it is fully issued."""
        key = id(task.program), bool(self.compute.placed)
        if key not in self._scores:
            self._scores[key] = score_of(task.program, self.copies.kept if key[1] else {})
        self._run = _Run(task, self._scores[key])

    @property
    def head(self) -> Action | None:
        """The next action to issue, None when the task is fully issued."""
        run = self._run
        if run is None or run.cursor == len(run.score.actions):
            return None
        return run.score.actions[run.cursor]

    @property
    def waits_for_compute(self) -> bool:
        """Whether the next action needs the device's compute stream."""
        run = self._run
        if run is None or run.cursor == len(run.score.actions):
            return False
        return run.score.computes[run.cursor]

    def startable(self) -> bool:
        """Whether the next compute action can be submitted without blocking."""
        return all(event.startable for event in self._needs())

    def is_ready(self) -> bool:
        """Whether it would not wait on the device either, but for its turn."""
        return all(event.ready for event in self._needs())

    def issue_copies(self) -> None:
        """Issue everything up to the next compute action, or to a message that is not here."""
        while self.head is not None and not self.waits_for_compute:
            if not self.may_issue:
                self._wake_when_written()
                return
            self._issue()

    @property
    def may_issue(self) -> bool:
        """Whether the next action can be issued without blocking; whoever sees to it notifies."""
        if self.head is None:
            return True
        if self.waits_for_compute:
            return self.startable()
        if self.head.op in (Op.SEND, Op.RECV):
            return not self.waits_for_message
        return not self._may_block or self.startable()

    @property
    def waits_for_message(self) -> bool:
        """Whether the next action is a message that has not come, or cannot be told yet."""
        action = self.head
        if action is None or action.op not in (Op.SEND, Op.RECV):
            return False
        if action.op is Op.SEND:  # that the host has what was stepped is told when it does
            return Part.PARAM in action.parts and not all(e.done for e in self._written.values())
        assert self.mail is not None
        return not self.mail.has(action)

    def _wake_when_written(self) -> None:
        if self.head is not None and self.head.op is Op.SEND:
            self._wake_after(self._written.values())

    def _wake_after(self, events: Iterable[Event]) -> None:
        """Have the host's thread wait, and wake the device: a copy of CUDA tells nobody."""
        if self._may_block and (self._waker is None or self._waker.done):
            left = [event for event in events if not event.done]
            self._waker = self._lane.host.submit(_nothing, left) if left else None

    def issue_compute(self) -> None:
        """Run the next compute action; the trial's random streams are in place."""
        self._issue()

    @property
    def settled(self) -> bool:
        """Whether ``drain`` would wait for nothing. On CUDA it is true: nobody says when."""
        if not self._may_block:
            self._prune()
        return self._may_block or not self._in_flight

    @property
    def is_quiet(self) -> bool:
        """The same on CUDA too, for who may not be told of what failed: that ``drain`` raises."""
        return all(event.done for event, _ in self._in_flight)

    def wake_when_quiet(self) -> None:
        """Have the device woken then, where nothing else does that."""
        self._wake_after(event for event, _ in self._in_flight)

    def drain(self) -> None:
        """Wait for everything in flight; raise the first error."""
        for event, _ in self._in_flight:
            event.wait()
        self.device.synchronize()
        self._in_flight.clear()

    def close(self) -> None:
        """End the streams and give the memory back; steps on the host that wait are left out."""
        self._closing.set()
        self.device.host_turns.let_go()
        self.device.synchronize()
        self._lane.close()
        self.copies.close()
        if self.ledger is not None:
            self.session.region.rest()
            self.ledger.release(self._owner)

    # -- issuing ----------------------------------------------------------------------

    def _needs(self) -> list[Event]:
        """The events the next action must come after."""
        run, action = self._run, self.head
        assert run is not None
        assert action is not None
        score, events = run.score, run.events
        if not (score.waits or self._stores_left or self._loads or self._advanced):
            return []
        needs = [events[i] for i in score.slots.waits[run.cursor] if i in events]
        if action.op in (Op.F, Op.B):
            needs += self._stores_left
        if score.computes[run.cursor]:
            needs += self._loads.get(action.shard, ())
            if action.op is Op.STEP and self._advanced is not None:
                needs.append(self._advanced)
        elif (part := lone_part(action)) is not None:
            key = part, action.shard, action.micro
            needs += [self._away[key]] if action.op is Op.LOAD else []
        elif action.op is Op.LOAD:
            needs += self._needs_of_load(run, action)
        return needs

    def _needs_of_load(self, run: _Run, action: Action) -> list[Event]:
        """The slot's last tenant, of any program, and whoever wrote the host's copy last."""
        slot, shard = run.score.slots.slots[run.cursor], action.shard
        if slot is None or action.late:
            needs = list(self._device_compute)
        else:
            is_first = run.score.slots.is_first[run.cursor]
            needs = list(self._tails.get(slot, self._born)) if is_first else []
        if HOME & set(action.parts):
            owners = {owner for owner, _ in self.session.layout.shards[shard].borrowed}
            needs += [self._written[s] for s in (shard, *owners) if s in self._written]
        if Part.GRAD in action.parts and shard in self._grads_written:
            needs.append(self._grads_written[shard])
        return needs

    @property
    def _device_compute(self) -> list[Event]:
        """What runs on the device's compute stream, whose memory the allocator may give anew."""
        so_far = self.device.so_far()
        return self._last_compute if so_far is None else [so_far]

    @property
    def _may_block(self) -> bool:
        """Whether submitting a copy waits for host work in the calling thread, as on CUDA."""
        return self.device.spec.kind == "cuda"

    def _issue(self) -> None:
        run, action = self._run, self.head
        assert run is not None
        assert action is not None
        after = self._needs()
        if self._in_flight:
            self._prune()
        event = self._dispatch(run, action, after)
        if self._may_block and run.score.computes[run.cursor]:
            self._release(after)
        if action.op in (Op.F, Op.B):
            self._stores_left = []
        if event is not None:
            run.events[run.cursor] = event
        run.cursor += 1
        if run.cursor == len(run.score.actions):
            self._settle_tails(run)

    def _dispatch(self, run: _Run, action: Action, after: list[Event]) -> Event | None:
        if run.score.computes[run.cursor]:
            return self._run_compute(run.task, action, after)
        if (part := lone_part(action)) is not None:
            return self._move_lone(run.task, action, part, after)
        if action.op in (Op.SEND, Op.RECV):
            assert self.mail is not None
            self.mail.pass_on(run.task, action)
            return None
        slot = run.score.slots.slots[run.cursor]
        if action.op is Op.LOAD:
            if slot is not None and not action.late and run.score.slots.is_first[run.cursor]:
                self._tails.pop(slot, None)
            return self._load(action, slot, after)
        if action.op is Op.STORE:
            return self._store(action)
        if action.op is Op.DROP:
            self._drop(action)
            return None
        return self._host_step(action)

    def _settle_tails(self, run: _Run) -> None:
        """Remember, per slot, what the next program's first LOAD into it waits for."""
        for slot, indices in enumerate(run.score.slots.tails):
            self._tails[slot] = [run.events[i] for i in indices if i in run.events]
        self.copies.end_program()
        self._stores_left = [run.events[i] for i in run.score.slots.stores_left]

    def _submit(
        self,
        stream: str,
        work: Callable[[], None],
        after: list[Event],
        sources: Sequence[Tensor] = (),
        size: int | None = None,
    ) -> Event:
        """Submit to a lane's stream; ``sources`` stay alive until it is done."""
        event: Event = getattr(self._lane, stream).submit(work, after)
        self._in_flight.append((event, sources))
        way = "up" if stream == "activations" else stream  # the link that it takes
        self._note(way, event, sum(s.nbytes for s in sources) if size is None else size)
        return event

    def _note(self, stream: str, event: Event, size: int = 0) -> None:
        run = self._run
        assert run is not None
        step = run.task.step or self.session.step + 1
        text = run.score.texts[run.cursor]
        self._record(Issued(stream, text, event, size, step, self.trial))

    def _release(self, after: list[Event]) -> None:
        """Let go of what copies read that the compute stream comes after from now on.

        On CUDA this thread runs ahead of the device, so a copy may not be done; but who is given
        its memory next writes it behind the compute stream's wait.
        """
        waited = {id(event) for event in after}
        self._in_flight = [
            (event, () if id(event) in waited else sources) for event, sources in self._in_flight
        ]

    def _prune(self) -> None:
        """Let go of what finished copies kept alive; raise if one failed."""
        kept = []
        for event, tensors in self._in_flight:
            if not event.done:
                kept.append((event, tensors))
            elif event.error is not None:
                event.wait()
        self._in_flight = kept

    # -- copies -----------------------------------------------------------------------

    def _load(self, action: Action, slot: int | None, after: list[Event]) -> Event:
        copies, fresh = self.copies.load(action, slot)
        work = copying(self.device, copies, "up", fresh, upload=self._upload())
        event = self._submit("up", work, after, [source for _, source in copies])
        self._loads.setdefault(action.shard, []).append(event)
        return event

    def _store(self, action: Action) -> Event:
        event = self._send_down(self.copies.store(action))
        if HOME & set(action.parts):
            self._written[action.shard] = event
        if Part.GRAD in action.parts:
            self._grads_written[action.shard] = event
        return event

    def _move_lone(
        self, task: Task, action: Action, part: Part, after: list[Event]
    ) -> Event | None:
        """A shard's input, or what it saved, leaves for the host, or is back for its backward."""
        micro, is_saved = task.micros[action.micro or 0], part is Part.SAVED
        key = part, action.shard, action.micro
        if action.op is Op.DROP:
            drop = self.copies.drop_saved if is_saved else self.copies.drop_boundary
            drop(action, micro)
            return None
        if action.op is Op.STORE:
            store = self.copies.store_saved if is_saved else self.copies.store_boundary
            self._away[key] = event = self._send_down(store(action, micro))
            return event
        # What comes back is counted where the forward's allocations were: a backward frees it.
        counted = self._saved.get(key[1:]) if is_saved else None
        with counted or contextlib.nullcontext():
            load = self.copies.load_saved if is_saved else self.copies.load_boundary
            copies = load(action, micro)
        del self._away[key]
        size = sum(source.nbytes for _, source in copies)
        work = copying(self.device, copies, "up", upload=self._upload(), passes=True)
        event = self._submit("activations", work, after + self._device_compute, size=size)
        self._loads.setdefault(action.shard, []).append(event)
        return event

    def _upload(self) -> Upload:
        """The next one: among those of other trials, and among its own in order of the list."""
        self._uploads += 1
        return Upload(self.trial, self._uploads)

    def _send_down(self, copies: list[Copy]) -> Event:
        work = copying(self.device, copies, "down")
        return self._submit("down", work, self._last_compute, [source for _, source in copies])

    def _drop(self, action: Action) -> None:
        self.copies.drop(action)
        if Part.PARAM in action.parts:
            self._loads.pop(action.shard, None)

    # -- compute ----------------------------------------------------------------------

    def _run_compute(self, task: Task, action: Action, after: list[Event]) -> Event:
        self.compute.begin(task, action)
        unit = self.compute.works[action.op]
        if self._is_counted(task):
            unit = functools.partial(self._counted, unit)
        work = functools.partial(unit, task, action)
        event = self.device.compute(work, after, seconds=self._seconds(action))
        self._last_compute = [event]
        self._loads.pop(action.shard, None)  # all that computes from now on comes after them
        self._note("compute", event)
        if event.error is not None:
            raise event.error
        if action.op is Op.SYNC:
            self._synced = event
        return event

    def _seconds(self, action: Action) -> float | None:
        """How long an action shall take where the device is emulated."""
        return emulated_seconds(action, self.session.job.shards[action.shard], self._profile)

    def _is_counted(self, task: Task) -> bool:
        """Whether allocations are counted: in chosen steps, and in a lease's first evaluation.

        Where a batch is larger than any before, to the end of its step or of its evaluation.
        """
        if not self.counts or task.is_counted or self.compute.grew:
            return self.counts
        return not self._has_evaluated if task.kind == "evaluation" else self.track

    def _counted(self, unit: Work, task: Task, action: Action) -> None:
        """Run a unit and count every byte it allocates against the budget."""
        self.compute.grew, task.is_counted = False, True
        if task.kind == "evaluation":
            self._has_evaluated = True
        else:
            self.track = True
        before = self.resident_bytes()
        saves = Part.SAVED in action.parts
        # A backward frees what its forward saved while it goes on, so one tracker counts both.
        tracker = self._saved.pop((action.shard, action.micro), None)
        tracker = tracker or AllocationTracker(as_alone=self.session.job.array is None)
        tracker.restart_peak()
        start = tracker.current_bytes
        with tracker:
            unit(task, action)
        if saves and action.op is Op.F:
            self._saved[action.shard, action.micro] = tracker
        more = tracker.peak_bytes - start
        self.peak_bytes = max(self.peak_bytes, before + more)
        on_top = before + more - self.session.job.held_bytes
        if on_top > self.unit_bytes:
            unplanned = max(0, before - self.session.job.held_bytes)  # batches are held too
            peak, scratch = Bytes(more + unplanned), Bytes(tracker.scratch_bytes)
            self._outgrow(task, action, Bytes(on_top), peak, scratch)

    def _outgrow(
        self, task: Task, action: Action, on_top: Bytes, peak: Bytes, scratch: Bytes
    ) -> None:
        """A unit needed more than was measured: reserve it from now on, or fail the trial.

        ``on_top`` is what it needed on top of what the trial holds at most, ``peak`` what it
        allocated, ``scratch`` of it inside a kernel.
        """
        left = peak - (on_top - self.unit_bytes)
        self.unit_bytes = on_top
        try:
            self.reserve_units()
        except CapacityError as error:
            what, device = f"{action} of trial {self.trial}", self.device.spec.name
            found = CapacityError(
                outgrown(what, device, peak, Bytes(left), error, scratch=scratch)
            )
            found.growth = growth_of(
                self.session.job,
                action,
                peak,
                self.copies.region.nbytes,
                evaluates=task.kind == "evaluation",
            )
            raise found from None

    def resident_bytes(self) -> Bytes:
        """What this seat holds on the device now, between units."""
        task = self._run.task if self._run else None
        held = self.copies.region.nbytes + sum(b.nbytes for b in self.session.model.buffers())
        elsewhere = {
            self.copies.region.untyped_storage().data_ptr(),  # counted already
            self.session.region.bytes.untyped_storage().data_ptr(),  # the host's
        }
        shards = range(len(self.session.layout.shards))
        tensors = [g for shard in shards for g in self.compute.grads_of(shard).values()]
        tensors += [t for event, sent in self._in_flight if not event.done for t in sent]
        tensors += self.copies.own_memory()
        micros = task.micros.values() if task else ()
        tensors += [tensor for micro in micros for tensor in micro.tensors()]
        storages = [storage for tensor in tensors for storage in storages_of(tensor)]
        storages += [storage for saved in self._saved.values() for storage in saved.alive()]
        found = {s.data_ptr(): s.nbytes() for s in storages}
        found |= read_bytes([tensor for micro in micros for tensor in tensors_of(micro.batch)])
        return Bytes(held + sum(size for key, size in found.items() if key not in elsewhere))

    def _host_step(self, action: Action) -> Event:
        shard = action.shard
        after = [self._grads_written[shard]] + ([self._synced] if self._synced else [])
        seconds, device = self._seconds(action), self.device
        pieces = [
            Piece(functools.partial(self._step_piece, work), seconds and seconds * share)
            for work, share in self.compute.host_step(shard)
        ]
        is_off = self._closing.is_set  # then nobody reads what is still to be stepped
        turn = Turn(device.host_turns, device.host_turns.claim(self.trial), is_off)
        event: Event = self._lane.host.submit_pieces(pieces, after, turn=turn)
        self._in_flight.append((event, ()))
        self._note("host", event)
        self._written[shard] = event
        return event

    def _step_piece(self, step: Callable[[], None]) -> None:
        """On the host's thread."""
        self.note_host(self.trial)
        try:
            step()
        finally:
            self.note_host(-1)

    def end_step(self) -> None:
        """What follows a step's last action: the schedule, and the next step's clean slate."""
        self._synced = None
        self._saved.clear()
        self.compute.end_step()
        if not steps_on_host((session := self.session).job.technique):
            return session.advance_schedule()
        self._advanced = self._lane.host.submit(session.advance_schedule)
        self._in_flight.append((self._advanced, ()))
        by_evaluations = session.recipe.schedule_interval == "evaluation"  # so on one device
        if by_evaluations and getattr(session, "valid_feed", None) is None:
            self.drain()  # schedules go on behind an evaluation, which is of nothing here


def _nothing() -> None:
    """Work that is over when what it waits for is."""
