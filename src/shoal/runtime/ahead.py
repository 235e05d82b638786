"""A step's batches, read before it runs, each with the random numbers that are its own.

[Note: which random numbers are whose]
With all micro-batches in each shard, micro-batch m + 1 begins long before m has ended, and the
plain loop has it begin where m ends:

    plain      read 0 | forward 0 | read 1 | forward 1 | ...
    here       read 0 | draws of 0 | read 1 | draws of 1 | ... | then all of the step

The draws are those of a forward of the batch's form, drawn again into nothing. A form that was
not met before is recorded first: its forwards run through the shards as in an evaluation, one
visit each, and leave nothing behind. So it takes the slots that are there, and no more than an
evaluation of such a batch does. A source that draws sees the random numbers that it would see in
the plain loop; and each micro-batch is compared with what was foretold when its last shard is
through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from shoal.core.errors import OrderError
from shoal.partition.build import clone_batch
from shoal.partition.draws import DrawRecorder, Recordings
from shoal.recipes.recipe import Batch
from shoal.rng import RngState, capture_rng, restore_rng, same_rng
from shoal.runtime.streams import Stream
from shoal.runtime.task import Task
from shoal.runtime.units import BY_MICRO, ChainUnits

Counted = Callable[[Callable[[], None], str], None]
"""Runs what is no unit, of that name, and sees to it that what it allocates fits."""


class Ahead:
    """Reads the batches of a trial's steps.

    Args:
        read: The next batch of a step.
        count: Runs what draws.
    """

    def __init__(
        self,
        units: ChainUnits,
        device: torch.device,
        read: Callable[[], Any],
        *,
        count: Counted,
    ) -> None:
        self._units, self._device = units, device
        self._read, self._count = read, count
        self._recordings = Recordings()

    def fill(self, task: Task, count: int) -> Iterator[Task]:
        """Give a step's task its batches, of which it has the first; what has to run before it.

        The caller has the trial's random streams in place whenever it advances this.
        """
        for number in range(count):
            batch = clone_batch(self._read() if number else task.batches[0])
            task.batches[number] = batch
            stream = task.streams[number] = Stream(capture_rng(self._device))
            if number + 1 < count:
                yield from self._end(batch, stream)

    def _end(self, batch: Batch, stream: Stream) -> Iterator[Task]:
        """Move the random state to where a micro-batch is going to end."""
        is_known, end = self._recordings.knows(batch), None
        if not is_known:
            recorder = DrawRecorder(self._device)
            program = self._units.evaluation_program()
            yield Task(program, "recording", batches={0: batch}, recorder=recorder)
            self._recordings.keep(batch, recorder.draws)
            end = capture_rng(self._device)
            restore_rng(stream.state, self._device)
        self._count(lambda: self._recordings.draw_on(batch), "drawing ahead")
        stream.foretold = capture_rng(self._device)
        if end is not None and not same_rng(end, stream.foretold):
            raise _unforeseen(end, stream.foretold)


def _unforeseen(end: RngState, foretold: RngState) -> OrderError:
    """Of a forward that was recorded, and came to another random state than its draws do."""
    is_torchs = torch.equal(end.torch, foretold.torch)
    where = "Python's or NumPy's generator" if is_torchs else "what no recorded operator draws"
    return OrderError(
        f"the model draws random numbers from {where}, which cannot be foretold, and its shards "
        "run all micro-batches of a step one after another, in another order than the plain loop. "
        f"Train it with {BY_MICRO}."
    )
