"""An array's place on a device: several trials of one shape, stepped as one.

Each trial has its own lease, session, host region and generations, as it has without an array.
What it shares is the pass: between two steps the trials that are here bring their batches, and
one step is done for all of them (``shoal.fusion``). Parameters and buffers live in the array's
rows meanwhile, the optimizer's state beside them; those of a spilled array (``spilled``) move
shard by shard.

[Note: a round]
Every trial's own loop (``Session.tasks``) says what it wants next, inside its random streams.

    some want to evaluate    one batch of each is evaluated; the others wait for them
    all want a step          one step of all of them
    a lease is over          the trial leaves its slot, the others keep their bits

Trials come and go at any step. Since a slot's bits depend on the slot and the width alone, it does
not matter who else is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shoal.core.arraykeys import has_one_base, looped_in, stacks_all
from shoal.core.errors import CapacityError
from shoal.core.plan import ArrayPlace, Job
from shoal.core.technique import Spilled
from shoal.core.units import Bytes
from shoal.data.sources import batch_bytes
from shoal.device import Device
from shoal.fusion import Array, Member
from shoal.fusion.batches import layout_of
from shoal.fusion.crew import ArrayBackend
from shoal.fusion.declined import FROZEN, Declined
from shoal.fusion.rows.stacked import Stacked, is_of_base
from shoal.memory.ledger import Ledger
from shoal.partition.track import AllocationTracker
from shoal.program.ir import Op
from shoal.recipes.habits import trained
from shoal.recipes.recipe import read_data, tensors_of, to_device
from shoal.recipes.several import entries_of
from shoal.rng import capture_rng, restore_rng
from shoal.runtime.arrays.blame import Blame
from shoal.runtime.arrays.onebase import require_untouched
from shoal.runtime.arrays.spilled import SpilledArray
from shoal.runtime.measuring.firstbatches import first_batch
from shoal.runtime.placing.binding import is_stored
from shoal.runtime.placing.outgrown import outgrown
from shoal.runtime.placing.placed import place_on_host
from shoal.runtime.saving import checkpoint
from shoal.runtime.score import is_sampled
from shoal.runtime.session import Session
from shoal.runtime.task import Issued, Task
from shoal.runtime.wire.messages import LeaseOver


@dataclass(slots=True, eq=False)
class Seated:
    """A trial in its slot, and how far its current lease is."""

    session: Session
    slot: int
    tasks: Iterator[Task]
    task: Task | None = None  # to be done
    last: Task | None = None  # the one before
    is_inside: bool = False  # whether the process's random streams are the trial's
    leaving: bool = False  # its tasks are through
    is_seen_out: bool = False  # the others have waited for it to go
    is_out: bool = False  # its slot is empty again
    over: LeaseOver | None = None  # it is out of the array and in its region; what to say of it

    @property
    def trial(self) -> int:
        return self.session.job.trial


STEP_BATCHES = 3
"""Batches to evaluate that take about as long as one to train on."""

Guard = Callable[[int, Callable[[], None]], None]
"""Runs a trial's own code; what it raises ends that trial and no other."""


class ArraySeat:
    """The trials of one group that are on a device, and the array that they share.

    Args:
        job: Of any of them: bytes and place.
        backend: Runs the passes, unless the array is spilled.
        ledger: The device's; what the array holds is reserved there for the seat's life.
        guard: See ``Guard``; it calls ``dismiss`` for a trial that failed.
        fail: Called with a trial whose part of a step failed, and why.
        record: Called with what was computed, for the timeline.
        room: Called when a step needs more than ``unit_bytes``; raises CapacityError if there is
            no room for that.

    Attributes:
        seated: Who is here, by trial.
        peak_bytes: The most that the array held on the device in a step that was counted.
        blame: Whose batches the last pass was over, if it failed.
        share_s: Each trial's part of the device's seconds in the last step.
    """

    def __init__(
        self,
        job: Job,
        backend: ArrayBackend,
        device: Device,
        ledger: Ledger,
        *,
        guard: Guard,
        fail: Callable[[int, BaseException], None],
        record: Callable[[Issued], None],
        room: Callable[[], None],
    ) -> None:
        assert job.array is not None
        self.place: ArrayPlace = job.array
        self.backend = backend
        self.held_bytes, self.unit_bytes = job.held_bytes, job.unit_bytes
        self._device, self._ledger = device, ledger
        self._guard, self._fail, self._record, self._room = guard, fail, record, room
        self._owner = f"array {self.place.group}"
        self._spills = isinstance(job.technique, Spilled)
        if not self._spills:  # else its seat does
            ledger.reserve(self._owner, job.held_bytes)
        self._array: Array | SpilledArray | None = None
        self.seated: dict[int, Seated] = {}
        self.peak_bytes = 0
        self._track = False  # count what the next step allocates
        self._largest: dict[str, int] = {}  # bytes of all slots' batches
        self._has_evaluated = False
        self.blame = Blame()
        self._held = 0  # steps for which an evaluation has been waiting
        self._began = time.perf_counter()
        self.share_s = 0.0

    # -- who is here ------------------------------------------------------------------

    @property
    def number(self) -> int:
        """A trial that stands for the array where one of several jobs is chosen."""
        return min(self.seated)

    @property
    def active(self) -> list[Seated]:
        """Those that train, in the order of slots."""
        here = [seated for seated in self.seated.values() if not seated.leaving]
        return sorted(here, key=lambda seated: seated.slot)

    @property
    def leaving(self) -> list[Seated]:
        """Those whose lease is over."""
        return [seated for seated in self.seated.values() if seated.leaving]

    def admit(self, session: Session) -> Seated:
        """Take a trial up whose state is in its host region.

        Raises:
            Declined: it has another signature than those that are here, or than it was made with:
                the first one that comes must not decide for the others.
        """
        assert session.job.array is not None
        if trained(session.model) != session.trains:
            raise Declined(FROZEN)
        slot = session.job.array.slot
        if not self._spills:
            _bring(session)
        varies = stacks_all(session.job.numerics)
        member = Member(
            recipe=session.recipe,
            hp=session.hp,
            module=session.model,
            optimizer=session.optimizer,
            schedule=session.schedule,
            rng=session.rng,
            step=session.step,
            modes=session.modes if session.recipe.step else None,
            usual=_usual_layout(session, self._device.torch_device) if varies else None,
        )
        self._place(slot, session, member)
        seated = Seated(session, slot, session.tasks())
        self.seated[session.job.trial] = seated
        self._began = time.perf_counter()
        return seated

    def _place(self, slot: int, session: Session, member: Member) -> None:
        """Into the array, which the first one makes."""
        where = self._device.torch_device
        if self._spills:
            if self._array is None:
                self._array = SpilledArray(
                    session,
                    self._device,
                    self._ledger,
                    usual=_usual_layout(session, where),
                    record=self._record,
                    room=self._take_room,
                )
            assert isinstance(self._array, SpilledArray)
            self._array.admit(slot, session, member)
        elif self._array is None:
            varies = stacks_all(session.job.numerics)
            array = Array(
                [member],
                device=where,
                backend=self.backend,
                usual=None if varies else _usual_layout(session, where),
                any_layout=varies,
                one_base=has_one_base(session.job.numerics),
                looped=looped_in(session.job.numerics),
                stacking=partial(Stacked, device=where),
                seat=(slot, self.place.width),
            )
            self._array = array
        else:
            assert isinstance(self._array, Array)
            self._array.refill(slot, member)

    def _take_room(self) -> None:
        """A unit of a spilled array needs more than was planned."""
        assert isinstance(self._array, SpilledArray)
        self.unit_bytes = self._array.seat.unit_bytes
        self._room()

    def dismiss(self, trial: int) -> None:
        """Take a trial out at once, whatever it is at; nothing of it is kept."""
        seated = self.seated.pop(trial)
        if not seated.is_out:
            self._retire(seated, whole=False)
        seated.tasks = iter(())
        seated.session.leave()
        seated.session.region.rest()

    def bring_out(self, seated: Seated) -> None:
        """Take a trial whose lease is over out of the array; all of it is in its region then."""
        session = seated.session
        member = self._retire(seated)
        session.rng = member.rng
        if not self._spills:
            _write_back(session)
            session.rest()

    def _retire(self, seated: Seated, *, whole: bool = True) -> Member:
        seated.is_out = True
        assert self._array is not None
        return self._array.retire(seated.slot, whole=whole)

    def take(self, seated: Seated) -> checkpoint.Content:
        """The state of a trial that trains on, at a step boundary."""
        session = seated.session
        slot = seated.slot
        drawn = self._members.drawn_until_now([slot])[slot]
        session.rng = capture_rng(session.device) if seated.is_inside else drawn
        if isinstance(self._array, SpilledArray):
            self._array.save(slot)
        else:
            _write_back(session)
        return checkpoint.content(session, copy=False)

    def close(self) -> None:
        """Give the memory back; nobody is here any more."""
        if isinstance(self._array, SpilledArray):
            self._array.close()
        self._array = None
        if not self._spills:
            self._ledger.release(self._owner)

    @property
    def _members(self) -> Array:
        """Who is in which slot, and their random streams."""
        assert self._array is not None
        return self._array.array if isinstance(self._array, SpilledArray) else self._array

    # -- a round ----------------------------------------------------------------------

    def round(self) -> None:
        """Have all that are here do one step, or those that want to evaluate one batch."""
        for seated in self.active:
            if seated.task is None:
                self._guard(seated.trial, lambda seated=seated: self._next(seated))  # type: ignore[misc]
        if self._spills and self._lets_go():
            return
        ready = [seated for seated in self.active if seated.task is not None]
        evaluating = [s for s in ready if s.task is not None and s.task.kind == "evaluation"]
        training = [s for s in ready if s not in evaluating]
        if not evaluating:
            self._held = 0
        if evaluating and not self._is_held(evaluating, training):
            self._evaluate(evaluating)
        elif training:
            self._held += bool(evaluating)
            self._train(training)

    def _lets_go(self) -> bool:
        """Whether trials leave first: of a step that fails in shards their rows may not be whole.

        Once each, since one may have to wait until it is written.
        """
        going = [s for s in self.leaving if not (s.is_out or s.is_seen_out)]
        for seated in going:
            seated.is_seen_out = True
        return bool(going)

    def _is_held(self, evaluating: Sequence[Seated], training: Sequence[Seated]) -> bool:
        """Whether those that want to be evaluated wait until others are as far.

        An evaluation takes as long for one as for all, and those that came a few steps later have
        these steps to do anyway. Nobody waits for more steps than an evaluation is worth, or where
        one is done after the other.
        """
        if not self._evaluates_as_one(evaluating):
            return False
        feeds = [seated.session.valid_feed for seated in evaluating]
        batches = min((feed.num_batches or 1 for feed in feeds if feed is not None), default=1)
        most = max(1, batches // STEP_BATCHES)
        if self._held >= most:
            return False
        left = [seated.session.steps_to_evaluation for seated in training]
        return any(steps is not None and steps < most for steps in left)

    def _evaluates_as_one(self, evaluating: Sequence[Seated]) -> bool:
        if isinstance(self._array, SpilledArray):
            return True
        tasks = [seated.task for seated in evaluating]
        return self._members.evaluates_as_one([task.batches[0] for task in tasks if task])

    def _next(self, seated: Seated) -> None:
        last = seated.last
        if last is not None and seated.session.draws_nothing_before(last):
            seated.task = next(seated.tasks, None)
        else:
            with self._streams(seated):
                seated.is_inside = True
                seated.task = next(seated.tasks, None)
            seated.is_inside = False
        seated.last, seated.leaving = seated.task, seated.task is None
        if seated.task is not None and seated.task.kind == "evaluation":
            self._has_evaluated = True  # its model is in that mode, also while it is held

    def _streams(self, seated: Seated) -> Any:
        return self._members.streams(seated.slot, puts_back=False)

    def _train(self, ready: Sequence[Seated]) -> None:
        array = self._array
        assert array is not None
        if self._has_evaluated:
            self._members.set_training(True)
            self._has_evaluated = False
        lost: dict[int, BaseException] = {}  # whose later batches could not be read
        rows = self._fetch(ready, lost)
        with self.blame.over(rows[0]):
            stepped = self._counted(lambda: array.step(*rows), rows, "training", ready)
        now = time.perf_counter()
        self.share_s, self._began = (now - self._began) / len(ready), now
        for seated in ready:
            failure = lost.get(seated.slot) or stepped.failures.get(seated.slot)
            if failure is not None:
                self._fail(seated.trial, failure)
            else:
                seated.session.begin_losses()
                seated.session.losses.add(stepped.losses[seated.slot])
                seated.session.tally.add(stepped.named.get(seated.slot, {}))
                seated.task = None

    def _fetch(self, ready: Sequence[Seated], lost: dict[int, BaseException]) -> list[Any]:
        """For each micro-batch the batches by slot, None where there is none.

        Those after the first are functions, which read them when their pass is due, since data
        and training draw random numbers in turn.
        """
        first: list[Any] = [None] * self.place.width
        counts: dict[int, int] = {}
        for seated in ready:
            assert seated.task is not None
            first[seated.slot] = seated.task.batches.pop(0)
            counts[seated.slot] = _micro_batches(seated.task)

        def later(index: int) -> list[Any]:
            row: list[Any] = [None] * self.place.width
            for seated in ready:
                slot, task = seated.slot, seated.task
                if index < counts[slot] and slot not in lost and task is not None:
                    read = partial(self._read, seated, task, index, row, lost)
                    self._guard(seated.trial, read)
            return row

        return [first, *(partial(later, index) for index in range(1, max(counts.values())))]

    def _read(
        self,
        seated: Seated,
        task: Task,
        index: int,
        row: list[Any],
        lost: dict[int, BaseException],
    ) -> None:
        """One of a step's later batches; nobody leaves the array in the middle of a step."""
        try:
            with self._streams(seated):
                row[seated.slot] = seated.session.fetch(task, index)
            self.blame.note(seated.slot, row[seated.slot])
        except (Exception, SystemExit) as error:
            lost[seated.slot] = error

    def _evaluate(self, evaluating: Sequence[Seated]) -> None:
        array = self._array
        assert array is not None
        self._members.set_training(False)
        self._has_evaluated = True
        batches: list[Any] = [None] * self.place.width
        for seated in evaluating:
            assert seated.task is not None
            batches[seated.slot] = seated.task.batches[0]
        before = self._members.drawn_until_now(seated.slot for seated in evaluating)
        try:
            with self.blame.over(batches):
                found = self._counted(
                    lambda: array.evaluate(batches), [batches], "evaluation", evaluating
                )
            self._take_metrics(evaluating, found)
        except CapacityError:
            raise
        except (Exception, SystemExit):
            self._members.draw_again(before)
            for seated in evaluating:  # whose it was ends that trial alone
                self._guard(
                    seated.trial,
                    lambda seated=seated: self._evaluate_one(seated, batches),  # type: ignore[misc]
                )

    def _evaluate_one(self, seated: Seated, batches: Sequence[Any]) -> None:
        array, slot = self._array, seated.slot
        assert array is not None
        mine = [batch if at == slot else None for at, batch in enumerate(batches)]
        before = self._members.drawn_until_now([slot])
        try:
            found = array.evaluate(mine)
        except (Exception, SystemExit):  # maybe of a row that takes no part
            if not isinstance(array, Array):
                raise
            array.draw_again(before)
            found = [None] * self.place.width
            found[slot] = array.evaluate_by_itself(slot, batches[slot])
        self._take_metrics([seated], found)

    def _take_metrics(
        self, evaluating: Sequence[Seated], found: Sequence[dict[str, float] | None]
    ) -> None:
        for seated in evaluating:
            assert seated.task is not None
            seated.task.metrics = found[seated.slot] or {}
            seated.task = None

    # -- what is told -----------------------------------------------------------------

    def count_after(self, step: int) -> None:
        """Have what the next step allocates counted, if it is time: steps are slower then."""
        self._track = self._track or is_sampled(step)

    def _counted(
        self,
        work: Callable[[], Any],
        rows: Sequence[Sequence[Any]],
        what: str,
        some: Sequence[Seated],
    ) -> Any:
        """Run a pass; now and then, and when batches are larger than ever, count its bytes.

        Not of compiled code, whose allocations nothing sees: they are taken for the eager pass's.
        """
        if self.place.kind == "compiled":
            return self._computed(work, what, some)
        if isinstance(self._array, SpilledArray):
            return self._counted_by_units(work, self._array, what)
        there = [row for row in rows if not callable(row)]  # of the same layout, mostly
        size = sum(batch_bytes(t) for batches in there for t in tensors_of(list(batches)))
        grew = size > self._largest.get(what, 0)
        self._largest[what] = max(size, self._largest.get(what, 0))
        trains = what == "training"
        if not (grew or (self._track and trains)):
            return self._computed(work, what, some)
        self._track = self._track and not trains  # it is the next step that is sampled
        with AllocationTracker() as tracker:
            result = self._computed(work, what, some)
        more = tracker.peak_bytes - self._state_among(tracker)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + more)
        if more > self.unit_bytes:
            reserved, self.unit_bytes = Bytes(self.unit_bytes), Bytes(more)
            try:
                self._room()
            except CapacityError as error:
                kind, device = "a step" if trains else "an evaluation", self._device.spec.name
                whose = f"{kind} of an array of {len(some)}"
                words = outgrown(whose, device, self.unit_bytes, reserved, error)
                raise CapacityError(words) from None
        return result

    def _counted_by_units(self, work: Callable[[], Any], array: SpilledArray, what: str) -> Any:
        """Run the programs of a spilled array, whose seat counts each unit."""
        seat, trains = array.seat, what == "training"
        if trains:
            seat.track, self._track = seat.track or self._track, False
        result = work()
        if trains and seat.track:
            self.peak_bytes = max(self.peak_bytes, seat.peak_bytes)
            seat.track = False
        self.unit_bytes = max(self.unit_bytes, seat.unit_bytes)
        return result

    def _computed(self, work: Callable[[], Any], what: str, some: Sequence[Seated]) -> Any:
        """Run a pass on the device's compute stream; one bar in the timeline, of the first."""
        results: list[Any] = []
        event = self._device.compute(lambda: results.append(work()), [])
        if event.error is not None:
            raise event.error
        session = some[0].session
        text = "B s0" if what == "training" else "F s0"
        self._record(Issued("compute", text, event, 0, session.step + 1, session.job.trial))
        return results[0]

    def _state_among(self, tracker: AllocationTracker) -> int:
        """Bytes of optimizer state that a first step made: they are held from then on."""
        storages = {storage.data_ptr(): storage.nbytes() for storage in tracker.alive()}
        state = {
            value.untyped_storage().data_ptr()
            for seated in self.seated.values()
            for entry in entries_of(seated.session.optimizer)
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        }
        return sum(size for pointer, size in storages.items() if pointer in state)


def _micro_batches(task: Task) -> int:
    return sum(action.op is Op.B for action in task.program.devices[0])


def _usual_layout(session: Session, device: torch.device) -> Hashable:
    """The layout of the batches that run stacked: of the first one of a source as it was built.

    That batch is part of the signature, so all trials of the group have this layout; but for those
    whose batches vary in length, of which each has its own.
    """
    outer = capture_rng(device)
    restore_rng(session.before_data, device)
    try:
        train, _ = read_data(session.recipe, session.hp)
        return layout_of(to_device(first_batch(train), device))
    finally:
        restore_rng(outer, device)


def _bring(session: Session) -> None:
    """Optimizer state on the device, where buffers are already.

    Parameters stay in the home until they are copied into the array's rows: these are what the
    device has room for.
    """
    host, device = place_on_host(session.region, session.layout, 0), session.device
    for name, parameter in session.binding.params.items():
        parameter.data = host.params[name]
    for name, keys in session.binding.stateful.items():
        state = session.optimizer.state[session.binding.params[name]]
        for key in keys:
            state[key] = host.states[name][key].to(device, copy=True)


def _write_back(session: Session) -> None:
    """Bring the host region up to date; nothing of the trial moves.

    Raises:
        TrialError: weights that the array's trials have once are others than they were.
    """
    host, binding = place_on_host(session.region, session.layout, 0), session.binding
    once = has_one_base(session.job.numerics)
    with torch.no_grad():
        for name, parameter in binding.params.items():
            if once and is_of_base(parameter):
                require_untouched(name, parameter, host.params[name])
                continue
            host.params[name].copy_(parameter)
            state = session.optimizer.state.get(parameter, {})
            made = {key: value for key, value in state.items() if is_stored(value)}
            for key, value in made.items():
                binding.check_place(name, key, value, host.states.get(name, {}))
                host.states[name][key].copy_(value)
            if state:  # of a parameter without dimensions it is numbers, and none is stored
                binding.stateful[name] = set(made)
    session.put_buffers_back()
