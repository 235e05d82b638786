"""Random numbers of micro-batches whose forwards overlap: each goes on where its own would be.

The plain loop runs one micro-batch after the other. Where a shard or a stage runs several of them
before the next one begins, each takes its random state along.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shoal.core.errors import TrialError
from shoal.rng import RngState, capture_rng, restore_rng, same_rng


@dataclass(slots=True)
class Stream:
    """The random numbers of one micro-batch.

    Attributes:
        state: Where its next first forward goes on.
        foretold: Where the last one is to end, if the next micro-batch began there already.
    """

    state: RngState
    foretold: RngState | None = None

    @contextmanager
    def going_on(self, device: torch.device) -> Iterator[None]:
        """A forward that draws from it."""
        restore_rng(self.state, device)
        yield
        self.state = capture_rng(device)

    def require_foretold(self, way_out: str, error: type[TrialError] = TrialError) -> None:
        """Of a micro-batch whose last forward is over.

        Raises:
            TrialError: or that ``error``: it ended elsewhere than was foretold.
        """
        if self.foretold is not None and not same_rng(self.foretold, self.state):
            raise error(
                "the model drew other random numbers for a micro-batch than for earlier ones of "
                "its form: its draws depend on what it computes, and cannot be foretold. Train it "
                f"with {way_out}."
            )


@contextmanager
def drawing_nothing(device: torch.device, otherwise: TrialError) -> Iterator[None]:
    """A forward of a model that draws nothing.

    Raises:
        TrialError: ``otherwise``: it does.
    """
    before = capture_rng(device)
    yield
    if not same_rng(before, capture_rng(device)):
        raise otherwise
