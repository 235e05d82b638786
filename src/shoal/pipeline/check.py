"""The proof that a pipeline's program may run, beside the rules of every program.

``shoal.program.check`` proves order, deadlock, weight versions, and that gradients are summed
per step. Here: that no stage holds activations of more micro-batches than its schedule's bound,
that what is borrowed has stepped, and that random numbers come in the order of the plain loop;
and of copies that each gets its batches, and that gradients are summed once before their step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.core.spec import ShardSpec
from shoal.core.units import Bytes
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.wide import as_alone, undealt, unsummed
from shoal.program.check import broken, check_devices
from shoal.program.costs import Costs, JobCosts
from shoal.program.footprint import Footprint
from shoal.program.ir import Action, Op, Part, Program

HERE = (Part.PARAM, Part.STATE)


def check_pipeline(
    pipeline: Pipeline, program: Program, costs: Costs | None = None
) -> tuple[Footprint, ...]:
    """Prove that ``program`` does what ``pipeline`` says; what each device needs.

    Without ``costs`` the bytes are all nothing; those of trial 0 are every copy's. The second
    weight version, the gradients of a second step and those of other copies are counted.

    Raises:
        ProgramError: a rule is broken; shows the device, the action, the rule and the way out.
    """
    copies = pipeline.copies
    starts = tuple({copies.place(device)[1]: HERE} for device in range(copies.devices))
    costs = costs or {0: JobCosts(shards=tuple(map(blank, range(pipeline.stages))))}
    costs = dict.fromkeys(range(pipeline.width), costs[0])
    found = check_devices(
        program,
        costs,
        start=starts,
        end=starts,
        versions=pipeline.versions,
        groups=pipeline.groups,
        begun=pipeline.begun,
    )
    for device, actions in enumerate(program.devices):
        judge = _complaints if pipeline.width == 1 else _complaints_of_copy
        for index, complaint in judge(pipeline, device, actions):
            raise broken(program, device, index, complaint)
    return tuple(
        _with_versions(pipeline, footprint, costs[0].shards[copies.place(device)[1]])
        for device, footprint in enumerate(found)
    )


def blank(stage: int) -> ShardSpec:
    """A shard that takes nothing."""
    none = Bytes(0)
    return ShardSpec(
        index=stage,
        layers=(stage, stage + 1),
        parameter_bytes=none,
        owned_bytes=none,
        state_bytes=none,
        gradient_bytes=none,
        boundary_bytes=none,
        carry_bytes=none,
        forward_peak_bytes=none,
        backward_peak_bytes=none,
        step_peak_bytes=none,
    )


def _with_versions(pipeline: Pipeline, found: Footprint, shard: ShardSpec) -> Footprint:
    """With what there is twice where two steps are under way, and other copies' gradients."""
    two, sets = pipeline.versions - 1, pipeline.gradient_sets
    if not two and sets == 1:
        return found
    more = two * shard.parameter_bytes + (sets - 1) * shard.gradient_bytes
    return replace(
        found,
        kept_bytes=Bytes(found.kept_bytes + more),
        held_bytes=Bytes(found.held_bytes + more),
        peak_bytes=Bytes(found.peak_bytes + more),
        running_bytes=tuple(Bytes(size + more) for size in found.running_bytes),
    )


def _complaints_of_copy(
    pipeline: Pipeline, device: int, actions: Sequence[Action]
) -> Iterator[tuple[int, str]]:
    """Those of its pipeline alone, and of what the copies send each other."""
    copies = pipeline.copies
    copy, stage = copies.place(device)
    mine = as_alone(actions, copies, device)
    alone = [action for _, action in mine]
    for index, complaint in _complaints(pipeline.of_copy(copy), stage, alone):
        yield mine[index][0], f"of copy {copy}, with its micro-batches counted alone: {complaint}"
    yield from undealt(actions, copies, device)
    yield from unsummed(actions, copies, device)


def _complaints(
    pipeline: Pipeline, stage: int, actions: Sequence[Action]
) -> Iterator[tuple[int, str]]:
    yield from _too_many(pipeline, stage, actions)
    yield from _old_weights(pipeline, stage, actions)
    yield from _out_of_turn(pipeline, stage, actions)
    if pipeline.clip and stage == 0:
        yield from _unclipped(actions)


def _too_many(
    pipeline: Pipeline, stage: int, actions: Sequence[Action]
) -> Iterator[tuple[int, str]]:
    """Activations of a micro-batch are held from its first unit to its last."""
    held: set[int | None] = set()
    bound = pipeline.bound(stage)
    for index, action in enumerate(actions):
        if action.op in (Op.F, Op.B, Op.I):
            held.add(action.micro)
            if len(held) > bound:
                first = min(str(micro) for micro in held)
                yield (
                    index,
                    f"stage {stage} would hold activations of {len(held)} micro-batches, m{first} "
                    f"first; its bound in {pipeline.schedule!r} is {bound}. Put a B before.",
                )
        if action.op in (Op.B, Op.W):
            held.discard(action.micro)


def _old_weights(
    pipeline: Pipeline, stage: int, actions: Sequence[Action]
) -> Iterator[tuple[int, str]]:
    """What is borrowed has the version of the unit that reads it."""
    for lender in sorted({owner for owner, borrower in pipeline.ties if borrower == stage}):
        known = set(range(pipeline.begun + 1))
        for index, action in enumerate(actions):
            if action.op is Op.RECV and Part.PARAM in action.parts and action.peer == lender:
                known = {v for v in known if v > action.version - pipeline.versions}
                known.add(action.version)
            elif action.op in (Op.F, Op.B, Op.I) and action.version not in known:
                yield (
                    index,
                    f"version {action.version} of what stage {stage} borrows of device {lender} "
                    f"is not here. Put RECV s{stage} v{action.version} param d{lender} before.",
                )


def _out_of_turn(
    pipeline: Pipeline, stage: int, actions: Sequence[Action]
) -> Iterator[tuple[int, str]]:
    """Forwards come in the order of the micro-batches, with the random state before each."""
    told, last = -1, -1
    is_last = stage == pipeline.stages - 1
    waits = pipeline.draws and stage == 0 and pipeline.stages > 1
    for index, action in enumerate(actions):
        if action.op is Op.RECV and Part.RNG in action.parts:
            told = action.micro or 0
        due = _rng_before(pipeline, action) if waits else None
        if due is not None and due + 1 < pipeline.num_micros and told != due:
            yield index, f"the random state after m{due} is not here. Put its RECV before."
        if action.op is not Op.F and not (is_last and action.op in (Op.B, Op.I)):
            continue
        micro = action.micro or 0
        if micro != last + 1:
            yield (
                index,
                f"m{last + 1} comes first: micro-batches are taken in the order of the data. Put "
                "them in order.",
            )
        last = micro
    if last + 1 < pipeline.num_micros:
        yield (
            len(actions) - 1,
            f"m{last + 1} never comes, of {pipeline.num_micros} micro-batches. Add its units.",
        )


def _rng_before(pipeline: Pipeline, action: Action) -> int | None:
    """The micro-batch whose random state an F needs, or a B compares with what was foretold."""
    micro = action.micro or 0
    if pipeline.foretold:
        return micro if action.op in (Op.B, Op.I) else None
    return micro - 1 if action.op is Op.F and micro else None


def _unclipped(actions: Sequence[Action]) -> Iterator[tuple[int, str]]:
    """Each step has its factor; the base rules see to the other stages."""
    known: set[int] = set()
    for index, action in enumerate(actions):
        if action.op is Op.SYNC:
            known.add(action.version)
        elif action.op is Op.STEP and action.version not in known:
            yield (
                index,
                f"the pipeline clips, and step {action.version} has no SYNC. Put it before.",
            )
