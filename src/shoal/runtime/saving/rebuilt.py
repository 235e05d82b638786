"""A trial's model, made again in a process that does not train it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shoal.core.spec import HyperParameters, Scalar
from shoal.kernels.kernelchoice import KernelChoice
from shoal.pystate.ofprocess import OfProcess
from shoal.recipes.recipe import Recipe
from shoal.recipes.several import Models
from shoal.rng import capture_rng, restore_rng, seed_all

_left: list[tuple[KernelChoice, KernelChoice]] = []
"""How the last model that was made left the process, and by what the next one is made."""


def build_model(recipe: Recipe, hp: Mapping[str, Scalar], seed: int) -> nn.Module:
    """The module as the trial built it, without a trace in the random streams.

    What ``model(hp)`` sets for the whole process (a default type) stays, for the module's forward;
    the next trial's is made without it, unless it has been set to something else since.
    """
    for after, found in _left:
        KernelChoice.here().without(found, after).take()
    settings = OfProcess()
    settings.begin()
    before = capture_rng()
    seed_all(seed)
    try:
        model = recipe.model(HyperParameters(hp))
        return model if isinstance(model, nn.Module) else Models(model)
    finally:
        restore_rng(before)
        settings.end()
        _left[:] = [(KernelChoice.here(), settings.of_study)]
