"""The numbers of autograd's nodes in the threads of slots, and in the one that drives them."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

NODES = 1 << 15
"""More nodes of autograd than a slot's own code makes in a step."""


class Numbers:
    """Keeps the nodes of shared passes ahead of those of the slots' own code.

    Of the nodes that are ready a backward runs the one with the highest number first, and each
    thread numbers by itself. So in which order the gradients of one tensor are summed would
    depend on how much each thread had computed before. Here the driver is always ahead, and the
    slots' threads begin a step alike: a pass waits for all slots' losses, and meanwhile nodes of
    ``create_graph=True``, which are numbered before a loss, would run in whoever is further.
    """

    def __init__(self) -> None:
        self._most = 0  # of any slot's thread
        self._begin = 0  # of all of them, in this step

    def note(self) -> None:
        """A slot's thread has come so far; called by it."""
        self._most = max(self._most, torch._C._autograd._get_sequence_nr())

    def lead(self) -> None:
        """Be further than any slot will be in the next step."""
        self._begin = self._most
        behind = self._most + NODES - torch._C._autograd._get_sequence_nr()
        if behind > 0:
            skip_numbers(behind + NODES)

    def follow(self) -> None:
        """Begin a step where all slots do; called by a slot's thread."""
        skip_numbers(self._begin - torch._C._autograd._get_sequence_nr())


def skip_numbers(count: int) -> None:
    """Make so many nodes in this thread."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
        none = torch.ones((), requires_grad=True)
        for left in range(count, 0, -1024):
            torch.atleast_1d(*[none] * min(left, 1024))  # a node for each
