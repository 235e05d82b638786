"""What an array of so many trials takes, and one of them alone: built, compared, timed.

On copies, before a trial trains. What is on the device is counted, and an array that has no room
there is found out by that, or is not built at all where its trials' states alone are too much.

[Note: all at once]
Alone on a machine an array has caches and memory to itself that it will share with the arrays of
the other devices. So all workers of a study build the same, and are then told a moment on the
clock that all processes of a machine share, from which on all of them do the same for the same
slices of time, in rounds: a step alone, a step of the array, a validation batch alone, one of the
array. What counts is the median of a worker's rounds, and of the workers the slowest. What others
on the machine take of a slice is not counted ([Note: others' work] in ``slices.py``).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from shoal.core.spec import HyperParameters, PassKind, ShardSpec, TrialSpec
from shoal.core.units import Bytes, Seconds
from shoal.data.sources import batch_bytes
from shoal.device import Device
from shoal.fusion import Array, Declined, Member, backend_of, dry_run
from shoal.fusion.crew import ArrayBackend
from shoal.fusion.dryrun import difference
from shoal.fusion.effects.beside import first_change, first_hold
from shoal.fusion.effects.sideeffects import first_side_effect
from shoal.fusion.graphs.branches import BranchesBackend
from shoal.fusion.graphs.compiled import compiler
from shoal.fusion.graphs.traced import TracedBackend
from shoal.fusion.likeness import copies
from shoal.fusion.matching.oldnorms import old_norm
from shoal.fusion.matching.scripted import scripted
from shoal.fusion.passes.fused import first_line, is_out_of_memory
from shoal.fusion.rows.stacked import Stacked
from shoal.partition.chain import Chain
from shoal.partition.compiled import compiles
from shoal.recipes.recipe import (
    Recipe,
    epoch_length,
    read_data,
    tensors_of,
    to_device,
)
from shoal.runtime.arrays.spilled import chain_for
from shoal.runtime.capture.captured import PROOFS
from shoal.runtime.capture.captures import Captures
from shoal.runtime.capture.cudagraph import REPEATS
from shoal.runtime.measuring.counting import sparse_gradient_of
from shoal.runtime.measuring.crowd import LEARNS, TIMED, Crowd
from shoal.runtime.measuring.firstbatches import FEW_ROWS, first_rows
from shoal.runtime.measuring.lonebench import (
    LoneTrial,
    on_device,
    one_that_can,
    states_on_device,
)
from shoal.runtime.measuring.meter import HOST, Meter, reserved_bytes
from shoal.runtime.measuring.readying import (
    by_code,
    evaluate_array,
    evaluated,
    passes_of,
    settle,
    step_all,
    without_others,
)
from shoal.runtime.measuring.slices import finish, in_slice, waited_s
from shoal.runtime.measuring.stackedmeasure import SlotsRaise, StackedMeasure
from shoal.runtime.wire.messages import (
    ArrayTry,
    MeasureArray,
    MeasureArrayShards,
    MeasuredArrayShards,
    TimeArray,
)

TRIED = 4  # trials that are compared, one step as an array with one step of each alone
COMPARED_S = 1.0  # and the others of an array too, where that takes no longer
LONE_ROUNDS = 5  # of a trial alone that has no room beside the array
MOST_RAISING = 3  # times that batches are passed over of which a trial's code raises
CHANGES = " Keep in buffers of the model what its training changes."
LONG_S = 0.5  # a contender with longer slices is timed in one round


class _Ready(NamedTuple):
    """An array that runs as it will from then on, its batches, and what getting there took."""

    array: Array
    steps: Sequence[Any]  # those that are timed, each by micro-batch and slot
    valid: Sequence[Any]
    build_s: float


class _Probe(NamedTuple):
    """Bytes of an array on its device: of a pass, between steps, at the most.

    ``valid_s``: seconds in which its slots were evaluated, allocations being counted. ``ready``
    where it is there still: not on a GPU, where a trial alone takes its place.
    """

    unit_bytes: Bytes
    held_bytes: int
    peak_bytes: int
    valid_s: float
    ready: _Ready | None


class ArrayBench:
    """The array that is looked at now, and a trial alone beside it; of one shape of trials.

    ``meter`` counts what they hold of the device. Trials that nothing is done with are in host
    memory, and so is what is compared where the device is a CPU.
    """

    def __init__(
        self, recipe: Recipe, device: Device, trials: Sequence[TrialSpec], captures: Captures
    ) -> None:
        self._recipe, self._device, self._where = recipe, device, device.torch_device
        self._captures = captures
        self._first = trials[0]
        self.meter = Meter(self._where, device.spec.for_trials)
        self._crowd = Crowd(recipe, trials, self._where)
        self._declined: str | None = None  # not looked at yet
        self._differs_as_one: str | None = None  # the same
        self._keeps: str | None = None  # the same
        self._alone: LoneTrial | None = None
        self._alone_fits = True
        self._captures_alone = False
        self._works: tuple[Callable[[], Any] | None, ...] = ()
        self._valid_batches = 0

    def is_of(self, trial: TrialSpec) -> bool:
        """Whether these are the trials of the one of that number."""
        return self._first == trial

    def build(self, order: MeasureArray) -> ArrayTry:
        """Compare a few of the trials with themselves alone, and build an array that fits."""
        width, kind = order.width, order.kind
        self._works = ()
        self._captures_alone = order.captures
        self._crowd.trials, self._crowd.varies = order.trials, order.varies
        self._crowd.one_base = order.one_base
        self._crowd.grow(min(TRIED, max(2, width)))
        if self._declined is None:
            self._declined = self._first_look(order)
        if not self._declined and kind != "branches" and self._differs_as_one is None:
            self._differs_as_one = self._dry_run(width)
        if self._declined:
            return ArrayTry(declined=self._declined)
        if kind == "branches" and (words := self._kept_in_python()):
            return ArrayTry(declined=words, is_kind=True)
        if kind != "branches" and self._differs_as_one:
            overlaps = self._where.type != "cpu"  # where slots' own passes may do
            return ArrayTry(declined=self._differs_as_one, is_kind=overlaps, overlaps=overlaps)
        if self._recipe.step is not None and kind != "eager":
            return ArrayTry(declined="a step of one's own is no graph", is_kind=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of schedules of copied optimizers
                return self._built(width, kind) if order.is_whole else self._over()
        except Declined as error:
            return ArrayTry(declined=str(error), is_kind=kind != "eager")
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return self._over()

    def _first_look(self, order: MeasureArray) -> str:
        crowd = self._crowd
        declined = _obstacle(self._recipe, self._device, self._first, crowd.members[0])
        self._alone_fits = order.alone_fits
        batch = crowd.first_batches(1)[0]  # few rows of it where the CPU would be slow
        seen = batch if self._where.type == "cpu" else first_rows(batch, FEW_ROWS)
        declined = declined or first_hold(crowd.members[0]) or first_change(crowd.members[0], seen)
        if not declined:
            try:
                self._place_alone()
            except Declined as error:
                declined = str(error)
        hp = HyperParameters(self._first.hp)
        self._valid_batches = 0 if declined else _count(read_data(self._recipe, hp)[1])
        return declined

    def _dry_run(self, width: int) -> str:
        """Of a few trials, and of all that an array has where that is a matter of a moment."""
        began = time.perf_counter()
        words = self._compared(0, TRIED)
        each_s = (time.perf_counter() - began) / TRIED
        if words or (width - TRIED) * each_s > COMPARED_S:
            return words
        self._crowd.grow(width)
        return self._compared(TRIED, width)

    def _kept_in_python(self) -> str:
        """What a forward keeps there; slots' own passes come from no dry run."""
        if self._keeps is None:
            look = partial(first_side_effect, own_passes=True)
            try:
                self._keeps = self._looked_at(look, 0, 1)
            except Declined as error:
                self._keeps = str(error)
        return self._keeps

    def _compared(self, start: int, stop: int) -> str:
        look = partial(dry_run, one_base=self._crowd.one_base)
        return self._looked_at(look, start, stop)

    def _looked_at(self, look: Callable[..., str], start: int, stop: int) -> str:
        """On the device; in host memory where it has no room, or is a CPU."""
        crowd, where = self._crowd, self._where
        members, batches = crowd.members[start:stop], crowd.alike(stop)[start:]
        if not members:
            return ""
        if where.type != "cpu":
            with suppress(torch.OutOfMemoryError), self.meter.counting():
                placed = on_device(copies(members), where)
                moved = [to_device(b, where) for b in batches]
                return look(placed, moved, device=where)
        return look(members, batches, device=HOST)

    def _place_alone(self) -> None:
        """A trial alone comes to the device, if it has room."""
        crowd = self._crowd
        if self._alone is None and self._alone_fits:
            self._alone = one_that_can(
                crowd.members,
                crowd.batches,
                crowd.valid,
                self.meter,
                several=crowd.groups if crowd.varies else (),
            )
            self._alone_fits = self._alone is not None

    def _built(self, width: int, kind: PassKind) -> ArrayTry:
        self._crowd.grow(width)
        probe = self._probed(width, kind)
        if probe is None:
            return self._over()
        self._place_alone()
        alone_once = self._alone_beside(probe)
        before = reserved_bytes(self._where)
        array, steps, valid, build_s = probe.ready or self._settled(width, kind)[0]
        grew = reserved_bytes(self._where) - before - probe.held_bytes
        backend, where = array.backend, self._where
        has_valid = any(batch is not None for batch in valid)
        if isinstance(backend, TracedBackend) and kind == "traced" and backend.why_eager:
            return ArrayTry(declined=backend.why_eager, is_kind=True)
        if kind == "compiled" and (words := self._differs(width, backend)):
            return ArrayTry(declined=words, is_kind=True)
        work = partial(step_all, array, steps)
        step_s = _seconds(work, where)
        unit, valid_s = probe.unit_bytes, probe.valid_s
        pool = 0 if where.type == "cpu" else max(grew, self._pool_bytes(array, unit))
        if probe.ready is None:  # runs in other ways than what was counted
            its_unit, valid_s = evaluated(array, valid)
            unit = Bytes(max(unit, its_unit))
        refill_s = self._refilled(array, work, step_s)
        step, evaluate = self._works_alone()
        self._works = (
            step,
            work,
            evaluate,
            (lambda: evaluate_array(array, valid)) if has_valid else None,
        )
        return ArrayTry(
            notes=(*array.notes, *by_code(backend)),
            unit_bytes=unit,
            pool_bytes=Bytes(pool),
            overlaps=where.type != "cpu",
            evaluates_each=not array.evaluates_as_one(valid),
            build_s=Seconds(build_s),
            refill_s=Seconds(max(0.0, refill_s)),
            once_s=(alone_once[0], step_s, alone_once[1], valid_s),
            valid_batches=self._valid_batches,
            nodes=getattr(backend, "nodes", 0),
            compiler=compiler() if where.type == "cpu" else "",
            steps=len(steps),
            passes=passes_of(steps) if self._crowd.varies and backend.stacks_gradients else 1.0,
            lengths=self._crowd.lengths(width),
            looped=tuple(array.by_data),
        )

    def _differs(self, width: int, backend: ArrayBackend) -> str:
        """How a step of compiled code differs from the trials'; on a CPU, which alone compiles."""
        members, batches = self._crowd.members[:width], self._crowd.first_batches(width)
        return difference(copies(members), batches, self._where, backend, self._crowd.one_base)

    def _array(self, members: Sequence[Member], backend: ArrayBackend) -> Array:
        """An array on the device, of trials in host memory that become its rows."""
        where = self._where
        return Array(
            states_on_device(members, where),
            device=where,
            backend=backend,
            any_layout=self._crowd.varies,
            one_base=self._crowd.one_base,
            stacking=partial(Stacked, device=where),
        )

    def _copies(self, width: int) -> list[Member]:
        return copies(self._crowd.members[:width])

    def _batches(self, width: int) -> tuple[list[Any], list[Any]]:
        """Of steps by micro-batch and slot, and to evaluate by slot; where their source has them.

        So they go to the device in every step, as they do when it trains.
        """
        crowd = self._crowd
        return crowd.steps(width), crowd.valid[:width]

    # -- a trial alone ----------------------------------------------------------------

    def _works_alone(self) -> tuple[Callable[[], Any] | None, Callable[[], Any] | None]:
        """A step, and a validation batch; None of what is not there."""
        alone = self._alone
        if alone is None:
            return None, None
        return alone.steps, alone.evaluate if alone.valid is not None else None

    def _once_alone(self, times: int = 1) -> tuple[float, float]:
        """Seconds of both, the median of a few; 0 where there is none."""
        works = self._works_alone()
        step, valid = (
            median(_seconds(work, self._where) for _ in range(times)) if work else 0.0
            for work in works
        )
        return step, valid

    def capture_alone(self) -> None:
        """Time the trial alone as it would train: with its passes captured."""
        if self._alone is not None:
            self._alone.capture(self._captures)

    def _alone_beside(self, probe: _Probe) -> tuple[float, float]:
        """Its seconds once; where it has no room beside the array it is gone then."""
        alone = self._alone
        if alone is None:
            return 0.0, 0.0
        most = max(probe.peak_bytes + alone.held_bytes, probe.held_bytes + alone.peak_bytes)
        if most <= self.meter.budget:
            self.meter.peak_bytes = max(self.meter.peak_bytes, most)
            return self._once_alone()
        if self._captures_alone:
            self.capture_alone()
        found = self._once_alone(times=LONE_ROUNDS)
        self._alone = None
        return found

    def _over(self) -> ArrayTry:
        """Of an array that does not fit: what a trial alone takes, if that does."""
        self._place_alone()
        once = self._once_alone()
        step, evaluate = self._works_alone()
        self._works = (step, None, evaluate, None)
        return ArrayTry(
            is_over=True,
            overlaps=self._where.type != "cpu",
            once_s=(once[0], 0.0, once[1], 0.0),
            valid_batches=self._valid_batches,
            steps=TIMED if self._crowd.varies else 1,
        )

    # -- what it takes ----------------------------------------------------------------

    def _probed(self, width: int, kind: PassKind) -> _Probe | None:
        """An array and its first passes, every byte counted; None if the device has no room.

        A trial alone is not on the device meanwhile, whatever is there of it is not counted.
        Compiled code, whose allocations nothing sees, is taken to need what the eager pass does.
        """
        on_host, counted = self._where.type == "cpu", "eager" if kind == "compiled" else kind
        if not on_host:  # there it would take room from the array; it comes back afterwards
            self._alone = None
        steps, valid = self._batches(width) if on_host else ([], [])
        try:
            with self.meter.hold((), tensors_of([steps, valid])), self.meter.counting() as whole:
                ready, unit, valid_s = self._counted(width, counted)
        except torch.OutOfMemoryError:
            return None
        stays = on_host and counted == kind and kind != "branches"  # not captured while counting
        kept = ready if stays else None
        return _Probe(unit, whole.current_bytes, whole.peak_bytes, valid_s, kept)

    def _counted(self, width: int, kind: PassKind) -> tuple[_Ready, Bytes, float]:
        """With what a step or an evaluation allocates, and the evaluation's seconds."""
        ready, unit = self._settled(width, kind)
        valid_unit, valid_s = evaluated(ready.array, ready.valid)
        return ready, Bytes(max(unit, valid_unit)), valid_s

    def _settled(self, width: int, kind: PassKind) -> tuple[_Ready, Bytes]:
        """With what a step allocates."""
        launcher = self._captures.launcher()
        array = self._array(self._copies(width), backend_of(kind, launcher=launcher))
        steps, valid = self._batches(width)
        timed = steps[LEARNS:] if self._crowd.varies else steps
        began = time.perf_counter()
        unit = settle(array, steps[:LEARNS], valid if kind != "eager" else ())
        took_s = time.perf_counter() - began
        if self._crowd.varies:
            unit = max(unit, without_others(array, timed))
        return _Ready(array, timed, valid, took_s), unit

    def _pool_bytes(self, array: Array, unit: Bytes) -> int:
        """What graphs on a GPU keep for themselves, between steps too: of a pass, of each slot's.

        A slot's pass takes what all of them do one after the other, without their gradients.
        """
        if isinstance(array.backend, TracedBackend):
            return unit
        if not isinstance(array.backend, BranchesBackend):
            return 0
        width, blocks = array.width, array.crew.stacked.parameters.values()
        gradients = sum(block.nbytes for block in blocks if block.requires_grad)
        lone_bytes = unit - gradients * (width - 1) // width
        return max(0, width * lone_bytes)

    def _refilled(self, array: Array, work: Callable[[], None], step_s: float) -> float:
        """Seconds that it takes beside steps when a slot gets another trial."""
        steps = 1 + PROOFS if isinstance(array.backend, BranchesBackend) else 1
        steps += REPEATS if array.backend.steps is not None else 0
        began = time.perf_counter()
        member = array.retire(0)
        try:
            array.refill(0, member)
        except Declined as error:
            words = f"a trial that has trained could not join one that begins: {error}{CHANGES}"
            raise Declined(words) from error
        for _ in range(steps):
            work()
        finish(self._where)
        return time.perf_counter() - began - steps * step_s

    # -- in shards --------------------------------------------------------------------

    def shards(self, order: MeasureArrayShards) -> MeasuredArrayShards:
        """An array in shards; why there is none, in words."""
        crowd, trial, width = self._crowd, self._first, order.width
        self._works, self._alone = (), None
        crowd.trials, crowd.one_base, crowd.varies = order.trials, order.one_base, order.varies
        crowd.grow(width)
        began = time.perf_counter()
        try:
            hp = HyperParameters(trial.hp)
            chain = chain_for(self._recipe, hp, trial.seed, self._where, order.num_layers)
            build_s = Seconds(time.perf_counter() - began)
            found, looped, batches = self._shards_of_longest(order, chain)
            lengths = crowd.lengths(width)
            passes = passes_of(crowd.steps(width)) if order.varies else 1.0
            size = Bytes(sum(map(batch_bytes, batches)))
            return MeasuredArrayShards(
                trial.number,
                found,
                build_s=build_s,
                passes=passes,
                lengths=lengths,
                batch_bytes=size,
                looped=looped,
            )
        except Declined as error:
            return MeasuredArrayShards(trial.number, declined=str(error))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            words = first_line(error)
            return MeasuredArrayShards(trial.number, declined=words, is_over=True)

    def _shards_of_longest(
        self, order: MeasureArrayShards, chain: Chain
    ) -> tuple[tuple[ShardSpec, ...], tuple[str, ...], list[Any]]:
        """The shards, what runs slot by slot in them, and the longest batches.

        Without those of which a trial's own code raises.
        """
        crowd, width, tries = self._crowd, order.width, 0
        while True:
            batches, tries = crowd.longest(width), tries + 1
            measure = StackedMeasure(
                crowd.members[:width],
                batches,
                chain,
                self.meter,
                self._clock,
                as_whole=self._where.type == "cpu",
                one_base=order.one_base,
                any_layout=order.varies,
            )
            try:
                return *measure.shards(order.cuts), batches
            except SlotsRaise as error:
                raising = [batches[slot] for slot in error.slots]
                if not crowd.pass_over(raising, width) or tries == MOST_RAISING:
                    raise

    def _clock(self) -> float:
        finish(self._where)
        return time.perf_counter()

    def _waited_s(self) -> float:
        """Of threads that work side by side, as if each had waited as long as the others."""
        is_cpu = self._where.type == "cpu"  # a GPU may work on meanwhile
        return waited_s() / torch.get_num_threads() if is_cpu else 0.0

    def _computed_s(self) -> float:
        """The same of what they computed."""
        is_cpu = self._where.type == "cpu"
        return time.process_time() / torch.get_num_threads() if is_cpu else 0.0

    def time(self, order: TimeArray) -> tuple[tuple[float, ...], ...]:
        """For each round, seconds of each of the four contenders; 0 for one that is left out.

        Or whose own code raises by then: steps on the same batches lead anywhere, and how many
        there are is a matter of how busy the machine is.
        """
        found = []
        until = order.begin
        for at in range(order.rounds):
            row = []
            for work, slice_s in zip(self._works, order.slices_s, strict=True):
                if work is None or not slice_s or (at and slice_s > LONG_S):
                    row.append(0.0)
                    continue
                time.sleep(max(0.0, until - time.monotonic()))
                until = max(until, time.monotonic()) + slice_s
                row.append(self._timed(work, until))
            found.append(tuple(row))
        return tuple(found)

    def _timed(self, work: Callable[[], Any], until: float) -> float:
        """Seconds of one; 0 where it raises. A device that has no room says so."""
        try:
            return in_slice(
                work,
                until,
                settle=partial(finish, self._where),
                waited=self._waited_s,
                computed=self._computed_s,
            )
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            return 0.0


def _obstacle(recipe: Recipe, device: Device, trial: TrialSpec, member: Member) -> str:
    """What keeps any trial of this study from an array; empty if nothing does."""
    if device.spec.profile is not None:
        return "an emulated device has no times for arrays"
    if compiles(member.module):
        return "its model is compiled"
    if words := old_norm(member.module) or scripted(member.module):
        return words
    if name := sparse_gradient_of(member.module):
        return (
            f"the gradient of {name!r} is sparse, which no rows of stacked tensors are; a layer "
            "built with sparse=False has a dense one"
        )
    if recipe.accumulate > 1:
        train, _ = read_data(recipe, HyperParameters(trial.hp))
        if epoch_length(train) is None:
            return "its data does not say how many batches it has, and a step takes several"
    return ""


def _count(valid: Any) -> int:
    """Batches of one evaluation; 1 where the data does not say."""
    if valid is None:
        return 0
    return epoch_length(valid) or 1


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Of doing it once."""
    finish(device)
    began = time.perf_counter()
    work()
    finish(device)
    return max(1e-9, time.perf_counter() - began)
