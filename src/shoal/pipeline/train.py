"""The training of one stage, from its own process's build to the state it ends with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.partition.build import clone_batch
from shoal.partition.chain import Chain
from shoal.pipeline.build import (
    Built,
    Found,
    Training,
    build,
    chain_like,
    find,
    let_go,
    pipeline_of,
    shares_of,
)
from shoal.pipeline.check import check_pipeline
from shoal.pipeline.compute import Share, StageCompute
from shoal.pipeline.copies import CopyCompute, Dealer, Dealt
from shoal.pipeline.feed import Feed
from shoal.pipeline.foretell import Foretelling
from shoal.pipeline.meeting import device_of, met, on, pairs_of
from shoal.pipeline.packing import Packer
from shoal.pipeline.post import Post, lines_of
from shoal.pipeline.schedule import Pipeline
from shoal.pipeline.stage import Compute, Ran, run_stage
from shoal.pipeline.weights import Weights
from shoal.program.ir import Program
from shoal.recipes.bound import bound
from shoal.recipes.recipe import Batch, to_device
from shoal.rng import RngState


class Place(Protocol):
    """Where a stage runs: which of how many, and who watches it.

    ``local`` is its number on its machine; ``host`` a group of gloo's, None for the default one.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def local(self) -> int: ...

    @property
    def host(self) -> dist.ProcessGroup | None: ...

    def begin(self, actions: list[str]) -> None:
        """Say what will be run."""

    def watch(self, index: int, waits: bool) -> None:
        """Say which action is next, and whether it only waits for another stage."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one stage has of the trained model.

    All of it is in host memory. ``losses`` are the last stage's, of each step's micro-batches;
    ``carried`` says which way its messages went.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    schedule: Any
    rng: RngState
    losses: list[list[float]]
    most_in_flight: int
    ran: list[Ran]
    pipeline: Pipeline
    program: Program
    carried: str


def train_stage(place: Place, training: Training) -> Part:
    """Train one stage for all steps; every process of the group calls this at once."""
    device = device_of(training.device, place.local)
    with on(device):
        return _train(place, training, device)


def _train(place: Place, training: Training, device: torch.device) -> Part:
    training = replace(training, recipe=bound(training.recipe, training.hp))
    built, groups = build(training, place.rank, device)
    foretelling = None
    if place.rank == 0:
        chain, found, foretelling = find(training, built, groups)
    else:
        found = _tell(place, None)
        chain = chain_like(training, built, found)
    shares = shares_of(chain, found.cuts, training.stages)
    share, pipeline = shares[place.rank % training.stages], pipeline_of(training, found, shares)
    program = pipeline.program()
    if place.rank == 0:  # the others make the same one, and wait until it is proved
        check_pipeline(pipeline, program)
        _tell(place, found)
    let_go(built, share)
    weights = _weights(built, share, pipeline, training.predict)
    copy = place.rank // training.stages
    compute, runs = _computing(copy, built, chain, share, weights, pipeline, foretelling)
    actions = program.devices[place.rank]
    with met(place.host, device, pairs_of(program), training.direct) as (routes, carried):
        place.begin([str(action) for action in actions])
        with Post(lines_of(actions), Packer(built.params), routes) as post:
            ran = run_stage(actions, runs, post, place.watch)
    weights.newest(len(pipeline.groups))
    chain.close()
    return _part(built, share, compute, pipeline, program, ran, carried)


def _computing(
    copy: int,
    built: Built,
    chain: Chain,
    share: Share,
    weights: Weights,
    pipeline: Pipeline,
    foretelling: Foretelling | None,
) -> tuple[StageCompute, Compute]:
    """The stage as its copy alone would compute it, and what runs the actions of all copies."""
    fetch = _no_feed if built.feed is None else functools.partial(_fetch, built.feed, built.device)
    after_step = built.schedule.step if built.schedule else _nothing
    if pipeline.width == 1:
        stage = StageCompute(
            pipeline,
            chain,
            share,
            weights,
            fetch=fetch,
            after_step=after_step,
            foretelling=foretelling,
        )
        return stage, stage
    dealt = Dealt(built.device)
    stage = StageCompute(
        pipeline.of_copy(copy),
        chain,
        share,
        weights,
        fetch=dealt.fetch,
        after_step=after_step,
    )
    dealer = None
    if built.feed is not None:  # what a source may use again is read ahead
        dealer = Dealer(lambda group: clone_batch(fetch(group)), foretelling, built.device)
    there = (weights, chain.model)
    return stage, CopyCompute(pipeline, stage, copy, share, *there, dealt=dealt, dealer=dealer)


def _tell(place: Place, found: Found | None) -> Found:
    """What stage 0 found, at every stage."""
    box = [cloudpickle.dumps(found)]
    dist.broadcast_object_list(box, src=0, group=place.host)
    told: Found = cloudpickle.loads(box[0])
    return told


def _weights(built: Built, share: Share, pipeline: Pipeline, predict: bool) -> Weights:
    borrowed = [name for names in share.borrowed.values() for name in names]
    return Weights(
        built.params,
        built.optimizer,
        share.owned,
        borrowed,
        versions=pipeline.versions,
        predict=predict and pipeline.versions > 1,
    )


def _part(
    built: Built,
    share: Share,
    compute: StageCompute,
    pipeline: Pipeline,
    program: Program,
    ran: list[Ran],
    carried: str,
) -> Part:
    owned = {name: built.params[name] for name in share.owned}
    names = {id(parameter): name for name, parameter in built.params.items()}
    state = built.optimizer.state
    buffers = {name: built.model.get_buffer(name) for name in share.buffers}
    if share.stage == 0:  # with those that nobody changes
        buffers = dict(built.model.named_buffers()) | buffers
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in built.optimizer.param_groups
    ]
    return Part(
        model=_on_host({name: p.detach() for name, p in owned.items()} | buffers),
        optimizer=_on_host({name: dict(state[p]) for name, p in owned.items() if p in state}),
        groups=_on_host(groups),
        schedule=_on_host(built.schedule.state_dict()) if built.schedule else None,
        rng=compute.end_rng,
        losses=compute.losses,
        most_in_flight=compute.most_in_flight,
        ran=ran,
        pipeline=pipeline,
        program=program,
        carried=carried,
    )


def _on_host(tree: Any) -> Any:
    """The same with all tensors in host memory; a process that reads it may lack this device."""
    return pytree.tree_map_only(Tensor, Tensor.cpu, tree)


def _fetch(feed: Feed, device: torch.device, group: int) -> Batch:
    """The next micro-batch, on the stage's device."""
    return to_device(feed.fetch(group), device)


def _no_feed(group: int) -> Any:
    raise AssertionError("only the first stage fetches")


def _nothing() -> None:
    """What follows a step where the learning rate has no schedule."""
