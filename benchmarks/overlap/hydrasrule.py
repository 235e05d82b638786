"""Hydra's rule in the place of shoal's: a step's program, and slots that hold all of a shard.

In a module of its own, so that the workers of that arm import it. What trains, and how it
copies, computes and waits, is shoal's own otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import paper

from shoal.core.technique import Spilled
from shoal.memory import layout
from shoal.program.ir import Program
from shoal.spill import generate


def _step(route: generate.Route, micro_batches: int, clip: bool) -> Program:
    assert (clip, micro_batches, route.optimizer, route.lookahead) == (True, 1, "device", 1)
    return paper.hydra_step(route.num_shards, everything=True)


def _slot_parts(technique: Spilled, **loop: Any) -> tuple[str, ...]:
    return ("state", "grad")


def _late_sizes(*args: Any, **loop: Any) -> list[int]:
    return []


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Spilled steps are by Hydra's rule."""
    with (
        mock.patch.object(generate, "_step", _step),
        mock.patch.object(layout, "slot_parts", _slot_parts),
        mock.patch.object(layout, "_late_sizes", _late_sizes),
    ):
        yield


def install() -> None:
    """The same, for as long as this process lives; again: nothing."""
    generate._step = _step
    layout.slot_parts, layout._late_sizes = _slot_parts, _late_sizes
