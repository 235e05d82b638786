"""Real trainings on a virtual device: the bytes that moved, the peak, and the bits."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bound
import torch
from arms import PLACES, RATIOS, Row
from rules import hydra
from torch import Tensor, nn
from touches import one_trial

import shoal
from shoal.core.event import ActionFinished, Event, PeakMeasured
from shoal.core.plan import Job, Plan
from shoal.core.spec import Place
from shoal.core.technique import (
    Spilled,
    kept_shards,
    kept_weights,
    turned_shards,
    waiting_gradients,
)
from shoal.examples.gpt import GPT, next_byte_loss
from shoal.planner.need import Request, footprints
from shoal.runtime.pool import WorkerPool
from shoal.testing import compare, plain_loop
from shoal.verify import read_losses

WIDTH, DEPTH, HEADS, CONTEXT, BATCH = 128, 24, 4, 32, 2  # 64 tokens a step
STEPS = 4
THIN_WIDTH, THIN_DEPTH, THIN_CONTEXT = 64, 96, 8  # one window of 8 tokens a step
TIMES = 64  # the training state over the device of the thin model


def model(hp: Any) -> nn.Module:
    return GPT(width=WIDTH, depth=DEPTH, heads=HEADS, context=CONTEXT, dropout=0.1)


def thin(hp: Any) -> nn.Module:
    return GPT(width=THIN_WIDTH, depth=THIN_DEPTH, heads=2, context=THIN_CONTEXT, dropout=0.1)


def data(hp: Any) -> tuple[list[tuple[Tensor, Tensor]], None]:
    return _windows(BATCH, CONTEXT), None


def thin_data(hp: Any) -> tuple[list[tuple[Tensor, Tensor]], None]:
    return _windows(1, THIN_CONTEXT), None


def _windows(count: int, length: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randint(256, (count, length + 1), generator=generator) for _ in range(STEPS)]
    return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]


def recipe(*, clip: bool) -> shoal.Recipe:
    return shoal.Recipe(
        model=model, data=data, loss=next_byte_loss, clip_grad_norm=1.0 if clip else None
    )


def state_of(net: nn.Module) -> int:
    """Bytes of parameters, gradients and Adam's two moments."""
    return 16 * sum(p.numel() for p in net.parameters())


class _Watch:
    """Bytes of every step on each link, and the highest peak."""

    def __init__(self) -> None:
        self.moved: dict[tuple[int, int], dict[str, int]] = {}
        self.peak: PeakMeasured | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, ActionFinished) and event.bytes:
            streams = self.moved.setdefault((event.trial, event.step), {"up": 0, "down": 0})
            streams[event.stream] += event.bytes
        if isinstance(event, PeakMeasured):
            self.peak = event


def real_steps(pool: WorkerPool) -> Iterator[Row]:
    """Every ratio, place and number of trials: what moved beside what the plan predicts."""
    state = state_of(model({}))
    for trials, ratio, place, clip in itertools.product((1, 4), RATIOS, PLACES, (False, True)):
        budget = int(state / ratio)
        row: Row = {"trials": trials, "state_over_budget": ratio, "step_on": place, "clip": clip}
        watch, plan = _run(pool, trials, budget, place, clip)
        yield row | _compared(watch, plan, clip)


def _run(
    pool: WorkerPool, trials: int, budget: int, place: Place, clip: bool
) -> tuple[_Watch, Plan]:
    watch = _Watch()
    with tempfile.TemporaryDirectory() as directory:
        study = shoal.Study(
            "residency",
            recipe(clip=clip),
            space=shoal.grid(lr=[1e-3 * (number + 1) for number in range(trials)]),
            steps=STEPS,
            metric="train_loss",
            directory=directory,
        )
        report = study.run(
            hardware=shoal.Hardware.virtual(devices=1, memory=budget),
            technique=Spilled(optimizer=place, spill_activations=()),  # bytes of weights
            callbacks=[watch],
            progress=False,
            workers=pool,
        )
        plan = Plan.from_json((Path(directory) / "residency" / "plan.json").read_text())
    errors = [trial.error for trial in report.trials if trial.error]
    assert not errors, errors[0]
    return watch, plan


def _compared(watch: _Watch, plan: Plan, clip: bool) -> Row:
    job, peak, budget = plan.jobs[0], watch.peak, plan.devices[0].memory
    assert isinstance(job.technique, Spilled)
    assert job.technique.optimizer is not None
    assert peak is not None
    place = job.technique.optimizer
    predicted, stays = predict(job, clip=clip), _stays(job)
    equal, visits = tally(watch.moved, predicted, stays, STEPS)
    owned = tuple(replace(shard, parameter_bytes=shard.owned_bytes) for shard in job.shards)
    step = one_trial(owned, budget, place=place, clip=clip, batch=job.batch_bytes)
    least = bound.least(step) if plan.active == 1 else None
    total = sum(predicted.values())
    return {
        "active": plan.active,
        "shards": len(job.shards),
        "lookahead": job.technique.lookahead,
        "kept": len(kept_shards(job.technique)),
        "weights_kept": len(kept_weights(job.technique)),
        "turned": len(turned_shards(job.technique, len(job.shards))),
        "gradients_kept": len(waiting_gradients(job.technique, len(job.shards))),
        "lookbehind": job.technique.lookbehind,
        "head_bytes": sum(shard.head_bytes for shard in job.shards),
        "predicted": predicted,
        "steps": len(plan.jobs) * STEPS,
        "steps_equal": equal,
        "visits": visits,
        "bytes_a_visit": 2 * stays,
        "over_least": round(total / least, 4) if least else None,
        "over_hydra": round(total / hydra(job.shards, place=place, clip=clip), 4),
        "budget": budget,
        "predicted_peak": peak.predicted_bytes,
        "measured_peak": peak.peak_bytes,
        "within_budget": peak.peak_bytes <= budget,
    }


def predict(job: Job, *, clip: bool) -> dict[str, int]:
    """Bytes a step over each link, as the plan's program costs them.

    The token embedding lends its weight to the head, so shard 0 lends where one borrows.
    """
    assert isinstance(job.technique, Spilled)
    borrows = any(shard.parameter_bytes > shard.owned_bytes for shard in job.shards)
    request = Request(micro_batches=1, clip=clip, technique=job.technique, prefers="host")
    lent = (0,) if borrows else ()
    found = footprints(job.shards, job.batch_bytes, job.technique, request, lent=lent)[0]
    return {"up": found.up_bytes, "down": found.down_bytes}


def _stays(job: Job) -> int:
    shards, technique = job.shards, job.technique
    whole = sum(shards[s].parameter_bytes + shards[s].state_bytes for s in kept_shards(technique))
    weights = sum(shards[s].parameter_bytes for s in kept_weights(technique))
    return whole + weights + sum(shard.head_bytes for shard in shards)


def tally(
    moved: dict[tuple[int, int], dict[str, int]],
    predicted: dict[str, int],
    stays: int,
    steps: int,
) -> tuple[int, int]:
    """How many steps moved what was predicted, and how often a trial came to its device.

    What stays comes with a trial and goes when it leaves. The coming is told with the step
    that it precedes, as is the leaving; the last one after all steps.
    """
    equal = visits = 0
    for (_, step), found in moved.items():
        planned = predicted if step <= steps else {"up": 0, "down": 0}
        more = {way: found[way] - planned[way] for way in planned}
        if stays and more["up"] == stays:
            visits += 1
        equal += step <= steps and set(more.values()) <= {0, stays}
    return equal, visits


def sixty_four_times(pool: WorkerPool) -> Row:
    """A training state of 64 times its device, and the plain loop's bits."""
    asked = shoal.Recipe(model=thin, data=thin_data, loss=next_byte_loss, clip_grad_norm=1.0)
    state, watch, begin = state_of(thin({})), _Watch(), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        study = shoal.Study(
            "thin",
            asked,
            space={"lr": 1e-3},
            trials=1,
            steps=STEPS,
            metric="train_loss",
            directory=directory,
        )
        report = study.run(
            hardware=shoal.Hardware.virtual(devices=1, memory=state // TIMES),
            callbacks=[watch],
            progress=False,
            workers=pool,
        )
        trial = report.trials[0]
        assert not trial.error, trial.error
        seconds = time.monotonic() - begin
        plain = plain_loop(asked, trial.hp, trial.seed, steps=STEPS)
        losses: Sequence[float] = read_losses(report.directory)[0]
        found = compare(plain, trial.load_state(), losses=losses)
        plan = Plan.from_json((Path(directory) / "thin" / "plan.json").read_text())
    job, peak = plan.jobs[0], watch.peak
    assert isinstance(job.technique, Spilled)
    assert peak is not None
    return {
        "state": state,
        "budget": plan.devices[0].memory,
        "state_over_budget": round(state / plan.devices[0].memory, 2),
        "shards": len(job.shards),
        "step_on": job.technique.optimizer,
        "steps": STEPS,
        "bitwise_equal": found.equal,
        "tensors_compared": found.tensors,
        "first_difference": found.first_difference,
        "predicted_peak": peak.predicted_bytes,
        "measured_peak": peak.peak_bytes,
        "within_budget": peak.peak_bytes <= plan.devices[0].memory,
        "seconds": round(seconds, 1),
    }
