"""A training step, an evaluation, a visit to the device: each generated as a program.

[Note: what stays and what travels]
The access pattern of training is known: every step goes through the shards forwards and
back again. So what stays on the device is decided here and not when memory runs out, as
Belady's rule would decide it:

    kept shards    never leave the device between steps: nothing of them moves. Evicting
                   what is used last, on a path that goes back and forth, comes to the same
                   bytes as leaving the same shards there for good. With the step on the
                   device parameters are used twice and state once, so where there is not
                   room for both the parameters of more shards stay. With clipping the state
                   comes when the activations and most gradients have gone, into slots that
                   are not there before; until then there is room for gradients to wait.
                   Without clipping such slots are there from the backward of the last shard
                   whose state travels, when the inputs of those behind it have gone
                   The room that is left keeps some tensors of one shard, its head: in its
                   steps no action names it, since the rest alone moves
    the others     visit one after another. A shard whose next unit is so near that its slot
                   would not be needed before stays in it: at the turn from forward to
                   backward, and between two micro-batches. At the turn gradients are not there
                   yet, so there is room for the parameters of a few more, in memory of their own
                   from forward to backward

[Note: frozen shards]
Before the first shard that has anything to train nothing goes backward: those shards have a
forward and no more. Their parameters come once a micro-batch, nothing of them is saved or run
again, and they do not step. A frozen backbone is such a run of shards, and only where frozen
layers come first: a frozen one behind a trained one hands gradients on.

[Note: which loop is outside]
The plain loop takes one micro-batch after the other through the whole model. Where that is
quicker, or asked for, every shard takes all of them while it is here, and a load is paid once a
step. Gradients, losses and statistics are summed in the same order where each belongs to one
shard; a model whose layers share what a forward changes would end on other bits. What a
micro-batch draws at random is drawn ahead of it (``runtime.ahead``). The boundaries of all
micro-batches are held then.

[Note: where boundaries wait]
A shard's input is read by its forward and again by its backward, and the first shards wait
longest. ``boundaries="host"`` stores it as soon as it is there, drops it after the forward, and
loads it again ``lookahead`` units before the backward. So of K boundaries no more than a few
are on the device at a time. Those of the shards next to the turn stay: they would be loaded
before what their STORE leaves behind is surely gone. Source of the idea: activation offloading
as in KARMA (SC 2020).

[Note: where what was saved waits]
A shard in ``spills`` runs its forward with gradients, and what autograd saved goes to the host
while others compute: its backward runs nothing again, and its parameters may leave meanwhile. Its
STORE follows the forward. How long it may take is the shard's ``gap``, the distance to the next
one in ``spills``: the DROP stands so many units later, and the LOAD so many before the backward.
So two of them are on the device at a time, whatever the distance:

    gap 2    F0 STORE0 | F1 DROP0 | F2 STORE2 | F3 DROP2 (here STORE0 is over) ... LOAD2 | ... | B2

[Note: double buffering]
Units are what computes: F and B. ``lookahead`` L gives L + 1 slots to the shards that
travel. The LOAD of a visit stands where a slot has just become free, before the units
that run meanwhile:

    lookahead 0   LOAD u0 | u0 STORE DROP | LOAD u1 | u1 ...           one slot
    lookahead 1   LOAD u0 | LOAD u1 | u0 STORE DROP | LOAD u2 | u1 ... two slots

A LOAD into a slot waits for the STORE that empties it, on the copy streams; the compute
stream does not. With lookahead 0 the copies of one trial hide behind the units of
another, and behind those of its own kept shards. ``lookbehind`` 0 has a unit wait for the
gradients of the one before to be on the host, and saves their room. Source of the idea: Hydra
(VLDB 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shoal.core.spec import Order, Place, ShardSpec
from shoal.core.technique import (
    Spilled,
    kept_shards,
    kept_weights,
    late_shards,
    turned_shards,
    waiting_gradients,
)
from shoal.program.ir import Action, Op, Part, Program, kept, single

PARAM, STATE, GRAD = Part.PARAM, Part.STATE, Part.GRAD
BOUNDARY, SAVED = Part.BOUNDARY, Part.SAVED
Parts = tuple[Part, ...]
Micros = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """What a shard does in one go, and which of its parts come before and leave after.

    A unit of a kept shard has no ``loads`` and no ``drops``. ``own`` parameters are in no slot,
    ``late`` parts in a late one.
    """

    shard: int = 0
    loads: Parts = ()
    computes: tuple[Action, ...] = ()
    stores: Parts = ()
    drops: Parts = ()
    host: tuple[Action, ...] = ()  # a step on the host copies
    own: bool = False
    late: Parts = ()  # loaded too


@lru_cache(maxsize=64)
def resident_step(*, micro_batches: int = 1, clip: bool = False) -> Program:
    """A step of a model that stays on the device: one shard and no copies."""
    actions = [Action(Op.B, 0, micro) for micro in range(micro_batches)]
    if clip:
        actions.append(Action(Op.SYNC))
    return single([*actions, Action(Op.STEP)])


@lru_cache(maxsize=64)
def resident_micro(micro: int) -> Program:
    """One batch of a resident step whose number of batches is not known yet."""
    return single([Action(Op.B, 0, micro)])


@dataclass(frozen=True, slots=True)
class Route:
    """How the shards of a trial travel, and the programs that has them do so.

    Every shard that is not in ``keep`` is loaded 2 times a micro-batch, or 2 times in all
    where ``order`` says that the loop over shards is outside, but for those near the turn.
    With the step on the device and no clipping the optimizer state comes along with the last
    backward; with clipping it comes in one more pass, when the norm is known. Those in
    ``keep`` step on the device, where ``optimizer`` is about the others. Of those in
    ``weights`` the parameters stay and the state travels. ``lent`` are shards whose parameters
    another one borrows, from the host's copy. ``boundaries`` says where a shard's input waits
    for its backward. Those in ``saves`` keep what their forward saved, and do not recompute: of
    the shards whose parameters stay until then, see ``may_save``. Of those in ``spills`` it waits
    on the host, see ``may_spill``. Those in ``turn`` hold their
    parameters from each forward to its backward, where the step is on the host, in memory of their
    own; if these are all that travel, there are no slots, nor in an evaluation. Of those in
    ``waits`` the gradients stay until the step, where that is on the device. Of those in ``late``,
    which are among ``weights``, the state comes into late slots also where nothing is clipped.
    Of the first ``frozen`` shards the forward is all: nothing is trained in them, or before them.
    """

    num_shards: int
    optimizer: Place = "device"
    lookahead: int = 1
    lookbehind: int = 1
    keep: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    lent: tuple[int, ...] = ()
    order: Order = "micro"
    boundaries: Place = "device"
    saves: tuple[int, ...] = ()
    spills: tuple[int, ...] = ()
    turn: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    frozen: int = 0

    def __post_init__(self) -> None:
        assert not set(self.spills) & set(self.saves)
        assert not self.turn or self.optimizer == "host"
        assert not self.waits or self.optimizer == "device"
        assert set(self.late) <= set(self.weights)

    def step(self, micro_batches: int, clip: bool) -> Program:
        """One optimizer step."""
        return _step(self, micro_batches, clip)

    def micro(self, micro: int) -> Program:
        """One batch of a step whose number of batches is not known yet.

        Gradients are summed on the host's copy, those of kept shards on the device, whichever
        batch turns out to be the last.
        """
        return _micro(self, micro)

    def finish(self, clip: bool) -> Program:
        """The optimizer step after such batches."""
        return _finish(self, clip)

    def evaluation(self) -> Program:
        """One validation batch: forwards only, the last one with the loss and the metrics."""
        return _evaluation(self)

    @property
    def trained(self) -> range:
        """Shards that something goes backward through, and that step."""
        return range(self.frozen, self.num_shards)

    @property
    def has_slots(self) -> bool:
        """Whether any shard that travels is loaded into a slot."""
        return len(self.turn) < self.num_shards - len(self.keep)

    @property
    def away(self) -> tuple[int, ...]:
        """Shards whose input waits on the host, where that frees memory before it comes back."""
        if self.boundaries == "device":
            return ()
        away = range(max(1, self.frozen), self.num_shards - 2 - self.lookahead)
        return tuple(shard for shard in away if shard not in self.saves)

    @property
    def may_save(self) -> tuple[int, ...]:
        """Shards whose parameters are on the device from their forward to their backward."""
        if self.order == "shard":  # the next micro-batch's forward comes before the backward
            return ()
        turn = range(self.num_shards - 1 - self.lookahead, self.num_shards - 1)
        stay = {*self.keep, *self.weights, *turn, *self.turn}
        return tuple(s for s in sorted(stay) if self.frozen <= s < self.num_shards - 1)

    @property
    def may_spill(self) -> tuple[int, ...]:
        """Shards for which what their forward saved is gone some time before it has to be back."""
        return () if self.order == "shard" else tuple(range(self.frozen, self.num_shards - 2))

    def gap(self, shard: int) -> int:
        """Units in which the copy of what a forward saved may hide, each way."""
        before = [other for other in self.spills if other < shard]
        after = [other for other in self.spills if other > shard]
        gap = after[0] - shard if after else shard - before[-1] if before else 1
        return max(1, min(gap, self.num_shards - 2 - shard))  # it must have left before it returns


def route_of(technique: Spilled, shards: Sequence[ShardSpec], lent: tuple[int, ...] = ()) -> Route:
    """The route of these shards by a technique that leaves nothing open."""
    return route_with(technique, len(shards), lent, sum(shard.frozen for shard in shards))


def route_with(
    technique: Spilled, num_shards: int, lent: tuple[int, ...] = (), frozen: int = 0
) -> Route:
    """The same of so many shards, the first ``frozen`` of which are."""
    assert technique.optimizer is not None
    assert technique.lookahead is not None
    return Route(
        num_shards,
        optimizer=technique.optimizer,
        lookahead=technique.lookahead,
        lookbehind=1 if technique.lookbehind is None else technique.lookbehind,
        keep=kept_shards(technique),
        weights=kept_weights(technique),
        lent=lent,
        order=technique.order or "micro",
        boundaries=technique.boundaries or "device",
        saves=technique.keep_activations or (),
        spills=technique.spill_activations or (),
        turn=turned_shards(technique, num_shards),
        waits=waiting_gradients(technique, num_shards),
        late=late_shards(technique),
        frozen=frozen,
    )


@lru_cache(maxsize=64)
def _step(route: Route, micro_batches: int, clip: bool) -> Program:
    shape = Shape(route)
    units: list[Unit] = []
    all_ = tuple(range(micro_batches))
    for micros in [all_] if route.order == "shard" else [(micro,) for micro in all_]:
        units += [shape.forward(shard, micros) for shard in range(route.num_shards - 1)]
        for shard in reversed(route.trained):
            if micros[-1] == all_[-1] and not clip:
                units += shape.backward_and_step(shard, micros)
            else:
                units.append(shape.backward(shard, micros))
    if clip:
        units.append(Unit(computes=(Action(Op.SYNC),)))
        units += shape.late_steps(clip)
    return single(in_order(units, route))


@lru_cache(maxsize=64)
def _micro(route: Route, micro: int) -> Program:
    shape = Shape(replace(route, optimizer="device", turn=()))
    units = [shape.forward(shard, (micro,)) for shard in range(route.num_shards - 1)]
    units += [shape.backward(shard, (micro,)) for shard in reversed(route.trained)]
    return single(in_order(units, route))


@lru_cache(maxsize=64)
def _finish(route: Route, clip: bool) -> Program:
    units = [Unit(computes=(Action(Op.SYNC),))] if clip else []
    units += Shape(route).late_steps(clip)
    return single(in_order(units, route))


@lru_cache(maxsize=64)
def _evaluation(route: Route) -> Program:
    route = replace(route, boundaries="device", waits=(), saves=(), spills=())
    if route.has_slots:
        route = replace(route, optimizer="device", turn=())
    shape = Shape(route)
    units = [shape.forward(shard, (0,)) for shard in range(route.num_shards)]
    return single(in_order(units, route))


@lru_cache(maxsize=64)
def resident_evaluation() -> Program:
    """One validation batch of a model that stays on the device."""
    return single([Action(Op.F, 0, 0)])


def spilled_step(
    num_shards: int, *, micro_batches: int = 1, clip: bool = False, **route: Any
) -> Program:
    """A step by ``Route(num_shards, **route)``."""
    return Route(num_shards, **route).step(micro_batches, clip)


@lru_cache(maxsize=64)
def arrival(
    keep: tuple[int, ...] = (0,), weights: tuple[int, ...] = (), heads: tuple[int, ...] = ()
) -> Program:
    """A trial comes to its device, with what stays there."""
    here = kept(keep, weights, heads)
    return single(Action(Op.LOAD, shard, parts=tuple(here[shard])) for shard in sorted(here))


@lru_cache(maxsize=64)
def departure(
    keep: tuple[int, ...] = (0,), weights: tuple[int, ...] = (), heads: tuple[int, ...] = ()
) -> Program:
    """A trial leaves its device; the host copy is current afterwards."""
    stay = kept(keep, weights, heads)
    here = {shard: tuple(parts) for shard, parts in sorted(stay.items())}
    stores = [Action(Op.STORE, shard, parts=parts) for shard, parts in here.items()]
    return single([*stores, *(Action(Op.DROP, s, parts=parts) for s, parts in here.items())])


def kept_of(num_shards: int, count: int, travel: Iterable[int] = ()) -> tuple[int, ...]:
    """Which ``count`` shards are kept: those that leave the others evenly spread.

    Then the copies of one that travels hide behind units of shards that do not. The last
    shard travels first: its forward and backward are one visit. ``travel`` are shards that
    cannot be kept.
    """
    can_stay = [shard for shard in range(num_shards) if shard not in set(travel)]
    moving = max(len(can_stay) - count, 0)
    spread = {can_stay[(turn + 1) * len(can_stay) // moving - 1] for turn in range(moving)}
    return tuple(shard for shard in can_stay if shard not in spread)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a route makes of each visit of a shard."""

    route: Route

    def forward(self, shard: int, micros: Micros) -> Unit:
        computes = tuple(self._compute(Op.F, shard, micro) for micro in micros)
        return self._unit(shard, (PARAM,), computes, drops=(PARAM,))

    def backward(self, shard: int, micros: Micros) -> Unit:
        """Backwards whose gradients go to the host, on top of what is there already."""
        computes = tuple(self._compute(Op.B, shard, micro) for micro in micros)
        loads = (PARAM, GRAD) if micros[0] else (PARAM,)
        return self._unit(shard, loads, computes, stores=(GRAD,), drops=(PARAM, GRAD))

    def backward_and_step(self, shard: int, micros: Micros) -> list[Unit]:
        """The last backward of a shard and its step; on the device, in one visit."""
        if shard not in self.route.keep and self.route.optimizer == "host":
            return [self.backward(shard, micros), self.late_step(shard)]
        backwards = (self._compute(Op.B, shard, micro) for micro in micros)
        loads = (PARAM, STATE, GRAD) if micros[0] else (PARAM, STATE)
        unit = self._stepping(shard, loads, (*backwards, Action(Op.STEP, shard)))
        return [self._at_the_end(unit)]

    def _compute(self, op: Op, shard: int, micro: int) -> Action:
        saves = shard in self.route.saves or shard in self.route.spills
        return Action(op, shard, micro, parts=(SAVED,) if saves else ())

    def late_steps(self, clip: bool, shards: Sequence[int] | None = None) -> list[Unit]:
        """The steps that had to wait for the gradients of all shards; of these, or of every one.

        Those of shards whose gradients take room come first. With clipping nothing is left then
        of what a backward needs, so what a step needs besides parameters comes into late slots.
        """
        here = self.route.trained if shards is None else shards
        first = (*self.route.keep, *(s for s in self.route.waits if s not in self.route.keep))
        first = tuple(shard for shard in first if shard in here)
        last = [shard for shard in here if shard not in first]
        units = [self.late_step(shard) for shard in (*first, *last)]
        return [after_norm(unit) if clip else self._at_the_end(unit) for unit in units]

    def _at_the_end(self, unit: Unit) -> Unit:
        """With its state in a late slot, where that is to have room at the end of a step alone."""
        if unit.shard not in self.route.late:
            return unit
        return replace(unit, loads=_without(unit.loads, STATE), late=(STATE,))

    def late_step(self, shard: int) -> Unit:
        if shard not in self.route.keep and self.route.optimizer == "host":
            return Unit(shard, host=(Action(Op.STEP, shard, place="host"),))
        return self._stepping(shard, (PARAM, STATE, GRAD), (Action(Op.STEP, shard),))

    def _stepping(self, shard: int, loads: Parts, computes: tuple[Action, ...]) -> Unit:
        parts = (PARAM, STATE)
        unit = self._unit(shard, loads, computes, stores=parts, drops=parts)
        if shard in self.route.lent and PARAM not in unit.stores:
            return replace(unit, stores=(PARAM, *unit.stores))
        return unit

    def _unit(
        self,
        shard: int,
        loads: Parts,
        computes: tuple[Action, ...],
        *,
        stores: Parts = (),
        drops: Parts,
    ) -> Unit:
        """A unit of a shard of which nothing stays, less what does stay."""
        here = {PARAM} if shard in self.route.weights else set()
        if shard in self.route.waits:
            here.add(GRAD)
        if shard in self.route.keep:
            here = {PARAM, STATE, GRAD}
        moved = [tuple(p for p in parts if p not in here) for parts in (loads, stores, drops)]
        own = shard in self.route.turn and moved[0] == (PARAM,)
        return Unit(shard, moved[0], computes, moved[1], moved[2], own=own)


def after_norm(unit: Unit) -> Unit:
    """With its state and gradients in a late slot."""
    loads, late = _without(unit.loads, STATE, GRAD), _without(unit.loads, PARAM)
    return replace(unit, loads=loads, late=late)


def in_order(units: Sequence[Unit], route: Route) -> Iterator[Action]:
    """The units in order, with every LOAD as early as there is a slot for it."""
    joined, chains = _join(units, route)
    loads = _loads(joined, chains, route.lookahead)
    late = _late_loads(joined, route.lookahead)
    returns = _returns(joined, route)
    for index, unit in enumerate(joined):
        yield from loads.get(index, ())
        yield from late.get(index, ())
        yield from returns.get(index, ())
        yield from unit.computes
        yield from _leaving(unit, route)
        if unit.stores:
            yield Action(Op.STORE, unit.shard, parts=unit.stores)
        if unit.drops:
            now = GRAD in unit.stores and not route.lookbehind
            yield Action(Op.DROP, unit.shard, parts=unit.drops, now=now)
        yield from unit.host


def _leaving(unit: Unit, route: Route) -> Iterator[Action]:
    """After a forward: its input is gone from the device, its output on its way down."""
    forwards = [action.micro for action in unit.computes if action.op is Op.F]
    away = route.away if forwards else ()
    if unit.shard in away:
        now = not route.lookbehind
        for micro in forwards:
            yield Action(Op.DROP, unit.shard, micro, parts=(BOUNDARY,), now=now)
    if unit.shard + 1 in away:
        for micro in forwards:
            yield Action(Op.STORE, unit.shard + 1, micro, parts=(BOUNDARY,))
    for micro in forwards:
        yield from _saved_leaves(unit.shard, micro, route)


def _saved_leaves(shard: int, micro: int | None, route: Route) -> Iterator[Action]:
    """After a forward: what it saved is on its way down, what an earlier one saved is gone."""
    if shard in route.spills:
        yield Action(Op.STORE, shard, micro, parts=(SAVED,))
    for gone in route.spills:
        if gone + route.gap(gone) - 1 == shard:
            yield Action(Op.DROP, gone, micro, parts=(SAVED,), now=not route.lookbehind)


def _returns(units: Sequence[Unit], route: Route) -> dict[int, list[Action]]:
    """Before which unit a backward's input, and what was saved for it, is loaded.

    The input ``lookahead`` units before its own.
    """
    returns: dict[int, list[Action]] = {}
    computing: list[int] = []
    for index, unit in enumerate(units):
        if not unit.computes:
            continue
        computing.append(index)
        backwards = [action.micro for action in unit.computes if action.op is Op.B]
        if backwards and unit.shard in route.away:
            at = computing[-1 - route.lookahead]
            returns.setdefault(at, []).extend(
                Action(Op.LOAD, unit.shard, micro, parts=(BOUNDARY,)) for micro in backwards
            )
        if backwards and unit.shard in route.spills:
            at = computing[-1 - route.gap(unit.shard)]
            returns.setdefault(at, []).extend(
                Action(Op.LOAD, unit.shard, micro, parts=(SAVED,)) for micro in backwards
            )
    return returns


def _join(units: Sequence[Unit], route: Route) -> tuple[list[Unit], list[list[int]]]:
    """Leave parameters in their slot where its next tenant comes no sooner than they are used.

    Those of shards in ``turn`` stay in memory of their own from a forward to its backward.
    Returns the units, and which of them are one visit: those that need a slot, in order.
    """
    joined = list(units)
    travelling = [index for index, unit in enumerate(units) if unit.loads]
    chains: list[list[int]] = []
    last: dict[int, tuple[int, list[int]]] = {}  # shard -> place among those, its chain
    for place, index in enumerate(travelling):
        unit = units[index]
        before, chain = last.get(unit.shard, (-1, []))
        between = {units[i].shard for i in travelling[before + 1 : place]}
        stays = chain and PARAM in units[chain[-1]].drops and PARAM in unit.loads
        is_old = chain and PARAM in units[chain[-1]].stores  # it may have been stepped
        if _turns(units, chain, unit, route):
            left = joined[chain[-1]]
            joined[chain[-1]] = replace(left, drops=_without(left.drops, PARAM))
            joined[index] = replace(unit, loads=_without(unit.loads, PARAM))
            chain = [index]  # it may stay on for the next micro-batch, in no slot
            if joined[index].loads:
                chains.append([index])
        elif stays and not is_old and len(between) <= route.lookahead:
            left = joined[chain[-1]]
            joined[chain[-1]] = replace(left, drops=_without(left.drops, PARAM))
            joined[index] = replace(unit, loads=_without(unit.loads, PARAM))
            chain.append(index)
        else:
            chain = [index]
            chains.append(chain)
        last[unit.shard] = place, chain
    return joined, chains


def _turns(units: Sequence[Unit], chain: Sequence[int], unit: Unit, route: Route) -> bool:
    """Whether a unit is the backward of what its shard did last, and finds its parameters."""
    if unit.shard not in route.turn or not chain:
        return False
    forward = {action.micro for action in units[chain[-1]].computes if action.op is Op.F}
    backward = {action.micro for action in unit.computes if action.op is Op.B}
    return bool(forward) and forward == backward


def _without(parts: Parts, *gone: Part) -> Parts:
    return tuple(part for part in parts if part not in gone)


def _late_loads(units: Sequence[Unit], lookahead: int) -> dict[int, list[Action]]:
    """Before which unit what goes into late slots: as soon as there is one."""
    loads: dict[int, list[Action]] = {}
    visits = [index for index, unit in enumerate(units) if unit.late]
    for number, index in enumerate(visits):
        at = visits[number - 1 - lookahead] + 1 if number > lookahead else visits[0]
        load = Action(Op.LOAD, units[index].shard, parts=units[index].late, late=True)
        loads.setdefault(at, []).append(load)
    return loads


def _loads(
    units: Sequence[Unit], chains: Sequence[Sequence[int]], lookahead: int
) -> dict[int, list[Action]]:
    """Before which unit what is loaded: as soon as a slot is free for the visit.

    A load never moves above an earlier unit of its own shard: it would read what
    that unit is about to write.
    """
    loads: dict[int, list[Action]] = {}
    ends: list[int] = []
    for chain in sorted(chains, key=lambda units_: units_[0]):
        latest = sorted(ends, reverse=True)
        free = latest[lookahead] + 1 if len(latest) > lookahead else 0
        shard = units[chain[0]].shard
        before = [index for index in range(chain[0]) if units[index].shard == shard]
        at = max(free, before[-1] + 1 if before else 0)
        for index in chain:
            if units[index].loads:
                load = Action(Op.LOAD, shard, parts=units[index].loads, own=units[index].own)
                loads.setdefault(at, []).append(load)
            at = index + 1
        ends.append(chain[-1])
    return loads
