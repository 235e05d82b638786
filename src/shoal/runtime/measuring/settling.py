"""Whether what forwards change in Python matters to the forwards that follow.

A shard's forward runs again in its backward, and a model runs now and then to find its blocks.
Buffers, parameters and random numbers are put back each time. Attributes are not: a flag that a
first batch sets, a rate that falls from call to call. Most of what forwards leave there is read by
nobody, or the same whenever it is made, as a mask of some length; so it is tried.

A forward may go another way with a later batch: ``if begins: self.h = zeros`` reads nothing of
what was left in the first batch of an epoch, and in all others it does. So it is also tried with
the other answers, of the values of Python that the model is given and of tensors that it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.core.spec import HyperParameters, TrialSpec
from shoal.fusion.effects.otherways import other_ways, with_other_numbers
from shoal.fusion.effects.sideeffects import attributes_of, in_words, names_changed, naming
from shoal.partition.build import clone_batch
from shoal.partition.preserve import preserved, same_values
from shoal.recipes.recipe import (
    Batch,
    Recipe,
    autocast,
    build_model,
    loss_and_output,
    to_device,
)
from shoal.rng import RngState, capture_rng, restore_rng, same_rng, seed_all

CPU = torch.device("cpu")
LATER = (1, 10, 1000, 10**6)
"""By how much more a count may have counted."""


def changed_attributes(before: Mapping[str, str], module: nn.Module) -> set[str]:
    """The attributes that are others than they were, in words of ``in_words``."""
    return set(names_changed(before, in_words(attributes_of(module))))


def why_changes_matter(
    recipe: Recipe, trial: TrialSpec, batch: Batch, names: Collection[str]
) -> str:
    """In words, why the model cannot be cut; empty where nothing depends on these attributes.

    Builds the trial's model a few times, on the CPU, and runs it there. Random state is as before.
    """
    before = capture_rng()
    try:
        there = to_device(batch, CPU)
        is_other = any(
            not _equal(
                _outcome(_built(recipe, trial), recipe, there), _outcome(used, recipe, there)
            )
            for used in _used_models(recipe, trial, there, names)
        )
        if is_other or _goes_another_way(recipe, trial, there, names):
            return (
                f"a forward changes {min(names)}, and forwards after it compute something "
                "else; in shards forwards run again. Make it a buffer of the model, or set it "
                "where the model is built"
            )
    except Exception:  # of the model's own, on a batch that it would not be given
        return ""
    finally:
        restore_rng(before)
    return ""


def _goes_another_way(
    recipe: Recipe, trial: TrialSpec, batch: Batch, names: Collection[str]
) -> bool:
    """Whether forwards after another one are others where code is given other answers."""
    for given, mode in other_ways(recipe, batch):
        found = []
        for model in (_built(recipe, trial), next(_used_models(recipe, trial, batch, names))):
            with mode:
                found.append(_outcome_if_any(model, recipe, given))
        fresh, used = found
        if (fresh is None) != (used is None) or (fresh and used and not _equal(fresh, used)):
            return True
    return False


def _outcome_if_any(
    model: nn.Module, recipe: Recipe, batch: Batch
) -> tuple[list[Tensor], RngState] | None:
    """None where the model's code raises."""
    try:
        return _outcome(model, recipe, batch)
    except (Exception, SystemExit):  # it would not be given that, maybe
        return None


def _used_models(
    recipe: Recipe, trial: TrialSpec, batch: Batch, names: Collection[str]
) -> Iterator[nn.Module]:
    """Models as they are after other batches, but for weights, buffers and random numbers."""
    model = _built(recipe, trial)
    with preserved(model, CPU):
        _outcome(model, recipe, with_other_numbers(batch))
    counts = _numbers(model, names)
    yield model
    for more in LATER if counts else ():
        model = _built(recipe, trial)
        for path, name in counts:
            owner = model.get_submodule(path)
            setattr(owner, name, getattr(owner, name) + more)
        yield model


def _numbers(model: nn.Module, names: Collection[str]) -> list[tuple[str, str]]:
    return [
        (path, name)
        for path, child in model.named_modules()
        for name, value in vars(child).items()
        if type(value) in (int, float) and naming(path, name) in names
    ]


def _built(recipe: Recipe, trial: TrialSpec) -> nn.Module:
    seed_all(trial.seed)
    return build_model(recipe, HyperParameters(trial.hp)).train()


def _outcome(model: nn.Module, recipe: Recipe, batch: Batch) -> tuple[list[Tensor], RngState]:
    """What a training forward and its backward make, and where they leave random numbers."""
    seed_all(1)
    model.zero_grad()
    with torch.enable_grad(), autocast(recipe, CPU):
        batch = clone_batch(batch)
        loss, output = loss_and_output(recipe, model, batch)
    with suppress(RuntimeError):  # through a graph of another batch: then forwards are compared
        loss.backward()  # a gradient may be all that a count is for, as one that is reversed
    leaves: list[Any] = [loss, *tree_leaves(output), *(p.grad for p in model.parameters())]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], capture_rng()


def _equal(one: tuple[list[Tensor], RngState], other: tuple[list[Tensor], RngState]) -> bool:
    alike: Callable[[Tensor, Tensor], bool] = same_values
    return (
        len(one[0]) == len(other[0])
        and all(map(alike, one[0], other[0]))
        and same_rng(one[1], other[1])
    )
