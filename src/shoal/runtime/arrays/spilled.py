"""An array whose stacked state does not fit its device: shard by shard, as a spilled trial.

    home of trial 3  --row 0-->  host memory of the array  --LOAD, STORE-->  slots on the device
    home of trial 8  --row 1-->  [N, ...], shard by shard                    [N, ...]

Programs, slots, streams and copies are those of any spilled trial (``interpret.Seat``), for shards
N times as large. Units run for all slots (``units``); every trial steps its own row with
its own optimizer, in shards too. A trial that comes or leaves copies its row between its home and
the array's host memory, which all of the state is in meanwhile.

[Note: many lengths]
Where batches vary in length those of one layout are a micro-batch of the program: shards come for
each, and no more than one is on the device at a time. A step of ``accumulate`` batches does not
know how many that will be before it has read the last one, so each is a program of its own.

[Note: coming and going]
For a trial that comes or leaves all that stays on the device goes home, and is back before the
next program. Whoever comes or goes between two programs shares that with the others: all trials
of an array that begin or end together move it once. One that is saved takes its row from there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.core.arraykeys import has_one_base, looped_in, stacks_all
from shoal.core.technique import Spilled, kept_heads, kept_shards
from shoal.device import Device
from shoal.fusion import Array, Member
from shoal.fusion.array import Stepped, read_now
from shoal.fusion.batches import layout_of
from shoal.fusion.declined import Declined
from shoal.fusion.graphs.constants import RATES
from shoal.fusion.passes.sharded import ShardBackend
from shoal.fusion.rows.stacked import other_base
from shoal.fusion.rows.unplaced import Unplaced
from shoal.memory.layout import arena, as_it_travels, lenders
from shoal.memory.ledger import Ledger
from shoal.memory.stacking import base_of, most_micro_batches, stacked_layout
from shoal.memory.store import same_bits
from shoal.partition.build import build_chain
from shoal.partition.chain import Chain
from shoal.partition.compiled import eagerly
from shoal.partition.discover import NotCuttable
from shoal.partition.transplant import obstacle
from shoal.program.ir import Program
from shoal.recipes.bound import bound
from shoal.recipes.recipe import HP, Recipe, build_model, evaluate_metrics, read_data
from shoal.rng import capture_rng, restore_rng, seed_all
from shoal.runtime.arrays.onebase import require_untouched
from shoal.runtime.arrays.spilledsession import ArrayCompute, Row, StackedSession, row_of
from shoal.runtime.arrays.units import StackedUnits
from shoal.runtime.interpret import Seat
from shoal.runtime.placing.placed import Placed, place_on_host
from shoal.runtime.seats.stay import here
from shoal.runtime.session import Session
from shoal.runtime.task import Issued, Task
from shoal.spill.generate import arrival, departure, route_of

CPU = torch.device("cpu")
UNKNOWN = sys.maxsize
"""Micro-batches of a step, as long as none is the last."""
_Tensors = Mapping[str, torch.Tensor]
_States = Mapping[str, _Tensors]


def chain_for(recipe: Recipe, hp: HP, seed: int, device: torch.device, num_layers: int) -> Chain:
    """The chain of a model of this code, to be used with others of it; none of its own is kept.

    A dropout of 0 hands on what it is given, where others make a tensor: so every one drops some.

    Raises:
        Declined: it has none, or none that runs for all slots.
    """
    before, recipe = capture_rng(device), bound(recipe, hp)
    try:
        seed_all(seed)
        model = build_model(recipe, hp)
        model.train()
        _drop_some(model)
        batch = next(iter(read_data(recipe, hp)[0]))
        with eagerly():
            chain = build_chain(model, recipe, batch, CPU)
    except NotCuttable as error:
        raise Declined(str(error)) from error
    finally:
        restore_rng(before, device)
    if words := obstacle(chain):
        raise Declined(f"the model cannot be cut into shards as an array: {words}")
    if chain.num_layers != num_layers:
        raise Declined(
            f"as an array the model has {chain.num_layers} layers, and the trial that was measured"
            f" has {num_layers}: one hands on between its blocks what another computes."
        )
    model.to("meta")
    return chain.on(device)


def _drop_some(model: nn.Module) -> None:
    for module in model.modules():
        name = RATES.get(type(module))
        if name is not None and getattr(module, name) == 0:
            setattr(module, name, 0.5)


class SpilledArray:
    """Trials in their slots, trained as one, a shard at a time.

    Args:
        first: One of them, which says how the model is cut.
        usual: The layout of batches that run together, unless those of every layout do.
        record: Called with every action that was issued.
        room: Called when a unit needs more than was planned; raises CapacityError.

    Raises:
        CapacityError: the device, or the host, has no room for it.
        Declined: the model cannot be cut, or not for all slots.
    """

    def __init__(
        self,
        first: Session,
        device: Device,
        ledger: Ledger,
        *,
        usual: Hashable,
        record: Callable[[Issued], None],
        room: Callable[[], None],
    ) -> None:
        job, recipe = first.job, first.recipe
        assert job.array is not None
        assert isinstance(job.technique, Spilled)
        self._device, self._where, self._usual = device, device.torch_device, usual
        self._technique, self._width = job.technique, job.array.width
        num_layers = job.shards[-1].layers[1]
        self._any_layout = stacks_all(job.numerics)
        self._chain = chain_for(recipe, first.hp, job.seed, self._where, num_layers)
        self._one_base = has_one_base(job.numerics)
        homes = first.layout.shards if self._one_base else ()
        self._base = frozenset[str]().union(*map(base_of, homes))
        rows = stacked_layout(first.layout, self._width, one_base=self._one_base)
        self._layout = as_it_travels(rows, self._technique, (), sums=False)
        self._ledger, self._record, self._room = ledger, record, room
        self._clip, self._accumulate = recipe.clip_grad_norm is not None, recipe.accumulate
        self._array: Array | None = None
        self._seat: Seat[StackedSession] | None = None
        self._job, self._recipe = job, recipe
        self._broken: BaseException | None = None  # why a program ended in the middle
        self._is_untouched = True  # the base, as far as is known since the last program

    # -- who is here ------------------------------------------------------------------

    def admit(self, slot: int, session: Session, member: Member) -> None:
        """Take a trial up whose state is in its home; its buffers are on the device."""
        if self._array is None:
            self._open(slot, member)
            for empty in range(self._width):  # somebody's weights, where nobody is
                self._fill(empty, session)
            self._fill_base(session)
        else:
            self._require_base(session)
            self._bring_home()
            self._array.refill(slot, member)
        self._take(slot, session)

    def _take(self, slot: int, session: Session) -> None:
        stacked = self._session
        stacked.trials[slot] = session
        stacked.failures.pop(slot, None)
        self._fill(slot, session)

    def _fill(self, slot: int, session: Session) -> None:
        """A slot's rows as a trial's home has them; but the base, which is there."""
        for home, rows in self._rows(session, slot):
            _copy(home.params, self._own(rows.params))
            for name, states in home.states.items():
                _copy(states, rows.states[name])

    def _own(self, params: _Tensors) -> _Tensors:
        """Those that each slot has for itself."""
        return {name: tensor for name, tensor in params.items() if name not in self._base}

    def _bases(self, session: Session) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """What is there once: its name, as the trial's home has it, and as the array has it."""
        for home, row in self._rows(session, 0):
            here = self._base & home.params.keys()
            yield from ((name, home.params[name], row.params[name]) for name in sorted(here))

    def _fill_base(self, session: Session) -> None:
        for _, home, mine in self._bases(session):
            mine.copy_(home)

    def _require_base(self, session: Session) -> None:
        """Raise Declined where a trial's base is another one."""
        for name, home, mine in self._bases(session):
            if not same_bits(home, mine):
                raise Declined(other_base(name))

    def _open(self, slot: int, member: Member) -> None:
        array = Array(
            [member],
            device=self._where,
            backend=ShardBackend(),
            usual=self._usual,
            any_layout=self._any_layout,
            one_base=self._one_base,
            looped=looped_in(self._job.numerics),
            stacking=Unplaced,
        )
        array.widen(slot, self._width)
        stacked = array.crew.stacked
        assert isinstance(stacked, Unplaced)
        if stacked.base != self._base:
            raise Declined("of its frozen weights some are planned as trained")
        session = StackedSession(
            self._job, self._recipe, self._layout, stacked, self._width, self._where
        )
        backend = array.backend
        assert isinstance(backend, ShardBackend)
        session.units = StackedUnits(
            lambda: array.crew,
            backend,
            self._chain,
            [shard.layers for shard in self._job.shards],
            route_of(self._technique, self._job.shards, lenders(self._layout)),
            None if self._any_layout else lambda batch: layout_of(batch) == self._usual,
        )
        most = most_micro_batches(self._accumulate, varies=self._any_layout)
        seat = Seat(
            session,
            self._device,
            self._ledger,
            arena=arena(self._layout, self._technique, clip=self._clip, accumulate=most),
            record=self._record,
            make_compute=ArrayCompute,
        )
        seat.reserve_units = self._room
        self._array, self._seat = array, seat

    def retire(self, slot: int, *, whole: bool = True) -> Member:
        """Take a trial out; its home has all of it then, unless it is not wanted ``whole``."""
        self._bring_home()
        array, stacked = self.array, self._session
        member = array.retire(slot, whole=whole)
        session = stacked.trials[slot]
        try:
            if whole:
                self._put_home(slot)
        finally:
            del stacked.trials[slot]
            stacked.failures.pop(slot, None)
            stacked.binding.forget(slot)
            session.evict_everything()
        return member

    def save(self, slot: int) -> None:
        """Bring a trial's home up to date; it trains on, and what stays on the device is there.

        Raises:
            Exception: its own optimizer or schedule, in the last step.
        """
        if self._broken is None:
            self.seat.drain()
        if kept_heads(self._technique):  # of a shard that is in two places
            self._bring_home()
        self._put_home(slot)
        self._session.trials[slot].binding.unbind()  # its state is that of its home now

    def _put_home(self, slot: int) -> None:
        stacked = self._session
        if self._broken is not None:  # its rows are not whole: it goes back to a generation
            raise self._broken
        if slot in stacked.failures:
            raise stacked.failures[slot]
        session = stacked.trials[slot]
        for shard, (home, rows) in enumerate(self._rows(session, slot)):
            params, states_now = self._current(shard, slot, rows)
            _copy(params, self._own(home.params))
            for name in self._base & home.params.keys() if not self._is_untouched else ():
                require_untouched(name, params[name], home.params[name])
            for name, states in home.states.items():
                _copy(states_now[name], states)
                entry = session.optimizer.state[session.binding.params[name]]
                for key in session.binding.stateful.get(name, ()):
                    entry[key] = states[key]
        self._is_untouched = True  # of all trials, whose homes had it when they came
        session.put_buffers_back()

    def _current(self, shard: int, slot: int, rows: Placed) -> tuple[_Tensors, _States]:
        """A slot's parameters and states of a shard, wherever they are up to date."""
        placed = self.seat.compute.placed.get(shard)
        if placed is None:
            return rows.params, rows.states
        on_device = row_of(placed, slot)
        whole = shard in kept_shards(self._technique)
        return on_device.params, on_device.states if whole else rows.states

    def _rows(self, session: Session, slot: int) -> list[tuple[Any, Any]]:
        """Of each shard what is in the trial's home, and its row in the array's host memory."""
        layout = session.layout
        return [
            (place_on_host(session.region, layout, shard), row_of(self._session.host[shard], slot))
            for shard in range(len(layout.shards))
        ]

    def close(self) -> None:
        """Give all memory back; nobody is here any more."""
        if self._seat is not None:
            with contextlib.suppress(Exception) if self._broken else contextlib.nullcontext():
                self._seat.drain()
            self._seat.close()
        self._seat = self._array = None

    # -- training ---------------------------------------------------------------------

    def step(self, *given: Row | Callable[[], Row]) -> Stepped:
        """One optimizer step of all slots: for each micro-batch the batches by slot.

        Or what reads them, called when the first unit of that micro-batch is to run.
        """
        session = self._session
        if self._any_layout and self._accumulate > 1:
            self._step_by_batch(given)
        else:
            rows = by_layout(read_now(given[0])) or given if self._any_layout else given
            self._begin(rows, len(rows))
            self._run(session.units.step_program(len(rows), self._clip), "step")
        session.stepping()
        session.end_step()
        self.seat.end_step()
        return Stepped(tuple(session.means()), dict(session.failures))

    def _step_by_batch(self, given: Sequence[Row | Callable[[], Row]]) -> None:
        """A step of batches that are read one after another, of any number of layouts each."""
        session = self._session
        self._begin((), UNKNOWN)
        for batches in given:
            for row in by_layout(read_now(batches)):
                self._run(session.units.micro_program(session.add(row)), "micro")
        session.units.require_even(session.failures, range(session.units.num_shards))
        self._run(session.units.finish_program(self._clip), "step")

    def _begin(
        self,
        rows: Sequence[Row | Callable[[], Row]],
        micro_batches: int,
        *,
        alone: bool = False,
    ) -> None:
        """Programs for these batches; the trial of the first slot stands for the array."""
        session = self._session
        self.array.fill_empty_slots()
        session.begin(rows)
        session.units.restart(micro_batches, alone=alone)
        first = session.trials[min(session.trials)]
        session.step, self.seat.trial = first.step, first.job.trial
        self._go()

    def evaluate(self, batches: Sequence[Any]) -> list[dict[str, float] | None]:
        """Loss and metrics of one validation batch per slot, in evaluation mode.

        Those that a whole array evaluates slot by slot, since they are large, so here too.
        """
        found: list[dict[str, float] | None] = [None] * self._width
        large, others = self._large_apart(batches)
        usual = self._usual
        try:
            for mine in by_layout(others):
                self._usual = layout_of(next(batch for batch in mine if batch is not None))
                self._evaluate(mine, found)
        finally:
            self._usual = usual
        if any(batch is not None for batch in large):
            self._evaluate(large, found, alone=True)
        return found

    def _large_apart(self, batches: Sequence[Any]) -> tuple[Row, Row]:
        """The large ones by slot, and the others."""
        is_large = [
            batch is not None and self.array.is_large(slot, layout_of(batch))
            for slot, batch in enumerate(batches)
        ]
        pairs = list(zip(batches, is_large, strict=True))
        return [b if large else None for b, large in pairs], [
            None if large else b for b, large in pairs
        ]

    def _evaluate(
        self, batches: Row, found: list[dict[str, float] | None], *, alone: bool = False
    ) -> None:
        self._begin([batches], 1, alone=alone)
        self._run(self._session.units.evaluation_program(), "evaluation")
        self._measure(batches, found)

    def _measure(self, batches: Sequence[Any], found: list[dict[str, float] | None]) -> None:
        session, array = self._session, self.array
        result = session.found
        for slot, batch in enumerate(batches):
            if batch is None:
                continue
            if slot in session.failures:
                raise session.failures[slot]
            assert result is not None
            recipe, moved = array.member(slot).recipe, session.fetch_one(batch)
            loss, output = result.losses[slot], result.outputs[slot]
            with torch.no_grad(), array.streams(slot):
                found[slot] = evaluate_metrics(recipe, loss, output, moved)

    def _run(self, program: Program, kind: str) -> None:
        """A program, to its last action."""
        if self._broken is not None:
            raise self._broken
        try:
            self._is_untouched = False
            self._play(Task(program, kind))
        except BaseException as error:
            self._broken = error
            raise

    def _play(self, task: Task) -> None:
        seat, device = self.seat, self._device
        seat.start(task)
        while True:
            seen = device.version
            seat.issue_copies()
            if seat.head is None:
                return
            if seat.waits_for_compute and seat.startable():
                seat.issue_compute()
                continue
            with device.progress:
                if device.version == seen:
                    device.progress.wait(timeout=1.0)

    def _bring_home(self) -> None:
        """All of the state is in host memory afterwards, and nothing is under way."""
        if self._broken is not None:  # nobody goes on from what it left: see ``_put_home``
            return
        self.seat.drain()
        stays = here(self._technique)
        if any(stays) and self.seat.compute.placed:
            self._run(departure(*stays), "departure")
            self.seat.drain()

    def _go(self) -> None:
        """What stays on the device is there; it may have been home since the last program."""
        if self._broken is not None or self.seat.compute.placed:
            return
        if any(stays := here(self._technique)):
            self._run(arrival(*stays), "arrival")

    # -- what an array's seat asks ----------------------------------------------------

    @property
    def array(self) -> Array:
        """Who is in which slot, and their random streams."""
        assert self._array is not None
        return self._array

    @property
    def seat(self) -> Seat[StackedSession]:
        """Its place on the device."""
        assert self._seat is not None
        return self._seat

    @property
    def _session(self) -> StackedSession:
        return self.seat.session


def by_layout(batches: Row) -> list[Row]:
    """Those of one layout at a time, in the order of slots, None for all others."""
    layouts = [None if batch is None else layout_of(batch) for batch in batches]
    found = [layout for layout in dict.fromkeys(layouts) if layout is not None]
    pairs = list(zip(batches, layouts, strict=True))
    return [[b if mine == one else None for b, mine in pairs] for one in found]


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])
