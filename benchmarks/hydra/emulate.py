"""GPT-2 XL on a 16 GB V100-class device, as the shards that programs are made of. Pure.

[Note: the profile]
Nothing here was measured on a GPU. The numbers are assumptions, each of a usual size:

    compute   12 TFLOP/s, fp32 matrix products on a V100 (peak 15.7)
    links     12 GB/s each way, PCIe 3 x16 with pinned memory
    memory    750 GB/s, what SGD's update reads and writes
    SGD       no momentum, so no state travels; its time is part of the backward

FLOPs per token, forward: a block 24 d^2 + 4 T d (matrix products and attention), the head
2 d V; twice as many backward; recomputing is one more forward. Norms, activations and
the embedding's lookup count as nothing. Bytes that a backward keeps, per block and token:
16 d for the activations and 2 heads T for the attention's scores, in fp32. d is the width,
T the sequence, V the vocabulary.

Workload: 12 trials = 2 batch sizes x 6 learning rates; 8 shards for batch 8, 13 for batch 16;
as in the fine-tuning study of Hydra (VLDB 2022). A learning rate changes no time here.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.spec import LayerMeasure, ShardSpec
from shoal.core.units import Bytes, Seconds
from shoal.partition.cut import cut
from shoal.program.costs import JobCosts

FP32 = 4
SHARDS = {8: 8, 16: 13}  # batch size -> number of shards
LEARNING_RATES = (3e-4, 1e-4, 5e-5, 6e-5, 1e-5, 2e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a device is assumed to sustain."""

    flops_per_s: float = 12e12
    link_bytes_per_s: float = 12e9
    memory_bytes_per_s: float = 750e9
    memory_bytes: int = 16 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder with learnt positions and a head tied to the embedding."""

    blocks: int = 48
    width: int = 1600
    heads: int = 25
    vocabulary: int = 50257
    positions: int = 1024
    sequence: int = 512

    @property
    def embedding_parameters(self) -> int:
        return (self.vocabulary + self.positions) * self.width

    @property
    def block_parameters(self) -> int:
        """Attention 4 d^2 + 4 d, feed-forward 8 d^2 + 5 d, two norms 4 d."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def norm_parameters(self) -> int:
        return 2 * self.width

    @property
    def parameters(self) -> int:
        return (
            self.embedding_parameters + self.blocks * self.block_parameters + self.norm_parameters
        )


GPT2_XL = Transformer()


def layers(model: Transformer, profile: Profile, batch: int) -> tuple[LayerMeasure, ...]:
    """The 51 modules of the chain: embedding, blocks, final norm, head."""
    block = _block(model, profile, batch)
    return (
        _layer(model, profile, batch, "embedding", parameters=model.embedding_parameters),
        *(block for _ in range(model.blocks)),
        _layer(model, profile, batch, "norm", parameters=model.norm_parameters),
        _head(model, profile, batch),
    )


def _block(model: Transformer, profile: Profile, batch: int) -> LayerMeasure:
    width, sequence = model.width, model.sequence
    return _layer(
        model,
        profile,
        batch,
        "block",
        parameters=model.block_parameters,
        flops_per_token=24 * width**2 + 4 * sequence * width,
        saved_per_token=16 * width + 2 * model.heads * sequence,
    )


def _head(model: Transformer, profile: Profile, batch: int) -> LayerMeasure:
    """Logits, their softmax and their gradient are alive at once. The weight is borrowed."""
    return _layer(
        model,
        profile,
        batch,
        "head",
        borrowed=model.vocabulary * model.width,
        flops_per_token=2 * model.width * model.vocabulary,
        saved_per_token=2 * model.vocabulary,
    )


def _layer(
    model: Transformer,
    profile: Profile,
    batch: int,
    name: str,
    *,
    parameters: int = 0,
    borrowed: int = 0,
    flops_per_token: int = 0,
    saved_per_token: int = 0,
) -> LayerMeasure:
    tokens = batch * model.sequence
    forward_s = tokens * flops_per_token / profile.flops_per_s
    update_s = 3 * parameters * FP32 / profile.memory_bytes_per_s  # two reads, one write
    boundary = Bytes(tokens * model.width * FP32)
    saved = Bytes(tokens * saved_per_token * FP32)
    owned = Bytes(parameters * FP32)
    return LayerMeasure(
        name=name,
        parameter_bytes=owned,
        state_bytes=Bytes(0),
        borrowed_bytes=Bytes(borrowed * FP32),
        boundary_bytes=boundary,
        carry_bytes=boundary,
        forward_peak_bytes=Bytes(boundary + saved),
        saved_bytes=saved,
        backward_peak_bytes=Bytes(saved + 2 * boundary + owned + borrowed * FP32),
        forward_s=Seconds(forward_s),
        backward_s=Seconds(3 * forward_s + update_s),
        step_s=Seconds(0.0),
    )


def shard_specs(
    model: Transformer, profile: Profile, batch: int, num_shards: int
) -> tuple[ShardSpec, ...]:
    """The chain cut into shards whose largest time is the smallest possible."""
    chain = layers(model, profile, batch)

    def nanoseconds(start: int, stop: int) -> int:
        return round(sum(layer.backward_s for layer in chain[start:stop]) * 1e9)

    starts = (0, *cut(chain, num_shards, nanoseconds))
    stops = (*starts[1:], len(chain))
    return tuple(
        _shard(chain, index, start, stop)
        for index, (start, stop) in enumerate(zip(starts, stops, strict=True))
    )


def _shard(chain: tuple[LayerMeasure, ...], index: int, start: int, stop: int) -> ShardSpec:
    part = chain[start:stop]
    owned = sum(layer.parameter_bytes for layer in part)
    borrowed = sum(layer.borrowed_bytes for layer in part)
    entering = chain[start - 1].boundary_bytes if start else Bytes(0)
    saved = sum(layer.saved_bytes for layer in part[:-1])
    return ShardSpec(
        index=index,
        layers=(start, stop),
        parameter_bytes=Bytes(owned + borrowed),
        owned_bytes=Bytes(owned),
        state_bytes=Bytes(0),
        gradient_bytes=Bytes(owned + borrowed),
        boundary_bytes=entering,
        carry_bytes=entering,
        forward_peak_bytes=max(layer.forward_peak_bytes for layer in part),
        backward_peak_bytes=Bytes(saved + max(layer.backward_peak_bytes for layer in part)),
        step_peak_bytes=Bytes(0),
        forward_s=Seconds(sum(layer.forward_s for layer in part)),
        backward_s=Seconds(sum(layer.backward_s for layer in part)),
        step_s=Seconds(0.0),
    )


def job_costs(
    batch: int,
    num_shards: int,
    *,
    model: Transformer = GPT2_XL,
    profile: Profile | None = None,
    micro_batches: int = 1,
) -> JobCosts:
    """What one trial's actions cost. A micro-batch costs its share of the batch's time.

    Stages hand boundaries to each other for free: 2 ms a boundary in truth, in favour of
    the pipelines, which alone do that.
    """
    profile = profile or Profile()
    if batch % micro_batches:
        raise ValueError(f"a batch of {batch} cannot be cut into {micro_batches} equal parts")
    return JobCosts(
        shards=shard_specs(model, profile, batch // micro_batches, num_shards),
        batch_bytes=Bytes(batch // micro_batches * model.sequence * 8),
        up_bytes_per_s=profile.link_bytes_per_s,
        down_bytes_per_s=profile.link_bytes_per_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedTrial:
    """One of the workload's trials, of ``samples`` samples."""

    number: int
    batch: int
    lr: float
    samples: int

    @property
    def steps(self) -> int:
        return self.samples // self.batch


def workload(samples: int) -> tuple[EmulatedTrial, ...]:
    """12 trials: batch 8 and 16, six learning rates each, the same samples for all."""
    settings = [(batch, lr) for batch in SHARDS for lr in LEARNING_RATES]
    return tuple(
        EmulatedTrial(number=number, batch=batch, lr=lr, samples=samples)
        for number, (batch, lr) in enumerate(settings)
    )
