"""Models on paper, and what shoal's planner decides for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from shoal.core.profile import Profile
from shoal.core.spec import ALIGNMENT, JobMeasure, LayerMeasure, Order, Place, ShardSpec
from shoal.core.technique import Spilled, heads_of, kept_shards, kept_weights
from shoal.core.units import Bytes, Seconds, round_up
from shoal.memory.layout import TensorSpec, TrialLayout, lay_out
from shoal.planner.choose import choices
from shoal.planner.keep import keep_best
from shoal.planner.need import Need, Request, footprints
from shoal.planner.predict import predict_shards
from shoal.planner.price import Speeds, price
from shoal.planner.room import Room
from shoal.testing import make_layer, make_measure

VOCABULARY = 256
MIB = 2**20
FEWEST = Speeds(up_bytes_per_s=inf, down_bytes_per_s=inf, device_step=0.0, host_step=0.0)
"""With nothing that takes time the fewest bytes decide."""
NO_TIME = Seconds(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a budget, and how it steps. Bytes."""

    measure: JobMeasure
    budget: int
    place: Place | None  # None: the planner's choice
    clip: bool
    shards: int | None = None  # forced
    micro_batches: int = 1
    order: Order | None = None  # None: the planner's choice

    @property
    def batch(self) -> int:
        return self.measure.batch_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What shoal does in a step. Bytes.

    ``slots`` are those that a load can be ahead in: all slots but the running unit's. A trial
    reserves ``reserved``, and at no moment has more than ``peak`` on the device.
    ``change`` crosses the links when the trial comes to its device and leaves it again.
    """

    technique: Spilled
    shards: tuple[ShardSpec, ...]
    moved: int
    slots: int
    change: int
    active: int
    reserved: int
    peak: int


def gpt(blocks: int, width: int, tokens: int, profile: Profile | None = None) -> JobMeasure:
    """A GPT over bytes in float32, by the sizes of its tensors: ``tokens`` in a step.

    A block has 12 width^2 + 13 width parameters. Its boundary is one tensor T of tokens x
    width; a forward takes 10 T at its peak, a backward finds 16 T saved (two norms, query,
    key and value, their mix, four times the width before and after GELU ...) and takes 8 T
    and its gradients on top. The token embedding is not tied to the head. With a ``profile``
    kernels take its time: 2 operations a parameter and token in a forward, 6 in a backward
    that recomputes, 28 bytes of the host's memory a parameter in an optimizer step.
    """
    tensor = 4 * width * tokens
    logits = 4 * VOCABULARY * tokens
    embedding = _layer("embedding", (VOCABULARY * width, tokens * width), tensor)
    embedding = replace(
        embedding,
        forward_peak_bytes=Bytes(2 * tensor),
        saved_bytes=Bytes(0),
        backward_peak_bytes=Bytes(tensor + embedding.parameter_bytes),
    )
    layers = [_layer(f"block {i}", block_of(width), tensor) for i in range(blocks)]
    head = _layer("head", (width, width, VOCABULARY * width), tensor)
    head = replace(
        head,
        boundary_bytes=Bytes(0),
        forward_peak_bytes=Bytes(2 * tensor + logits),
        saved_bytes=Bytes(2 * tensor + logits),
        backward_peak_bytes=Bytes(4 * tensor + 2 * logits + head.parameter_bytes),
    )
    chain = (embedding, *layers, head)
    if profile is not None:
        chain = tuple(_timed(layer, tokens, profile) for layer in chain)
    return make_measure(chain, batch_bytes=Bytes(16 * tokens))


def block_of(width: int) -> tuple[int, ...]:
    """Elements of a block's tensors: norm, query, key and value, mix; norm, and two layers."""
    attention = (3 * width**2, 3 * width, width**2, width)
    return (width, width, *attention, width, width, 4 * width**2, 4 * width, 4 * width**2, width)


def tensors_of(measure: JobMeasure) -> list[tuple[int, ...]]:
    """Elements of the tensors of each layer of ``gpt``, in order; of ``even`` one a layer."""
    if not measure.batch_bytes:
        return [(layer.parameter_bytes // 4,) for layer in measure.layers]
    tokens = measure.batch_bytes // 16
    width = measure.layers[0].boundary_bytes // 4 // tokens
    blocks = [block_of(width)] * (len(measure.layers) - 2)
    return [(VOCABULARY * width, tokens * width), *blocks, (width, width, VOCABULARY * width)]


def laid_out(shards: Sequence[ShardSpec], tensors: Sequence[Sequence[int]]) -> TrialLayout:
    """The host region of these shards in float32 with Adam; ``tensors`` are those of layers."""
    owned = [
        {f"{layer}.{i}": n for layer in range(*s.layers) for i, n in enumerate(tensors[layer])}
        for s in shards
    ]
    sizes = {name: size for names in owned for name, size in names.items()}
    parameters = {name: _flat(name, size) for name, size in sizes.items()}
    states = {n: [_flat(n, s, key) for key in ("exp_avg", "exp_avg_sq")] for n, s in sizes.items()}
    return lay_out([list(names) for names in owned], [()] * len(shards), parameters, states, [])


def _flat(name: str, size: int, key: str = "") -> TensorSpec:
    return TensorSpec(name, (size,), (1,), "float32", 4 * size, key)


def _timed(layer: LayerMeasure, tokens: int, profile: Profile) -> LayerMeasure:
    parameters = layer.parameter_bytes // 4
    return replace(
        layer,
        forward_s=profile.kernel_seconds(2.0 * parameters * tokens),
        backward_s=profile.kernel_seconds(6.0 * parameters * tokens),
        step_s=profile.host_seconds(28 * parameters),
    )


def _layer(name: str, tensors: Sequence[int], tensor: int) -> LayerMeasure:
    size = sum(round_up(4 * elements, ALIGNMENT) for elements in tensors)
    return make_layer(
        name,
        size,
        boundary_bytes=Bytes(tensor),
        carry_bytes=Bytes(tensor),
        forward_peak_bytes=Bytes(10 * tensor),
        saved_bytes=Bytes(16 * tensor),
        backward_peak_bytes=Bytes(24 * tensor + size),
        forward_s=NO_TIME,
        backward_s=NO_TIME,
        step_s=NO_TIME,
    )


def even(layers: int) -> JobMeasure:
    """Layers of a mebibyte of parameters each, whose activations hardly count."""
    chain = [_layer(f"layer {i}", (MIB // 4,), MIB // 256) for i in range(layers)]
    return make_measure(chain, batch_bytes=Bytes(0))


def parameters_of(measure: JobMeasure) -> int:
    """Bytes of its parameters; the training state is four times as many."""
    return sum(layer.parameter_bytes for layer in measure.layers)


def finest(measure: JobMeasure) -> tuple[ShardSpec, ...]:
    """A shard a layer."""
    return predict_shards(measure.layers, range(1, len(measure.layers)))


def plan(
    case: Case,
    *,
    actives: Sequence[int] = (1,),
    lookahead: int | None = None,
    speeds: Speeds = FEWEST,
    mixes: bool = True,
) -> Planned | None:
    """What the planner takes for one of ``actives`` trials at a time; None: nothing fits."""
    forced = Spilled(
        optimizer=case.place,
        lookahead=lookahead,
        shards=case.shards,
        recompute=True,
        order=case.order,
    )
    request = Request(
        micro_batches=case.micro_batches,
        clip=case.clip,
        technique=forced,
        prefers="host",
        mixes=mixes,
    )
    budget, measure = Bytes(case.budget), case.measure
    for choice in choices(measure, budget, actives, request, speeds):
        shards, active = predict_shards(measure.layers, choice.cuts), choice.active
        layout = laid_out(shards, tensors_of(measure))
        room = Room(
            measure=measure,
            shards=shards,
            technique=choice.technique,
            request=request,
            budget=budget,
            active=active,
            layout=layout,
        )
        found = keep_best(room, speeds)
        if found is not None:
            return _planned(shards, case, request, found, active)
    return None


def priced(case: Case, found: Planned, speeds: Speeds) -> Seconds:
    """What a step of one trial costs a device."""
    request = Request(
        micro_batches=case.micro_batches, clip=case.clip, technique=found.technique, prefers="host"
    )
    batch = Bytes(case.batch)
    return price(found.shards, batch, found.technique, request, speeds, found.active).step_s


def _planned(
    shards: tuple[ShardSpec, ...],
    case: Case,
    request: Request,
    found: tuple[Spilled, Need],
    active: int,
) -> Planned:
    technique, need = found
    step = footprints(shards, Bytes(case.batch), technique, request)[0]
    whole, weights = kept_shards(technique), kept_weights(technique)
    stays = sum(shards[s].parameter_bytes + shards[s].state_bytes for s in whole)
    stays += sum(shards[s].parameter_bytes for s in weights)
    stays += sum(heads_of(technique).values())
    return Planned(
        technique=technique,
        shards=shards,
        moved=step.up_bytes + step.down_bytes,
        slots=max(step.num_slots - 1, 0) * step.slot_bytes,
        change=2 * stays,
        active=active,
        reserved=need.total,
        peak=need.peak,
    )
