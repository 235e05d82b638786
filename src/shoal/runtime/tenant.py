"""Who has a seat on a device: a trial, or an array of several that is spilled as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from shoal.core.plan import Job
from shoal.memory.layout import TrialLayout
from shoal.memory.store import Region
from shoal.recipes.recipe import Recipe


class Tenant(Protocol):
    """What a seat asks of it.

    Attributes:
        binding: Its parameters and states by name, and where they point.
        model: Whose buffers are on the device.
        owned: Per shard the parameters that it steps.
        units: What F and B compute.
        compiled: Whether what it allocates cannot be counted.
    """

    job: Job
    recipe: Recipe
    layout: TrialLayout
    region: Region
    device: torch.device
    binding: Any
    model: Any
    owned: Any
    units: Any
    step: int
    compiled: bool

    @property
    def owner(self) -> str:
        """By which its memory is reserved."""
        ...

    def fetch(self, task: Any, micro: int) -> Any:
        """The batch of one micro-batch, on the device."""
        ...

    def note_loss(self, loss: Any) -> None:
        """What the last shard's backward came to."""
        ...

    @property
    def require_finite(self) -> Callable[[], None]:
        """What waits for the losses of this step, and raises where nothing may step for them.

        It may be called on any thread, and when another step has begun.
        """
        ...

    def note_losses(self, losses: Any) -> None:
        """The same of a step of one's own."""
        ...

    def advance_schedule(self) -> None:
        """Step the schedule, once per optimizer step."""
        ...
