"""One stage of a recipe's model, made in its own process: its share, weights and feed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.core.errors import PlanError, SpecError
from shoal.core.spec import HyperParameters, LayerMeasure, Scalar
from shoal.core.technique import Schedule
from shoal.kernels.kernelchoice import KernelChoice
from shoal.kernels.poison import Poison
from shoal.partition.build import build_chain
from shoal.partition.chain import Chain
from shoal.partition.cut import cut
from shoal.partition.measure import measure_layers
from shoal.partition.pilot import pilot
from shoal.partition.preserve import preserved
from shoal.pipeline.compute import Share
from shoal.pipeline.feed import Feed, group_sizes
from shoal.pipeline.foretell import Foretelling
from shoal.pipeline.meeting import DeviceKind
from shoal.pipeline.schedule import Pipeline
from shoal.recipes.bound import clip_limit
from shoal.recipes.optimizers import build_optimizer_of
from shoal.recipes.recipe import (
    Batch,
    Recipe,
    autocast,
    build_model,
    compute_loss,
    model_inputs,
    read_data,
    to_device,
)
from shoal.recipes.schedules import build_schedule
from shoal.rng import capture_rng, restore_rng, same_rng, seed_all

_TICKS_PER_S = 10**9


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is to be trained, and how: see ``run_stages``."""

    recipe: Recipe
    hp: Mapping[str, Scalar]
    seed: int
    steps: int
    stages: int
    schedule: Schedule
    cuts: tuple[int, ...] | None = None
    recompute: bool = False
    lag: int = 0
    predict: bool = False
    draws: bool | None = None
    foretell: bool = True
    threads: int = 1
    kernels: KernelChoice = field(default_factory=KernelChoice.here)  # of who asks for it
    width: int = 1
    device: DeviceKind = "cpu"
    direct: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Built:
    """What every stage makes for itself, from the same seed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    params: Mapping[str, nn.Parameter]
    feed: Feed | None  # of the first stage
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the first stage finds, and all others are told."""

    batch: Batch
    caches_off: bool
    cuts: tuple[int, ...]
    groups: tuple[int, ...]
    draws: bool
    foretold: bool


def build(training: Training, stage: int, device: torch.device) -> tuple[Built, tuple[int, ...]]:
    """Model, optimizer and schedule as the plain loop makes them; on stage 0 the groups too.

    Stage 0 has fetched the first batch then, and its random streams are those after that.
    """
    recipe, hp = training.recipe, HyperParameters(training.hp)
    torch.set_num_threads(training.threads)
    training.kernels.take()
    seed_all(training.seed)
    model = build_model(recipe, hp).to(device).train()
    train, _ = read_data(recipe, hp)
    optimizer = build_optimizer_of(recipe, model, hp)
    schedule = build_schedule(recipe, optimizer, hp, train)
    groups: tuple[int, ...] = ()
    feed = None
    if stage == 0:
        groups = group_sizes(train, recipe.accumulate, training.steps)
        feed = Feed(train)
    params = dict(model.named_parameters())
    _refuse_forgotten(recipe, params, optimizer)
    built = Built(
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        params=params,
        feed=feed,
        device=device,
    )
    return built, groups


def _refuse_forgotten(
    recipe: Recipe, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    forgotten = [n for n, p in params.items() if p.requires_grad and id(p) not in held]
    if forgotten and clip_limit(recipe) is not None:
        raise SpecError(
            f"the optimizer does not hold {len(forgotten)} trainable parameters, the first "
            f"{forgotten[0]!r}, and clip_grad_norm is set: their gradients would count in the "
            "norm, larger at every step. Freeze them, or give them to the optimizer."
        )


def find(
    training: Training, built: Built, groups: tuple[int, ...]
) -> tuple[Chain, Found, Foretelling | None]:
    """The chain of the model, compared with it bit for bit, and where it is cut; on stage 0.

    And what later stages draw, where they draw and that can be foretold.

    Raises:
        PlanError: the model cannot be cut so; says why.
        SpecError: fewer micro-batches than the schedule needs, or cuts that are none.
    """
    probe = Pipeline(
        schedule=training.schedule, stages=training.stages, groups=groups, width=training.width
    )
    assert built.feed is not None
    device, rng = built.device, capture_rng(built.device)
    batch = to_device(built.feed.first, device)
    report = pilot(built.model, training.recipe, batch, device)
    if report.chain is None:
        raise PlanError(
            f"{report.notes[0]} A pipeline needs one piece of the model for each of its "
            f"{probe.stages} stages. Train this model on one device."
        )
    chain = report.chain
    draws = training.draws
    if draws is None:
        draws = draws_numbers(chain, batch)
    cuts = training.cuts
    if cuts is None:
        cuts = choose_cuts(measure_layers(chain, batch, {}), training.stages)
    foretelling = None
    if draws and training.foretell and (cuts or training.width > 1):
        told = Foretelling(chain, cuts[0] if cuts else 0, whole=training.width > 1)
        foretelling = told if told.works(batch) else None
    restore_rng(rng, device)
    for parameter in built.params.values():
        parameter.grad = None
    found = Found(
        batch=built.feed.first,
        caches_off=chain.caches_off,
        cuts=cuts,
        groups=groups,
        draws=draws,
        foretold=foretelling is not None,
    )
    return chain, found, foretelling


def chain_like(training: Training, built: Built, found: Found) -> Chain:
    """The chain that stage 0 found, of this process's model."""
    rng = capture_rng(built.device)
    chain = build_chain(
        built.model,
        training.recipe,
        to_device(found.batch, built.device),
        built.device,
        switch_caches_off=found.caches_off,
    )
    restore_rng(rng, built.device)
    return chain


def choose_cuts(layers: Sequence[LayerMeasure], stages: int) -> tuple[int, ...]:
    """Where to cut so that the slowest stage is as quick as can be.

    Raises:
        CutError: there are fewer layers than stages.
    """
    seconds = [layer.forward_s + layer.backward_s for layer in layers]

    def ticks(start: int, stop: int) -> int:
        return round(_TICKS_PER_S * sum(seconds[start:stop]))

    return cut(layers, stages, ticks)


def draws_numbers(chain: Chain, batch: Batch) -> bool:
    """Does a training forward draw random numbers?"""
    recipe, model, device = chain.recipe, chain.model, chain.device
    was_training = model.training
    with preserved(model, device), torch.no_grad(), autocast(recipe, device):
        model.train()
        before = capture_rng(device)
        args, kwargs = model_inputs(recipe, batch)
        compute_loss(recipe, model(*args, **kwargs), batch)
        model.train(was_training)
        return not same_rng(before, capture_rng(device))


def shares_of(chain: Chain, cuts: tuple[int, ...], stages: int) -> tuple[Share, ...]:
    """What each stage is of the chain.

    Raises:
        SpecError: the cuts do not make so many stages.
        PlanError: two stages would change the same buffer, or a forward writes to a parameter.
    """
    edges = (0, *cuts, chain.num_layers)
    if len(cuts) != stages - 1 or list(edges) != sorted(set(edges)):
        raise SpecError(
            f"{stages} stages need {stages - 1} cuts, ascending, between layers 1 and "
            f"{chain.num_layers - 1} of this model; got {cuts}. Leave cuts= out to have them "
            "chosen."
        )
    spans = list(itertools.pairwise(edges))
    owned = [_names(chain.parameters_of(layer) for layer in range(*span)) for span in spans]
    owner = {name: stage for stage, names in enumerate(owned) for name in names}
    used = [_names(chain.borrowed_by(layer) for layer in range(*span)) for span in spans]
    away = [[n for n in names if owner[n] != s] for s, names in enumerate(used)]
    buffers = [_names(chain.changing_buffers(layer) for layer in range(*span)) for span in spans]
    _refuse_shared_state(chain, spans, buffers)
    return tuple(
        Share(
            stage=stage,
            start=span[0],
            stop=span[1],
            owned=owned[stage],
            borrowed=_by_stage((owner[n], n) for n in away[stage]),
            lent=_by_stage((s, n) for s in range(stages) for n in away[s] if owner[n] == stage),
            buffers=buffers[stage],
        )
        for stage, span in enumerate(spans)
    )


def _names(parts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))


def _by_stage(pairs: Any) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for stage, name in pairs:
        found[stage] = (*found.get(stage, ()), name)
    return found


def _refuse_shared_state(
    chain: Chain, spans: Sequence[tuple[int, int]], buffers: Sequence[tuple[str, ...]]
) -> None:
    changed: dict[int, tuple[int, str]] = {}
    for stage, names in enumerate(buffers):
        for name in names:
            key = id(chain.model.get_buffer(name))
            first, other = changed.setdefault(key, (stage, name))
            if first != stage:
                raise PlanError(
                    f"stages {first} and {stage} would both change the buffer {other!r}, and each "
                    "has a copy. Choose cuts= that keep its uses in one stage."
                )
    written = [
        n for span in spans for layer in range(*span) for n in chain.written_parameters(layer)
    ]
    if written:
        raise PlanError(
            f"a forward writes to the parameter {written[0]!r}, as max_norm does, while other "
            "micro-batches of a pipeline are between their forward and backward. Train this "
            "model on one device."
        )


def ties_of(shares: Sequence[Share]) -> tuple[tuple[int, int], ...]:
    """Pairs of stages: who owns a parameter, and who borrows it."""
    return tuple(sorted((owner, s.stage) for s in shares for owner in s.borrowed))


def pipeline_of(training: Training, found: Found, shares: Sequence[Share]) -> Pipeline:
    """The pipeline that all stages run."""
    return Pipeline(
        schedule=training.schedule,
        stages=training.stages,
        groups=found.groups,
        recompute=training.recompute,
        lag=training.lag,
        clip=training.recipe.clip_grad_norm is not None,
        ties=ties_of(shares),
        draws=found.draws,
        foretold=found.foretold,
        whole=whole_stages(shares, training.recompute),
        width=training.width,
    )


def whole_stages(shares: Sequence[Share], recompute: bool) -> tuple[int, ...]:
    """Stages whose backwards are not cut in two.

    Tied parameters' gradients travel with the first half. And where a forward is run again, as
    the last stage's never is, the buffers that it changes are put back after it, which would be
    between the halves.
    """
    tied = {stage for pair in ties_of(shares) for stage in pair}
    changed = {share.stage for share in shares[:-1] if share.buffers and recompute}
    return tuple(sorted(tied | changed))


def let_go(built: Built, share: Share) -> None:
    """Free the parameters that neither this stage nor a tie of it reads; NaN is in their place."""
    here = {*share.owned, *(name for names in share.borrowed.values() for name in names)}
    poison = Poison()
    for name, parameter in built.params.items():
        if name not in here:
            parameter.data = poison.like(parameter)
