"""An array that is to be timed, made to run as it will from then on: its graphs, its captures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import torch

from shoal.core.units import Bytes
from shoal.fusion import Array, Declined
from shoal.fusion.batches import layout_of
from shoal.fusion.crew import ArrayBackend
from shoal.fusion.graphs.branches import BranchesBackend
from shoal.fusion.graphs.compiled import CompiledBackend
from shoal.fusion.graphs.traced import TracedBackend
from shoal.fusion.passes.fused import first_line, is_out_of_memory
from shoal.partition.track import AllocationTracker
from shoal.runtime.capture.captured import PROOFS
from shoal.runtime.capture.cudagraph import REPEATS

MOST_PROOFS = 4  # steps until a graph of a pass is trusted, or is not made


def passes_of(steps: Sequence[Sequence[Sequence[Any]]]) -> float:
    """Of each micro-batch on average: one for each layout of its batches."""
    return mean(len({layout_of(b) for b in slots}) for step in steps for slots in step)


def without_others(array: Array, steps: Sequence[Any]) -> Bytes:
    """Have no graphs but those that there are, and do these steps; the most bytes of one."""
    if isinstance(array.backend, TracedBackend):
        array.backend.makes_more = False
    with AllocationTracker() as tracker:
        for rows in steps:
            _step(array, rows)
    return Bytes(tracker.peak_bytes)


def step_all(array: Array, steps: Sequence[Any]) -> None:
    """Do one step after another.

    Raises:
        Declined: all slots raise. A step that ends early is no measure of any.
    """
    for rows in steps:
        _refuse_if_all_raise(array, array.step(*rows).failures)


def settle(array: Array, steps: Sequence[Any], valid: Sequence[Any]) -> Bytes:
    """Steps and evaluations until the array runs as it will from then on.

    Returns the most bytes that a step allocates, where it makes its graph too. The optimizers'
    states are there by then.
    """
    backend = array.backend
    if isinstance(backend, BranchesBackend):
        return _settle_branches(array, steps)
    if isinstance(backend, CompiledBackend):
        _step(array, steps[0])
        _settle_evaluation(array, valid)
        return Bytes(0)
    if isinstance(backend, TracedBackend):
        backend.is_paused = True
    _step(array, steps[0])
    if isinstance(backend, TracedBackend):
        backend.is_paused = False
    with AllocationTracker() as tracker:
        for rows in steps:
            _step(array, rows)
    if isinstance(backend, TracedBackend):
        for _ in range(MOST_PROOFS):
            for rows in steps if backend.learns else ():
                _step(array, rows)
        _settle_evaluation(array, valid)
    _settle_steps(array, steps[0])
    return Bytes(tracker.peak_bytes)


def _settle_steps(array: Array, rows: Sequence[Sequence[Any]]) -> None:
    """Have the optimizers' steps captured, where they can be."""
    for _ in range(REPEATS if array.backend.steps is not None else 0):
        _step(array, rows)


def by_code(backend: ArrayBackend) -> tuple[str, ...]:
    """In words, why slots' own passes are not captured."""
    words = backend.why_eager if isinstance(backend, BranchesBackend) else ""
    return (f"passes run by their code: {words}",) if words else ()


def _settle_branches(array: Array, steps: Sequence[Any]) -> Bytes:
    """The same of slots' own passes; what a capture is compared with comes on top."""
    _step(array, steps[0])
    with AllocationTracker() as tracker:
        _step(array, steps[0])  # by the slots' code
    for _ in range(PROOFS):
        for rows in steps:
            _step(array, rows)
    _settle_steps(array, steps[0])
    crew = array.crew
    beside = 2 * sum(p.nbytes for p in crew.members[0].module.parameters())
    beside += 3 * sum(b.nbytes for b in crew.members[0].module.buffers())
    return Bytes(tracker.peak_bytes + beside)


def _settle_evaluation(array: Array, valid: Sequence[Any]) -> None:
    """Have its graph made, then proven; it is no part of what an evaluation takes."""
    if any(batch is not None for batch in valid) and array.evaluates_as_one(valid):
        for _ in range(2):
            evaluate_array(array, valid)


def _step(array: Array, rows: Sequence[Any]) -> None:
    """A step in which no slot is out of memory, and not all of them raise."""
    failures = array.step(*rows).failures
    for failure in failures.values():
        if is_out_of_memory(failure):
            raise torch.OutOfMemoryError(first_line(failure))
    _refuse_if_all_raise(array, failures)


def _refuse_if_all_raise(array: Array, failures: Mapping[int, BaseException]) -> None:
    """Those that failed take no part in steps after it."""
    if array.training:
        return
    why = f": {first_line(next(iter(failures.values())))}" if failures else ""
    raise Declined(f"all of its slots raise{why}")


def evaluated(array: Array, batches: Sequence[Any]) -> tuple[int, float]:
    """The most bytes that an evaluation of one batch for each slot allocates, and its seconds."""
    if all(batch is None for batch in batches):
        return 0, 0.0
    began = time.perf_counter()
    with AllocationTracker() as tracker:
        evaluate_array(array, batches)
    return int(tracker.peak_bytes), time.perf_counter() - began


def evaluate_array(array: Array, batches: Sequence[Any]) -> None:
    """Evaluate a batch for each slot; it goes on training afterwards."""
    array.set_training(False)
    array.evaluate(batches)
    array.set_training(True)
