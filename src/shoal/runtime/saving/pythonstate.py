"""What a trial in a worker keeps in Python, as a part of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

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
        self._objects = model, optimizer, schedule
        self._attributes = Attributes(model, optimizer, schedule)
        self._ambient, self._fixed = ambient.here(), self._attributes.fixed()
        self._built = self._notes = self._ambient.settle(self._fixed)
        self._marked = self._attributes, self._built
        self._learnt: dict[str, dict[str, Any]] = {}  # of what runs in other processes
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
        found = {name: packed | self._learnt.get(name, {}) for name, packed in found.items()}
        return {name: packed for name, packed in found.items() if packed}

    def mark(self) -> None:
        """What is there now is known to whoever leads the trial: ``since`` begins here."""
        self._marked = Attributes(*self._objects), self._notes

    def since(self) -> dict[str, Any]:
        """Of what ``pack`` gives, what changed after ``mark``: by what runs in this process."""
        self.put_away()
        attributes, notes = self._marked
        of_globals, _ = self._ambient.changed(notes, self._notes)
        changed = attributes.changed()[0].keys() | of_globals.keys()
        return {
            name: {place: one for place, one in packed.items() if place in changed}
            for name, packed in self.pack().items()
        }

    def learn(self, packed: Mapping[str, Mapping[str, Any]]) -> None:
        """What another process of this trial gave as ``since``."""
        for name, places in packed.items():
            own = tree_map_only(Tensor, lambda tensor: tensor.cpu().clone(), dict(places))
            self._learnt.setdefault(name, {}).update(own)

    def give(self, packed: Mapping[str, Any], device: torch.device, *, warm: bool) -> None:
        """What ``pack`` gave, in the place of what was built; ``warm``: another trial's."""
        if packed or warm:  # else it goes on where it stood
            self._learnt.clear()
        self._attributes.give(packed.get("attributes", {}), device, scheduled=not warm)
        if kept := packed.get("globals"):
            self.put()
            self._ambient.give(kept, device, self._attributes.looked_after())
            self.put_away()
