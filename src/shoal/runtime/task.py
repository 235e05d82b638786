"""What a seat is given to run, and what it says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.device import Event
from shoal.partition.draws import DrawRecorder
from shoal.program.ir import Program
from shoal.runtime.streams import Stream
from shoal.runtime.units import Micro


@dataclass(slots=True)
class Task:
    """One program to run, and what its actions read and leave behind.

    ``micros`` are filled in by the first unit of each micro-batch. ``batches`` holds batches
    that are fetched already; a training task fetches the others through ``fetch``. ``streams`` are
    those of micro-batches that take their random numbers along. ``recorder`` notes what the
    forwards of a recording draw. ``groups`` are
    the steps of a pipeline's program, by how many micro-batches they take. ``step`` is the number
    of the step that it is of, where that is not always the session's next one. ``is_counted``:
    what its units allocate is counted from the one that runs now.
    """

    program: Program
    kind: str  # "step", "micro" (a part of one), "evaluation", "recording", "arrival",
    # "departure", and of a pipeline "save" and "metrics", which wait for other stages
    micros: dict[int, Micro] = field(default_factory=dict)
    batches: dict[int, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    streams: dict[int, Stream] = field(default_factory=dict)
    recorder: DrawRecorder | None = None
    groups: tuple[int, ...] = ()
    step: int | None = None
    is_counted: bool = False


class Issued(NamedTuple):
    """An action in flight, for the timeline."""

    stream: str
    action: str  # its text form
    event: Event
    num_bytes: int
    step: int
    trial: int
