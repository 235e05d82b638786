"""What of a trial goes into a generation, and back: never a pickle.

    trials/0003/step-00000100/weights.safetensors   the user's own names, ties once
                              frozen.safetensors    those of them that nothing changes, if any
                              state.safetensors     optimizer, random streams
                              manifest.json         all that is no tensor, ties, position
                              own.safetensors       only where it was taken over from another
                                                    trial: this one's own random streams

How a generation becomes durable is ``shoal.storage``'s. One without ``state`` is finished:
its weights were kept, and nothing can train on from it.

[Note: what is written once]
Of a model whose base is frozen most bytes are the same in every generation of every trial. They
have a file of their own, which generations share (``storage/shared.py``). Which weights these are
is decided each time, by their bits: those that are frozen now and have the digest that they had in
the trial's generation before, or that are frozen now, of a first one. No counter of torch's knows
of all that writes to a weight (``weight.data.add_()`` counts nowhere), so each save reads them:
8 GB a second, where a disk writes a fraction of one. Where a weight lies is a matter of bytes on
the disk alone: whoever reads takes both files.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.aim import Aim
from shoal.core.errors import StorageError
from shoal.core.plan import Job
from shoal.core.studyfiles import trial_directory
from shoal.core.technique import DataParallel, Pipelined
from shoal.data import Position
from shoal.memory.layout import ShardLayout, TrialLayout
from shoal.memory.split import SplitWeight, split_weights
from shoal.memory.store import Region, state_views, views
from shoal.pystate import ambient
from shoal.recipes.recipe import Recipe
from shoal.runtime.capture.captures import Captures
from shoal.runtime.gangs.pipelined import PipelineSession
from shoal.runtime.gangs.replicated import ReplicaSession
from shoal.runtime.measuring.chains import Chains
from shoal.runtime.saving.extrastate import extra_state
from shoal.runtime.saving.fitting import Fit
from shoal.runtime.saving.packing import Packer, unpack
from shoal.runtime.saving.tensorfile import read_into, read_tensors, row
from shoal.runtime.session import Session
from shoal.runtime.wire.messages import Grant, Progress, Settings
from shoal.storage.files import sync_directory
from shoal.storage.generations import Draft, Generation, Generations
from shoal.storage.manifest import APART
from shoal.storage.shared import (
    LEAST_SHARED_BYTES,
    Row,
    Shared,
    digests_before,
    unchanged,
)
from shoal.storage.tensors import digest_of

WEIGHTS, STATE, OWN = "weights.safetensors", "state.safetensors", "own.safetensors"
OnDamage = Callable[[Path, str], None]


@dataclass(frozen=True, slots=True)
class Content:
    """One generation to be: tensors by file, and the manifest's words. Belongs to its holder.

    ``frozen``: the weights that are not trained now.
    """

    trial: int
    step: int
    files: Mapping[str, Mapping[str, Tensor]]
    meta: Mapping[str, Any]
    frozen: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for tensors in self.files.values() for t in tensors.values())


class Written(NamedTuple):
    """A generation, and the bytes of tensors that it added to the disk."""

    generation: Generation
    num_bytes: int


def generations(
    study: str | os.PathLike[str], trial: int, keep: int = 2, best: Aim | None = None
) -> Generations:
    """A trial's generations; that of its ``best`` evaluation stays, if one is."""
    rank = None if best is None else functools.partial(rank_of, trial=trial, aim=best)
    return Generations(trial_directory(study, trial), keep, inside=study, rank=rank)


def rank_of(generation: Generation, trial: int, aim: Aim) -> float:
    """How good the evaluation of a trial was that the generation was written after; less is
    better. It is infinite where there was none, or where another trial went on from there."""
    meta = generation.manifest.meta
    if not meta.get("evaluated") or is_warm(generation, trial):
        return math.inf
    return aim.rank(meta["metrics"])


def latest(
    study: str | os.PathLike[str], trial: int, on_damage: OnDamage | None = None
) -> Generation | None:
    """The newest generation that verifies, byte for byte; damaged ones are told of.

    Its name is durable when this returns: who published it may have died before that.
    """
    found = generations(study, trial).newest(on_damage)
    if found is not None:
        sync_directory(found.path.parent)
    return found


def content(session: Session, *, copy: bool) -> Content:
    """A session's state; its tensors are current in the host region.

    ``copy`` them, where the region changes before they are written.

    Raises:
        TrialError: its code put other parameters into the model, which are not in the region.
    """
    session.binding.require_parameters("the trial's code")
    weights, ties = _weights(session, copy=copy)
    tensors = _stored_state(session)
    if copy:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    packer = Packer(tensors)
    evaluated = session.evaluated_at == session.step
    ended = session.ended and evaluated  # it is to be evaluated where it goes on, if it was not
    meta: dict[str, Any] = {
        "trial": session.job.trial,
        "hp": dict(session.job.hp),
        "seed": session.job.seed,
        "numerics": dict(session.job.numerics),
        "ties": ties,
        "extra": packer.pack(extra_state(session.model)),
        "progress": packer.pack(progress_record(session.progress())),
        "ended": ended,
        "length": session.settings.steps or session.settings.epochs,
        "metrics": dict(session.metrics),
        "evaluated": evaluated,
        "batches": session.feed.num_batches,
    }
    files = {WEIGHTS: weights, STATE: tensors}
    if ended and session.settings.keep_finished == "weights":
        files = {WEIGHTS: weights} | _packed_only(meta["extra"], tensors)
    frozen = {name for name, p in session.model.named_parameters() if not p.requires_grad}
    return Content(session.job.trial, session.step, files, meta, frozenset(frozen))


def _packed_only(extra: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a model's extra state, which belong to its weights; usually none."""
    names = set(_tensor_names(extra))
    return {"extra.safetensors": {n: tensors[n] for n in names}} if names else {}


def _tensor_names(packed: Any) -> Iterator[str]:
    if isinstance(packed, dict) and "tensor" in packed:
        yield packed["tensor"]
    elif isinstance(packed, dict | list):
        for item in packed.values() if isinstance(packed, dict) else packed:
            yield from _tensor_names(item)


def write(what: Content, place: Generations, shared: Shared) -> Written:
    """Write a generation, durably. Older ones stay until somebody collects them.

    ``shared`` is the caller's for all that it writes, and of ``APART``.

    Raises:
        StorageError: it could not be written; the older ones are as they were.
    """
    with ExitStack() as until_committed, place.begin(what.step) as draft:
        apart = _put_apart(what, place, shared, draft, until_committed)
        for name, tensors in what.files.items():
            rest = tensors.keys() - (apart if name == WEIGHTS else ())
            draft.tensors(name, [row(key, tensors[key]) for key in tensors if key in rest])
        written = draft.commit(**what.meta)
        return Written(written, what.num_bytes - draft.shared_bytes)


def _put_apart(
    what: Content,
    place: Generations,
    shared: Shared,
    draft: Draft,
    until_committed: ExitStack,
) -> set[str]:
    """Put the weights that nothing changes into a file of their own; says which they are."""
    weights = what.files.get(WEIGHTS, {})
    rows: dict[str, Row] = {n: row(n, weights[n]) for n in weights if n in what.frozen}
    if sum(weights[name].nbytes for name in rows) < LEAST_SHARED_BYTES:
        return set()
    digests = {name: digest_of(found[3]) for name, found in rows.items()}
    names = unchanged(digests, digests_before(place, (WEIGHTS, APART)))
    if sum(weights[name].nbytes for name in names) < LEAST_SHARED_BYTES:
        return set()
    chosen = [rows[name] for name in rows if name in names]
    their = {name: digests[name] for name in names}
    return shared.put(draft, place, chosen, their, until_committed)


def weight_files(generation: Generation) -> tuple[str, ...]:
    """Those that have the model's weights, each in one of them."""
    return WEIGHTS, *([APART] if APART in generation.manifest.files else [])


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The model's state dict, tied names included, on the CPU."""
    generation = at(path)
    manifest = generation.manifest
    files = weight_files(generation)
    found = {n: t for file in files for n, t in read_tensors(generation, file).items()}
    found |= {alias: found[name] for alias, name in manifest.meta["ties"].items()}
    tensors: dict[str, Tensor] = {}
    for name in manifest.files:
        if name not in files and any(_tensor_names(manifest.meta["extra"])):
            tensors |= read_tensors(generation, name)
    extra: dict[str, Any] = unpack(manifest.meta["extra"], tensors)
    return found | extra


def read_attributes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a trial's model kept in attributes that changed as it trained, packed, by place.

    Nothing of a finished trial whose weights alone were kept.
    """
    generation = at(path)
    found = read_progress(generation).python if has_state(generation) else {}
    return dict(found.get("attributes", {}))


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """``{"model", "optimizer", "schedule", "rng", "step"}`` by parameter name.

    Of a finished trial whose weights alone were kept: model and step, the others None.
    """
    generation = at(path)
    if not has_state(generation):
        rest = dict.fromkeys(("optimizer", "schedule", "rng"))
        return {"model": read_weights(path), **rest, "step": generation.step}
    tensors = _state_tensors(generation)
    progress = _read_progress(generation, tensors)
    state: dict[str, dict[str, Any]] = {n: dict(v) for n, v in progress.scalars.items()}
    for key, tensor in tensors.items():
        kind, _, rest_ = key.partition("|")
        if kind == "state":
            name, _, entry = rest_.partition("|")
            if name in state:
                state[name][entry] = tensor
    return {
        "model": read_weights(path),
        "optimizer": {"state": state, "groups": [dict(g) for g in progress.groups]},
        "schedule": progress.schedule,
        "rng": progress.rng,
        "step": progress.step,
    }


def has_state(generation: Generation) -> bool:
    """Whether a trial can train on from it."""
    return STATE in generation.manifest.files


def restore(path: str | os.PathLike[str], layout: TrialLayout, region: Region) -> Progress:
    """Fill a host region from a generation; returns the rest of the state.

    Raises:
        StorageError: it is damaged, another model's, or holds weights only.
    """
    generation = _with_state(path)
    weights: dict[str, Tensor] = views(region.bytes, layout.buffers, layout.buffers_at)
    state = {f"buffer|{name}": place for name, place in weights.items()}
    for shard in layout.shards:
        weights |= views(region.bytes, shard.whole, shard.whole_at)
        for name, places in state_views(region.bytes, shard.state, shard.state_at).items():
            state |= {f"state|{name}|{key}": place for key, place in places.items()}
    files = weight_files(generation)
    for file in files:
        read_into(generation, file, weights)
    read_into(generation, STATE, state)
    for shard in layout.shards:
        for name, weight in split_weights(region.bytes, shard).items():  # one float32 at a time
            whole = weight.empty()
            for file in files:
                read_into(generation, file, {name: whole})
            weight.split(whole)
    return read_progress(generation)


def _with_state(path: str | os.PathLike[str]) -> Generation:
    generation = at(path)
    if not has_state(generation):
        raise StorageError(
            f"{path} holds the weights of a finished trial and no optimizer state "
            "(keep_finished='weights'): nothing can train on from it."
        )
    return generation


def read_progress(generation: Generation) -> Progress:
    """What a trial's state is beside the tensors of its model and its optimizer.

    Raises:
        StorageError: it is damaged.
    """
    return _read_progress(generation, _state_tensors(generation))


def is_warm(generation: Generation, trial: int) -> bool:
    """Whether ``trial`` goes on from it with hyperparameters that it was not trained with.

    It is another trial's, or was taken over from one.
    """
    return generation.manifest.meta.get("trial") != trial or OWN in generation.manifest.files


def _state_tensors(generation: Generation) -> dict[str, Tensor]:
    own = read_tensors(generation, OWN) if OWN in generation.manifest.files else {}
    return read_tensors(generation, STATE) | own


def at(path: str | os.PathLike[str]) -> Generation:
    """The generation of a path that was recorded.

    Raises:
        StorageError: it is not there any more.
    """
    place = Path(path)
    for generation in Generations(place.parent).all():
        if generation.path.name == place.name:
            return generation
    raise StorageError(
        f"there is no checkpoint at {place} any more. Was the study's directory moved or cleaned "
        "up? Open it where it is: shoal.open(path)."
    )


def _weights(session: Session, *, copy: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict from the host region, ties once; and alias -> stored name.

    Split weights are copies in any case.
    """
    stored = _region_tensors(session)
    split = {n: w for s in session.layout.shards for n, w in _split(session, s).items()}
    names = {id(p): n for n, p in session.model.named_parameters()}
    names |= {id(b): n for n, b in session.model.named_buffers()}
    weights: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for key, value in session.model.state_dict(keep_vars=True).items():
        name = names.get(id(value))
        if name is None:
            continue  # a module's extra state
        if name != key:
            ties[key] = name
        if name not in weights:
            there = stored.get(name)
            if there is None:
                weights[name] = split[name].whole()
            else:
                weights[name] = there.clone() if copy else there
    return weights, ties


def take_up(
    recipe: Recipe,
    grant: Grant,
    region: Region,
    settings: Settings,
    device: torch.device,
    parked: Session | None,
    captures: Captures | None = None,
    chains: Chains | None = None,
) -> Session:
    """A trial in its host region: built, or as it was ``parked`` if that is where it stands.

    ``captures``: who captures its passes, if these are to be. ``chains``: who knows some.
    """
    progress, fit = grant.progress, None
    if grant.restore:
        fit = _fit(grant, settings)
        progress = restore(grant.restore, grant.layout, region)
    session = parked
    if session is None or progress is None or session.step != progress.step:
        session = new_session(recipe, grant.job, settings, device)
    if (session.job.array is None) != (grant.job.array is None):
        session.units = None  # by itself it runs other ones
    session.job = grant.job
    session.captures, session.chains = captures, chains
    session.place(grant.layout, region, fresh=progress is None)
    if progress is None:
        check_rules(session)
    else:
        if fit is not None:
            fit.require_groups(progress, session.binding.groups())
            fit.require_pace(progress, session.schedule)
            if grant.warm and fit.counts_otherwise(session.feed.num_batches):
                progress = replace(progress, position=session.feed.position())
        if session is parked and not grant.warm:  # it has its own still
            progress = replace(progress, python={})
        session.resume(progress, warm=grant.warm)
    return session


def _fit(grant: Grant, settings: Settings) -> Fit:
    """Whether a trial fits its generation, whose tensors do.

    Raises:
        TrialError: they do not.
        StorageError: it is damaged, or holds weights only.
    """
    found = _with_state(grant.restore)
    fit = Fit(found, grant, settings)
    fit.require_tensors(weight_files(found), STATE)
    return fit


def new_session(recipe: Recipe, job: Job, settings: Settings, device: torch.device) -> Session:
    """A trial built from its seed, as its technique wants it."""
    ambient.here().begin()
    kinds = {Pipelined: PipelineSession, DataParallel: ReplicaSession}
    kind = kinds.get(type(job.technique), Session)
    return kind(recipe, job, settings, device)


def check_rules(session: Session) -> None:
    """Raise now, and not after the last step, for state that no checkpoint could hold."""
    packer = Packer({})
    packer.pack(extra_state(session.model))
    packer.pack(progress_record(session.progress()))
    for name, tensor in _region_tensors(session).items():
        row(name, tensor[:0] if tensor.dim() else tensor)


def _region_tensors(session: Session) -> dict[str, Tensor]:
    """What of a state dict the host region has as it is: all but split weights."""
    layout, flat = session.layout, session.region.bytes
    found = views(flat, layout.buffers, layout.buffers_at)
    for shard in layout.shards:
        found |= views(flat, shard.whole, shard.whole_at)
    return found


def _split(session: Session, shard: ShardLayout) -> dict[str, SplitWeight]:
    return split_weights(session.region.bytes, shard)


def _stored_state(session: Session) -> dict[str, Tensor]:
    """Optimizer state of the parameters that have some, and buffers no state dict keeps."""
    flat = session.region.bytes
    result: dict[str, Tensor] = {}
    for shard in session.layout.shards:
        for name, places in state_views(flat, shard.state, shard.state_at).items():
            made = session.binding.stateful.get(name, set())
            result |= {f"state|{name}|{k}": places[k] for k in made}
    kept = set(session.model.state_dict())
    buffers = views(flat, session.layout.buffers, session.layout.buffers_at)
    result |= {f"buffer|{n}": b for n, b in buffers.items() if n not in kept}
    return result


def progress_record(progress: Progress) -> dict[str, Any]:
    """The inverse of what ``read_progress`` makes of it, to be packed."""
    return {
        "step": progress.step,
        "rng": progress.rng,
        "position": progress.position.pack(),
        "valid": progress.valid.pack() if progress.valid else None,
        "scalars": progress.scalars,
        "stored": progress.stored,
        "groups": list(progress.groups),
        "schedule": progress.schedule,
        **({"scheduled": progress.scheduled} if progress.scheduled else {}),
        **({"tally": progress.tally} if progress.tally else {}),
        **({"python": progress.python} if progress.python else {}),
    }


def _read_progress(generation: Generation, tensors: Mapping[str, Tensor]) -> Progress:
    record = unpack(generation.manifest.meta["progress"], tensors)
    return Progress(
        step=record["step"],
        rng=record["rng"],
        position=Position.unpack(record["position"]),
        valid=Position.unpack(record["valid"]) if record["valid"] else None,
        scalars=record["scalars"],
        stored=record["stored"],
        groups=record["groups"],
        schedule=record["schedule"],
        scheduled=record.get("scheduled", ""),
        tally=record.get("tally", {}),
        python=record.get("python", {}),
        extra=unpack(generation.manifest.meta["extra"], tensors),
    )
