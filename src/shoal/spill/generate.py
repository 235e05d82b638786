"""A training step, an evaluation, a visit to the device: each generated as a program.

[Note: double buffering]
Units are what computes: F and B. With ``lookahead`` L the LOAD of unit u + L stands just
after the DROP of unit u - 1 and before unit u, so that L + 1 slots are enough:

    lookahead 0   LOAD u0 | u0 STORE DROP | LOAD u1 | u1 ...           one slot
    lookahead 1   LOAD u0 | LOAD u1 | u0 STORE DROP | LOAD u2 | u1 ... two slots

A LOAD into a slot waits for the STORE that empties it, on the copy streams; the compute
stream does not. With lookahead 0 the copies of one trial hide behind the units of
another. Source of the idea: Hydra (VLDB 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shoal.core.spec import Place
from shoal.program.ir import Action, Op, Part, Program, single

PARAM, STATE, GRAD = Part.PARAM, Part.STATE, Part.GRAD


@dataclass(frozen=True, slots=True)
class _Unit:
    """Loads, compute and what follows, of one visit of a shard to the device."""

    loads: tuple[Action, ...]
    computes: tuple[Action, ...]
    leaves: tuple[Action, ...]  # stores, drops, host steps

    @property
    def shard(self) -> int:
        return (self.loads + self.computes + self.leaves)[0].shard


@lru_cache(maxsize=64)
def resident_step(*, micro_batches: int = 1, clip: bool = False) -> Program:
    """A step of a model that stays on the device: one shard and no copies."""
    actions = [Action(Op.B, 0, micro) for micro in range(micro_batches)]
    if clip:
        actions.append(Action(Op.SYNC))
    return single([*actions, Action(Op.STEP)])


@lru_cache(maxsize=64)
def spilled_step(
    num_shards: int,
    *,
    micro_batches: int = 1,
    clip: bool = False,
    optimizer: Place = "device",
    lookahead: int = 1,
) -> Program:
    """A step of a model whose shards visit the device one after another.

    Every shard is loaded 2 times a micro-batch (the last one once). With the step on
    the device and no clipping the optimizer state comes along with the last
    backward; with clipping it comes in one more pass, when the norm is known.
    """
    units: list[_Unit] = []
    last_micro = micro_batches - 1
    for micro in range(micro_batches):
        units += [_forward(shard, micro) for shard in range(num_shards - 1)]
        for shard in reversed(range(num_shards)):
            steps = optimizer == "device" and not clip and micro == last_micro
            units.append(_backward_and_step(shard, micro) if steps else _backward(shard, micro))
            if optimizer == "host" and not clip and micro == last_micro:
                units.append(_Unit((), (), (Action(Op.STEP, shard, place="host"),)))
    if clip:
        units.append(_Unit((), (Action(Op.SYNC),), ()))
        units += [_late_step(shard, optimizer) for shard in range(num_shards)]
    return single(_interleave_loads(units, lookahead))


@lru_cache(maxsize=64)
def resident_micro(micro: int) -> Program:
    """One batch of a resident step whose number of batches is not known yet."""
    return single([Action(Op.B, 0, micro)])


@lru_cache(maxsize=64)
def spilled_micro(num_shards: int, micro: int, *, lookahead: int = 1) -> Program:
    """One batch of a spilled step whose number of batches is not known yet.

    Gradients are summed on the host's copy, whichever batch turns out to be the last.
    """
    units = [_forward(shard, micro) for shard in range(num_shards - 1)]
    units += [_backward(shard, micro) for shard in reversed(range(num_shards))]
    return single(_interleave_loads(units, lookahead))


@lru_cache(maxsize=64)
def spilled_finish(
    num_shards: int, *, clip: bool = False, optimizer: Place = "device", lookahead: int = 1
) -> Program:
    """The optimizer step after ``spilled_micro`` programs."""
    units = [_Unit((), (Action(Op.SYNC),), ())] if clip else []
    units += [_late_step(shard, optimizer) for shard in range(num_shards)]
    return single(_interleave_loads(units, lookahead))


@lru_cache(maxsize=64)
def evaluation(num_shards: int, *, spilled: bool, lookahead: int = 1) -> Program:
    """One validation batch: forwards only, the last one with the loss and the metrics."""
    if not spilled:
        return single([Action(Op.F, 0, 0)])
    return single(_interleave_loads([_forward(s, 0) for s in range(num_shards)], lookahead))


@lru_cache(maxsize=64)
def arrival() -> Program:
    """A resident trial comes to its device."""
    return single([Action(Op.LOAD, parts=(PARAM, STATE))])


@lru_cache(maxsize=64)
def departure() -> Program:
    """A resident trial leaves its device; the host copy is current afterwards."""
    parts = (PARAM, STATE)
    return single([Action(Op.STORE, parts=parts), Action(Op.DROP, parts=parts)])


def _forward(shard: int, micro: int) -> _Unit:
    return _Unit(
        (Action(Op.LOAD, shard, parts=(PARAM,)),),
        (Action(Op.F, shard, micro),),
        (Action(Op.DROP, shard, parts=(PARAM,)),),
    )


def _backward(shard: int, micro: int) -> _Unit:
    """A backward whose gradients go to the host, on top of what is there already."""
    loaded = (PARAM, GRAD) if micro else (PARAM,)
    return _Unit(
        (Action(Op.LOAD, shard, parts=loaded),),
        (Action(Op.B, shard, micro),),
        (
            Action(Op.STORE, shard, parts=(GRAD,)),
            Action(Op.DROP, shard, parts=(PARAM, GRAD)),
        ),
    )


def _backward_and_step(shard: int, micro: int) -> _Unit:
    """The last backward of a shard and its step, in one visit."""
    loaded = (PARAM, STATE, GRAD) if micro else (PARAM, STATE)
    return _Unit(
        (Action(Op.LOAD, shard, parts=loaded),),
        (Action(Op.B, shard, micro), Action(Op.STEP, shard)),
        _write_back(shard),
    )


def _late_step(shard: int, optimizer: Place) -> _Unit:
    """A step that had to wait for the gradients of all shards."""
    if optimizer == "host":
        return _Unit((), (), (Action(Op.STEP, shard, place="host"),))
    return _Unit(
        (Action(Op.LOAD, shard, parts=(PARAM, STATE, GRAD)),),
        (Action(Op.STEP, shard),),
        _write_back(shard),
    )


def _write_back(shard: int) -> tuple[Action, ...]:
    parts = (PARAM, STATE)
    return (Action(Op.STORE, shard, parts=parts), Action(Op.DROP, shard, parts=parts))


def _interleave_loads(units: list[_Unit], lookahead: int) -> Iterator[Action]:
    """The units in order, each one's loads ``lookahead`` loading units early.

    A load never moves above an earlier unit of its own shard: it would read what
    that unit is about to write.
    """
    loading = [index for index, unit in enumerate(units) if unit.loads]
    early: dict[int, list[Action]] = {}
    last_use: dict[int, int] = {}
    for index, unit in enumerate(units):
        if unit.loads:
            wanted = loading[max(loading.index(index) - lookahead, 0)]
            at = max(wanted, last_use.get(unit.shard, -1) + 1)
            early.setdefault(at, []).extend(unit.loads)
        last_use[unit.shard] = index
    for index, unit in enumerate(units):
        yield from early.get(index, ())
        yield from unit.computes
        yield from unit.leaves
