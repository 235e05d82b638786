"""Random numbers of later stages, drawn ahead of them: so that a first stage need not wait.

[Note: foretelling]
The plain loop's micro-batch k + 1 goes on with the random state that k left at the end of the
model. The first stage would have to wait for that, and forwards would not overlap at all. But
what later stages draw does not depend on what they compute: their draws are recorded once per
form of a batch, as operators and shapes, and drawn again into nothing (``partition.draws``).

    stage 0   F0  draws of 1, 2    F1  draws of 1, 2    F2 ...   then, with B0: was it so?
    stage 1        F0                   F1
    stage 2             F0                   F1    -> its random state goes back to stage 0

The weights that the recorded forward needs may be elsewhere: ``lent`` has those of one layer there
at a time, so that no device holds more of the model than that for it. With copies of a pipeline
the first stage's own draws are foretold as well: micro-batches of other copies have them too.

Every state that was foretold is compared with the real one before the gradients of its
micro-batch are complete. Where the first batch shows that it cannot be done (a forward that
draws from Python's or NumPy's streams), stage 0 waits for the real state instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from shoal.partition.build import clone_batch
from shoal.partition.chain import Chain
from shoal.partition.draws import Draw, DrawRecorder, Recordings
from shoal.partition.preserve import preserved
from shoal.partition.units import run_forward
from shoal.recipes.recipe import Batch, autocast
from shoal.rng import RngState, capture_rng, restore_rng, same_rng


class Look(NamedTuple):
    """What a first batch shows: whether the model draws, and whether that can be foretold."""

    draws: bool
    foretold: bool


class _Seen(NamedTuple):
    """A forward of the whole model: what was recorded of it, and the random state on its way."""

    draws: list[Draw]
    begin: RngState
    after_first: RngState  # where recording began
    end: RngState


class Foretelling:
    """What stages after the first draw for a micro-batch.

    Args:
        chain: The model's; its later parameters may be gone: what they compute is not looked at.
        stop: The layer at which the second stage begins; 0 where there is one stage alone: then
            the model runs as it is, and needs all of its weights.
        lent: Has the weights of some layers there, of whatever values, while they run to be
            recorded.
        whole: Foretell the first stage's draws too.
    """

    def __init__(
        self,
        chain: Chain,
        stop: int,
        lent: Callable[[range], AbstractContextManager[object]] = nullcontext,
        *,
        whole: bool = False,
    ) -> None:
        self._stop, self._lent, self._whole = stop, lent, whole or not stop
        self._chain = chain.with_around(lambda layer: lent(range(layer, layer + 1)))
        self._recordings = Recordings()

    def works(self, batch: Batch) -> bool:
        """Does it come to the random state that the whole model comes to?"""
        return self.look(batch).foretold

    def look(self, batch: Batch) -> Look:
        """Run the whole model once, and see what it draws; leaves the random state as it is."""
        device = self._chain.device
        seen = self._run(batch)
        self._recordings.keep(batch, seen.draws)
        restore_rng(seen.after_first, device)
        self._recordings.draw_on(batch)
        foretold = same_rng(seen.end, capture_rng(device))
        restore_rng(seen.begin, device)
        return Look(not same_rng(seen.begin, seen.end), foretold)

    def draw_on(self, batch: Batch) -> None:
        """Move the random state on as later stages do for this micro-batch."""
        if not self._recordings.knows(batch):
            self._recordings.keep(batch, self._run(batch).draws)
        self._recordings.draw_on(batch)

    def _run(self, batch: Batch) -> _Seen:
        """A forward in which nothing is kept; the random state is afterwards what it was."""
        chain, device, recorder = self._chain, self._chain.device, DrawRecorder(self._chain.device)
        with preserved(chain.model, device):
            begin = after_first = capture_rng(device)
            micro, wires = chain.begin(clone_batch(batch)), {}
            if self._stop:
                with recorder if self._whole else nullcontext():
                    wires = run_forward(chain, micro, 0, self._stop, {})
                after_first = begin if self._whole else capture_rng(device)
            lent = nullcontext() if self._stop else self._lent(range(chain.num_layers))
            with lent, recorder, torch.no_grad(), autocast(chain.recipe, device):
                chain.loss(micro, self._stop, wires)
            return _Seen(recorder.draws, begin, after_first, capture_rng(device))
