"""A chain of one model for another one of the same code: an array's template, or a slot's own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from shoal.partition.callsheet import EmptyCache
from shoal.partition.chain import Chain
from shoal.partition.template import Constant
from shoal.recipes.recipe import Recipe


def transplanted(chain: Chain, model: nn.Module, recipe: Recipe) -> Chain:
    """``chain`` with the modules of ``model``, which has the same names; it keeps no others."""
    skeleton = chain.skeleton
    blocks = tuple(
        replace(block, module=model.get_submodule(block.name)) for block in skeleton.blocks
    )
    outside = {name: model.get_submodule(name) for name in skeleton.outside}
    skeleton = replace(skeleton, model=model, recipe=recipe, blocks=blocks, outside=outside)
    # Which modules it called was asked for while the chain was made.
    record = replace(chain.record, blocks=blocks, outside=outside, called=())
    return replace(chain, skeleton=skeleton, record=record, on_close=[], places=())


def obstacle(chain: Chain) -> str:
    """Why an array cannot run shard by shard what a trial alone can; empty if it can."""
    if chain.skeleton.draws:
        return "its forward draws random numbers between its modules"
    if any(chain.written_parameters(layer) for layer in range(chain.num_layers)):
        return "a forward writes to its weights, as max_norm does"
    if any(chain.shared_casts):
        return "several parts of it cast one weight under autocast"
    leaves = [
        leaf for part in chain.record.sheet.parts for call in part.calls for leaf in call.leaves
    ]
    if any(isinstance(leaf, EmptyCache) for leaf in leaves):
        return "its blocks are handed a key-value cache"
    if any(isinstance(leaf, Constant) and _is_parameter(leaf.value) for leaf in leaves):
        return "its blocks are handed weights of other modules"
    given = [leaf for block in chain.skeleton.blocks for leaf in block.output.leaves]
    if any(isinstance(leaf, Constant) and isinstance(leaf.value, float) for leaf in given):
        return "its blocks return floats, which may be another trial's"
    return ""


def _is_parameter(value: object) -> bool:
    return isinstance(value, torch.nn.Parameter)
