"""Shards as their layers were measured, before they are measured themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shoal.core.spec import NO_BYTES, LayerMeasure, Narrow, ShardSpec
from shoal.core.units import Bytes, Seconds


def predict_shards(layers: Sequence[LayerMeasure], cuts: Sequence[int]) -> tuple[ShardSpec, ...]:
    """The shards between ``cuts``, from what their layers measured."""
    bounds = [0, *cuts, len(layers)]
    return tuple(
        predict_shard(layers, index, start, stop)
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    )


def predict_shard(layers: Sequence[LayerMeasure], index: int, start: int, stop: int) -> ShardSpec:
    """One shard of layers ``start`` to ``stop``."""
    chosen = layers[start:stop]
    gradients = [layer.trained_bytes for layer in chosen]
    saved, peak = _in_backward(chosen, gradients)
    forward = max(layer.forward_peak_bytes for layer in chosen)
    return ShardSpec(
        index=index,
        layers=(start, stop),
        parameter_bytes=Bytes(sum(c.parameter_bytes + c.borrowed_bytes for c in chosen)),
        owned_bytes=Bytes(sum(c.parameter_bytes for c in chosen)),
        state_bytes=Bytes(sum(c.state_bytes for c in chosen)),
        gradient_bytes=Bytes(sum(gradients)),
        boundary_bytes=layers[start - 1].boundary_bytes if start else Bytes(0),
        private_bytes=_private_bytes(layers, start),
        stash_bytes=Bytes(sum(c.stash_bytes for c in chosen)),
        carry_bytes=chosen[0].carry_bytes if start else Bytes(0),
        forward_peak_bytes=Bytes(forward),
        backward_peak_bytes=Bytes(peak),
        step_peak_bytes=Bytes(0),
        saved_bytes=Bytes(saved) if stop < len(layers) else None,
        saving_peak_bytes=Bytes(peak),  # no more than that
        forward_s=Seconds(sum(c.forward_s for c in chosen)),
        backward_s=Seconds(sum(c.backward_s for c in chosen)),
        step_s=Seconds(sum(c.step_s for c in chosen)),
        frozen=chosen[-1].frozen,
        narrow=_narrow_shard([layer.narrow for layer in chosen]),
    )


def _in_backward(
    layers: Sequence[LayerMeasure | Narrow], gradients: Sequence[Bytes]
) -> tuple[Bytes, Bytes]:
    """What a shard's layers save, and the peak of its backward.

    It holds what all of them saved, and on top the most that one layer needs while the gradients
    of the later ones exist already.
    """
    saved: int = sum(layer.saved_bytes for layer in layers)
    behind, peak, grads = saved, 0, 0
    for layer, gradient in zip(reversed(layers), reversed(gradients), strict=True):
        inside = layer.backward_peak_bytes - layer.saved_bytes
        peak = max(peak, behind + grads + inside)
        behind -= layer.saved_bytes
        grads += gradient
    return Bytes(saved), Bytes(peak)


def _narrow_shard(layers: Sequence[Narrow | None]) -> Narrow | None:
    chosen = [layer for layer in layers if layer is not None]
    if not chosen:
        return None
    saved, peak = _in_backward(chosen, [layer.gradient_bytes for layer in chosen])
    return Narrow(
        parameter_bytes=Bytes(sum(c.parameter_bytes for c in chosen)),
        gradient_bytes=Bytes(sum(c.gradient_bytes for c in chosen)),
        forward_peak_bytes=Bytes(max(c.forward_peak_bytes for c in chosen)),
        backward_peak_bytes=peak,
        saved_bytes=saved,
        saved_output_bytes=NO_BYTES,
        saving_peak_bytes=peak,  # no more than that
        forward_s=Seconds(sum(c.forward_s for c in chosen)),
        backward_s=Seconds(sum(c.backward_s for c in chosen)),
        step_s=Seconds(sum(c.step_s for c in chosen)),
    )


def _private_bytes(layers: Sequence[LayerMeasure], start: int) -> Bytes:
    """What of a boundary can wait on the host: what its first layer alone reads."""
    if not start:
        return Bytes(0)
    return Bytes(min(layers[start].private_bytes, layers[start - 1].boundary_bytes))
