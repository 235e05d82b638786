"""Chains that were found in this worker, for other trials of the same code and shapes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import nn

from shoal.core.spec import HyperParameters
from shoal.fusion import signature_of
from shoal.fusion.graphs.constants import constants_of
from shoal.partition.build import build_chain, without_caches
from shoal.partition.chain import Chain
from shoal.partition.compiled import eagerly
from shoal.partition.transplant import obstacle, transplanted
from shoal.recipes.recipe import Batch, Recipe
from shoal.rng import capture_rng, restore_rng
from shoal.runtime.measuring.describe import hollow_model
from shoal.runtime.measuring.firstbatches import FEW_ROWS, first_rows

CPU = torch.device("cpu")
MOST = 8
"""Kinds of trials whose chains are kept."""


class Chains:
    """To find a chain takes two forwards of the whole model on the CPU, which a large one feels.

    Trials whose modules have equal classes, settings and shapes, floats too, and equal batches,
    call their blocks alike. What is kept of one has no weights.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._known: dict[Hashable, Chain] = {}

    def keep(self, chain: Chain, hp: HyperParameters, key: Hashable) -> None:
        """Have it for others of that key, where another model may take its modules' place."""
        if obstacle(chain):
            return
        before = capture_rng()
        try:
            hollow = hollow_model(self._recipe, hp, seed=0)
        finally:
            restore_rng(before)
        if hollow is None:
            return
        while len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[key] = transplanted(chain, hollow, chain.recipe)

    def find(
        self, key: Hashable, model: nn.Module, recipe: Recipe, *, caches_off: bool
    ) -> Chain | None:
        """The chain of ``model``, which has that key, where one of its like is known.

        ``caches_off`` switches key-value caches off, until it is closed.
        """
        found = self._known.get(key)
        if found is None or found.caches_off != caches_off:
            return None
        chain = transplanted(found, model, recipe).watched()
        if not caches_off:
            return chain
        restore, notes = without_caches(model)
        return replace(chain, notes=notes, on_close=[restore])


def key_of(model: nn.Module, recipe: Recipe, batch: Batch) -> Hashable:
    """What those have in common that call their blocks alike.

    Asked for before the first forward, which may change settings: Hugging Face's models note
    there what problem they solve. A class is told by itself: one that a function makes may differ
    in what it closes over.
    """
    kinds = tuple(type(module) for module in model.modules())
    return kinds, signature_of(recipe, model, batch=batch), constants_of(recipe, model, rates=True)


def chain_of(
    model: nn.Module,
    recipe: Recipe,
    hp: HyperParameters,
    batch: Batch,
    known: Chains | None,
    caches_off: bool,
    device: torch.device = CPU,
) -> Chain:
    """A known one with the modules of ``model``, which is on the CPU; else it is found there.

    ``caches_off`` switches key-value caches off, until the chain is closed. For a GPU as
    ``device`` it is found with a few rows of the batch: as good for others, and sooner there.

    Raises:
        NotCuttable: it has none.
    """
    key = None if known is None else key_of(model, recipe, batch)
    if known is not None:
        found = known.find(key, model, recipe, caches_off=caches_off)
        if found is not None:
            return found
    with eagerly():
        seen = batch if device.type == "cpu" else first_rows(batch, FEW_ROWS)
        chain = build_chain(model, recipe, seen, CPU, switch_caches_off=caches_off)
    if known is not None:
        known.keep(chain, hp, key)
    return chain
