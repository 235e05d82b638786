"""What code beside the passes changes in what they read: a global, a number on a class.

Alone a trial has its globals for itself. In an array passes of all slots find one of each, or a
graph holds the numbers that it read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from shoal.fusion.batches import changed_by
from shoal.fusion.effects.sideeffects import names_changed, settings_beside
from shoal.fusion.likeness import copies
from shoal.fusion.member import Member, in_streams
from shoal.fusion.passes.loop import lone_pass
from shoal.kernels.kernelstep import is_torchs
from shoal.pystate import ambient
from shoal.pystate.finding import fields_that_find, in_words
from shoal.recipes.recipe import Batch, read_data
from shoal.recipes.schedules import turn
from shoal.rng import capture_rng, restore_rng

HOST = torch.device("cpu")


def first_change(member: Member, batch: Batch) -> str:
    """In words, what reading the data, a metric, or the end of a step changes; empty if nothing.

    ``member`` and ``batch`` are in host memory. Globals and random streams are as before then.
    """
    here, rng = ambient.here(), capture_rng(HOST)
    before = here.take()
    try:
        (copied,) = copies([member])
        return _first_change(copied, batch)
    except (Exception, SystemExit):  # it cannot be copied, or its own code raises: said elsewhere
        return ""
    finally:
        here.put(before)
        restore_rng(rng, HOST)


def first_hold(member: Member) -> str:
    """In words, which code of the recipe's finds its model without being given it; empty if none.

    In a global, say, where whoever makes a model puts it: that of the trial that was made last.
    """
    found = fields_that_find(member.recipe, member.hp)
    return in_words(found[0], "there would be one for all slots") if found else ""


def _first_change(member: Member, batch: Batch) -> str:
    recipe = member.recipe
    train, valid = read_data(recipe, member.hp)
    read = _Read(member)
    _begin_twice(train)
    if words := read.change("reading the data"):
        return words
    if valid is not None:
        _begin_twice(valid)
        if words := read.change("reading the validation data"):
            return words
    if recipe.step is not None:
        return ""  # of such a step two calls are looked at
    if not (recipe.metrics or member.schedule) and is_torchs(member.optimizer):
        return ""
    batch = changed_by(torch.clone, batch)
    member.module.train()
    with in_streams(member, HOST):
        output, loss = lone_pass(member, batch, HOST)
        loss.backward()
    read = _Read(member)  # what a forward changes is looked at elsewhere
    with torch.no_grad():
        for name, metric in recipe.metrics.items():
            metric(output, batch)
            if words := read.change(f"the metric {name!r}"):
                return words
    member.optimizer.step()
    if words := read.change("the optimizer's step"):
        return words
    for _ in range(2 if member.schedule else 0):
        turn(member.schedule)
    return read.change("the schedule's step")


class _Read:
    """What passes read that is no part of the model."""

    def __init__(self, member: Member) -> None:
        self._member, self._then = member, settings_beside(member)

    def change(self, what: str) -> str:
        """The first thing that is another now, in words; empty if nothing is."""
        changed = names_changed(self._then, settings_beside(self._member))
        if not changed:
            return ""
        return (
            f"{what} changes {changed[0]}, which the code of a step reads, and there would be one "
            "for all slots. Hand it over in the batch, or make it a buffer of the model."
        )


def _begin_twice(source: Iterable[Any]) -> None:
    """Two epochs' first batches; not of a loader with processes, whose globals are others."""
    if isinstance(source, DataLoader) and source.num_workers:
        return
    for _ in range(2):
        iterator = iter(source)
        for _ in range(2):
            next(iterator, None)
