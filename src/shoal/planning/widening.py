"""Copies of a pipeline: what they need of a trial, and the words for it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.spec import JobMeasure, ShardSpec
from shoal.core.technique import Pipelined
from shoal.core.units import Bytes, format_bytes


def least_micros(asked: Pipelined) -> int:
    """Micro-batches that each step has to have: of "2bw" as many as stages, in each copy."""
    return asked.width * ((asked.stages or 2) if asked.is_stale else 1)


def too_few_micros(asked: Pipelined, micros: int, found: str) -> str:
    """That so many are too few, with what was ``found``; empty if they are enough."""
    least = least_micros(asked)
    if micros >= least:
        return ""
    copies = f"{asked.width} copies" if asked.width > 1 else ""
    who = f"{copies} of a pipeline need"
    if asked.is_stale:
        stages = f"{asked.stages or 2} stages"
        who = f"2bw with {stages}{' in each of ' * bool(copies)}{copies} needs"
    return f"{who} {least} micro-batches a step or more, {found}"


def who_needs(asked: Pipelined) -> str:
    """For whom there may be too few micro-batches, with a verb."""
    copies = f"{asked.width} copies of a pipeline need"
    return "2bw needs" if asked.width == 1 else copies


def instead(asked: Pipelined) -> str:
    """What takes steps of any number of micro-batches."""
    if asked.is_stale:
        return "schedule='flush'" + (" and width=1" if asked.width > 1 else "")
    return "width=1"


def ways_out(asked: Pipelined) -> str:
    """What needs fewer micro-batches a step."""
    fewer = "fewer copies, " if asked.width > 1 else ""
    return f"{fewer}fewer stages, or schedule='flush'" if asked.is_stale else "or width=1"


def refuse_copies(measure: JobMeasure, asked: Pipelined) -> str:
    """Why a model cannot have copies as asked; empty if it can, or is asked for one."""
    if asked.width > 1 and asked.is_stale and any(layer.stash_bytes for layer in measure.layers):
        return (
            "its forwards change buffers, as BatchNorm's do, and copies of a '2bw' pipeline are "
            "at no time between two steps to have the same again. Use schedule='flush', or "
            "width=1."
        )
    return ""


def why_wide(technique: Pipelined, stages: Sequence[ShardSpec]) -> str:
    """What copies do to a step."""
    micros, width = technique.micro_batches or 1, technique.width
    each = f"{micros // width}" + (f" or {micros // width + 1}" if micros % width else "")
    most = Bytes((width - 1) * max(stage.gradient_bytes for stage in stages))
    return (
        f"{width} copies were asked for: each takes {each} of a step's {micros} micro-batches, "
        f"and every stage sends its gradients to the others, {format_bytes(most)} of the largest; "
        "they are added up in the order of the copies, which rounds otherwise than training alone"
    )
