"""Replicas on paper: what each needs, what they send each other, how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from shoal.core.spec import JobMeasure, ReplicaMeasure
from shoal.core.technique import DataParallel
from shoal.core.units import Bytes, Seconds
from shoal.planner.need import Need, Request
from shoal.planner.price import Speeds
from shoal.planner.steptime import MESSAGE_S, byte_s

BUCKET_BYTES = 25 * 2**20  # of gradients that DDP sends at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A trial with replicas, measured: ``sent`` are bytes that each sends in a step."""

    technique: DataParallel  # with nothing left open
    replica: ReplicaMeasure
    need: Need
    sent: Bytes
    step_s: Seconds
    sending_s: Seconds  # of that


def replicated(
    technique: DataParallel, measure: JobMeasure, request: Request, speeds: Speeds
) -> Replicated:
    """What a settled technique needs and takes."""
    replica, width = measure.replica, technique.width or 1
    assert replica is not None
    micros = request.micro_batches
    gradients, parameters = replica.shard.gradient_bytes, replica.shard.parameter_bytes
    others = (width - 1) / width
    if technique.shard:  # gathered for the forward and again for the backward
        each = others * (2 * parameters + gradients)
        sent, messages = micros * each, micros * 3 * (replica.blocks + 1)
    else:
        sent, messages = 2 * others * gradients, 2 * ceil(gradients / BUCKET_BYTES)
    sending_s = sent * byte_s(speeds) + (width - 1) * messages * MESSAGE_S
    part = width if technique.shard else 1
    compute_s = micros * replica.shard.backward_s
    compute_s += replica.shard.step_s * speeds.device_step / part
    # The first one has the whole batch beside its pieces; all of a step where they are read ahead.
    ahead = micros if measure.num_batches is None else 1
    # And a validation batch for each replica, before all of them are evaluated.
    batches = max(ahead + 1, width * measure.valid_scale)
    held = replica.held_bytes + ceil(batches * measure.batch_bytes)
    return Replicated(
        technique=technique,
        replica=replica,
        need=Need(
            held=Bytes(held),
            unit=replica.unit_bytes,
            peak=Bytes(held + replica.unit_bytes),
            moved=Bytes(0),
        ),
        sent=Bytes(ceil(sent)),
        step_s=Seconds(max(compute_s + sending_s, 1e-6)),
        sending_s=Seconds(sending_s),
    )
