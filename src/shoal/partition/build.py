"""From a model, a recipe and one real batch to a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import ShoalError
from shoal.partition.callsheet import CallSheet, EmptyCache, Wire, Wires, flatten
from shoal.partition.chain import Chain
from shoal.partition.discover import Candidate, NotCuttable, find_candidates
from shoal.partition.glue import Skeleton, run_prologue
from shoal.partition.owners import Owners, UseRecorder, find_owners
from shoal.partition.preserve import preserved
from shoal.partition.record import Record, record_forward
from shoal.partition.taint import Taint
from shoal.recipe import Batch, Recipe, autocast

_ATTEMPTS = 4  # to find what the epilogue reads: what is kept may let it read more


@dataclass(frozen=True, slots=True)
class _Source:
    """What a chain is built from."""

    model: nn.Module
    recipe: Recipe
    batch: Batch
    device: torch.device


def build_chain(
    model: nn.Module,
    recipe: Recipe,
    batch: Batch,
    device: torch.device,
    *,
    switch_caches_off: bool = False,
) -> Chain:
    """The chain of ``model`` for batches like ``batch``, which is on ``device``.

    The model is in training mode. Parameters, buffers, gradients and random state are
    afterwards as before. ``switch_caches_off`` sets ``use_cache`` to False in the configs
    of the model's modules, until ``Chain.close``.

    Raises:
        NotCuttable: says what in the model stands against it.
    """
    source = _Source(model, recipe, batch, device)
    candidates = find_candidates(model)
    restore, notes = _switch_caches_off(model) if switch_caches_off else (_nothing, ())
    try:
        chain = _first_that_works(source, candidates)
    except BaseException:
        restore()
        raise
    return replace(chain, notes=(*chain.notes, *notes), on_close=[restore])


def _first_that_works(source: _Source, candidates: list[Candidate]) -> Chain:
    """The chain of the first candidate that has one.

    Raises:
        NotCuttable: none has; the reason is the last one's.
    """
    for candidate in candidates:
        try:
            return _build(source, candidate)
        except NotCuttable as error:
            refusal = error
    if len(candidates[-1].lists) > 1:
        reason = f"its lists {candidates[-1].title} do not form one chain: {refusal.reason}"
        raise NotCuttable(reason) from refusal
    raise refusal


def _build(source: _Source, candidate: Candidate) -> Chain:
    """The chain, once it is known what the epilogue reads besides the last block's output."""
    kept: frozenset[Wire] = frozenset()
    for _ in range(_ATTEMPTS):
        chain, read = _build_with(source, candidate, kept)
        if read <= kept:
            return chain
        kept |= read
    raise NotCuttable("what it does after its blocks depends on ever more of what came before")


def _build_with(
    source: _Source, candidate: Candidate, kept: frozenset[Wire]
) -> tuple[Chain, frozenset[Wire]]:
    """A chain that keeps ``kept`` for the epilogue, and what the epilogue reads in fact."""
    model, device = source.model, source.device
    with preserved(model, device):
        batch = clone_batch(source.batch)
        record = record_forward(model, source.recipe, batch, device, candidate, kept=kept)
    skeleton = Skeleton(
        model=model,
        recipe=source.recipe,
        device=device,
        blocks=record.blocks,
        prologue=record.prologue,
        kept=kept,
        glue_free=_is_plain(model, candidate),
    )
    try:
        return _finish(source, skeleton, record)
    except ShoalError:
        raise
    except Exception:  # the glue may change stand-ins in place: once more, with memory
        dense = replace(skeleton, dense=True)
    try:
        return _finish(source, dense, record)
    except ShoalError:
        raise
    except Exception as error:
        raise NotCuttable(
            "its forward fails when the modules before and between the blocks are replaced by "
            f"stand-ins ({type(error).__name__}: {error})"
        ) from error


def _finish(source: _Source, skeleton: Skeleton, record: Record) -> tuple[Chain, frozenset[Wire]]:
    """Check the glue, and see which layer reads which parameter and the epilogue which wire.

    Raises:
        NotCuttable: the glue computes from the blocks' outputs.
    """
    sheet = _check_glue(source, skeleton)
    pairs = zip(sheet.calls, record.sheet.calls, strict=True)
    if not all(one.has_form_of(other) for one, other in pairs):
        raise NotCuttable("its forward calls the blocks otherwise when they are stand-ins")
    nobody = Owners((), (), ())
    chain = Chain(skeleton=skeleton, record=replace(record, sheet=sheet), owners=nobody)
    recorder, read = _watch(chain, source.batch)
    return replace(chain, owners=find_owners(chain.model, record, recorder)), read


def _check_glue(source: _Source, skeleton: Skeleton) -> CallSheet:
    """The call sheet of a prologue run in which nothing is computed from a block's output.

    Raises:
        NotCuttable: something is; or a block is given a cache that is not empty.
    """
    model, device, taint = source.model, source.device, Taint()
    with preserved(model, device), torch.no_grad(), autocast(source.recipe, device), taint:
        sheet, _ = run_prologue(skeleton, clone_batch(source.batch), taint)
    if taint.read:
        layer = max(wire.layer for wire in taint.read)
        raise NotCuttable(
            "the forward reads a value of the output of block "
            f"{skeleton.blocks[layer - 1].name!r} between blocks"
        )
    leaves = [leaf for call in sheet.calls for leaf in call.leaves]
    caches = [leaf.value for leaf in leaves if isinstance(leaf, EmptyCache)]
    filled = next((cache for cache in caches if cache.get_seq_length() != 0), None)
    if filled is not None:
        raise NotCuttable(f"its blocks are given a {type(filled).__name__} that is not empty")
    return sheet


def _watch(chain: Chain, batch: Batch) -> tuple[UseRecorder, frozenset[Wire]]:
    """One forward, layer by layer: the parameters each layer reads, the epilogue's wires."""
    recorder = UseRecorder(dict(chain.model.named_parameters()))
    taint = Taint()
    epilogue = chain.num_layers - 1

    def enter_epilogue() -> None:
        recorder.layer = epilogue
        taint.noting = True

    with preserved(chain.model, chain.device), torch.no_grad():
        micro = chain.begin(clone_batch(batch))
        wires: Wires = {}
        for layer in range(epilogue):
            with autocast(chain.recipe, chain.device), recorder:
                recorder.layer = layer
                wires |= chain.forward(micro, layer, layer + 1, wires)
            alive = chain.live_wires(layer + 1, micro)
            wires = {wire: wires[wire] for wire in alive}
        with autocast(chain.recipe, chain.device), recorder, taint:
            recorder.layer = epilogue if chain.skeleton.kept else None
            loss, output = chain.loss(
                micro, epilogue, wires, on_resume=enter_epilogue, taint=taint
            )
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
    return recorder, frozenset(taint.read | taint.sources_of([loss, *leaves]))


def clone_batch(batch: Batch) -> Batch:
    """A copy with tensors of its own, for a forward that may change them."""
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(batch)]
    return pytree.tree_unflatten(copies, pytree.tree_structure(batch))


def _is_plain(model: nn.Module, candidate: Candidate) -> bool:
    """Is there nothing between the blocks but plain nn.Sequential?"""
    return candidate.lists == ("",) and type(model) is nn.Sequential


def configs_with_cache(model: nn.Module) -> list[Any]:
    """The configs of the model's modules whose ``use_cache`` is on."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    on = {id(c): c for c in configs if getattr(c, "use_cache", None) is True}
    return list(on.values())


def _switch_caches_off(model: nn.Module) -> tuple[Callable[[], None], tuple[str, ...]]:
    """Switch ``use_cache`` off in every module's config; how to undo it, and a note."""
    configs = configs_with_cache(model)
    for config in configs:
        config.use_cache = False

    def restore() -> None:
        for config in configs:
            config.use_cache = True

    names = ", ".join(sorted({type(config).__name__ for config in configs}))
    note = f"use_cache was switched off in {names}: training needs no key-value cache"
    return restore, (note,) if configs else ()


def _nothing() -> None:
    """What there is to undo when nothing was switched off."""
