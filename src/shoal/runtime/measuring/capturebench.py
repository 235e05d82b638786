"""What a training pass takes by a capture, and as the plain loop runs it, turn by turn."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from shoal.core.spec import CaptureMeasure
from shoal.core.units import Seconds
from shoal.recipes.recipe import Batch, Recipe
from shoal.runtime.capture.captured import PROOFS
from shoal.runtime.capture.captures import Captures
from shoal.runtime.measuring.slices import finish
from shoal.runtime.units import Micro, ResidentUnits

ROUNDS = 5
SLICE_S = 0.01  # of each of the two in a round, or one pass


def measure_capture(
    captures: Captures, recipe: Recipe, model: nn.Module, batch: Batch, device: torch.device
) -> CaptureMeasure:
    """Capture a pass over a batch that is on the device, and time it; or why there is none."""
    eager, captured = ResidentUnits(model, recipe, device), captures.units(model, recipe)

    def run(units: ResidentUnits) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        units.backward(0, Micro(batch))

    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what keeps it from being captured, which is told below
        for _ in range(PROOFS):
            try:
                run(captured)
            except (torch.OutOfMemoryError, MemoryError):
                captured.let_go()
                return CaptureMeasure(declined="there is no room to compare it with a pass")
    finish(device)
    make_s = time.perf_counter() - began
    try:
        if not captured.is_captured:
            return CaptureMeasure(declined=captured.why_not or "its batches hold floats")
        pairs = [
            (_seconds(lambda: run(eager), device), _seconds(lambda: run(captured), device))
            for _ in range(ROUNDS)
        ]
    finally:
        captured.let_go()
        for parameter in model.parameters():
            parameter.grad = None
    ratios = [one / other for other, one in pairs]
    middle = median(ratios)
    spread = median(abs(ratio - middle) for ratio in ratios)
    return CaptureMeasure(
        eager_s=Seconds(median(pair[0] for pair in pairs)),
        captured_s=Seconds(median(pair[1] for pair in pairs)),
        make_s=Seconds(make_s),
        noise=1.5 * spread / middle / ROUNDS**0.5,
    )


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Of one, of as many as are over in a slice; at least one."""
    finish(device)
    began, count = time.perf_counter(), 0
    while True:
        work()
        count += 1
        if time.perf_counter() - began > SLICE_S:
            finish(device)
            return (time.perf_counter() - began) / count
