"""The proof that a program of spilled stages may run, beside the rules of every program.

``shoal.program.check`` proves loads, stores, order, deadlock, and that gradients are summed. Here:
that no stage holds activations of more micro-batches than its bound, that micro-batches come in
the order of the data with the random state before them, that each step has its clipping factor,
and that nobody is told of a lender's new parameters before the host has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.pipeline.check import blank
from shoal.pipeline.spilled import SpilledPipeline
from shoal.program.check import broken, check_devices
from shoal.program.costs import Costs, JobCosts
from shoal.program.footprint import Footprint
from shoal.program.ir import Action, Op, Part, Program

Complaints = Iterator[tuple[int, str]]


def check_spilled(
    spilled: SpilledPipeline, program: Program, costs: Costs | None = None
) -> tuple[Footprint, ...]:
    """Prove that ``program`` does a step of ``spilled``; what each device needs.

    Without ``costs`` the bytes are all nothing.

    Raises:
        ProgramError: a rule is broken; shows the device, the action, the rule and the way out.
    """
    found = _checked(spilled, program, costs)
    for device, actions in enumerate(program.devices):
        for index, complaint in _complaints(spilled, device, actions):
            raise broken(program, device, index, complaint)
    return found


def check_evaluation(
    spilled: SpilledPipeline, costs: Costs | None = None
) -> tuple[Footprint, ...]:
    """The same of a validation batch."""
    return _checked(spilled, spilled.evaluation(), costs)


def _checked(
    spilled: SpilledPipeline, program: Program, costs: Costs | None
) -> tuple[Footprint, ...]:
    here = spilled.kept()
    costs = costs or {0: JobCosts(shards=tuple(map(blank, range(spilled.num_shards))))}
    return check_devices(program, costs, start=here, end=here)


def _complaints(spilled: SpilledPipeline, stage: int, actions: Sequence[Action]) -> Complaints:
    yield from _too_many(spilled, stage, actions)
    yield from _out_of_turn(spilled, stage, actions)
    yield from _old_host_copies(spilled, stage, actions)
    if stage == 0 and spilled.pipeline.draws:
        yield from _unknown_rng(spilled, actions)
    if spilled.pipeline.clip:
        yield from _unclipped(actions)


def _too_many(spilled: SpilledPipeline, stage: int, actions: Sequence[Action]) -> Complaints:
    """Activations of a micro-batch are held from a stage's first unit to its last."""
    held: set[int | None] = set()
    bound, (first, _) = spilled.bound(stage), spilled.spans[stage]
    for index, action in enumerate(actions):
        if action.op in (Op.F, Op.B):
            held.add(action.micro)
            if len(held) > bound:
                yield (
                    index,
                    f"stage {stage} would hold activations of {len(held)} micro-batches; its "
                    f"bound in {spilled.pipeline.schedule!r} is {bound}. Put a B before.",
                )
        if action.op is Op.B and action.shard == first:
            held.discard(action.micro)


def _out_of_turn(spilled: SpilledPipeline, stage: int, actions: Sequence[Action]) -> Complaints:
    """First forwards of each shard come in the order of the micro-batches."""
    ends = spilled.num_shards - 1
    for shard in range(*spilled.spans[stage]):
        op, due = (Op.B if shard == ends else Op.F), 0
        for index, action in enumerate(actions):
            if action.op is not op or action.shard != shard:
                continue
            if action.micro != due:
                yield (
                    index,
                    f"m{due} of s{shard} comes first: micro-batches are taken in the order of the "
                    "data. Put them in order.",
                )
            due += 1
        if due < spilled.pipeline.num_micros:
            yield (
                len(actions) - 1,
                f"m{due} of s{shard} never comes, of {spilled.pipeline.num_micros} micro-batches. "
                "Add its units.",
            )


def _unknown_rng(spilled: SpilledPipeline, actions: Sequence[Action]) -> Complaints:
    """Stage 0 goes on with the random state after the micro-batch before, or compares it."""
    told, (_, stop) = -1, spilled.spans[0]
    for index, action in enumerate(actions):
        if action.op is Op.RECV and Part.RNG in action.parts:
            told = action.micro or 0
        micro, due = action.micro or 0, None
        if spilled.pipeline.foretold and action.op is Op.B and action.shard == stop - 1:
            due = micro
        elif not spilled.pipeline.foretold and action.op is Op.F and action.shard == 0:
            due = micro - 1 if micro else None
        if due is not None and told != due:
            yield index, f"the random state after m{due} is not here. Put its RECV before."


def _old_host_copies(
    spilled: SpilledPipeline, stage: int, actions: Sequence[Action]
) -> Complaints:
    """Whoever borrows reads the host: it has what lenders stepped before a borrower is told."""
    mine = [tie for tie in spilled.ties if tie[0] in range(*spilled.spans[stage])]
    old: set[int] = set()
    for index, action in enumerate(actions):
        if action.op is Op.STEP and action.place == "device":
            old.add(action.shard)
        elif action.op is Op.STORE and Part.PARAM in action.parts:
            old.discard(action.shard)
        elif action.op is Op.SEND and Part.PARAM in action.parts:
            for owner in sorted({a for a, b in mine if b == action.shard} & old):
                yield index, _lent_late(owner, action.shard)
    for owner, borrower in mine:
        if owner in old:
            yield len(actions) - 1, _lent_late(owner, borrower)


def _lent_late(owner: int, borrower: int) -> str:
    return (
        f"the host does not have the new parameters of s{owner}, which s{borrower} borrows. STORE "
        f"s{owner} param before."
    )


def _unclipped(actions: Sequence[Action]) -> Complaints:
    """No step before the factor is known here."""
    known = False
    for index, action in enumerate(actions):
        is_told = action.op is Op.RECV and Part.NORM in action.parts and action.shard == 0
        known |= action.op is Op.SYNC or is_told
        if action.op is Op.STEP and not known:
            yield index, "the pipeline clips, and its factor is not known yet. Put SYNC before."
