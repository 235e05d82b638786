"""What a trial in a worker keeps in Python, as a part of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.pystate import Attributes, ambient
from shoal.pystate.attributes import in_words


class PythonState:
    """That of one session: what its objects keep, and its own values of globals.

    Made when all objects are built and nothing has run, with the trial's globals in place.

    Attributes:
        on_left_out: Called with the places, in words, of what changed and cannot be packed; once
            with each.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        self._attributes = Attributes(model, optimizer, schedule)
        self._ambient, self._fixed = ambient.here(), self._attributes.fixed()
        self._built = self._notes = self._ambient.settle(self._fixed)
        self._left_out: set[str] = set()
        self.on_left_out: Callable[[tuple[str, ...]], None] = lambda places: None

    def put(self) -> None:
        """Put the trial's globals in place."""
        self._ambient.put(self._notes)

    def put_away(self) -> None:
        """Note them: others may come in their place."""
        self._notes = self._ambient.take(self._fixed)

    def pack(self) -> dict[str, Any]:
        """What changed since the trial was built, for another process."""
        attributes, lost = self._attributes.changed()
        of_globals, lost_globals = self._ambient.changed(self._built, self._notes)
        if places := [p for p in (*lost, *lost_globals) if p not in self._left_out]:
            self._left_out.update(places)
            self.on_left_out(tuple(map(in_words, places)))
        found = {"attributes": attributes, "globals": of_globals}
        return {name: packed for name, packed in found.items() if packed}

    def give(self, packed: Mapping[str, Any], device: torch.device, *, warm: bool) -> None:
        """What ``pack`` gave, in the place of what was built; ``warm``: another trial's."""
        self._attributes.give(packed.get("attributes", {}), device, scheduled=not warm)
        if kept := packed.get("globals"):
            self.put()
            self._ambient.give(kept, device, self._attributes.looked_after())
            self.put_away()
