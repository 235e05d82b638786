"""From a model, a recipe and one real batch to a chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shoal.core.errors import ShoalError, TrialError
from shoal.partition.callsheet import EmptyCache, own_among
from shoal.partition.chain import Chain, Micro
from shoal.partition.discover import (
    CalledApart,
    Candidate,
    NotCuttable,
    find_candidates,
    find_parts,
)
from shoal.partition.evaluated import with_retyped
from shoal.partition.glue import Block, Skeleton
from shoal.partition.handed import Keepers
from shoal.partition.owners import Owners, UseRecorder, find_owners
from shoal.partition.preserve import preserved, same_values
from shoal.partition.record import Record, make_record
from shoal.partition.spy import Spy
from shoal.partition.units import run_forward
from shoal.partition.unwritten import require_quiet_switch
from shoal.partition.wires import OwnCall, Wire, Wires
from shoal.pystate.finding import fields_holding
from shoal.recipes.recipe import Batch, Recipe, autocast

_ATTEMPTS = 5  # to find the joints, of which known ones may bring others to light, and so on


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
    require_quiet_switch(model, device)
    restore, notes = without_caches(model) if switch_caches_off else (_nothing, ())
    try:
        chain = _best_chain(source)
    except BaseException:
        restore()
        raise
    return replace(chain, notes=notes, caches_off=bool(notes), on_close=[restore])


def _best_chain(source: _Source) -> Chain:
    """The chain of the model's lists, or if they make none that is fine, of its parts.

    Raises:
        NotCuttable: there is no chain; the reason is that of the most blocks.
    """
    chains: list[Chain] = []
    refusals: list[NotCuttable] = []
    for candidate in find_candidates(source.model):
        try:
            chains.append(_build(source, candidate))
        except NotCuttable as error:
            refusals.append(error)
            continue
        if _is_fine(chains[-1]) and not chains[-1].skeleton.sections.joints:
            return _choose(chains)
    if not any(map(_is_fine, chains)):
        chains += _chains_of_parts(source, refusals)
    if chains:
        return _choose(chains)
    raise refusals[0]


def _chains_of_parts(source: _Source, refusals: list[NotCuttable]) -> list[Chain]:
    """The fine chain of the modules that the model consists of; why not, for each other one.

    One without joints, if any has none.
    """
    chains = []
    for candidate in find_parts(source.model):
        try:
            chain = _build(source, candidate)
        except NotCuttable as error:
            refusals.append(error)
            continue
        if _is_fine(chain):
            chains.append(chain)
    refusals.append(
        NotCuttable(
            "it has no nn.ModuleList or nn.Sequential with two or more children that have "
            "parameters, and most of it is in one module, so there is nothing to cut between"
        )
    )
    return sorted(chains, key=lambda chain: bool(chain.skeleton.sections.joints))[:1]


def _choose(chains: list[Chain]) -> Chain:
    """The chain with the most blocks; one without joints that has half as many is preferred."""
    fine = [chain for chain in chains if _is_fine(chain)] or chains
    longest = max(fine, key=lambda chain: len(chain.skeleton.blocks))
    enough = len(longest.skeleton.blocks) / 2
    plain = [
        chain
        for chain in fine
        if not chain.skeleton.sections.joints and len(chain.skeleton.blocks) >= enough
    ]
    return plain[0] if plain else longest


def _is_fine(chain: Chain) -> bool:
    """Is its largest layer at most half of the model, or as small as its largest parameter?"""
    sizes = {name: parameter.numel() for name, parameter in chain.model.named_parameters()}
    layers = [
        sum(sizes[n] for n in {*chain.parameters_of(layer), *chain.borrowed_by(layer)})
        for layer in range(chain.num_layers)
    ]
    return max(layers) <= max(sum(sizes.values()) / 2, 1.1 * max(sizes.values(), default=0))


def _build(source: _Source, candidate: Candidate) -> Chain:
    """The candidate's chain.

    Raises:
        NotCuttable: it has none; says why.
    """
    record, glue_free = _record(source, candidate), _is_plain(source.model, candidate)
    if source.recipe.precision != "fp32" and not glue_free:
        record = replace(record, blocks=_with_retyped(source, record.blocks))
    skeleton = Skeleton(
        model=source.model,
        recipe=source.recipe,
        device=source.device,
        sections=record.sections,
        blocks=record.blocks,
        outside=record.outside,
        reads=record.sheet.reads,
        keepers=record.keepers,
        glue_free=glue_free,
        draws=record.draws,
        graph_kernels=record.by_gradients,
    )
    chain = Chain(skeleton=skeleton, record=record, owners=Owners((), (), ()))
    try:
        chain, rehearsal = _rehearse_somehow(chain, source.batch)
    except TrialError as error:
        raise NotCuttable(f"its rehearsal failed: {str(error).removesuffix('.')}") from error
    owners = find_owners(chain.model, record, rehearsal.recorder)
    finders = frozenset(fields_holding(source.recipe, source.model))
    record = replace(record, made={})
    return replace(chain, owners=owners, record=record, finders=finders).watched()


def _record(source: _Source, candidate: Candidate) -> Record:
    """What a forward does. Blocks that it calls as none can be are modules among others.

    Raises:
        NotCuttable: no chain of the other ones could do that, or there are not two.
    """
    while True:
        try:
            return _watched(source, candidate)
        except CalledApart as error:
            candidate = candidate.without(error.blocks)
            if len(candidate.blocks) < 2:
                raise


def _watched(source: _Source, candidate: Candidate) -> Record:
    """What a forward does, watched until its joints are known.

    What it computes itself and changes afterwards is no wire: it would change it once more.
    """
    joints: tuple[int, ...] = ()
    shared, names_own = frozenset[OwnCall](), True
    keepers: Keepers = {}
    for _ in range(_ATTEMPTS):
        with preserved(source.model, source.device):
            spy = Spy(
                source.model,
                candidate,
                source.device,
                joints,
                shared=shared,
                names_own=names_own,
                keepers=keepers,
            )
            spy.watch(source.recipe, clone_batch(source.batch))
            seen = spy.seen
            changed = any(seen.made[own]._version for own in own_among(seen.made).values())
            known = (*seen.found,) == joints, seen.keepers == keepers, seen.shared == shared
            if all(known) and not changed:
                return make_record(source.model, seen)
        joints, names_own = tuple(seen.found), names_own and not changed
        keepers, shared = seen.keepers, seen.shared
    raise NotCuttable("what it computes between its blocks changes each time its forward runs")


def _with_retyped(source: _Source, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    batch = clone_batch(source.batch)
    return with_retyped(source.model, source.recipe, batch, source.device, blocks)


# -- the rehearsal: one forward, layer by layer ---------------------------------------------


@dataclass(slots=True)
class _Rehearsal:
    """Which parameters each layer read, and which wires came out otherwise than recorded."""

    recorder: UseRecorder
    different: list[Wire] = field(default_factory=list)


def _rehearse_somehow(chain: Chain, batch: Batch) -> tuple[Chain, _Rehearsal]:
    """The chain as it can run: with stand-ins that have memory, or other kernels, if need be.

    Raises:
        NotCuttable: it cannot.
    """
    try:
        rehearsal = _rehearse(chain, batch)
    except ShoalError:
        raise
    except Exception:  # the glue may change stand-ins in place: once more, with memory
        chain = replace(chain, skeleton=replace(chain.skeleton, dense=True))
        rehearsal = _rehearse_or_refuse(chain, batch)
    if not rehearsal.different:
        return chain, rehearsal
    other = replace(chain, skeleton=replace(chain.skeleton, graph_kernels=True))
    again = _rehearse_or_refuse(other, batch)
    return (chain, rehearsal) if again.different else (other, again)


def _rehearse_or_refuse(chain: Chain, batch: Batch) -> _Rehearsal:
    try:
        return _rehearse(chain, batch)
    except ShoalError:
        raise
    except Exception as error:
        raise NotCuttable(
            "its forward fails when the modules before and between the blocks are replaced by "
            f"stand-ins ({type(error).__name__}: {error}){_side_door(chain.model)}"
        ) from error


def _side_door(model: nn.Module) -> str:
    """What may be missing: a module of transformers may collect what its blocks compute."""
    names = ("output_router_logits", "output_hidden_states", "output_attentions")
    configs = [getattr(module, "config", None) for module in model.modules()]
    asked = [name for name in names if any(getattr(c, name, False) is True for c in configs)]
    if not asked:
        return ""
    return (
        f"; the config sets {asked[0]}, and what is collected so is known here by hooks that do "
        "nothing but keep what they are given (transformers 5): without it the model may be cut"
    )


def _rehearse(chain: Chain, batch: Batch) -> _Rehearsal:
    """One forward, layer by layer.

    Raises:
        NotCuttable: it calls its blocks otherwise than the plain forward did.
    """
    rehearsal = _Rehearsal(UseRecorder(dict(chain.model.named_parameters())))
    recorder, epilogue = rehearsal.recorder, chain.num_layers - 1
    with preserved(chain.model, chain.device):
        micro = chain.begin(clone_batch(batch))
        wires: Wires = {}
        for layer in range(epilogue):
            with recorder:
                made = _rehearse_layer(chain, micro, layer, wires, recorder)
            rehearsal.different += _different(chain.record, made)
            wires = {
                w: made[w] if w in made else wires[w] for w in chain.live_wires(layer + 1, micro)
            }
        _require_form(chain, micro)
        with torch.no_grad(), autocast(chain.recipe, chain.device), recorder:
            recorder.layer = None
            chain.loss(micro, epilogue, wires, on_resume=lambda: recorder.enter(epilogue))
    return rehearsal


def _rehearse_layer(
    chain: Chain, micro: Micro, layer: int, wires: Wires, recorder: UseRecorder
) -> Wires:
    """One layer's forward unit; a joint's parameters are those that it reads when it is there."""
    section = chain.skeleton.sections.headed_by(layer)
    recorder.layer = None if section else layer
    enter = None if section is None else (lambda: recorder.enter(layer))
    made = run_forward(chain, micro, layer, layer + 1, wires, on_resume=enter)
    if section is not None and micro.sheet is not None:
        _refuse_filled_caches(micro.sheet.parts[section].calls)
    return made


def _different(record: Record, made: Wires) -> list[Wire]:
    """The wires that are not what the plain forward made; those changed since do not count."""
    return [
        wire
        for wire, tensor in made.items()
        if wire in record.made
        and wire not in record.cloned
        and not same_values(record.made[wire], tensor)
    ]


def _require_form(chain: Chain, micro: Micro) -> None:
    """Raise NotCuttable unless the blocks are called as in the plain forward."""
    assert micro.sheet is not None
    for position, block in enumerate(chain.skeleton.blocks):
        if not micro.sheet.call(position).has_form_of(chain.record.sheet.call(position)):
            raise NotCuttable(
                f"its forward calls block {block.name!r} otherwise when the blocks before it are "
                "stand-ins"
            )


def _refuse_filled_caches(calls: Any) -> None:
    """Raise NotCuttable for a cache that is not empty when no block has run."""
    leaves = [leaf for call in calls for leaf in call.leaves]
    caches = [leaf.value for leaf in leaves if isinstance(leaf, EmptyCache)]
    filled = next((cache for cache in caches if cache.get_seq_length() != 0), None)
    if filled is not None:
        raise NotCuttable(f"its blocks are given a {type(filled).__name__} that is not empty")


# -- aids -----------------------------------------------------------------------------------


def clone_batch(batch: Batch) -> Batch:
    """A copy with tensors of its own, for a forward that may change them."""
    copies = [_cloned(leaf) for leaf in pytree.tree_leaves(batch)]
    return pytree.tree_unflatten(copies, pytree.tree_structure(batch))


def _cloned(leaf: Any) -> Any:
    if isinstance(leaf, Mapping):  # one that pytree does not know
        return type(leaf)({key: clone_batch(value) for key, value in leaf.items()})  # type: ignore[call-arg]  # as ``to_device`` makes one
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _is_plain(model: nn.Module, candidate: Candidate) -> bool:
    """Is there nothing between the blocks but plain nn.Sequential?"""
    return candidate.lists == ("",) and type(model) is nn.Sequential


def configs_with_cache(model: nn.Module) -> list[Any]:
    """The configs of the model's modules whose ``use_cache`` is on."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    on = {id(c): c for c in configs if getattr(c, "use_cache", None) is True}
    return list(on.values())


def without_caches(model: nn.Module) -> tuple[Callable[[], None], tuple[str, ...]]:
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
