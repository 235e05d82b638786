"""The two baselines as programs: naive model parallelism, and GPipe. Pure.

One trial at a time, stage s of the model lives on device s, nothing is spilled.

    naive        one micro-batch: at any time one device computes
        device 0   F0                              B0
        device 1      F1                        B1
        device 2         B2 (its forward is in it)

    GPipe, m=4   all forwards, then all backwards; weights change at the end of the step
        device 0   F F F F                  B   B   B   B
        device 1     F F F F            B   B   B   B
        device 2       B   B   B   B

Both compute what a spilled step computes: F runs under no_grad, B runs the forward again
and then the backward, the last stage runs B only. That the last stage starts a backward as
soon as a micro-batch arrives is a little better than GPipe as published.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.program.ir import Action, Op, Part, Program


def pipelined_step(num_stages: int, *, micro_batches: int) -> Program:
    """One synchronous step: GPipe, and with one micro-batch naive model parallelism."""
    return Program(
        tuple(tuple(_stage(stage, num_stages, micro_batches)) for stage in range(num_stages))
    )


def visiting(program: Program) -> Program:
    """The same step with its stages loaded before and written back after it.

    In this form the checker can prove that the order is sound and that a stage fits.
    """
    parts = (Part.PARAM, Part.STATE)
    return Program(
        tuple(
            (
                Action(Op.LOAD, stage, parts=parts),
                *actions,
                Action(Op.STORE, stage, parts=parts),
                Action(Op.DROP, stage, parts=parts),
            )
            for stage, actions in enumerate(program.devices)
        )
    )


def _stage(stage: int, num_stages: int, micro_batches: int) -> Iterator[Action]:
    is_last = stage == num_stages - 1
    if not is_last:
        for micro in range(micro_batches):
            yield from _forward(stage, micro)
    for micro in range(micro_batches):
        yield from _backward(stage, micro, is_last=is_last)
    yield Action(Op.STEP, stage)


def _forward(stage: int, micro: int) -> Iterator[Action]:
    if stage:
        yield Action(Op.RECV, stage, micro, peer=stage - 1)
    yield Action(Op.F, stage, micro)
    yield Action(Op.SEND, stage + 1, micro, peer=stage + 1)


def _backward(stage: int, micro: int, *, is_last: bool) -> Iterator[Action]:
    if not is_last:
        yield Action(Op.RECV, stage + 1, micro, parts=(Part.GRAD,), peer=stage + 1)
    elif stage:
        yield Action(Op.RECV, stage, micro, peer=stage - 1)
    yield Action(Op.B, stage, micro)
    if stage:
        yield Action(Op.SEND, stage, micro, parts=(Part.GRAD,), peer=stage - 1)
